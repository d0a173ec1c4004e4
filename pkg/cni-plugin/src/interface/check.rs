//! CHECK: is the attachment as ADD left it?
//!
//! What a later plugin of the list may have changed (MAC, MTU, addresses, routes) is judged by
//! `prevResult` alone; the plugin's own things by its configuration.

use std::time::{Duration, Instant};

use cni::delegate::Delegate;
use cni::result::{AddResult, IpConfig};
use cni::skel::{Call, RestoreMode, Restored};
use cni::{Cidr, Code, Error, Result};
use cni_linux::route::MAIN_TABLE;
use cni_linux::{Family, Link, Mac, Watch};

use super::layer3::Layer3;
use super::{AttachmentContext, HostEnd, Interface, LinkState, masquerade};
use crate::keys::Masquerading;

/// How long states that settle by themselves are given.
const SETTLE: Duration = Duration::from_secs(2);

/// One CHECK: what is expected, and the steps that all plugins have.
#[derive(Debug)]
pub struct Check<'a, C> {
    /// Both sides of the attachment.
    pub context: AttachmentContext<'a, C>,
    /// The result of the list so far.
    pub prev: AddResult,
    /// CNI_IFNAME in the container.
    pub inner: Link,
    /// Its addresses and routes by `prevResult`.
    pub layer3: Layer3,
    /// CNI_IFNAME by `prevResult`.
    expected: cni::result::Interface,
    masquerade: Masquerading,
    state: LinkState,
}

pub(super) fn check<I: Interface>(plugin: &I, call: &Call<'_>) -> Result<()> {
    let sides = Sides::open(plugin, call)?;
    if !plugin.is_in_kernel(&sides.context.conf)? {
        return check_ipam(plugin, call, &sides.context.conf);
    }
    let check = sides.compare(plugin)?;
    check_ipam(plugin, call, &check.context.conf)?;
    if !plugin.is_kind(&check.inner) {
        return Err(failed(format!("Container interface {} not of type {}", check.inner.name, I::KIND)));
    }
    plugin.check(&check)
}

fn check_ipam<I: Interface>(plugin: &I, call: &Call<'_>, conf: &I::Conf) -> Result<()> {
    match plugin.layer3(conf).ipam {
        Some(kind) => Delegate::find(call, kind)?.check(),
        None => Ok(()),
    }
}

/// Both sides of an attachment, and the result of its ADD.
struct Sides<'a, C> {
    context: AttachmentContext<'a, C>,
    prev: AddResult,
    /// The place of CNI_IFNAME in `prev`.
    place: usize,
}

impl<'a, C> Sides<'a, C> {
    fn open<I: Interface<Conf = C>>(plugin: &I, call: &'a Call<'_>) -> Result<Sides<'a, C>> {
        let conf = plugin.parse(&call.conf, &call.environment.args, &call.notes)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("Required prevResult missing"))?;
        let context = AttachmentContext::open(call, conf, None)?;
        let place = container_interface(call, &prev)?;
        Ok(Sides { context, prev, place })
    }

    fn compare<I: Interface<Conf = C>>(self, plugin: &I) -> Result<Check<'a, C>> {
        let Sides { context, prev, place } = self;
        let Some(inner) = context.container.find_link(&context.call.ifname)? else {
            return Err(absent::<I>(&context, &prev)?);
        };
        let expected = prev.interfaces[place].clone();
        // An interface whose sandbox is the container's ID is a virtual machine's, which has the
        // addresses of this one since tc-redirect-tap.
        let is_ours = |of: &cni::result::Interface| *of == expected || of.sandbox == context.call.container_id;
        let ips =
            prev.ips.iter().filter(|ip| ip.interface.is_none_or(|at| prev.interfaces.get(at).is_some_and(is_ours)));
        let policy = plugin.layer3(&context.conf);
        let layer3 = Layer3 { ips: ips.cloned().collect(), routes: prev.routes.clone(), subnet: policy.subnet };
        let (masquerade, state) = (policy.masquerade, policy.state);
        Ok(Check { context, prev, inner, layer3, expected, masquerade, state })
    }
}

/// Code 101: the attachment differs from what ADD left.
pub fn failed(msg: impl Into<String>) -> Error {
    Error::new(Code::CHECK_FAILED, msg)
}

/// The place of CNI_IFNAME in prevResult.
fn container_interface(call: &Call<'_>, prev: &AddResult) -> Result<usize> {
    let sandbox = call.sandbox();
    if let Some(place) = prev.find_interface(&call.ifname, sandbox).filter(|_| !sandbox.is_empty()) {
        return Ok(place);
    }
    let mut named =
        prev.interfaces.iter().filter(|interface| interface.name == call.ifname && !interface.sandbox.is_empty());
    Err(match named.next() {
        Some(other) => {
            Error::config(format!("Sandbox in prevResult {} doesn't match configured netns: {sandbox}", other.sandbox))
        }
        None => Error::config(format!("prevResult has no interface {} in a container", call.ifname)),
    })
}

/// The container's end is gone. Is anything left of the attachment? If not, that is code 3.
fn absent<I: Interface>(context: &AttachmentContext<'_, I::Conf>, prev: &AddResult) -> Result<Error> {
    let msg = format!("Interface name {} not found", context.call.ifname);
    if let HostEnd::Veth { .. } = I::HOST_END {
        let host_names = prev
            .interfaces
            .iter()
            .filter(|interface| interface.sandbox.is_empty() && interface.name.starts_with("veth"));
        for name in host_names.map(|interface| interface.name.clone()).chain([context.mark.host_name(0)]) {
            if context.host.find_link(&name)?.is_some() {
                return Ok(failed(msg).with_details(format!("the host's end {name} still exists")));
            }
        }
    }
    let details = "nothing of this attachment exists in the kernel";
    Ok(Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(details))
}

fn addresses(ips: &[IpConfig]) -> Vec<Cidr> {
    ips.iter().map(|ip| ip.address).collect()
}

impl<'a, C> Check<'a, C> {
    /// Opens both sides of the attachment, to compare single things of it.
    ///
    /// # Errors
    /// Those of the configuration and of `prevResult`; 101 or 3 if CNI_IFNAME does not exist.
    pub fn open<I: Interface<Conf = C>>(plugin: &I, call: &'a Call<'_>) -> Result<Check<'a, C>> {
        Sides::open(plugin, call)?.compare(plugin)
    }

    /// Returns the other end of the container's veth, on the host.
    ///
    /// # Errors
    /// 101 with the text of `missing` if there is none.
    pub fn host_end(&self, missing: &str) -> Result<Link> {
        let missing = || failed(missing);
        let index = self.inner.peer_index.ok_or_else(missing)?;
        let outer = self.context.host.find_link_by_index(index)?.ok_or_else(missing)?;
        if outer.peer_index == Some(self.inner.index) { Ok(outer) } else { Err(missing()) }
    }

    /// Compares the container's interface with prevResult, and its state with the policy's.
    ///
    /// # Errors
    /// 101 for what differs.
    pub fn interface(&self) -> Result<()> {
        let (inner, expected) = (&self.inner, &self.expected);
        let name = &inner.name;
        if !expected.mac.is_empty() && expected.mac.parse::<Mac>().ok() != inner.mac {
            let found = inner.mac.map(|mac| mac.to_string()).unwrap_or_default();
            return Err(failed(format!("Interface {name} Mac {} doesn't match container Mac: {found}", expected.mac)));
        }
        if let Some(mtu) = expected.mtu.filter(|mtu| *mtu != inner.mtu) {
            return Err(failed(format!("Interface {name} has MTU {}, expected {mtu}", inner.mtu)));
        }
        if self.state == LinkState::Up && !inner.up {
            return Err(failed(format!("Interface {name} is down")));
        }
        Ok(())
    }

    /// Looks for the addresses and routes of prevResult.
    ///
    /// # Errors
    /// 101 for the first that is missing.
    pub fn layer3(&self) -> Result<()> {
        self.addresses()?;
        self.routes()
    }

    fn addresses(&self) -> Result<()> {
        let there = self.context.container.list_addresses(self.inner.index)?;
        for ip in &self.layer3.ips {
            if !there.iter().any(|address| address.cidr == ip.address) {
                let found: Vec<String> = there.iter().map(|address| address.cidr.to_string()).collect();
                let msg = format!("Failed to match addr {} on interface {}", ip.address, self.inner.name);
                return Err(failed(msg).with_details(format!("found [{}]", found.join(" "))));
            }
        }
        Ok(())
    }

    /// Compares destination, table, metric and gateway. Does not compare MTU and MSS: Go never sets
    /// them. Later plugins, sbr and vrf for example, move routes of the main table into others.
    fn routes(&self) -> Result<()> {
        for wanted in self.layer3.kernel_routes(self.inner.index) {
            let wanted = cni_linux::Route { dst: wanted.dst.network(), ..wanted };
            let is_it = |route: &cni_linux::Route| route.gw == wanted.gw && route.oif == wanted.oif;
            let container = &self.context.container;
            let mut there = container.list_conflicting(&wanted)?;
            if wanted.table_id() == MAIN_TABLE && !there.iter().any(is_it) {
                there = container.list_all_routes(Family::of(wanted.dst.address()))?;
                there.retain(|route| wanted.conflicts_with(&cni_linux::Route { table: wanted.table, ..*route }));
            }
            if !there.iter().any(is_it) {
                return Err(failed(format!("Expected Route {wanted} not found in routing table")));
            }
        }
        Ok(())
    }

    /// Looks for the masquerade rules of these addresses, if the configuration asks for any.
    ///
    /// # Errors
    /// 101 for what is missing.
    pub fn masquerade(&self, ips: &[IpConfig]) -> Result<()> {
        let missing = self.missing_masquerade(&addresses(ips))?.unwrap_or_default();
        if missing.is_empty() { Ok(()) } else { Err(failed(missing.join("; "))) }
    }

    /// Which masquerade rules are missing; `None` if the configuration asks for none.
    fn missing_masquerade(&self, addresses: &[Cidr]) -> Result<Option<Vec<String>>> {
        if self.masquerade == Masquerading::Off {
            return Ok(None);
        }
        Ok(Some(masquerade::open(self.context.call).check(&self.context.mark, addresses)?))
    }

    /// Writes the masquerade rules of these addresses again, if some are missing. `None` if the
    /// configuration asks for none.
    ///
    /// # Errors
    /// What keeps the rules from being compared or written.
    pub fn restore_masquerade(&self, ips: &[IpConfig], mode: RestoreMode) -> Result<Option<Restored<'a>>> {
        let addresses = addresses(ips);
        let Some(missing) = self.missing_masquerade(&addresses)? else { return Ok(None) };
        let mut rollback = self.context.call.rollback();
        if mode == RestoreMode::Write && !missing.is_empty() {
            masquerade::ensure(&self.context, self.masquerade, &addresses, &mut rollback)?;
        }
        Ok(Some(Restored { missing, rollback }))
    }

    /// The end of the wait for states that settle by themselves, if it begins now.
    pub fn dad_deadline(&self) -> Instant {
        self.context.call.machine.now() + SETTLE
    }

    /// Waits until none of the attachment's addresses is tentative.
    ///
    /// # Errors
    /// 101 if one is at `deadline`, or is a duplicate.
    pub fn wait_for_dad(&self, deadline: Instant) -> Result<()> {
        let AttachmentContext { container, netns, call, .. } = &self.context;
        let unsettled = || -> cni_linux::Result<bool> {
            // The kernel's own link-local address is not part of the attachment, and may take its
            // time.
            let ours = |cidr| self.layer3.ips.iter().any(|ip| ip.address == cidr);
            let there = container.list_addresses(self.inner.index)?;
            Ok(there.iter().any(|address| ours(address.cidr) && (address.tentative || address.dad_failed)))
        };
        if !self.layer3.ips.is_empty() && unsettled()? {
            let watch = Watch::open_in(netns)?;
            watch
                .wait("duplicate address detection", deadline, call.machine, || {
                    Ok(if unsettled()? { None } else { Some(()) })
                })
                .map_err(|error| failed(format!("an address of {} is not usable: {error}", self.inner.name)))?;
        }
        Ok(())
    }
}
