//! The daemon's access to a container's namespace: checks the interface, adds and deletes
//! addresses.
//!
//! No descriptor stays open between two exchanges with a server. It would keep the namespace, and
//! with it the host's end of a veth, alive after the container has ended.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use cni::Cidr;
use cni::result::AddResult;
use cni_linux::{Dad, Error, Family, LinkKind, Mac, Netlink, Netns, Route, Watch};
use cni_plugin::interface::kernel_route;
use tokio::io::unix::AsyncFd;

/// An attachment's interface.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    /// The path of the namespace.
    pub(crate) netns: PathBuf,
    /// The device and inode numbers of the namespace.
    pub(crate) netns_id: (u64, u64),
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) mac: Mac,
}

/// Finds an interface by its name in a namespace.
///
/// # Errors
/// The text for the plugin: the namespace cannot be opened, or the interface is not found or has no
/// MAC.
pub(crate) fn find(netns: PathBuf, name: &str) -> Result<Interface, String> {
    let namespace = Netns::open(&netns).map_err(|error| error.to_string())?;
    let link = namespace.run(Netlink::open).and_then(|netlink| netlink?.link(name));
    let link = link.map_err(|error| match error.is_not_found() {
        true => format!("error looking up {name:?}: Link not found"),
        false => format!("error looking up {name:?}: {error}"),
    })?;
    let mac = link.mac.ok_or_else(|| format!("interface {name} has no Ethernet address"))?;
    Ok(Interface { netns, netns_id: namespace.id(), name: name.to_owned(), index: link.index, mac })
}

/// Registers a descriptor with tokio, so that a task can wait until it is readable.
#[expect(
    deprecated,
    reason = "the successor is unsafe because a type may change its descriptor; the types used here do not"
)]
pub(crate) fn register<T: AsRawFd>(fd: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::new(fd)
}

impl Interface {
    /// Opens the interface's namespace. Returns `None` if it is gone or its path leads to another
    /// one.
    pub(super) fn open(&self) -> Result<Option<Netns>, Error> {
        match Netns::open(&self.netns) {
            Ok(netns) if netns.id() == self.netns_id => Ok(Some(netns)),
            Ok(_) => Ok(None),
            Err(error) if error.is_no_netns() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens a netlink socket in the interface's namespace. Returns `None` if the namespace is
    /// gone.
    pub(super) fn netlink(&self) -> Result<Option<Netlink>, Error> {
        match self.open()? {
            Some(netns) => netns.run(Netlink::open)?.map(Some),
            None => Ok(None),
        }
    }

    /// Whether the interface or its namespace is gone. Returns false after an error.
    pub(crate) fn is_gone(&self) -> bool {
        match self.netlink() {
            Ok(Some(netlink)) => matches!(netlink.find_link_by_index(self.index), Ok(None)),
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// Calls `check` at once and after every change in the interface's namespace, until it returns
    /// `Some`. Returns `None` after `timeout`.
    ///
    /// # Errors
    /// That of `check`, the namespace is gone, or the kernel's error.
    async fn wait<T>(
        &self,
        timeout: Duration,
        mut check: impl FnMut(&Netlink) -> Result<Option<T>, String>,
    ) -> Result<Option<T>, String> {
        let text = |error: Error| error.to_string();
        let netns = self
            .open()
            .map_err(text)?
            .ok_or_else(|| format!("the network namespace of {} no longer exists", self.name))?;
        let watch = Watch::open_in(&netns).map_err(text)?;
        let netlink = netns.run(Netlink::open).and_then(|netlink| netlink).map_err(text)?;
        drop(netns);
        let watch = register(watch).map_err(|error| error.to_string())?;
        let wait = async {
            loop {
                if let Some(found) = check(&netlink)? {
                    return Ok(Some(found));
                }
                let mut ready = watch.readable().await.map_err(|error| error.to_string())?;
                watch.get_ref().drain();
                ready.clear_ready();
            }
        };
        tokio::time::timeout(timeout, wait).await.unwrap_or(Ok(None))
    }

    /// Sets the interface up and waits until it has a carrier, and for DHCPv6 a usable link-local
    /// address. Also succeeds after `timeout`: a lease is requested even without them.
    ///
    /// # Errors
    /// The interface or its namespace is gone, or the kernel's error.
    pub(crate) async fn bring_up(&self, timeout: Duration, family: Family) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let check = |netlink: &Netlink| {
            let mut link = netlink.find_link_by_index(self.index).map_err(text)?.ok_or("Link not found")?;
            if !link.up {
                netlink.set_up(self.index).map_err(text)?;
                link = netlink.find_link_by_index(self.index).map_err(text)?.ok_or("Link not found")?;
            }
            let is_ready = match family {
                Family::V4 => true,
                Family::V6 => self.link_local(netlink).map_err(text)?.is_some(),
            };
            Ok((link.has_carrier() && is_ready).then_some(()))
        };
        self.wait(timeout, check).await.map(drop)
    }

    /// Returns the interface's link-local address, if it is usable.
    pub(super) fn link_local(&self, netlink: &Netlink) -> Result<Option<Ipv6Addr>, Error> {
        let usable = netlink.list_addresses(self.index)?.into_iter().filter(|addr| !addr.tentative && !addr.dad_failed);
        let mut addresses = usable.map(|addr| addr.cidr.address());
        Ok(addresses.find_map(|address| match address {
            IpAddr::V6(address) if address.is_unicast_link_local() => Some(address),
            _ => None,
        }))
    }

    /// Whether no other host on the link has an address of DHCPv6. Adds the address until the
    /// kernel has searched for a duplicate: the interface plugin adds it after the ADD. An address
    /// that the interface has already is unique. Returns true after `timeout`: without a carrier
    /// the kernel does not search.
    ///
    /// # Errors
    /// The interface or its namespace is gone, or the kernel's error.
    pub(crate) async fn is_unique(&self, cidr: Cidr, timeout: Duration) -> Result<bool, String> {
        let text = |error: Error| error.to_string();
        let mut added = None;
        let check = |netlink: &Netlink| {
            if added.is_none() {
                match netlink.add_address_without_route(self.index, cidr, Dad::Normal) {
                    Err(error) if error.is_exists() => added = Some(false),
                    outcome => added = Some(outcome.map(|()| true).map_err(text)?),
                }
            }
            let addresses = netlink.list_addresses(self.index).map_err(text)?;
            Ok(match addresses.iter().find(|addr| addr.cidr == cidr) {
                // The kernel removes a duplicate that may expire.
                None => Some(false),
                Some(addr) if addr.dad_failed => Some(false),
                Some(addr) if addr.tentative => None,
                Some(_) => Some(true),
            })
        };
        let is_unique = self.wait(timeout, check).await;
        if added == Some(true) {
            self.purge_address(cidr).map_err(text)?;
        }
        Ok(is_unique?.unwrap_or(true))
    }

    /// Returns the MTU of the interface. Returns `None` after an error, and if the interface is
    /// gone.
    pub(crate) fn mtu(&self) -> Option<u32> {
        let netlink = self.netlink().ok()??;
        netlink.find_link_by_index(self.index).ok()?.map(|link| link.mtu)
    }

    /// Sets the MTU of the interface. Raises it only if nothing else limits the packets: the other
    /// end of a veth, and the master of an ipvlan, drop packets that are longer than their own MTU.
    ///
    /// # Errors
    /// The text for the log: the MTU is not raised, the interface is gone, or the kernel's error.
    pub(crate) fn set_mtu(&self, mtu: u32) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let gone = || format!("{} no longer exists", self.name);
        let netlink = self.netlink().map_err(text)?.ok_or_else(gone)?;
        let link = netlink.find_link_by_index(self.index).map_err(text)?.ok_or_else(gone)?;
        if mtu > link.mtu && (link.is_veth() || link.kind == LinkKind::Other("ipvlan".to_owned())) {
            return Err(format!("the MTU {} of a {} is never raised", link.mtu, link.kind));
        }
        if mtu == link.mtu { Ok(()) } else { netlink.set_mtu(self.index, mtu).map_err(text) }
    }

    /// Whether the interface has this address. Returns false after an error.
    pub(crate) fn has_address(&self, address: Cidr) -> bool {
        let Ok(Some(netlink)) = self.netlink() else { return false };
        let Ok(addresses) = netlink.list_addresses(self.index) else { return false };
        addresses.iter().any(|existing| existing.cidr == address)
    }

    /// Adds the address and the routes of a lease, unless they exist. A default route is added
    /// behind those of other networks. Does nothing if the namespace is gone.
    pub(crate) fn add_address_and_routes(&self, result: &AddResult) -> Result<(), Error> {
        let Some(netlink) = self.netlink()? else { return Ok(()) };
        let accept_existing =
            |outcome: Result<(), Error>| outcome.or_else(|error| if error.is_exists() { Ok(()) } else { Err(error) });
        for ip in &result.ips {
            accept_existing(netlink.add_address(self.index, ip.address, Dad::Normal))?;
        }
        let routes = result.routes.iter().map(|route| kernel_route(route, route.gw, self.index));
        // All routes are tried, even if one is invalid. The first error is returned.
        let mut outcome = Ok(());
        for route in routes {
            outcome = outcome.and(add_route(&netlink, &route));
        }
        outcome
    }

    /// Deletes an address. It is not an error if the interface does not have it or the namespace
    /// is gone.
    pub(crate) fn purge_address(&self, address: Cidr) -> Result<(), Error> {
        self.netlink()?.map_or(Ok(()), |netlink| netlink.purge_address(self.index, address))
    }
}

/// Adds a route of a lease, unless it exists. If another network has the default route, adds the
/// lease's behind it, as the ADD of an interface plugin does.
fn add_route(netlink: &Netlink, route: &Route) -> Result<(), Error> {
    match netlink.add_route(route) {
        Err(error) if error.is_exists() => {}
        outcome => return outcome,
    }
    let is_same = |existing: &Route| {
        existing.dst == route.dst
            && (existing.oif, existing.gw, existing.table_id()) == (route.oif, route.gw, route.table_id())
    };
    let is_default = route.dst.prefix() == 0;
    if !is_default || netlink.list_all_routes(Family::of(route.dst.address()))?.iter().any(is_same) {
        return Ok(());
    }
    netlink.add_default_route_behind(&[*route]).map(drop)
}
