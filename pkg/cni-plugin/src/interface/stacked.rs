//! An interface on top of another one, its master: macvlan, ipvlan and vlan.
//!
//! Nothing of it is ever on the host. It gets CNI_IFNAME only in its namespace, because old kernels
//! want a new interface's name to be free in the host's namespace too; until then its name is
//! derived from the attachment, as that of a veth's host end is. DEL removes an interface of either
//! name.

use std::fmt;
use std::rc::Rc;

use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::{Code, Error, Result};
use cni_linux::{Link, Mac, Netlink, Stacked, StackedSpec};
use serde::{Deserialize, Deserializer};

use super::veth::undo_creation;
use super::{AttachmentContext, Check, CreatedLink, failed, taken};

/// The choices of an interface that is to be created.
#[derive(Clone, Debug)]
pub struct Choices {
    /// The kind and mode.
    pub stacked: Stacked,
    /// The name of the master, or that of the default route's interface.
    pub master: Option<String>,
    /// Where the master is.
    pub place: MasterNamespace,
    /// The MTU as configured; what it may be depends on the master's.
    pub mtu: i64,
    /// The hardware address, or one of the kernel's choice.
    pub mac: Option<Mac>,
    /// How many broadcast frames a macvlan's master may hold, or the kernel's default.
    pub broadcast_queue: Option<u32>,
}

/// The namespace of a master.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MasterNamespace {
    /// The host's.
    #[default]
    Host,
    /// The container's.
    Container,
}

impl<'de> Deserialize<'de> for MasterNamespace {
    /// Reads `linkInContainer`.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<MasterNamespace, D::Error> {
        let inside = Option::<bool>::deserialize(deserializer)?.unwrap_or_default();
        Ok(if inside { MasterNamespace::Container } else { MasterNamespace::Host })
    }
}

impl Choices {
    /// `master` is in the namespace of `netlink`.
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

    /// Returns the name of the master, whether it exists or not. `None` if the master is not on the
    /// host, or if there is neither a `master` nor a default route.
    pub fn host_master(&self) -> Option<String> {
        match (&self.master, self.place) {
            (_, MasterNamespace::Container) => None,
            (Some(name), MasterNamespace::Host) => Some(name.clone()),
            (None, MasterNamespace::Host) => Some(self.find_master(&Netlink::open().ok()?).ok()?.name),
        }
    }

    /// An ipvlan may have a larger MTU than its master, as in Go.
    fn mtu(&self, master: &Link) -> Result<Option<u32>> {
        let most = if let Stacked::Ipvlan(_) = self.stacked { i64::from(u32::MAX) } else { master.mtu.into() };
        if !(0..=most).contains(&self.mtu) {
            let msg = format!("invalid MTU {}, must be [0, master MTU({})]", self.mtu, master.mtu);
            return Err(Error::config(msg));
        }
        Ok(u32::try_from(self.mtu).ok().filter(|mtu| *mtu > 0))
    }
}

/// Creates the interface, down and marked.
///
/// # Errors
/// Code 7 for the master and the MTU, with Go's texts; the kernel's.
pub fn create<'a, C>(
    context: &AttachmentContext<'a, C>,
    choices: &Choices,
    rollback: &mut Rollback<'a>,
) -> Result<CreatedLink<()>> {
    let container = Rc::new(context.container.clone());
    let socket: &Netlink = if choices.place == MasterNamespace::Host { &context.host } else { &container };
    let (master, stacked) = (choices.find_master(socket)?, choices.stacked);
    let spec = StackedSpec {
        name: &context.mark.host_name(0),
        master: master.index,
        stacked,
        mtu: choices.mtu(&master)?,
        mac: choices.mac,
        broadcast_queue: choices.broadcast_queue,
        netns: &context.netns,
    };
    // The name is this attachment's alone. An interface that is called CNI_IFNAME already is found
    // by its index.
    let created = undo_creation(&container, spec.name, move |link| is_of(link, stacked), rollback);
    socket.create_stacked(&spec).map_err(|error| exists(error, &master, stacked))?;
    let link = container.link(spec.name)?;
    created.set(Some(link.index));
    container
        .set_first_name(link.index, &context.call.ifname, &context.mark.alias())
        .map_err(|error| if error.is_exists() { taken(&context.call.ifname) } else { error.into() })?;
    let Some(mac) = link.mac else {
        return Err(Error::new(Code::KERNEL, format!("{} has no Ethernet address", stacked.kind())));
    };
    if choices.mac.is_some_and(|wanted| wanted != mac) {
        context.call.notes.note(format_args!("{} has its master's hardware address {mac}", context.call.ifname));
    }
    let result = AddResult { interfaces: vec![context.container_interface(mac)], ..AddResult::default() };
    Ok(CreatedLink { index: link.index, mac, result, interface: 0, link: () })
}

fn is_of(link: &Link, stacked: Stacked) -> bool {
    link.kind.to_string() == stacked.kind()
}

/// The kernel allows only one interface for a master and a VLAN ID, in whichever namespace.
fn exists(error: cni_linux::Error, master: &Link, stacked: Stacked) -> Error {
    match stacked {
        Stacked::Vlan(id) if error.is_exists() => Error::from(error)
            .with_code(Code::CONFLICT)
            .with_details(format!("{} has an interface for VLAN {id}, perhaps in another namespace", master.name)),
        _ => error.into(),
    }
}

/// CHECK: compares mode or VLAN ID with the configuration, everything else with `prevResult`.
///
/// # Errors
/// Code 101 for what differs, `mismatch` being Go's words for a mode or ID.
pub fn check<C>(check: &Check<'_, C>, stacked: Stacked, mismatch: impl fmt::Display) -> Result<()> {
    if check.inner.stacked != Some(stacked) {
        let found = check.inner.stacked.map_or_else(|| "unknown".to_owned(), |found| found.to_string());
        return Err(failed(format!("{mismatch} {found} does not match expected value: {stacked}")));
    }
    check.interface()?;
    check.layer3()?;
    check.wait_for_dad(check.dad_deadline())
}

/// STATUS: whether the master exists. One that is in the container exists only with the container.
///
/// # Errors
/// Code 50.
pub fn ready(choices: &Choices) -> Result<()> {
    if choices.place == MasterNamespace::Container {
        return Ok(());
    }
    let ready = || choices.mtu(&choices.find_master(&Netlink::open()?)?).map(drop);
    ready().map_err(|error| error.with_code(Code::NOT_AVAILABLE))
}
