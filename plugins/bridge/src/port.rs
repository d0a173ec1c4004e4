//! The port: what decides which frames may pass.
//!
//! All of it is set while the container's end is still down.

use cni::AttachmentId;
use cni::rollback::Rollback;
use cni::{Code, Error, Result};
use cni_firewall::spoof::SpoofCheck;
use cni_linux::{Link, Mac, Netlink, PortFlags, Target, VlanFlags};

use crate::conf::{Conf, Vlans};

/// Flags, VLANs and spoof rules of a port.
///
/// # Errors
/// 2 where the kernel lacks what the configuration asks for.
pub(crate) fn protect<'a>(
    host: &Netlink,
    port: &PortEnds<'_>,
    mark: &AttachmentId,
    conf: &Conf,
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    host.set_port(port.index, &PortFlags { hairpin: conf.hairpin, isolated: conf.isolated })?;
    if let Some(vlans) = &conf.vlans {
        set_vlans(host, port.index, vlans)?;
    }
    if conf.spoof_check {
        guard(port.name, port.peer_mac, mark, rollback)?;
    }
    Ok(())
}

/// The spoof rules of a port.
///
/// # Errors
/// 2 where the kernel lacks nf_tables for bridges.
pub(crate) fn guard(name: &str, peer_mac: Mac, mark: &AttachmentId, rollback: &mut Rollback<'_>) -> Result<()> {
    let (own, host_end) = (mark.clone(), name.to_owned());
    rollback.push("remove the spoof rules", move || SpoofCheck::open()?.undo(&own, &host_end));
    SpoofCheck::open().and_then(|mut spoof| spoof.ensure(mark, name, peer_mac)).map_err(|error| {
        let unsupported = error.is_unsupported();
        let error = Error::from(error);
        if unsupported {
            error.with_code(Code::UNSUPPORTED_FIELD).context("\"macspoofchk\": true needs nf_tables for bridges")
        } else {
            error
        }
    })
}

/// Refuses an ADD whose spoof rules would replace those of an earlier interface of this attachment
/// that still exists, in any namespace. `port` is the host's end if it exists already.
///
/// # Errors
/// Code 102, naming the host's end of the earlier interface.
pub(crate) fn refuse_second(host: &Netlink, mark: &AttachmentId, port: Option<&Link>) -> Result<()> {
    if port.is_none()
        && let Some(earlier) = host.find_host_end(mark)?
        && !host.peer_is_gone(&earlier)?
    {
        let AttachmentId { network, container_id: container, ifname } = mark;
        let name = &earlier.name;
        let msg = format!("container {container} already has interface {ifname} in network {network}: host end {name}");
        let details = "\"macspoofchk\": true guards one interface of that name; run DEL before adding it again";
        return Err(Error::new(Code::CONFLICT, msg).with_details(details));
    }
    let name = port.map(|port| port.name.as_str()).unwrap_or_default();
    match SpoofCheck::open().and_then(|mut spoof| spoof.find_conflicting_interface(mark, name)) {
        Ok(Some(owner)) => {
            let msg = format!("failed to make spoof rules {}: they are those of {owner}", owner.id_ifname);
            Err(Error::new(Code::CONFLICT, msg).with_details("the interface exists; run DEL before adding it again"))
        }
        Ok(None) => Ok(()),
        Err(error) if error.is_unsupported() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The two ends of a port, as far as protecting the port needs them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortEnds<'a> {
    /// The host's end.
    pub(crate) index: u32,
    /// Its name.
    pub(crate) name: &'a str,
    /// The container end's address.
    pub(crate) peer_mac: Mac,
}

/// The port's VLANs as Go sets them: the default one goes unless it is to be kept; untagged frames
/// belong to `vlan`, or with a trunk alone to VLAN 1.
fn set_vlans(host: &Netlink, index: u32, vlans: &Vlans) -> Result<()> {
    if !vlans.keep_default {
        for vlan in host.vlans(index)? {
            host.del_vlan(index, vlan.vid, Target::Master)?;
        }
    }
    for vid in &vlans.trunk {
        host.add_vlan(index, *vid, VlanFlags::Tagged, Target::Master)?;
    }
    host.add_vlan(index, vlans.access.unwrap_or(1), VlanFlags::Access, Target::Master)?;
    Ok(())
}

/// Whether the port's VLANs are as [`set_vlans`] leaves them; others may have come in addition.
pub(crate) fn missing_vlans(host: &Netlink, index: u32, vlans: &Vlans) -> Result<Vec<String>> {
    let there = host.vlans(index)?;
    let access = vlans.access.unwrap_or(1);
    let mut missing = Vec::new();
    if !there.iter().any(|vlan| vlan.vid == access && vlan.pvid && vlan.untagged) {
        missing.push(format!("VLAN {access} untagged"));
    }
    for vid in vlans.trunk.iter().filter(|vid| **vid != access) {
        if !there.iter().any(|vlan| vlan.vid == *vid) {
            missing.push(format!("VLAN {vid}"));
        }
    }
    Ok(missing)
}
