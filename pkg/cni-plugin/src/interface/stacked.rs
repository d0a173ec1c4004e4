//! Creates an interface on top of another one, its master: macvlan, ipvlan and vlan.
//!
//! The interface is created in the container's namespace under a temporary name and then renamed to
//! CNI_IFNAME, because old kernels require that the first name is free in the host's namespace too.
//! The temporary name is the one that the attachment's host end would have if it were a veth. DEL
//! removes an interface with either name.

use std::fmt;
use std::rc::Rc;

use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::{Code, Error, Result};
use cni_linux::{Link, Mac, Netlink, Stacked, StackedSpec};

use super::veth::undo_creation;
use super::{AttachmentContext, Check, CreatedLink, failed, ifname_taken};

/// The properties of an interface to create.
#[derive(Clone, Debug)]
pub struct Choices {
    /// The kind of link, with its mode or VLAN ID.
    pub stacked: Stacked,
    /// The name of the master, or `None` for the interface of the default route.
    pub master: Option<String>,
    /// Whether the master is in the container's namespace, not in the host's.
    pub link_in_container: bool,
    /// The MTU as configured, not yet checked against the master's; 0 for the kernel's default.
    pub mtu: i64,
    /// The hardware address, or `None` for one that the kernel chooses.
    pub mac: Option<Mac>,
    /// How many broadcast frames the master of a macvlan may queue, or `None` for the kernel's
    /// default.
    pub broadcast_queue: Option<u32>,
}

impl Choices {
    /// Returns the master. `netlink` is a socket in the master's namespace.
    ///
    /// # Errors
    /// - Code 7 if the master does not exist, or if none is configured and there is no default
    ///   route.
    /// - The errors of the kernel.
    fn find_master(&self, netlink: &Netlink) -> Result<Link> {
        let found = match &self.master {
            Some(name) => netlink.find_link(name)?,
            None => {
                let index = netlink.find_default_interface()?.ok_or_else(|| {
                    Error::config("no default route interface found").with_details("name one in \"master\"")
                })?;
                netlink.find_link_by_index(index)?
            }
        };
        let name = self.master.as_deref().unwrap_or_default();
        found.ok_or_else(|| {
            Error::config(match self.stacked {
                Stacked::Ipvlan(_) => format!("failed to lookup master {name:?}: Link not found"),
                _ => format!("Link not found: \"master\": {name:?}"),
            })
        })
    }

    /// Returns the name of the master on the host, without checking that a configured master
    /// exists. Returns `None` if the master is in the container, or if none is configured and the
    /// interface of the default route cannot be found.
    pub fn host_master(&self) -> Option<String> {
        match &self.master {
            _ if self.link_in_container => None,
            Some(name) => Some(name.clone()),
            None => Some(self.find_master(&Netlink::open().ok()?).ok()?.name),
        }
    }

    /// Checks the configured MTU. Returns the MTU to set, or `None` for the kernel's default.
    ///
    /// # Errors
    /// Code 7 if the configured MTU is negative or larger than the MTU of `master`. As in Go, only
    /// an ipvlan can have a larger MTU than its master.
    fn check_mtu(&self, master: &Link) -> Result<Option<u32>> {
        let largest = if let Stacked::Ipvlan(_) = self.stacked { i64::from(u32::MAX) } else { master.mtu.into() };
        if !(0..=largest).contains(&self.mtu) {
            let msg = format!("invalid MTU {}, must be [0, master MTU({})]", self.mtu, master.mtu);
            return Err(Error::config(msg));
        }
        Ok(u32::try_from(self.mtu).ok().filter(|mtu| *mtu > 0))
    }
}

/// Creates the interface CNI_IFNAME in the container, down, with the alias that names the
/// attachment.
///
/// # Errors
/// - Code 7, with the Go plugins' texts, if the master does not exist or the MTU is out of range.
/// - Code 102 if CNI_IFNAME or the master's VLAN exists already.
/// - The errors of the kernel.
pub fn create<'a, C>(
    context: &AttachmentContext<'a, C>,
    choices: &Choices,
    rollback: &mut Rollback<'a>,
) -> Result<CreatedLink<()>> {
    let container = Rc::new(context.container.clone());
    let master_side: &Netlink = if choices.link_in_container { &container } else { &context.host };
    let master = choices.find_master(master_side)?;
    let stacked = choices.stacked;
    let spec = StackedSpec {
        name: &context.attachment.host_name(0),
        master: master.index,
        stacked,
        mtu: choices.check_mtu(&master)?,
        mac: choices.mac,
        broadcast_queue: choices.broadcast_queue,
        netns: &context.netns,
    };
    // Only this attachment uses the temporary name, so the undo may delete by it. Once the index is
    // known, the undo uses the index, because the interface is renamed to CNI_IFNAME.
    let created_index = undo_creation(&container, spec.name, move |link| has_kind(link, stacked), rollback);
    master_side.create_stacked(&spec).map_err(|error| creation_error(error, &master, stacked))?;
    let link = container.link(spec.name)?;
    created_index.set(Some(link.index));
    container
        .set_first_name(link.index, &context.call.ifname, &context.attachment.alias())
        .map_err(|error| if error.is_exists() { ifname_taken(&context.call.ifname) } else { error.into() })?;
    let Some(mac) = link.mac else {
        return Err(Error::new(Code::KERNEL, format!("{} has no Ethernet address", stacked.kind())));
    };
    // The kernel gives a macvlan in passthru mode and an ipvlan the master's address, even if
    // another one was requested.
    if choices.mac.is_some_and(|configured| configured != mac) {
        context.call.notes.note(format_args!(
            "the requested hardware address is not used: {} has the address {mac} of its master",
            context.call.ifname
        ));
    }
    let result = AddResult { interfaces: vec![context.container_interface(mac)], ..AddResult::default() };
    Ok(CreatedLink { index: link.index, mac, result, interface_position: 0, link: () })
}

/// Whether a link is of the kind macvlan, ipvlan or vlan that `stacked` names.
fn has_kind(link: &Link, stacked: Stacked) -> bool {
    link.kind.to_string() == stacked.kind()
}

/// Returns the error of a failed creation: code 102 if the master already has an interface for this
/// VLAN ID. The kernel allows only one, in all namespaces together.
fn creation_error(error: cni_linux::Error, master: &Link, stacked: Stacked) -> Error {
    match stacked {
        Stacked::Vlan(id) if error.is_exists() => Error::from(error)
            .with_code(Code::CONFLICT)
            .with_details(format!("{} has an interface for VLAN {id}, perhaps in another namespace", master.name)),
        _ => error.into(),
    }
}

/// CHECK: compares the mode or VLAN ID with the configuration, and everything else with
/// `prevResult`. `mismatch` is the beginning of the Go plugin's message about a wrong mode or ID.
///
/// # Errors
/// Code 101 for the first difference.
pub fn check<C>(check: &Check<'_, C>, stacked: Stacked, mismatch: impl fmt::Display) -> Result<()> {
    if check.inner.stacked != Some(stacked) {
        let found = check.inner.stacked.map_or_else(|| "unknown".to_owned(), |found| found.to_string());
        return Err(failed(format!("{mismatch} {found} does not match expected value: {stacked}")));
    }
    check.compare_interface()?;
    check.compare_layer3()?;
    check.wait_for_dad(check.settle_deadline())
}

/// STATUS: checks that the master exists and that the MTU is in range. A master in the container is
/// not checked, because no container exists yet.
///
/// # Errors
/// Code 50 if the master does not exist or the MTU is out of range.
pub fn ready(choices: &Choices) -> Result<()> {
    if choices.link_in_container {
        return Ok(());
    }
    let check = || choices.check_mtu(&choices.find_master(&Netlink::open()?)?);
    check().map(drop).map_err(|error| error.with_code(Code::NOT_AVAILABLE))
}
