//! CHECK: compares the attachment with the state in which ADD left it.
//!
//! Properties that a later plugin of the list may have changed (MAC, MTU, addresses, routes) are
//! compared with `prevResult` only, the plugin's own properties with its configuration.

use std::time::{Duration, Instant};

use cni::delegate::call_ipam;
use cni::result::{AddResult, IpConfig};
use cni::skel::{Call, RestoreMode, Verb};
use cni::{Cidr, Code, Error, Result};
use cni_linux::route::MAIN_TABLE;
use cni_linux::{Addr, Family, Link, Mac, Watch, sysctl};

use super::conf::CommonConf;
use super::layer3::{Layer3, forwarding_sysctl};
use super::{AttachmentContext, HostEnd, Interface, LinkState, PortMark, masquerade};
use crate::identity::find_host_end;
use crate::keys::MasqueradeScope;

/// How long CHECK waits for a state that the kernel reaches by itself.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

/// One CHECK: the expected state, and the steps that all plugins have in common.
#[derive(Debug)]
pub struct Check<'a, C> {
    /// The call, the configuration and both namespaces.
    pub context: AttachmentContext<'a, C>,
    /// `prevResult`: the result of the whole list.
    pub prev: AddResult,
    /// CNI_IFNAME in the container.
    pub inner: Link,
    /// The addresses and routes of CNI_IFNAME in `prevResult`.
    pub layer3: Layer3,
    /// The entry of CNI_IFNAME in `prevResult`.
    expected: cni::result::Interface,
    masquerade: Option<MasqueradeScope>,
    state: LinkState,
}

/// Compares the attachment with the configuration and with `prevResult`.
///
/// # Errors
/// - Code 101 for the first difference.
/// - Code 3 if nothing of the attachment exists.
/// - The errors of the configuration and of the IPAM plugin.
pub(super) fn check<I: Interface>(plugin: &I, call: &Call<'_>) -> Result<()> {
    let attachment = OpenedAttachment::open(plugin, call)?;
    if !plugin.is_in_kernel(&attachment.context.conf)? {
        return call_ipam(call, Verb::Check);
    }
    let check = attachment.find_interface(plugin)?;
    call_ipam(call, Verb::Check)?;
    let policy = plugin.layer3(&check.context.conf);
    CommonConf::read(&call.conf, &policy, &call.notes)?.accept_ra.check(&check.context)?;
    if !plugin.is_kind(&check.inner) {
        return Err(failed(format!("Container interface {} not of type {}", check.inner.name, I::KIND)));
    }
    plugin.check(&check)
}

/// An attachment and `prevResult`, before CNI_IFNAME is looked up in the container.
struct OpenedAttachment<'a, C> {
    context: AttachmentContext<'a, C>,
    /// `prevResult`: the result of the whole list.
    prev: AddResult,
    /// The position of CNI_IFNAME in `prev.interfaces`.
    position: usize,
}

impl<'a, C> OpenedAttachment<'a, C> {
    /// Parses the configuration and `prevResult`, and opens both namespaces.
    ///
    /// # Errors
    /// - Code 7 without `prevResult`, or if `prevResult` does not list CNI_IFNAME in CNI_NETNS.
    /// - The errors of the configuration and of opening the namespace.
    fn open<I: Interface<Conf = C>>(plugin: &I, call: &'a Call<'_>) -> Result<OpenedAttachment<'a, C>> {
        let conf = plugin.parse(&call.conf, &call.environment.args)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("Required prevResult missing"))?;
        let context = AttachmentContext::open(call, conf, None)?;
        let position = position_in_prev(call, &prev)?;
        Ok(OpenedAttachment { context, prev, position })
    }

    /// Finds CNI_IFNAME in the container, and its entry, addresses and routes in `prevResult`.
    ///
    /// # Errors
    /// Code 101 or 3 if CNI_IFNAME does not exist, see [`not_found`].
    fn find_interface<I: Interface<Conf = C>>(self, plugin: &I) -> Result<Check<'a, C>> {
        match self.context.container.find_link(&self.context.call.ifname)? {
            Some(inner) => Ok(self.with_interface(plugin, inner)),
            None => Err(not_found::<I>(&self.context, &self.prev)?),
        }
    }

    /// Finds the container's interface by the attachment's mark on its end on the host. The
    /// container may have renamed the interface, and have another one named CNI_IFNAME.
    ///
    /// # Errors
    /// The links of the host or the container cannot be read.
    fn find_marked_interface(&self) -> Result<Option<Link>> {
        let attachment = &self.context.attachment;
        let links = self.context.host.list_links()?;
        let has_mark = |link: &&Link| {
            attachment.is_on(link.alias.as_deref())
                || PortMark::of(link).is_some_and(|mark| mark.belongs_to(attachment))
        };
        match links.iter().filter(|link| link.is_veth()).find(has_mark) {
            Some(outer) => Ok(self.context.container.find_other_end(outer)?),
            None => Ok(None),
        }
    }

    /// Adds `inner`, the container's interface, and its entry, addresses and routes in
    /// `prevResult`.
    fn with_interface<I: Interface<Conf = C>>(self, plugin: &I, inner: Link) -> Check<'a, C> {
        let OpenedAttachment { context, prev, position } = self;
        let expected = prev.interfaces[position].clone();
        // tc-redirect-tap lists an interface of the virtual machine, with the container's ID as its
        // sandbox, and assigns the addresses of CNI_IFNAME to that entry. The kernel has them on
        // CNI_IFNAME.
        let is_ifname_or_vm =
            |listed: &cni::result::Interface| *listed == expected || listed.sandbox == context.call.container_id;
        let mut ips = Vec::new();
        for ip in &prev.ips {
            let is_on_ifname = match ip.interface {
                Some(index) => prev.interfaces.get(index).is_some_and(is_ifname_or_vm),
                // An address whose entry names no interface counts as one of CNI_IFNAME.
                None => true,
            };
            if is_on_ifname {
                ips.push(ip.clone());
            }
        }
        let policy = plugin.layer3(&context.conf);
        let layer3 = Layer3 { ips, routes: prev.routes.clone(), subnet: policy.subnet };
        let (masquerade, state) = (policy.masquerade.cloned(), policy.state);
        Check { context, prev, inner, layer3, expected, masquerade, state }
    }
}

/// Returns the error, code 101, of a CHECK that has found a difference.
pub fn failed(msg: impl Into<String>) -> Error {
    Error::new(Code::CHECK_FAILED, msg)
}

/// Checks that the host forwards packets of `family` that arrive on `link`, the gateway's link.
///
/// # Errors
/// Code 101 if the host does not.
pub fn check_forwarding(link: &Link, family: Family) -> Result<()> {
    if family == Family::V4 && link.ipv4.is_none() {
        return Err(failed(format!(
            "{} has no IPv4, because its MTU is too small: the host does not forward",
            link.name
        )));
    }
    match disabled_forwarding(link, family)? {
        None => Ok(()),
        Some(sysctl) => Err(failed(format!("sysctl {sysctl} is off: the host does not forward"))),
    }
}

/// Returns the sysctl because of which the host does not forward packets of `family` that arrive on
/// `link`, or `None` if the host forwards them.
///
/// # Errors
/// A sysctl cannot be read, for example because the kernel has no IPv6, or because the link's MTU
/// is too small for IPv4.
pub fn disabled_forwarding(link: &Link, family: Family) -> Result<Option<String>> {
    // In IPv6 the kernel decides by the value of all links, in IPv4 by that of the link:
    // `ip_forward` only writes the latter for all, and systemd-networkd can set single links while
    // `ip_forward` is 0. Any number but 0 means on.
    if family == Family::V4 && link.ipv4.is_some_and(|ipv4| ipv4.forwarding) {
        return Ok(None);
    }
    let for_all_links = forwarding_sysctl(family);
    if sysctl::read(for_all_links)? == "0" {
        return Ok(Some(for_all_links.to_owned()));
    }
    if family == Family::V6 {
        return Ok(None);
    }
    let of_link = format!("net/ipv4/conf/{}/forwarding", link.name);
    Ok(if sysctl::read(&of_link)? == "0" { Some(of_link) } else { None })
}

/// Returns the position of CNI_IFNAME in `prev.interfaces`.
///
/// # Errors
/// Code 7 if CNI_IFNAME is not listed with the namespace CNI_NETNS.
fn position_in_prev(call: &Call<'_>, prev: &AddResult) -> Result<usize> {
    let sandbox = call.sandbox();
    if !sandbox.is_empty()
        && let Some(position) = prev.find_interface(&call.ifname, sandbox)
    {
        return Ok(position);
    }
    let same_name =
        prev.interfaces.iter().find(|interface| interface.name == call.ifname && !interface.sandbox.is_empty());
    Err(match same_name {
        Some(found) => {
            Error::config(format!("Sandbox in prevResult {} doesn't match configured netns: {sandbox}", found.sandbox))
        }
        None => Error::config(format!("prevResult has no interface {} in a container", call.ifname)),
    })
}

/// Returns the error of a CHECK whose CNI_IFNAME does not exist: code 101 if the host's end still
/// exists, else 3, because nothing of the attachment exists.
///
/// # Errors
/// The host's end cannot be looked up.
fn not_found<I: Interface>(context: &AttachmentContext<'_, I::Conf>, prev: &AddResult) -> Result<Error> {
    let msg = format!("Interface name {} not found", context.call.ifname);
    if let HostEnd::Veth { .. } = I::HOST_END {
        let mut host_names = vec![context.attachment.host_name(0)];
        // ADD tries other names if the first one is taken, and the Go plugins choose random ones.
        // All begin with `veth`.
        for interface in &prev.interfaces {
            if interface.sandbox.is_empty() && interface.name.starts_with("veth") {
                host_names.push(interface.name.clone());
            }
        }
        for name in host_names {
            if context.host.find_link(&name)?.is_some() {
                return Ok(failed(msg).with_details(format!("the host's end {name} still exists")));
            }
        }
    }
    let details = "nothing of this attachment exists in the kernel";
    Ok(Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(details))
}

/// Returns the addresses without their gateways.
fn addresses(ips: &[IpConfig]) -> Vec<Cidr> {
    ips.iter().map(|ip| ip.address).collect()
}

impl<'a, C> Check<'a, C> {
    /// Opens the attachment, for a caller that runs single steps of a CHECK. The container's
    /// interface is found by its marked end on the host or, if there is none, by its name.
    ///
    /// # Errors
    /// - Code 101 if CNI_IFNAME does not exist and its end on the host does; 3 if neither exists.
    /// - The errors of the configuration, of `prevResult` and of opening the namespace.
    pub fn open<I: Interface<Conf = C>>(plugin: &I, call: &'a Call<'_>) -> Result<Check<'a, C>> {
        let attachment = OpenedAttachment::open(plugin, call)?;
        match attachment.find_marked_interface()? {
            Some(inner) => Ok(attachment.with_interface(plugin, inner)),
            None => attachment.find_interface(plugin),
        }
    }

    /// Returns the MAC that `prevResult` has for CNI_IFNAME or, if it has none, that of the
    /// interface, which the container can change.
    pub fn expected_mac(&self) -> Option<Mac> {
        self.expected.mac.parse().ok().or(self.inner.mac)
    }

    /// Returns the host's end of the veth pair whose other end is CNI_IFNAME.
    ///
    /// # Errors
    /// Code 101 with the text `missing` if the host has no such end.
    pub fn host_end(&self, missing: &str) -> Result<Link> {
        let AttachmentContext { host, attachment, netns, .. } = &self.context;
        find_host_end(host, attachment, netns, &self.inner)?.ok_or_else(|| failed(missing))
    }

    /// Compares the MAC and MTU of CNI_IFNAME with `prevResult`. If the plugin's policy asks for
    /// [`LinkState::Up`], also checks that CNI_IFNAME is up.
    ///
    /// # Errors
    /// Code 101 for the first difference.
    pub fn compare_interface(&self) -> Result<()> {
        let (inner, expected) = (&self.inner, &self.expected);
        let name = &inner.name;
        if !expected.mac.is_empty() && expected.mac.parse::<Mac>().ok() != inner.mac {
            let found = inner.mac.map(|mac| mac.to_string()).unwrap_or_default();
            return Err(failed(format!("Interface {name} Mac {} doesn't match container Mac: {found}", expected.mac)));
        }
        if let Some(mtu) = expected.mtu.filter(|mtu| *mtu != inner.mtu) {
            let msg = format!("Interface {name} has MTU {}, expected {mtu}", inner.mtu);
            if inner.mtu > mtu {
                return Err(failed(msg));
            }
            // Smaller packets pass too.
            self.context.call.notes.note(msg);
        }
        if self.state == LinkState::Up && !inner.up {
            return Err(failed(format!("Interface {name} is down")));
        }
        Ok(())
    }

    /// Checks that the container has the addresses and routes of `prevResult`.
    ///
    /// # Errors
    /// Code 101 for the first missing address or route.
    pub fn compare_layer3(&self) -> Result<()> {
        self.compare_addresses()?;
        self.compare_routes()
    }

    /// Checks that CNI_IFNAME has the addresses of `prevResult`.
    fn compare_addresses(&self) -> Result<()> {
        let existing = self.context.container.list_addresses(self.inner.index)?;
        for ip in &self.layer3.ips {
            if !existing.iter().any(|address| address.cidr == ip.address) {
                let found: Vec<String> = existing.iter().map(|address| address.cidr.to_string()).collect();
                let msg = format!("Failed to match addr {} on interface {}", ip.address, self.inner.name);
                return Err(failed(msg).with_details(format!("found [{}]", found.join(" "))));
            }
        }
        Ok(())
    }

    /// Checks that the container has the routes of `prevResult`, by destination, table, metric,
    /// gateway and interface. MTU and MSS are not compared, because the Go plugins never set them.
    /// A route of the main table is also accepted in another table, because later plugins (sbr,
    /// vrf) move it there. A default route may have another metric there: vrf gives it the metric
    /// that it would have without the default routes of other networks.
    fn compare_routes(&self) -> Result<()> {
        let expected_routes = self.layer3.kernel_routes(self.inner.index);
        // A container may have very many routes, so each family is listed only once.
        let mut existing = Vec::new();
        for family in Family::ALL {
            if expected_routes.iter().any(|route| Family::of(route.dst.address()) == family) {
                existing.extend(self.context.container.list_all_routes(family)?);
            }
        }
        for expected in &expected_routes {
            let is_expected = |route: &cni_linux::Route| {
                // The route is compared as if no later plugin had moved it.
                let mut compared = *route;
                if expected.table_id() == MAIN_TABLE && route.table_id() != MAIN_TABLE {
                    compared.table = expected.table;
                    if route.dst.is_default_route() {
                        compared.priority = expected.priority;
                    }
                }
                expected.conflicts_with(&compared) && (route.gw, route.oif) == (expected.gw, expected.oif)
            };
            if !existing.iter().any(is_expected) {
                return Err(failed(format!("Expected Route {expected} not found in routing table")));
            }
        }
        Ok(())
    }

    /// Checks that the masquerade rules of these addresses exist, if the configuration has
    /// `ipMasq`.
    ///
    /// # Errors
    /// Code 101 with every missing rule.
    pub fn compare_masquerade(&self, ips: &[IpConfig]) -> Result<()> {
        let missing = self.missing_masquerade(&addresses(ips))?.unwrap_or_default();
        if missing.is_empty() { Ok(()) } else { Err(failed(missing.join("; "))) }
    }

    /// Describes each masquerade rule that is missing. Returns `None` without `ipMasq`.
    fn missing_masquerade(&self, addresses: &[Cidr]) -> Result<Option<Vec<String>>> {
        let Some(scope) = &self.masquerade else { return Ok(None) };
        let masquerade = masquerade::open(self.context.call).excluding(&scope.exclude);
        Ok(Some(masquerade.check(&self.context.attachment, &scope.select(addresses))?))
    }

    /// Writes the masquerade rules of these addresses again if some are missing and `mode` is
    /// [`RestoreMode::Write`]. Returns descriptions of the rules that were missing. Returns `None`
    /// without `ipMasq`.
    ///
    /// # Errors
    /// The rules cannot be read or written.
    pub fn restore_masquerade(&self, ips: &[IpConfig], mode: RestoreMode<'_, 'a>) -> Result<Option<Vec<String>>> {
        let addresses = addresses(ips);
        let Some(missing) = self.missing_masquerade(&addresses)? else { return Ok(None) };
        if let RestoreMode::Write(rollback) = mode
            && !missing.is_empty()
        {
            masquerade::ensure(&self.context, self.masquerade.as_ref(), &addresses, rollback)?;
        }
        Ok(Some(missing))
    }

    /// Returns the deadline for all waits of this CHECK. To be called once, before the first wait.
    pub fn settle_deadline(&self) -> Instant {
        self.context.call.machine.now() + SETTLE_TIMEOUT
    }

    /// Waits until duplicate address detection has accepted all of the attachment's addresses. Does
    /// not check that the addresses exist.
    ///
    /// # Errors
    /// - Code 101 if an address is still tentative, or marked as a duplicate, at `deadline`.
    /// - The error of the wait or of the kernel, such as code 11 after SIGTERM.
    pub fn wait_for_dad(&self, deadline: Instant) -> Result<()> {
        if self.layer3.ips.is_empty() {
            return Ok(());
        }
        let Some(mut unusable) = self.find_unusable_address()? else { return Ok(()) };
        let watch = Watch::open_in(&self.context.netns)?;
        let waited = watch.wait("duplicate address detection", deadline, self.context.call.machine, || {
            let Some(address) = self.find_unusable_address()? else { return Ok(Some(())) };
            unusable = address;
            Ok(None)
        });
        waited.map_err(|error| {
            if !error.is_deadline() {
                return error.into();
            }
            let state = if unusable.dad_failed {
                "another host on the link has it (DADFAILED state)"
            } else {
                "it is still tentative"
            };
            let name = &self.inner.name;
            failed(format!("address {} of {name} is not usable: {state}", unusable.cidr))
                .with_details(error.to_string())
        })
    }

    /// Returns one of the attachment's addresses that is tentative or marked as a duplicate,
    /// preferably a duplicate. Returns `None` if all are usable.
    fn find_unusable_address(&self) -> cni_linux::Result<Option<Addr>> {
        let mut unusable = self.context.container.list_addresses(self.inner.index)?;
        // The link-local address that the kernel adds is not part of the attachment, so its
        // detection may still run.
        unusable.retain(|address| {
            let is_expected = self.layer3.ips.iter().any(|ip| ip.address == address.cidr);
            is_expected && (address.tentative || address.dad_failed)
        });
        let duplicate = unusable.iter().find(|address| address.dad_failed);
        Ok(duplicate.or(unusable.first()).copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_linux::Netlink;
    use cni_testkit::{in_new_netns, output};

    #[test]
    fn a_link_without_ipv4_has_no_forwarding_that_is_off() {
        in_new_netns(|| {
            output("ip link set lo mtu 60");
            sysctl::write("net/ipv4/ip_forward", "1").unwrap();
            let link = Netlink::open().unwrap().find_link("lo").unwrap().unwrap();
            assert_eq!(link.ipv4, None);
            let error = disabled_forwarding(&link, Family::V4).unwrap_err().to_string();
            assert!(error.contains("failed to read") && error.contains("conf/lo/forwarding"), "{error}");
            let error = check_forwarding(&link, Family::V4).unwrap_err();
            assert_eq!(error.code(), Code::CHECK_FAILED, "{error}");
        });
    }
}
