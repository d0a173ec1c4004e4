//! Sets what decides which frames pass a port: flags, VLANs and spoof rules.
//!
//! For a new veth pair, that happens while the container's end is still down. In chained use, the
//! earlier plugin may have set that end up already: the spoof rules are written before the link
//! becomes a port, but until its flags and VLANs are set, its frames pass with the bridge's
//! defaults.

use cni::AttachmentId;
use cni::rollback::Rollback;
use cni::{Code, Error, Result};
use cni_firewall::spoof::{RESOLVE_CONFLICT, SpoofCheck};
use cni_linux::{Link, Mac, Netlink, PortFlags, Target, VlanFlags};

use crate::conf::{Conf, Vlans};

/// Sets a port's flags and VLANs as configured.
pub(crate) fn configure(host: &Netlink, index: u32, conf: &Conf) -> Result<()> {
    let flags = PortFlags { hairpin: conf.hairpin, isolated: conf.isolated, neigh_suppress: conf.neigh_suppress };
    host.set_port(index, &flags)?;
    if let Some(vlans) = &conf.vlans {
        set_vlans(host, index, vlans)?;
    }
    Ok(())
}

/// Writes the spoof rules of the port `name`: only frames with the source `peer_mac`, the MAC of
/// the container's end, pass.
///
/// # Errors
/// - Code 2 if the kernel lacks nf_tables for bridges.
/// - The other errors of the kernel.
pub(crate) fn guard(name: &str, peer_mac: Mac, attachment: &AttachmentId, rollback: &mut Rollback<'_>) -> Result<()> {
    let (owner, host_end) = (attachment.clone(), name.to_owned());
    rollback.push("remove the spoof rules", move || SpoofCheck::open()?.undo(&owner, &host_end));
    match SpoofCheck::open().and_then(|mut spoof| spoof.ensure(attachment, name, peer_mac)) {
        Ok(()) => Ok(()),
        Err(error) if error.is_unsupported() => Err(Error::from(error)
            .with_code(Code::UNSUPPORTED_FIELD)
            .context("\"macspoofchk\": true needs nf_tables for bridges")),
        Err(error) => Err(error.into()),
    }
}

/// Checks that the spoof rules of this ADD will not replace those of another interface that exists.
/// Rules are identified by container ID and CNI_IFNAME only. So the other interface may be an
/// earlier one of this attachment, in any namespace, or one of this container in another network.
/// `port` is the host's end in chained use, `None` if this plugin will create that end.
///
/// # Errors
/// - Code 102 with the name of the other interface or of its host's end.
/// - The errors of the kernel.
pub(crate) fn check_not_guarded(host: &Netlink, attachment: &AttachmentId, port: Option<&Link>) -> Result<()> {
    if port.is_none()
        && let Some(earlier) = host.find_host_end(attachment)?
        && !host.peer_is_gone(&earlier)?
    {
        let AttachmentId { network, container_id: container, ifname } = attachment;
        let name = &earlier.name;
        let msg =
            format!("container {container} already has interface {ifname} in network {network} (host end {name})");
        let details = "\"macspoofchk\": true guards one interface of that name; run DEL before adding it again";
        return Err(Error::new(Code::CONFLICT, msg).with_details(details));
    }
    // No link has an empty name, so without `port` no rules count as this ADD's own.
    let own_port = port.map(|port| port.name.as_str()).unwrap_or_default();
    match SpoofCheck::open()?.find_conflicting_interface(attachment, own_port)? {
        Some(owner) => {
            let msg = format!("failed to create spoof rules {}: they belong to {owner}, which exists", owner.id());
            Err(Error::new(Code::CONFLICT, msg).with_details(RESOLVE_CONFLICT))
        }
        None => Ok(()),
    }
}

/// Sets the port's VLANs as Go does: removes those that it has (on a new port, the bridge's default
/// VLAN) unless `preserveDefaultVlan` is set, adds those of the trunk, and assigns untagged frames
/// to `vlan`, or to VLAN 1 if only a trunk is configured.
fn set_vlans(host: &Netlink, index: u32, vlans: &Vlans) -> Result<()> {
    if !vlans.keep_default {
        for vlan in host.vlans(index)? {
            host.del_vlan(index, vlan.vid, Target::Port)?;
        }
    }
    for vid in &vlans.trunk {
        host.add_vlan(index, *vid, VlanFlags::Tagged, Target::Port)?;
    }
    host.add_vlan(index, vlans.access.unwrap_or(1), VlanFlags::Access, Target::Port)?;
    Ok(())
}

/// Returns a text for each VLAN of [`set_vlans`] that the port lacks; empty if none. Accepts
/// additional VLANs.
pub(crate) fn missing_vlans(host: &Netlink, index: u32, vlans: &Vlans) -> Result<Vec<String>> {
    let existing = host.vlans(index)?;
    let access = vlans.access.unwrap_or(1);
    let mut missing = Vec::new();
    if !existing.iter().any(|vlan| vlan.vid == access && vlan.pvid && vlan.untagged) {
        missing.push(format!("VLAN {access} untagged"));
    }
    // The access VLAN is already checked, even if it is part of the trunk.
    for vid in vlans.trunk.iter().filter(|vid| **vid != access) {
        if !existing.iter().any(|vlan| vlan.vid == *vid) {
            missing.push(format!("VLAN {vid}"));
        }
    }
    Ok(missing)
}
