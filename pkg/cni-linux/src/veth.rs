//! Creates veth pairs, finds their host ends, and removes pairs that a killed ADD has left.
//!
//! The peer, which is the container's end, is created in the container's namespace with its final
//! name, because moving an end to another namespace takes the kernel 15 to 30 ms. Both hardware
//! addresses are set at creation, so that udev does not change them.
//!
//! A pair needs two requests. The first creates the pair; its host end can be up and a port of a
//! bridge at once. In this request the kernel refuses to set the peer up and silently ignores an
//! alias (Linux 6.18), so the second request sets the host end's alias, which names the attachment.
//! In between, the host end has its network's [group](AttachmentId::group), by which a host end
//! without an alias is recognized after a crash.

use std::time::Duration;

use cni::machine::Machine;

use crate::error::{Cause, Error, Result, TakenName};
use crate::link::{Link, LinkRequest};
use crate::mac::Mac;
use crate::netlink::Netlink;
use crate::netns::Netns;
use crate::watch::Watch;
use cni::AttachmentId;

/// How many names for a host end are tried. A name equals that of another attachment's host end
/// with a probability of 1 in 2^32.
pub const HOST_NAME_ATTEMPTS: u32 = 4;

/// The time after which a pair without an alias counts as left by a killed ADD. An ADD sets the
/// alias some 20 µs after the creation.
const ALIAS_TIMEOUT: Duration = Duration::from_secs(1);

/// The properties of a pair to create. The host end is the one in the connection's namespace.
#[derive(Clone, Copy, Debug)]
pub struct VethSpec<'a> {
    /// The host end's name.
    pub name: &'a str,
    /// The host end's hardware address.
    pub host_mac: Mac,
    /// The MTU of both ends, or the kernel's default.
    pub mtu: Option<u32>,
    /// The host end's alias, which names the [attachment](cni::AttachmentId).
    pub alias: Option<&'a str>,
    /// The index of the bridge that the host end becomes a port of.
    pub master: Option<u32>,
    /// Whether the host end is set up at once. It has no carrier until the peer is up too.
    pub up: bool,
    /// The peer's name.
    pub peer_name: &'a str,
    /// The peer's hardware address.
    pub peer_mac: Mac,
    /// The peer's namespace; `None` for the connection's.
    pub peer_netns: Option<&'a Netns>,
}

impl<'a> VethSpec<'a> {
    /// Returns a pair in one namespace, both ends down, with the kernel's default MTU.
    pub fn new(name: &'a str, host_mac: Mac, peer_name: &'a str, peer_mac: Mac) -> VethSpec<'a> {
        VethSpec {
            name,
            host_mac,
            mtu: None,
            alias: None,
            master: None,
            up: false,
            peer_name,
            peer_mac,
            peer_netns: None,
        }
    }
}

/// The indexes of a created pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Veth {
    /// The host end's index.
    pub index: u32,
    /// The peer's index, in the peer's namespace.
    pub peer_index: u32,
}

impl Netlink {
    /// Creates a pair; the peer is down.
    ///
    /// # Errors
    /// If a name is in use, [`Error::taken`] returns which. An error leaves no pair behind, unless
    /// the kernel's answer was lost or the removal failed: the caller can find such a pair by the
    /// host end's name and hardware address.
    pub fn create_veth(&self, spec: &VethSpec<'_>) -> Result<Veth> {
        let request = host_request(spec).veth(&peer_request(spec));
        let link = self.create_link(&request, spec.name).map_err(|cause| {
            let cause = self.add_taken_name(spec, cause);
            Error::new(format_args!("failed to create veth {} with peer {}", spec.name, spec.peer_name), cause)
        })?;
        let complete = || -> Result<Veth> {
            if let Some(alias) = spec.alias {
                self.set_first_alias(link.index, alias)?;
            }
            let peer_index = link.peer_index.ok_or_else(|| {
                Error::new(format_args!("failed to find the other end of {}", spec.name), Cause::LinkNotFound)
            })?;
            Ok(Veth { index: link.index, peer_index })
        };
        complete().inspect_err(|_| {
            // An error of the removal is ignored: the first error is returned.
            let _ = self.purge_link(link.index);
        })
    }

    /// Returns the host end of an attachment; `None` if there is none. Looks up each name that the
    /// host end may have ([`AttachmentId::host_name`] for the attempts below
    /// [`HOST_NAME_ATTEMPTS`]), which is cheaper than listing all links.
    ///
    /// Also returns a veth that has one of these names and no alias, as left by an ADD that was
    /// killed before it set the alias.
    pub fn find_host_end(&self, attachment: &AttachmentId) -> Result<Option<Link>> {
        for attempt in 0..HOST_NAME_ATTEMPTS {
            let Some(link) = self.find_link(&attachment.host_name(attempt))? else { continue };
            let has_own_or_no_alias = link.alias.is_none() || attachment.is_on(link.alias.as_deref());
            if link.is_veth() && has_own_or_no_alias {
                return Ok(Some(link));
            }
        }
        Ok(None)
    }

    /// Removes the unmarked host ends and ifbs of a network: those without an alias, because the
    /// ADD that created them was killed. `listed` are the links of the namespace. If one of them is
    /// unmarked, waits up to a second first, because an ADD in progress may still set its alias.
    ///
    /// # Errors
    /// The first failed removal, after all links have been tried; [`Error::is_terminated`] if
    /// SIGTERM ends the wait.
    pub fn purge_unmarked(&self, network: &str, listed: &[Link], machine: &dyn Machine) -> Result<()> {
        let group = AttachmentId::group(network);
        let is_unmarked = |link: &Link| {
            let has_plugin_name = (link.is_veth() && AttachmentId::is_host_name(&link.name))
                || (link.is_ifb() && AttachmentId::is_ifb_name(&link.name));
            link.group == group && link.alias.is_none() && has_plugin_name
        };
        let mut unmarked: Vec<Link> = listed.iter().filter(|link| is_unmarked(link)).cloned().collect();
        if unmarked.is_empty() {
            return Ok(());
        }
        let awaited = format!("the alias of {}", unmarked[0].name);
        let waited = Watch::open()?.wait(&awaited, machine.now() + ALIAS_TIMEOUT, machine, || {
            let mut still_unmarked = Vec::new();
            for link in &unmarked {
                let current = self.find_link_by_index(link.index)?;
                still_unmarked.extend(current.filter(is_unmarked));
            }
            unmarked = still_unmarked;
            Ok(unmarked.is_empty().then_some(()))
        });
        match waited {
            Err(error) if error.is_deadline() => {}
            // Every link has an alias now or is gone, or the wait failed.
            result => return result,
        }
        let mut result = Ok(());
        for link in &unmarked {
            let purged = self.purge_link(link.index).map(drop);
            result = result.and(purged);
        }
        result
    }

    /// If a creation failed with EEXIST, stores in the cause which of the two names is in use.
    /// Returns any other cause unchanged.
    ///
    /// Looks up only the peer's name: if it is in use, another host name would not help. If no link
    /// is found, the host end's name must be the one in use.
    fn add_taken_name(&self, spec: &VethSpec<'_>, cause: Cause) -> Cause {
        if cause.errno() != Some(libc::EEXIST) {
            return cause;
        }
        let find_peer = || match spec.peer_netns {
            Some(netns) => self.open_in(netns)?.find_link(spec.peer_name),
            None => self.find_link(spec.peer_name),
        };
        match find_peer() {
            Ok(Some(_)) => cause.with_taken_name(TakenName::ContainerName),
            // If the look-up failed, the caller at worst tries other host names in vain.
            Ok(None) | Err(_) => cause.with_taken_name(TakenName::HostName),
        }
    }
}

/// Returns the part of the request that describes the host end.
fn host_request(spec: &VethSpec<'_>) -> LinkRequest {
    let group = spec.alias.and_then(AttachmentId::parse).map(|id| AttachmentId::group(&id.network));
    let request = LinkRequest::without_index().name(spec.name).mac(spec.host_mac);
    let request = if spec.up { request.up() } else { request };
    request
        .optional(spec.mtu, LinkRequest::mtu)
        .optional(spec.master, LinkRequest::master)
        .optional(group, LinkRequest::group)
}

/// Returns the part of the request that describes the peer.
fn peer_request(spec: &VethSpec<'_>) -> LinkRequest {
    let request = LinkRequest::without_index().name(spec.peer_name).mac(spec.peer_mac);
    request.optional(spec.mtu, LinkRequest::mtu).optional(spec.peer_netns, LinkRequest::netns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BridgeSpec;
    use crate::testing::{in_new_netns, machine, new_netns};

    const HOST: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const PEER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    #[test]
    fn a_pair_is_created_complete_in_both_namespaces() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let netns = new_netns();
            let container = host.open_in(&netns).unwrap();
            let bridge = host.create_bridge(&BridgeSpec::named("br0")).unwrap();
            let alias = AttachmentId::new("net", "c1", "eth0").alias();
            let spec = VethSpec {
                mtu: Some(1400),
                alias: Some(&alias),
                master: Some(bridge.index),
                up: true,
                peer_netns: Some(&netns),
                ..VethSpec::new("veth0", HOST, "eth0", PEER)
            };
            let made = host.create_veth(&spec).unwrap();

            let outer = host.link("veth0").unwrap();
            assert_eq!((outer.index, outer.peer_index), (made.index, Some(made.peer_index)));
            assert_eq!((outer.mac, outer.mtu, outer.master), (Some(HOST), 1400, Some(bridge.index)));
            assert_eq!((outer.alias.as_deref(), outer.group), (Some(alias.as_str()), 0));
            assert!(outer.up && outer.is_veth() && outer.peer_netnsid.is_some() && outer.port.is_some());

            let inner = container.link("eth0").unwrap();
            assert_eq!((inner.index, inner.peer_index), (made.peer_index, Some(made.index)));
            assert_eq!((inner.mac, inner.mtu, inner.up, inner.master), (Some(PEER), 1400, false, None));
            let found = host.find_peer(&outer).unwrap().unwrap();
            assert_eq!((found.name, found.index, found.mtu), ("eth0".to_owned(), inner.index, 1400));

            host.delete_link(made.index).unwrap();
            assert_eq!(container.find_link("eth0").unwrap(), None);
        });
    }

    #[test]
    fn both_ends_can_be_in_one_namespace() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let made = host.create_veth(&VethSpec::new("br0.5", HOST, "veth5", PEER)).unwrap();
            let ends = (host.link("br0.5").unwrap(), host.link("veth5").unwrap());
            assert_eq!((ends.0.index, ends.1.index), (made.index, made.peer_index));
            assert_eq!((ends.0.peer_netnsid, host.find_peer(&ends.0).unwrap()), (None, None));
        });
    }

    #[test]
    fn taken_host_and_container_names_are_distinguished() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let netns = new_netns();
            let spec = VethSpec { peer_netns: Some(&netns), ..VethSpec::new("veth0", HOST, "eth0", PEER) };
            host.create_veth(&spec).unwrap();
            for (name, peer_name, taken) in [
                ("veth0", "eth1", TakenName::HostName),
                ("veth1", "eth0", TakenName::ContainerName),
                ("veth0", "eth0", TakenName::ContainerName),
            ] {
                let error = host.create_veth(&VethSpec { name, peer_name, ..spec }).unwrap_err();
                assert_eq!(error.taken(), Some(taken), "{name} {peer_name}: {error}");
                assert!(error.is_exists());
            }
            assert_eq!(host.list_links().unwrap().len(), 2);
            assert_eq!(host.open_in(&netns).unwrap().list_links().unwrap().len(), 2);
        });
    }

    #[test]
    fn a_pair_that_cannot_be_completed_leaves_nothing() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let netns = new_netns();
            let spec = VethSpec { peer_netns: Some(&netns), ..VethSpec::new("veth0", HOST, "eth0", PEER) };
            let too_long = "x".repeat(300);
            assert!(host.create_veth(&VethSpec { alias: Some(&too_long), ..spec }).is_err());
            assert!(host.create_veth(&VethSpec { master: Some(4711), ..spec }).is_err());
            assert!(host.create_veth(&VethSpec { mtu: Some(1), ..spec }).is_err());
            assert!(host.create_veth(&VethSpec { peer_mac: Mac([1; 6]), ..spec }).is_err());
            assert_eq!(host.list_links().unwrap().len(), 1);
            assert_eq!(host.open_in(&netns).unwrap().list_links().unwrap().len(), 1);
        });
    }

    #[test]
    fn the_host_end_is_found_by_its_attachment_alone() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let mark = AttachmentId::new("net", "c1", "eth0");
            assert_eq!(host.find_host_end(&mark).unwrap(), None);
            let (alias, names) = (mark.alias(), [mark.host_name(0), mark.host_name(1)]);
            let foreign = VethSpec::new(&names[0], HOST, "other", PEER);
            let foreign = host.create_veth(&VethSpec { alias: Some("another's"), ..foreign }).unwrap();
            assert_eq!(host.find_host_end(&mark).unwrap(), None);
            let ours = VethSpec { alias: Some(&alias), ..VethSpec::new(&names[1], HOST, "eth0", PEER) };
            let ours = host.create_veth(&ours).unwrap();
            assert_eq!(host.find_host_end(&mark).unwrap().unwrap().index, ours.index);
            host.delete_link(foreign.index).unwrap();
            assert_eq!(host.find_host_end(&mark).unwrap().unwrap().index, ours.index);
            host.set_alias(ours.index, "").unwrap();
            assert_eq!(host.find_host_end(&mark).unwrap().unwrap().index, ours.index);
            host.set_alias(ours.index, "cni:net/c2/eth0").unwrap();
            assert_eq!(host.find_host_end(&mark).unwrap(), None);
        });
    }

    /// Creates a pair without an alias, as an ADD that is killed in between leaves it. Returns the
    /// index of the host end.
    fn create_unmarked(host: &Netlink, mark: &AttachmentId) -> u32 {
        let (name, alias) = (mark.host_name(0), mark.alias());
        let peer_name = name.replace("veth", "peer");
        let spec = VethSpec { alias: Some(&alias), ..VethSpec::new(&name, HOST, &peer_name, PEER) };
        host.create_link(&host_request(&spec).veth(&peer_request(&spec)), &name).unwrap().index
    }

    #[test]
    fn links_that_get_no_alias_are_removed() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            create_unmarked(&host, &AttachmentId::new("net", "c1", "eth0"));
            create_unmarked(&host, &AttachmentId::new("net", "c2", "eth0"));
            create_unmarked(&host, &AttachmentId::new("other", "c1", "eth0"));
            let foreign = VethSpec::new("veth01234567", HOST, "foreign", PEER);
            host.create_veth(&foreign).unwrap();
            let renamed = create_unmarked(&host, &AttachmentId::new("net", "c3", "eth0"));
            host.set_name(renamed, "mine").unwrap();
            host.purge_unmarked("net", &host.list_links().unwrap(), &machine()).unwrap();
            let left: Vec<String> = host.list_links().unwrap().into_iter().map(|link| link.name).collect();
            let other = AttachmentId::new("other", "c1", "eth0").host_name(0);
            assert!(
                ["mine", "veth01234567", &other].iter().all(|name| left.iter().any(|left| left == name)),
                "{left:?}"
            );
            // `lo` and both ends of three.
            assert_eq!(left.len(), 7, "{left:?}");
        });
    }

    #[test]
    fn an_add_in_progress_keeps_its_veth() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let mark = AttachmentId::new("net", "c1", "eth0");
            let index = create_unmarked(&host, &mark);
            let listed = host.list_links().unwrap();
            host.set_first_alias(index, &mark.alias()).unwrap();
            host.purge_unmarked("net", &listed, &machine()).unwrap();
            let link = host.find_link_by_index(index).unwrap().unwrap();
            assert_eq!((link.alias, link.group), (Some(mark.alias()), 0));
        });
    }

    /// Checks the fact by which a link without an alias is found. Both ends take a group, because a
    /// host end may be created from inside the container.
    #[test]
    fn the_kernel_takes_a_group_in_the_request_that_creates() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let netns = new_netns();
            let spec = VethSpec { peer_netns: Some(&netns), ..VethSpec::new("veth0", HOST, "eth0", PEER) };
            let spec = VethSpec { alias: Some("cni:net/c1/eth0"), ..spec };
            let request = host_request(&spec).veth(&peer_request(&spec).group(4711));
            host.create_link(&request, "veth0").unwrap();
            assert_eq!(
                (host.link("veth0").unwrap().group, host.link("veth0").unwrap().alias),
                (AttachmentId::group("net"), None)
            );
            assert_eq!(host.open_in(&netns).unwrap().link("eth0").unwrap().group, 4711);
        });
    }

    /// Checks why the second request is needed. If a kernel ever sets the alias at creation, this
    /// test fails, and the second request can be deleted.
    #[test]
    fn the_kernel_ignores_an_alias_in_the_request_that_creates() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let spec = VethSpec::new("veth0", HOST, "eth0", PEER);
            let request = host_request(&spec).veth(&peer_request(&spec)).alias("at once");
            host.create_link(&request, "veth0").unwrap();
            assert_eq!(host.link("veth0").unwrap().alias, None);
        });
    }
}
