//! Creates a veth pair: one end in the container under its final name, the other on the host with
//! an alias that names the attachment.

use std::cell::Cell;
use std::rc::Rc;

use cni::rollback::Rollback;
use cni::{Code, Error, Result};
use cni_linux::veth::HOST_NAME_ATTEMPTS;
use cni_linux::{Link, Mac, Netlink, TakenName, VethSpec, sysctl};

use super::{AttachmentContext, UNTOUCHED};

/// The properties of a pair to create.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choices {
    /// The MTU of both ends, or `None` for the kernel's default.
    pub mtu: Option<u32>,
    /// The hardware address of the container's end, or `None` for a random one.
    pub mac: Option<Mac>,
    /// The index of the bridge whose port the host's end becomes, or `None` for no bridge.
    pub master: Option<u32>,
}

/// A veth pair between host and container.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The index of the host's end.
    pub index: u32,
    /// The name of the host's end.
    pub name: String,
    /// The hardware address of the host's end.
    pub mac: Mac,
    /// The index of the container's end, in its namespace.
    pub peer_index: u32,
    /// The hardware address of the container's end.
    pub peer_mac: Mac,
}

/// Creates a pair: the host's end up and with its alias, the container's end down.
///
/// # Errors
/// - Code 102 with the Go plugin's text if the container already has an interface CNI_IFNAME.
/// - The errors of the kernel.
pub fn create<'a, C>(
    context: &AttachmentContext<'a, C>,
    choices: &Choices,
    rollback: &mut Rollback<'a>,
) -> Result<Pair> {
    let (host, attachment) = (&context.host, &context.attachment);
    let mac = made_up_mac()?;
    let peer_mac = match choices.mac {
        Some(mac) => mac,
        None => made_up_mac()?,
    };
    let alias = attachment.alias();
    let mut attempt = 0;
    let (name, veth) = loop {
        let name = attachment.host_name(attempt);
        let spec = VethSpec {
            mtu: choices.mtu,
            alias: Some(&alias),
            master: choices.master,
            up: true,
            peer_netns: Some(&context.netns),
            ..VethSpec::new(&name, mac, &attachment.ifname, peer_mac)
        };
        attempt += 1;
        // Registered before the creation: if the kernel's answer is lost, the pair may exist. Its
        // random MAC identifies it.
        let created_index = undo_creation(host, &name, move |link| link.mac == Some(mac), rollback);
        match host.create_veth(&spec) {
            Ok(veth) => {
                created_index.set(Some(veth.index));
                break (name, veth);
            }
            Err(error) => match error.taken() {
                Some(TakenName::ContainerName) => return Err(name_taken(&attachment.ifname, &name)),
                Some(TakenName::HostName) if attempt < HOST_NAME_ATTEMPTS => {}
                _ => return Err(Error::from(error).context("failed to make veth pair")),
            },
        }
    };
    refuse_router_advertisements(&name);
    Ok(Pair { index: veth.index, name, mac, peer_index: veth.peer_index, peer_mac })
}

/// Registers the deletion of a link that the caller is about to create.
///
/// The caller stores the index of the new link in the returned cell. If the cell is still empty
/// when the undo runs, the undo looks the link up by `name` and deletes it only if `is_ours`
/// accepts it.
pub fn undo_creation<'a>(
    netlink: &Rc<Netlink>,
    name: &str,
    is_ours: impl Fn(&Link) -> bool + 'a,
    rollback: &mut Rollback<'a>,
) -> Rc<Cell<Option<u32>>> {
    let created_index = Rc::new(Cell::new(None));
    let (netlink, index, name) = (Rc::clone(netlink), Rc::clone(&created_index), name.to_owned());
    rollback.push(format!("delete {name}"), move || match index.get() {
        Some(index) => netlink.purge_link(index).map(drop),
        None => match netlink.find_link(&name)?.filter(&is_ours) {
            Some(link) => netlink.purge_link(link.index).map(drop),
            None => Ok(()),
        },
    });
    created_index
}

/// Returns the error, code 102 with the Go plugin's text, of an ADD whose CNI_IFNAME exists
/// already. `host_name` is the name of the host's end.
pub(super) fn name_taken(ifname: &str, host_name: &str) -> Error {
    let msg = format!("container veth name ({ifname:?}) peer provided ({host_name:?}) already exists");
    Error::new(Code::CONFLICT, msg).with_details(UNTOUCHED)
}

/// Sets the sysctl `accept_ra` of a link of the host to 0, as Go does: the host must not learn
/// routes from router advertisements of its containers. Errors are ignored, because a kernel
/// without IPv6 has no such file.
pub fn refuse_router_advertisements(link: &str) {
    let _ = sysctl::write(&format!("net/ipv6/conf/{link}/accept_ra"), "0");
}

/// Returns a random MAC for a link to be created. udev's MAC policy may change an address that the
/// kernel chose, but not one that was set at creation.
///
/// # Errors
/// Code 5 if the kernel returns no random bytes.
pub fn made_up_mac() -> Result<Mac> {
    Mac::random().map_err(|error| Error::caused(Code::IO, "failed to generate a MAC address", error))
}
