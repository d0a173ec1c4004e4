//! CHECK: is the attachment as ADD left it?
//!
//! What a later plugin of the list may have changed (MAC, MTU, addresses, routes) is judged by `prevResult` alone; the
//! bridge's own things by its configuration. The bridge's MAC is not judged: on a bridge that a Go plugin made it
//! follows the ports, and no container is the worse for it.

use std::time::Duration;

use cni::delegate::Delegate;
use cni::result::{AddResult, Interface, IpConfig};
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_firewall::spoof::SpoofCheck;
use cni_linux::{Link, Mac, Netlink, Netns, PortState, Watch, sysctl};

use crate::chained::PortMark;
use crate::conf::{Conf, Gateway, Masquerading, vlan_gateway_name};
use crate::layer3::Layer3;
use crate::{attach, gateway, mark, masquerade, port};

/// How long states that settle by themselves are given.
const SETTLE: Duration = Duration::from_secs(2);

pub(crate) fn check(call: &Call<'_>, conf: &Conf) -> Result<()> {
    let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("Required prevResult missing"))?;
    let netns = Netns::open(call.netns()?)?;
    let host = Netlink::open()?;
    let container = host.open_in(&netns)?;

    let expected = container_interface(call, &prev)?;
    let Some(inner) = container.find_link(&call.ifname)? else {
        return Err(absent(call, &host, &prev)?);
    };
    if let Some(kind) = &conf.ipam {
        Delegate::find(call, kind)?.check()?;
    }
    let outer = host_end(&host, conf, &inner)?;
    let bridge = bridge(&host, conf)?;
    check_inner(conf, expected, &inner)?;
    check_port(&host, call, conf, &bridge, &outer, &inner)?;
    let ips = prev.ips.iter().filter(|ip| {
        ip.interface.is_none_or(|index| prev.interfaces.get(index).is_some_and(|interface| interface == expected))
    });
    let layer3 = Layer3 { ips: ips.cloned().collect(), routes: prev.routes.clone() };
    check_addresses(&container, &inner, &layer3)?;
    check_routes(&container, &inner, &layer3)?;
    if conf.ipam.is_some() {
        check_service(call, &host, conf, &bridge, &own_addresses(&outer, &prev, &layer3))?;
    }
    if conf.container_down {
        return Ok(());
    }
    settle(call, &host, &container, &netns, &outer, &inner, &layer3)
}

fn failed(msg: impl Into<String>) -> Error {
    Error::new(Code::CHECK_FAILED, msg)
}

/// The container's interface as prevResult has it.
fn container_interface<'p>(call: &Call<'_>, prev: &'p AddResult) -> Result<&'p Interface> {
    let sandbox = attach::sandbox(call);
    let named =
        || prev.interfaces.iter().filter(|interface| interface.name == call.ifname && !interface.sandbox.is_empty());
    if let Some(interface) = named().find(|interface| interface.sandbox == sandbox) {
        return Ok(interface);
    }
    Err(match named().next() {
        Some(other) => {
            Error::config(format!("Sandbox in prevResult {} doesn't match configured netns: {sandbox}", other.sandbox))
        }
        None => Error::config(format!("prevResult has no interface {} in a container", call.ifname)),
    })
}

/// The container's end is gone. Is anything left of the attachment? If not, that is code 3.
fn absent(call: &Call<'_>, host: &Netlink, prev: &AddResult) -> Result<Error> {
    let msg = format!("Interface name {} not found", call.ifname);
    let mark = mark(call);
    let host_names =
        prev.interfaces.iter().filter(|interface| interface.sandbox.is_empty() && interface.name.starts_with("veth"));
    for name in host_names.map(|interface| interface.name.clone()).chain([mark.host_name(0)]) {
        if host.find_link(&name)?.is_some() {
            return Ok(failed(msg).with_details(format!("the host's end {name} still exists")));
        }
    }
    let details = "nothing of this attachment exists in the kernel";
    Ok(Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(details))
}

fn bridge(host: &Netlink, conf: &Conf) -> Result<Link> {
    let name = &conf.bridge;
    let link = host.find_link(name)?.ok_or_else(|| failed(format!("Interface name {name} not found")))?;
    if !link.is_bridge() {
        return Err(failed(format!("Interface {name} not of type bridge")));
    }
    if !link.up {
        return Err(failed(format!("bridge {name} is down")));
    }
    // Higher than asked is fine: somebody may be capturing.
    if conf.promiscuous && link.promiscuity == 0 {
        let msg = format!("Bridge interface {name} configured Promisc Mode true doesn't match current state: false");
        return Err(failed(msg));
    }
    Ok(link)
}

/// The other end of the container's interface, on the host.
fn host_end(host: &Netlink, conf: &Conf, inner: &Link) -> Result<Link> {
    let missing = || failed(format!("CNI veth created for bridge {} was not found", conf.bridge));
    if !inner.is_veth() {
        return Err(failed(format!("Container interface {} not of type veth", inner.name)));
    }
    let outer = host.find_link_by_index(inner.peer_index.ok_or_else(missing)?)?.ok_or_else(missing)?;
    if outer.peer_index == Some(inner.index) { Ok(outer) } else { Err(missing()) }
}

fn check_inner(conf: &Conf, expected: &Interface, inner: &Link) -> Result<()> {
    let name = &inner.name;
    if !expected.mac.is_empty() && expected.mac.parse::<Mac>().ok() != inner.mac {
        let found = inner.mac.map(|mac| mac.to_string()).unwrap_or_default();
        return Err(failed(format!("Interface {name} Mac {} doesn't match container Mac: {found}", expected.mac)));
    }
    if let Some(mtu) = expected.mtu.filter(|mtu| *mtu != inner.mtu) {
        return Err(failed(format!("Interface {name} has MTU {}, expected {mtu}", inner.mtu)));
    }
    if !conf.container_down && !inner.up {
        return Err(failed(format!("Interface {name} is down")));
    }
    Ok(())
}

fn check_port(host: &Netlink, call: &Call<'_>, conf: &Conf, bridge: &Link, outer: &Link, inner: &Link) -> Result<()> {
    let name = &outer.name;
    if outer.master != Some(bridge.index) {
        return Err(failed(format!("{name} is no port of bridge {}", bridge.name)));
    }
    if !outer.up {
        return Err(failed(format!("{name} is down")));
    }
    let marked = outer.alias.as_deref().and_then(PortMark::parse);
    if marked.is_some_and(|port_mark| !port_mark.is(&mark(call))) {
        return Err(failed(format!("{name} was given to {} by another attachment", bridge.name)));
    }
    let port = outer.port.ok_or_else(|| failed(format!("{name} is no port of bridge {}", bridge.name)))?;
    for (what, found, expected) in
        [("hairpin mode", port.hairpin, conf.hairpin), ("port isolation", port.isolated, conf.isolated)]
    {
        if found != expected {
            return Err(failed(format!("{name}: {what} is {found}, expected {expected}")));
        }
    }
    if let Some(vlans) = &conf.vlans {
        let missing = port::missing_vlans(host, outer.index, vlans)?;
        if !missing.is_empty() {
            return Err(failed(format!("{name} lacks {}", missing.join(", "))));
        }
    }
    if conf.spoof_check {
        let mac = inner.mac.ok_or_else(|| failed(format!("{} has no hardware address", inner.name)))?;
        let wrong = SpoofCheck::open()?.check(&call.container_id, &call.ifname, name, mac)?;
        if !wrong.is_empty() {
            return Err(failed(wrong.join("; ")));
        }
    }
    Ok(())
}

fn check_addresses(container: &Netlink, inner: &Link, layer3: &Layer3) -> Result<()> {
    let there = container.list_addresses(inner.index)?;
    for ip in &layer3.ips {
        if !there.iter().any(|address| address.cidr == ip.address) {
            let found: Vec<String> = there.iter().map(|address| address.cidr.to_string()).collect();
            let msg = format!("Failed to match addr {} on interface {}", ip.address, inner.name);
            return Err(failed(msg).with_details(format!("found [{}]", found.join(" "))));
        }
    }
    Ok(())
}

/// By destination, table, metric and gateway. Not by MTU and MSS: Go never sets them.
fn check_routes(container: &Netlink, inner: &Link, layer3: &Layer3) -> Result<()> {
    for wanted in layer3.kernel_routes(inner.index) {
        let wanted = cni_linux::Route { dst: wanted.dst.network(), ..wanted };
        let there = container.find_rivals(&wanted)?;
        if !there.iter().any(|route| route.gw == wanted.gw && route.oif == wanted.oif) {
            return Err(failed(format!("Expected Route {wanted} not found in routing table")));
        }
    }
    Ok(())
}

/// Those of the result's addresses that this plugin's IPAM gave. On a port that an earlier plugin made there are also
/// that one's, which have no gateway here and are not masqueraded by us.
fn own_addresses(outer: &Link, prev: &AddResult, layer3: &Layer3) -> Vec<IpConfig> {
    match outer.alias.as_deref().and_then(PortMark::parse) {
        Some(PortMark { addresses: (first, count), .. }) => prev.ips.iter().skip(first).take(count).cloned().collect(),
        None => layer3.ips.clone(),
    }
}

/// What the host does for the addresses: it is their gateway, and masquerades them.
fn check_service(call: &Call<'_>, host: &Netlink, conf: &Conf, bridge: &Link, own: &[IpConfig]) -> Result<()> {
    if conf.gateway != Gateway::None {
        check_gateway(host, conf, bridge, own)?;
    }
    if conf.masquerade != Masquerading::Off {
        let addresses: Vec<Cidr> = own.iter().map(|ip| ip.address).collect();
        let missing = masquerade::open(call).check(&mark(call), &addresses)?;
        if !missing.is_empty() {
            return Err(failed(missing.join("; ")));
        }
    }
    Ok(())
}

fn check_gateway(host: &Netlink, conf: &Conf, bridge: &Link, own: &[IpConfig]) -> Result<()> {
    let link = match conf.gateway_vlan() {
        None => bridge.clone(),
        Some(vlan) => {
            let name = vlan_gateway_name(&bridge.name, vlan);
            host.find_link(&name)?.ok_or_else(|| failed(format!("Interface name {name} not found")))?
        }
    };
    let there = host.list_addresses(link.index)?;
    for ip in own {
        let Some(gateway) = ip.gateway.and_then(|gateway| Cidr::new(gateway, ip.address.prefix())) else { continue };
        if !there.iter().any(|address| address.cidr == gateway) {
            return Err(failed(format!("{} does not have the gateway's address {gateway}", link.name)));
        }
        let key = gateway::forwarding(ip.address.is_ipv4());
        if sysctl::read(key)? != "1" {
            return Err(failed(format!("sysctl {key} is off: the host does not forward")));
        }
    }
    Ok(())
}

/// The port forwards and none of the attachment's addresses is tentative: soon, if not yet.
fn settle(
    call: &Call<'_>,
    host: &Netlink,
    container: &Netlink,
    netns: &Netns,
    outer: &Link,
    inner: &Link,
    layer3: &Layer3,
) -> Result<()> {
    let deadline = call.machine.now() + SETTLE;
    if outer.port.is_none_or(|port| port.state != PortState::Forwarding) {
        let watch = Watch::open()?;
        host.wait_port_forwarding(&watch, outer.index, deadline, call.machine.0)
            .map_err(|error| failed(format!("{} does not forward: {error}", outer.name)))?;
    }
    let unsettled = || -> cni_linux::Result<bool> {
        // The kernel's own link-local address is not part of the attachment, and may take its time.
        let ours = |cidr| layer3.ips.iter().any(|ip| ip.address == cidr);
        let there = container.list_addresses(inner.index)?;
        Ok(there.iter().any(|address| ours(address.cidr) && (address.tentative || address.dad_failed)))
    };
    if !layer3.ips.is_empty() && unsettled()? {
        let watch = Watch::open_in(netns)?;
        watch
            .wait("duplicate address detection", deadline, call.machine.0, || {
                Ok(if unsettled()? { None } else { Some(()) })
            })
            .map_err(|error| failed(format!("an address of {} is not usable: {error}", inner.name)))?;
    }
    Ok(())
}
