//! Checks links, forwarding, MTUs and reverse path filters.

use std::collections::HashSet;
use std::path::Path;

use cni::AttachmentId;
use cni::Error;
use cni_linux::route::Family;
use cni_linux::{Link, Netns, OperState, sysctl};
use cni_plugin::interface::disabled_forwarding;

use super::{CheckOutcome, Examined};
use crate::node::attachments::CachedAttachment;
use crate::node::leftovers::quoted;
use crate::node::name_of;

/// Checks that the host forwards packets, if a network that containers use needs forwarding. Agrees
/// with CHECK of bridge and ptp.
pub(super) fn forwarding(node: &Examined<'_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("forwarding");
    if !node.a_used_network_sets(&["isGateway", "isDefaultGateway", "ipMasq"]) {
        return outcome.with_summary("no network needs forwarding; the plugins switch it on when a network does");
    }
    let ips = node.snapshot.attachments.cached.iter().flat_map(|cached| &cached.result).flat_map(|result| &result.ips);
    let families: Vec<Family> = ips.map(|ip| Family::of(ip.address.address())).collect();
    // The links behind which containers use the host as a gateway.
    let attached_links = &node.snapshot.attachments.attached_links;
    let outside_bridges = attached_links.iter().map(|(_, link)| link).filter(|link| link.master.is_none());
    let gateways: Vec<&Link> = node.snapshot.bridges().into_iter().chain(outside_bridges).collect();
    let mut sysctls = Vec::new();
    for family in [Family::V4, Family::V6] {
        // Without results, the addresses are probably IPv4.
        if !families.contains(&family) && (family == Family::V6 || !families.is_empty()) {
            continue;
        }
        // A sysctl that cannot be read needs no fix: for example, IPv6 is disabled.
        sysctls.extend(gateways.iter().filter_map(|link| disabled_forwarding(link, family).ok().flatten()));
    }
    sysctls.dedup();
    // sysctl(8) writes a name with dots.
    for name in sysctls.iter().map(|name| sysctl::swap_separators(name)) {
        let problem = "is 0: containers reach their bridge, but no other network";
        outcome.add(&name, problem, format!("sysctl -w {}=1", quoted(&name)));
    }
    outcome.with_summary("the host forwards packets of containers")
}

/// Checks that the bridges, the two ends of each attachment's link, and the other ports of the
/// bridges are up.
pub(super) fn links(node: &Examined<'_>) -> CheckOutcome {
    let mut outcome = CheckOutcome::new("links");
    let bridges = node.snapshot.bridges();
    for bridge in bridges.iter().filter(|bridge| !bridge.up) {
        let problem = "is down: its containers cannot communicate";
        outcome.add(format!("bridge {}", bridge.name), problem, set_link(&bridge.name, "up"));
    }
    let attached_links = &node.snapshot.attachments.attached_links;
    for (attachment, link) in attached_links {
        let object = format!("host link {} ({})", link.name, name_of(attachment));
        if !link.up {
            outcome.add(object, "is down", set_link(&link.name, "up"));
        } else if link.oper_state == OperState::Down
            && find_container_end(node, attachment, link).is_some_and(|container_end| !container_end.up)
        {
            let problem = "has no carrier: the container's end is down";
            outcome.add(object, problem, set_container_end(node, attachment, "up"));
        }
    }
    for bridge in bridges {
        // The links of attachments have been checked above.
        let is_other_port = |link: &&Link| {
            link.master == Some(bridge.index) && !attached_links.iter().any(|(_, known)| known.index == link.index)
        };
        for link in node.snapshot.attachments.links.iter().filter(is_other_port).filter(|link| !link.up) {
            let problem = format!(", a port of {}, is down", bridge.name);
            outcome.add(&link.name, problem, set_link(&link.name, "up"));
        }
    }
    outcome.with_summary(match attached_links.len() {
        1 => "1 host link, up".to_owned(),
        count => format!("{count} host links, all up"),
    })
}

/// Returns the path of an attachment's namespace, or `None` if the result cache does not have the
/// path.
fn netns_of(node: &Examined<'_>, attachment: &AttachmentId) -> Option<String> {
    let cached = node.snapshot.attachments.find_cached(attachment)?;
    Some(cached.entry.attachment.netns.clone()).filter(|netns| !netns.is_empty())
}

/// Returns the command that changes a link of the host.
fn set_link(name: &str, change: &str) -> String {
    format!("ip link set dev {} {change}", quoted(name))
}

/// Returns the command that changes an attachment's link in the container.
fn set_container_end(node: &Examined<'_>, attachment: &AttachmentId, change: &str) -> String {
    let netns = netns_of(node, attachment).unwrap_or_default();
    format!("nsenter --net={} {}", quoted(&netns), set_link(&attachment.ifname, change))
}

/// Returns the attachment's link in the container, or `None` if the link does not exist or the
/// namespace cannot be entered. Looks the link up from the host, as the other end of `host_end`.
/// Enters the namespace only if the kernel cannot do that, because it takes longer.
fn find_container_end(node: &Examined<'_>, attachment: &AttachmentId, host_end: &Link) -> Option<Link> {
    let has_name = |link: &Link| link.name == attachment.ifname;
    if let Some(peer) = node.netlink.find_peer(host_end).ok().flatten().filter(has_name) {
        return Some(peer);
    }
    let netns = Netns::open(Path::new(&netns_of(node, attachment)?)).ok()?;
    node.netlink.open_in(&netns).ok()?.find_link(&attachment.ifname).ok()?
}

/// Checks for each attachment that the two ends of its link have the same MTU, and that neither the
/// bridge nor the uplink (see [`find_uplink`]) has a smaller MTU.
///
/// # Errors
/// The kernel's error if the routes cannot be listed.
pub(super) fn mtu(node: &Examined<'_>) -> Result<CheckOutcome, Error> {
    let mut outcome = CheckOutcome::new("mtu");
    let uplink = find_uplink(node)?;
    // A problem that many containers share is reported once for their bridge or network.
    let (mut reported_bridges, mut reported_networks) = (HashSet::new(), HashSet::new());
    let attached_links = &node.snapshot.attachments.attached_links;
    for (attachment, host_end) in attached_links {
        let Some(container_end) = find_container_end(node, attachment, host_end) else { continue };
        let AttachmentId { network, ifname, .. } = attachment;
        if container_end.mtu != host_end.mtu {
            let problem = format!(
                "{ifname} in the container has the MTU {}, but its host end {} has {}: larger packets are lost",
                container_end.mtu, host_end.name, host_end.mtu
            );
            let command = set_link(&host_end.name, &format!("mtu {}", container_end.mtu));
            outcome.add(format!("{}:", name_of(attachment)), problem, command);
        }
        let bridge = node.snapshot.attachments.links.iter().find(|link| Some(link.index) == host_end.master);
        if let Some(bridge) = bridge.filter(|bridge| bridge.mtu < host_end.mtu)
            && reported_bridges.insert(&bridge.name)
        {
            let problem = format!(
                "has the MTU {}, but its port {} has {}: larger packets are lost",
                bridge.mtu, host_end.name, host_end.mtu
            );
            let command = set_link(&bridge.name, &format!("mtu {}", host_end.mtu));
            outcome.add(format!("bridge {}", bridge.name), problem, command);
        }
        if let Some(uplink) = uplink.as_ref().filter(|uplink| uplink.mtu < container_end.mtu)
            && reported_networks.insert(network)
        {
            let problem = format!(
                "containers have the MTU {}, but {}, the interface of the default route, has {}: packets that must \
                 not be fragmented are lost where ICMP is filtered; set \"mtu\": {} in the network for new containers",
                container_end.mtu, uplink.name, uplink.mtu, uplink.mtu
            );
            let change = format!("mtu {}", uplink.mtu);
            let inside = set_container_end(node, attachment, &change);
            let command = format!("{inside} && {}", set_link(&host_end.name, &change));
            outcome.add(format!("network {network}:"), problem, command);
        }
    }
    Ok(outcome.with_summary("the MTUs of links, bridges and the uplink are consistent"))
}

/// Returns the uplink: the host's interface with the best default route of IPv4 or, if IPv4 has no
/// default route, of IPv6. Returns `None` if the host has no default route.
///
/// # Errors
/// The kernel's error if the routes cannot be listed.
fn find_uplink(node: &Examined<'_>) -> Result<Option<Link>, Error> {
    for family in [Family::V4, Family::V6] {
        let mut routes = node.netlink.list_routes(family, None)?;
        routes.retain(|route| route.dst.is_default_route());
        routes.sort_by_key(cni_linux::Route::metric);
        if let Some(route) = routes.first() {
            return Ok(node.snapshot.attachments.links.iter().find(|link| link.index == route.oif).cloned());
        }
    }
    Ok(None)
}

/// The strict mode of the sysctl rp_filter.
const STRICT_RP_FILTER: u8 = 1;

/// The loose mode of the sysctl rp_filter.
const LOOSE_RP_FILTER: u8 = 2;

/// Checks that the strict reverse path filter does not drop packets of containers. The filter drops
/// a packet if the host's route to the packet's source does not use the interface on which the
/// packet arrived.
///
/// # Errors
/// The kernel's error if netlink cannot be used.
pub(super) fn rp_filter(node: &Examined<'_>) -> Result<CheckOutcome, Error> {
    let mut outcome = CheckOutcome::new("rp_filter");
    for bridge in node.snapshot.bridges() {
        // A value that cannot be read counts as 0 (no filter).
        let read_mode = |name: &str| -> u8 {
            let value = sysctl::read(&format!("net/ipv4/conf/{name}/rp_filter"));
            value.ok().and_then(|value| value.parse().ok()).unwrap_or_default()
        };
        // The kernel uses the larger value.
        if read_mode("all").max(read_mode(&bridge.name)) != STRICT_RP_FILTER {
            continue;
        }
        for CachedAttachment { id, result, .. } in node.snapshot.attachments.cached_on_bridge(bridge) {
            for ip in result.iter().flat_map(|result| &result.ips).filter(|ip| ip.address.is_ipv4()) {
                let address = ip.address.address();
                if node.netlink.outgoing_interface(address).ok() != Some(bridge.index) {
                    let object = format!("{address} of network {}", id.network);
                    let problem = format!(
                        "is on {}, but the host's route to it uses another interface: the strict rp_filter drops packets that it \
                         sends to the host or through it",
                        bridge.name
                    );
                    // The loose mode is the largest value, so it takes effect whatever `all` is.
                    let name = sysctl::swap_separators(&format!("net/ipv4/conf/{}/rp_filter", bridge.name));
                    outcome.add(object, problem, format!("sysctl -w {}={LOOSE_RP_FILTER}", quoted(&name)));
                    break;
                }
            }
        }
    }
    Ok(outcome.with_summary("the host's route to each container uses the interface of its packets"))
}
