//! A veth pair with one end in the container, under its final name, and the other, marked, on the
//! host.

use std::cell::Cell;
use std::rc::Rc;

use cni::rollback::Rollback;
use cni::{Code, Error, Result};
use cni_linux::veth::HOST_NAME_ATTEMPTS;
use cni_linux::{Link, Mac, Netlink, TakenName, VethSpec, sysctl};

use super::{AttachmentContext, UNTOUCHED};

/// The choices of a pair that is to be created.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choices {
    /// The largest packet of both ends, or the kernel's default.
    pub mtu: Option<u32>,
    /// The hardware address of the container's end, or a random one.
    pub mac: Option<Mac>,
    /// The index of the bridge that the host's end becomes a port of.
    pub master: Option<u32>,
}

/// A veth pair between host and container.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The index of the host's end.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its address.
    pub mac: Mac,
    /// The index of the container's end, in its namespace.
    pub peer_index: u32,
    /// Its address.
    pub peer_mac: Mac,
}

/// Creates a pair: the host's end up and marked, the container's end down.
///
/// # Errors
/// 102 with Go's text if the container has an interface of that name.
pub fn create<'a, C>(
    context: &AttachmentContext<'a, C>,
    choices: &Choices,
    rollback: &mut Rollback<'a>,
) -> Result<Pair> {
    let (host, mark) = (&context.host, &context.mark);
    let (mac, peer_mac) = (made_up_mac()?, choices.mac.map_or_else(made_up_mac, Ok)?);
    let alias = mark.alias();
    let mut attempt = 0;
    let (name, veth) = loop {
        let name = mark.host_name(attempt);
        let spec = VethSpec {
            mtu: choices.mtu,
            alias: Some(&alias),
            master: choices.master,
            up: true,
            peer_netns: Some(&context.netns),
            ..VethSpec::new(&name, mac, &mark.ifname, peer_mac)
        };
        attempt += 1;
        // Registered before the effect: if the kernel's answer is lost, the pair may exist.
        let made = undo_creation(host, &name, move |link| link.mac == Some(mac), rollback);
        match host.create_veth(&spec) {
            Ok(veth) => {
                made.set(Some(veth.index));
                break (name, veth);
            }
            Err(error) => match error.taken() {
                Some(TakenName::ContainerName) => return Err(name_taken(&mark.ifname, &name)),
                Some(TakenName::HostName) if attempt < HOST_NAME_ATTEMPTS => {}
                _ => return Err(Error::from(error).context("failed to make veth pair")),
            },
        }
    };
    no_router_advertisements(&name);
    Ok(Pair { index: veth.index, name, mac, peer_index: veth.peer_index, peer_mac })
}

/// Registers the deletion of a link that is about to be created: by its index, once that is known,
/// else by its name, if it `is_ours`.
pub fn undo_creation<'a>(
    netlink: &Rc<Netlink>,
    name: &str,
    is_ours: impl Fn(&Link) -> bool + 'a,
    rollback: &mut Rollback<'a>,
) -> Rc<Cell<Option<u32>>> {
    let made = Rc::new(Cell::new(None));
    let (netlink, index, name) = (Rc::clone(netlink), Rc::clone(&made), name.to_owned());
    rollback.push(format!("delete {name}"), move || match index.get() {
        Some(index) => netlink.purge_link(index).map(drop),
        None => match netlink.find_link(&name)?.filter(&is_ours) {
            Some(link) => netlink.purge_link(link.index).map(drop),
            None => Ok(()),
        },
    });
    made
}

/// Go's words for an interface that is there already.
pub(super) fn name_taken(ifname: &str, host_name: &str) -> Error {
    let msg = format!("container veth name ({ifname:?}) peer provided ({host_name:?}) already exists");
    Error::new(Code::CONFLICT, msg).with_details(UNTOUCHED)
}

/// Sets a link's `accept_ra` to 0, as Go does: an interface of a node must not learn its routes
/// from its containers. Kernels without IPv6 have no such file, and that is fine.
pub fn no_router_advertisements(link: &str) {
    let _ = sysctl::write(&format!("net/ipv6/conf/{link}/accept_ra"), "0");
}

/// Returns a random MAC, to be given to a link at its creation, so that no policy of udev's
/// rewrites it.
///
/// # Errors
/// Code 5 if the kernel has no random bytes.
pub fn made_up_mac() -> Result<Mac> {
    Mac::random().map_err(|error| Error::caused(Code::IO, "failed to generate a MAC address", error))
}
