//! The container's interface: starts IPv6 on it again, and waits for advertisements.

use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;
use std::time::Instant;

use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{AttachmentId, Cidr, Code, Error, Result, hash};
use cni_linux::{Addr, Family, Link, Netlink, Netns, Route, Watch, sysctl};

use crate::conf::{AddrGenMode, Conf, NoRouter};
use crate::resolver::Resolvers;

/// The sysctls of an interface that accepts advertisements, and the values that CHECK expects. With
/// `accept_ra` 1, the kernel ignores advertisements while the interface forwards packets.
pub(crate) const ACCEPTING: [(&str, &str); 3] = [("accept_ra", "2"), ("autoconf", "1"), ("disable_ipv6", "0")];

/// The other sysctls that ADD writes, because a node may have other defaults. Temporary addresses
/// (`use_tempaddr`) would not match the result after a day. The result has the routes of
/// advertisements, of any length (`accept_ra_rt_info_max_plen`). The delay before the first
/// solicitation, up to a second, is for hosts that start at the same moment.
const PREPARING: [(&str, &str); 6] = [
    ("accept_ra_defrtr", "1"),
    ("accept_ra_pinfo", "1"),
    ("accept_dad", "1"),
    ("use_tempaddr", "0"),
    ("router_solicitation_delay", "0"),
    ("accept_ra_rt_info_max_plen", "128"),
];

/// RTPROT_RA: the kernel added the route because of an advertisement.
const RA: u8 = 9;

/// What routers have advertised.
#[derive(Debug, Default)]
pub(crate) struct Advertised {
    /// The addresses that are usable.
    pub(crate) addresses: Vec<Cidr>,
    /// The routes, among them the default routes.
    pub(crate) routes: Vec<Route>,
    /// The name resolution.
    pub(crate) resolvers: Resolvers,
}

/// CNI_IFNAME in CNI_NETNS.
#[derive(Debug)]
pub(crate) struct Interface<'a> {
    call: &'a Call<'a>,
    netns: Rc<Netns>,
    netlink: Rc<Netlink>,
    link: Link,
}

impl<'a> Interface<'a> {
    /// Finds the interface.
    ///
    /// # Errors
    /// - Code 7 if it has a global IPv6 address that does not come from an advertisement. Starting
    ///   IPv6 again would remove the address.
    /// - Those of the namespace and of the kernel.
    pub(crate) fn open(call: &'a Call<'a>) -> Result<Interface<'a>> {
        let netns = Rc::new(Netns::open(call.netns()?)?);
        let netlink = Rc::new(netns.run(Netlink::open)??);
        let link = netlink.link(&call.ifname)?;
        let configured = netlink.list_addresses(link.index)?.into_iter().find(|addr| is_global(addr) && addr.permanent);
        if let Some(Addr { cidr, .. }) = configured {
            return Err(Error::config(format!("{} has the configured address {cidr}", call.ifname))
                .with_details("slaac starts IPv6 on the interface again, which would remove the address"));
        }
        Ok(Interface { call, netns, netlink, link })
    }

    /// Subscribes to the changes that [`wait`](Interface::wait) waits for.
    pub(crate) fn watch(&self) -> Result<Watch> {
        Ok(Watch::open_with_options_in(&self.netns)?)
    }

    /// Starts IPv6 on the interface again, with the sysctls that the configuration asks for, and
    /// sets the interface up. The kernel then solicits an advertisement.
    ///
    /// # Errors
    /// The kernel refuses a change.
    pub(crate) fn restart_ipv6(
        &self,
        conf: &Conf,
        attachment: &AttachmentId,
        rollback: &mut Rollback<'a>,
    ) -> Result<()> {
        // The kernel removes all IPv6 addresses and routes of the interface.
        self.set("disable_ipv6", "1", rollback)?;
        for (name, value) in ACCEPTING.iter().chain(&PREPARING).filter(|(name, _)| *name != "disable_ipv6") {
            match self.set(name, value, rollback) {
                // Kernels can be built without routes of advertisements.
                Err(error) if error.is_not_found() && *name == "accept_ra_rt_info_max_plen" => {}
                result => result?,
            }
        }
        match conf.addr_gen_mode {
            None => {}
            Some(AddrGenMode::Eui64) => self.set("addr_gen_mode", "0", rollback)?,
            Some(AddrGenMode::None) => self.set("addr_gen_mode", "1", rollback)?,
            // The kernel changes the mode with the secret.
            Some(AddrGenMode::StablePrivacy) => self.set_secret(attachment)?,
        }
        let (netlink, index) = (self.netlink.clone(), self.link.index);
        if !self.link.up {
            self.netlink.set_up(index)?;
            let netlink = netlink.clone();
            rollback.push(format!("set {} down", self.link.name), move || netlink.set_down(index));
        }
        if let Some(token) = conf.token {
            self.netlink.set_token(index, token)?;
            rollback.push("remove the token", move || netlink.set_token(index, Ipv6Addr::UNSPECIFIED));
        }
        Ok(self.set("disable_ipv6", "0", rollback)?)
    }

    /// Writes a sysctl of the interface, and registers the undo if that changes the value.
    fn set(&self, name: &str, value: &str, rollback: &mut Rollback<'a>) -> cni_linux::Result<()> {
        let path = self.sysctl(name);
        if let Some(old) = self.netns.run(|| sysctl::ensure(&path, value))?? {
            let netns = self.netns.clone();
            rollback.push(format!("restore {path}"), move || netns.run(|| sysctl::write(&path, &old))?);
        }
        Ok(())
    }

    /// Writes the secret from which the kernel makes addresses (RFC 7217). It is a hash of the
    /// attachment's names, so that a second ADD gets the same addresses. It has no undo, because
    /// the kernel cannot remove a secret.
    fn set_secret(&self, attachment: &AttachmentId) -> cni_linux::Result<()> {
        let digits = hash::sha512_hex(&[attachment.alias().as_bytes()], 32);
        let secret = Ipv6Addr::from_bits(u128::from_str_radix(&digits, 16).unwrap_or_default());
        self.netns.run(|| sysctl::write(&self.sysctl("stable_secret"), &secret.to_string()))?
    }

    /// Returns the path of a sysctl of the interface.
    fn sysctl(&self, name: &str) -> String {
        format!("net/ipv6/conf/{}/{name}", self.call.ifname)
    }

    /// Waits until the interface has a usable address and a default route, both from
    /// advertisements, and no such address is tentative. Returns what has been advertised.
    ///
    /// # Errors
    /// - Code 102 if another host has an address that the interface would use.
    /// - Code 11 at `deadline`, except with [`NoRouter::Succeed`], and after SIGTERM.
    pub(crate) fn wait(&self, watch: &Watch, conf: &Conf, deadline: Instant) -> Result<Advertised> {
        let what = format!("{} to get an address and a default route from an IPv6 router", self.link.name);
        let mut advertised = Advertised::default();
        let mut resolvers = Resolvers::default();
        let mut duplicates =
            Duplicates { retries: conf.addr_gen_mode == Some(AddrGenMode::StablePrivacy), ..Duplicates::default() };
        let check = || {
            let addresses = self.netlink.list_addresses(self.link.index)?;
            let is_pending = addresses.iter().any(|addr| is_advertised(addr) && addr.tentative);
            let usable = addresses.iter().filter(|addr| is_advertised(addr) && !addr.tentative);
            advertised.addresses = usable.map(|addr| addr.cidr).collect();
            advertised.routes = self.advertised_routes()?;
            duplicates.look(&addresses);
            let has_default = advertised.routes.iter().any(|route| route.dst.is_default_route());
            let is_complete = !is_pending && has_default && !advertised.addresses.is_empty();
            Ok((is_complete || duplicates.found.is_some()).then_some(()))
        };
        let take = |index, options: &[u8]| {
            if index == self.link.index {
                resolvers.read(options);
            }
        };
        let waited = watch.wait_with_options(&what, deadline, self.call.machine, check, take);
        if let Some(address) = duplicates.found {
            let msg = format!("address {address} is in use by another host on the link");
            return Err(Error::new(Code::CONFLICT, msg).with_details("duplicate address detection failed"));
        }
        match waited {
            Err(error) if error.is_deadline() && conf.no_router == NoRouter::Succeed => {
                self.call.notes.note(format_args!("{error}; ADD continues, because of \"required\": false"));
            }
            Err(error) if error.is_deadline() => return Err(Error::from(error).with_details(advertised.missing())),
            result => result?,
        }
        advertised.resolvers = resolvers;
        Ok(advertised)
    }

    /// Returns the routes of the interface that come from advertisements.
    fn advertised_routes(&self) -> cni_linux::Result<Vec<Route>> {
        let mut routes = self.netlink.list_all_routes(Family::V6)?;
        routes.retain(|route| route.protocol == RA && route.oif == self.link.index);
        Ok(routes)
    }
}

impl Advertised {
    /// Describes why the wait was in vain.
    fn missing(&self) -> &'static str {
        match (self.addresses.is_empty(), self.routes.iter().any(|route| route.dst.is_default_route())) {
            (true, true) => "a router answered, but advertises no prefix for addresses",
            (true, false) => "no router answered",
            (false, _) => "routers gave addresses, but none of them is a default router (lifetime 0)",
        }
    }
}

/// Finds addresses that another host of the link has. The kernel marks such a link-local address,
/// and removes one that comes from an advertisement.
#[derive(Debug, Default)]
struct Duplicates {
    /// Whether the kernel tries other addresses instead of removed ones.
    retries: bool,
    /// The tentative addresses of the last look.
    tentative: Vec<Cidr>,
    /// The first duplicate.
    found: Option<Cidr>,
}

impl Duplicates {
    /// Looks for a duplicate, given the interface's addresses.
    fn look(&mut self, addresses: &[Addr]) {
        let is_gone = |cidr: &&Cidr| addresses.iter().all(|addr| addr.cidr != **cidr);
        let gone = self.tentative.iter().find(is_gone).filter(|_| !self.retries).copied();
        let marked = addresses.iter().find(|addr| addr.dad_failed).map(|addr| addr.cidr);
        self.found = self.found.or(gone).or(marked);
        self.tentative =
            addresses.iter().filter(|addr| is_advertised(addr) && addr.tentative).map(|addr| addr.cidr).collect();
    }
}

/// Whether an address is a global IPv6 address that comes from an advertisement: the kernel lets
/// only these expire.
fn is_advertised(addr: &Addr) -> bool {
    is_global(addr) && !addr.permanent
}

/// Whether an address is a global IPv6 address.
fn is_global(addr: &Addr) -> bool {
    matches!(addr.cidr.address(), IpAddr::V6(_)) && addr.scope == 0
}
