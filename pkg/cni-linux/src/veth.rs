//! Pairs of virtual Ethernet interfaces (veth).
//!
//! The container's end is created in the container's namespace with its final name, because moving
//! an end to another namespace takes the kernel 15 to 30 ms. The hardware addresses are set at the
//! creation, so that udev's MAC policy does not change them.
//!
//! Two requests are needed. The first creates the pair with names, addresses, MTU and bridge, and
//! sets the host's end up. It ignores an alias (Linux 6.18), so a second request sets that. Between
//! the two the host's end has its network's [group](AttachmentId::group). The container's end
//! cannot be set up by the first request.

use std::time::Duration;

use cni::machine::Machine;

use crate::error::{Cause, Error, Reason, Result, TakenName};
use crate::link::{Link, LinkRequest};
use crate::mac::Mac;
use crate::netlink::Netlink;
use crate::netns::Netns;
use crate::watch::Watch;
use cni::AttachmentId;

/// How many names for the host's end are tried. The names have 32 random-looking bits, so
/// collisions are rare.
pub const HOST_NAME_ATTEMPTS: u32 = 4;

/// How long GC waits for the alias of a new link. An ADD sets it some 20 µs after the creation.
const ALIAS_DEADLINE: Duration = Duration::from_secs(1);

/// The properties of a pair to create.
#[derive(Clone, Copy, Debug)]
pub struct VethSpec<'a> {
    /// The name of the host's end, which is in the socket's namespace.
    pub name: &'a str,
    /// The hardware address of the host's end.
    pub host_mac: Mac,
    /// The MTU of both ends, or `None` for the kernel's default.
    pub mtu: Option<u32>,
    /// The alias of the host's end, which names the [attachment](cni::AttachmentId).
    pub alias: Option<&'a str>,
    /// The index of the bridge that the host's end is attached to.
    pub master: Option<u32>,
    /// Whether the host's end is set up. It has no carrier until the other end is up too.
    pub up: bool,
    /// The name of the other end.
    pub peer_name: &'a str,
    /// The hardware address of the other end.
    pub peer_mac: Mac,
    /// The namespace of the other end, or `None` for the socket's namespace.
    pub peer_netns: Option<&'a Netns>,
}

impl<'a> VethSpec<'a> {
    /// Returns a pair with both ends in the socket's namespace and down, with the kernel's default
    /// MTU.
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

/// A pair that was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Veth {
    /// The index of the host's end.
    pub index: u32,
    /// The index of the other end in its namespace.
    pub peer_index: u32,
}

impl Netlink {
    /// Creates a pair. The other end is down.
    ///
    /// # Errors
    /// Those of the kernel. If a name is in use, [`Error::taken`] returns which. The pair does not
    /// exist then, unless the kernel's answer was lost; the caller finds such a pair by its name
    /// and MAC.
    pub fn create_veth(&self, spec: &VethSpec<'_>) -> Result<Veth> {
        let created = self.create_link(&host_request(spec).veth(&peer_request(spec)), spec.name).map_err(|cause| {
            let cause = self.with_taken_name(spec, cause);
            Error::new(format_args!("failed to create veth {} with peer {}", spec.name, spec.peer_name), cause)
        })?;
        let alias_set = match spec.alias {
            Some(alias) => self.set_first_alias(created.index, alias),
            None => Ok(()),
        };
        let peer_index = created.peer_index.ok_or_else(|| {
            Error::new(format_args!("failed to find the other end of {}", spec.name), Reason::LinkNotFound)
        });
        match alias_set.and(peer_index) {
            Ok(peer_index) => Ok(Veth { index: created.index, peer_index }),
            Err(error) => {
                // Without its alias, DEL and GC might miss the pair. An error of this deletion is
                // not reported, because the first one says more.
                let _ = self.purge_link(created.index);
                Err(error)
            }
        }
    }

    /// Returns the host's end of an attachment, or `None` if there is none. Looks up the names that
    /// it may have ([`AttachmentId::host_name`]), usually with one request.
    ///
    /// A veth with such a name and without an alias is returned too: its ADD was killed before it
    /// set the alias.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn find_host_end(&self, attachment: &AttachmentId) -> Result<Option<Link>> {
        for attempt in 0..HOST_NAME_ATTEMPTS {
            if let Some(link) = self.find_link(&attachment.host_name(attempt))?
                && link.is_veth()
                && (link.alias.is_none() || attachment.is_on(link.alias.as_deref()))
            {
                return Ok(Some(link));
            }
        }
        Ok(None)
    }

    /// Removes the host ends and ifbs of a network that have no alias, because their ADD was killed
    /// before it set one. `listed` are all links. If such a link is among them, waits up to
    /// [`ALIAS_DEADLINE`], because a running ADD may be about to set the alias.
    ///
    /// # Errors
    /// The first deletion that failed, after all were tried; [`Error::is_terminated`] if a signal
    /// ends the wait.
    pub fn purge_unmarked(&self, network: &str, listed: &[Link], machine: &dyn Machine) -> Result<()> {
        let group = AttachmentId::group(network);
        let is_unmarked = |link: &Link| {
            let is_named = (link.is_veth() && AttachmentId::is_host_name(&link.name))
                || (link.is_ifb() && AttachmentId::is_ifb_name(&link.name));
            link.group == group && link.alias.is_none() && is_named
        };
        let mut unmarked: Vec<Link> = listed.iter().filter(|link| is_unmarked(link)).cloned().collect();
        if unmarked.is_empty() {
            return Ok(());
        }
        let what = format!("the alias of {}", unmarked[0].name);
        let waited = Watch::open()?.wait(&what, machine.now() + ALIAS_DEADLINE, machine, || {
            let mut still_unmarked = Vec::new();
            for link in &unmarked {
                still_unmarked.extend(self.find_link_by_index(link.index)?.filter(is_unmarked));
            }
            unmarked = still_unmarked;
            Ok(if unmarked.is_empty() { Some(()) } else { None })
        });
        match waited {
            Err(error) if error.is_deadline() => {}
            outcome => return outcome,
        }
        let mut outcome = Ok(());
        for link in &unmarked {
            outcome = outcome.and(self.purge_link(link.index).map(drop));
        }
        outcome
    }

    /// Adds to a cause EEXIST which of the pair's names is in use, by looking up the name of the
    /// container's end. If both are in use, that is the container's, because the caller can try
    /// another host name.
    fn with_taken_name(&self, spec: &VethSpec<'_>, cause: Cause) -> Cause {
        if cause.errno() != Some(libc::EEXIST) {
            return cause;
        }
        let peer_exists = || -> Result<bool> {
            let existing = match spec.peer_netns {
                Some(netns) => self.open_in(netns)?.find_link(spec.peer_name)?,
                None => self.find_link(spec.peer_name)?,
            };
            Ok(existing.is_some())
        };
        cause.taken(if peer_exists().unwrap_or(false) { TakenName::ContainerName } else { TakenName::HostName })
    }
}

/// Returns the part of the request that describes the host's end.
fn host_request(spec: &VethSpec<'_>) -> LinkRequest {
    let group = spec.alias.and_then(AttachmentId::parse).map(|mark| AttachmentId::group(&mark.network));
    let request = LinkRequest::new(0).name(spec.name).mac(spec.host_mac);
    let request = if spec.up { request.up() } else { request };
    request
        .optional(spec.mtu, LinkRequest::mtu)
        .optional(spec.master, LinkRequest::master)
        .optional(group, LinkRequest::group)
}

/// Returns the part of the request that describes the container's end.
fn peer_request(spec: &VethSpec<'_>) -> LinkRequest {
    let request = LinkRequest::new(0).name(spec.peer_name).mac(spec.peer_mac);
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
    fn a_pair_is_born_with_everything_in_both_namespaces() {
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

            host.delete_link(made.index).unwrap();
            assert_eq!(container.find_link("eth0").unwrap(), None);
        });
    }

    #[test]
    fn both_ends_may_live_in_one_namespace() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let made = host.create_veth(&VethSpec::new("br0.5", HOST, "veth5", PEER)).unwrap();
            let ends = (host.link("br0.5").unwrap(), host.link("veth5").unwrap());
            assert_eq!((ends.0.index, ends.1.index), (made.index, made.peer_index));
            assert_eq!(ends.0.peer_netnsid, None);
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

    /// A pair whose ADD was killed before it could set the alias, with both names and the index of
    /// the host's end.
    fn unmarked(host: &Netlink, mark: &AttachmentId) -> u32 {
        let (name, alias) = (mark.host_name(0), mark.alias());
        let peer_name = name.replace("veth", "peer");
        let spec = VethSpec { alias: Some(&alias), ..VethSpec::new(&name, HOST, &peer_name, PEER) };
        host.create_link(&host_request(&spec).veth(&peer_request(&spec)), &name).unwrap().index
    }

    #[test]
    fn what_stays_without_an_alias_is_removed() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            unmarked(&host, &AttachmentId::new("net", "c1", "eth0"));
            unmarked(&host, &AttachmentId::new("net", "c2", "eth0"));
            unmarked(&host, &AttachmentId::new("other", "c1", "eth0"));
            let foreign = VethSpec::new("veth01234567", HOST, "foreign", PEER);
            host.create_veth(&foreign).unwrap();
            let renamed = unmarked(&host, &AttachmentId::new("net", "c3", "eth0"));
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
    fn an_add_at_work_keeps_its_veth() {
        in_new_netns(|| {
            let host = Netlink::open().unwrap();
            let mark = AttachmentId::new("net", "c1", "eth0");
            let index = unmarked(&host, &mark);
            let listed = host.list_links().unwrap();
            host.set_first_alias(index, &mark.alias()).unwrap();
            host.purge_unmarked("net", &listed, &machine()).unwrap();
            let link = host.find_link_by_index(index).unwrap().unwrap();
            assert_eq!((link.alias, link.group), (Some(mark.alias()), 0));
        });
    }

    /// The fact that finding an unmarked link rests on. The other end takes one too: a host's end
    /// that is made from inside the container.
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

    /// The fact that the second request rests on. Should a kernel ever take the alias at once, this
    /// test fails and the request can go.
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
