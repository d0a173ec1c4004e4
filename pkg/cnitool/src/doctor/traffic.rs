//! Links, forwarding, MTUs, reverse path filters: whether packets of containers get through.

use std::path::Path;

use cni::AttachmentId;
use cni::Error;
use cni_linux::route::Family;
use cni_linux::{Link, Netlink, Netns, OperState, sysctl};

use super::{CheckOutcome, Context};
use crate::inspect::orphans::quoted;
use crate::inspect::result_of;

/// Whether the host forwards, where containers rely on it. A bridge's ADD switches it on, and
/// nothing switches it back.
pub(super) fn forwarding(context: &Context<'_, '_>) -> CheckOutcome {
    let mut seen = CheckOutcome::new("forwarding");
    if !context.is_in_use(&["isGateway", "isDefaultGateway", "ipMasq"]) {
        return seen.ok_summary("nothing needs it now; bridge switches it on when something does");
    }
    let mut require = |name: String| {
        if sysctl::read(&name).is_ok_and(|value| value == "0") {
            let dotted = dotted(&name);
            seen.problem(
                format!("{dotted} is 0: containers reach their bridge and nothing behind it"),
                format!("sysctl -w {}=1", quoted(&dotted)),
            );
        }
    };
    require("net/ipv4/ip_forward".to_owned());
    for bridge in context.snapshot.bridges() {
        require(format!("net/ipv4/conf/{}/forwarding", bridge.name));
    }
    let results = context.snapshot.remembered.iter().filter_map(result_of);
    let has_ipv6 = results.flat_map(|result| result.ips).any(|ip| !ip.address.is_ipv4());
    if has_ipv6 {
        require("net/ipv6/conf/all/forwarding".to_owned());
    }
    seen.ok_summary("the host forwards for containers")
}

/// A value's name as sysctl(8) writes it.
fn dotted(name: &str) -> String {
    let swapped = name.chars().map(|c| match c {
        '/' => '.',
        '.' => '/',
        c => c,
    });
    swapped.collect()
}

/// Reports bridges, host links and unattributed bridge ports that are down, each with the command
/// that sets it up.
pub(super) fn links(context: &Context<'_, '_>) -> Result<CheckOutcome, Error> {
    let mut seen = CheckOutcome::new("links");
    let bridges = context.snapshot.bridges();
    for bridge in bridges.iter().filter(|bridge| !bridge.up) {
        let what = format!("bridge {} is down: nothing passes between its containers", bridge.name);
        seen.problem(what, format!("ip link set dev {} up", quoted(&bridge.name)));
    }
    let attached = context.snapshot.attached();
    for (mark, link) in &attached {
        let whose = format!("{} ({} {} {})", link.name, mark.network, mark.container_id, mark.ifname);
        if !link.up {
            seen.problem(format!("host link {whose} is down"), format!("ip link set dev {} up", quoted(&link.name)));
        } else if link.oper_state == OperState::Down && is_container_up(context, mark) == Some(false) {
            let what = format!("host link {whose} has no carrier: the container's end is down");
            let netns = netns_of(context, mark).unwrap_or_default();
            let command = format!("nsenter --net={} ip link set dev {} up", quoted(&netns), quoted(&mark.ifname));
            seen.problem(what, command);
        }
    }
    // The attachment of these ports is unknown, but the bridge belongs to a network.
    for bridge in bridges {
        let is_unknown = |link: &&Link| {
            link.master == Some(bridge.index) && !attached.iter().any(|(_, one)| one.index == link.index)
        };
        for link in context.snapshot.links.iter().filter(is_unknown).filter(|link| !link.up) {
            let what = format!("{}, a port of {}, is down", link.name, bridge.name);
            seen.problem(what, format!("ip link set dev {} up", quoted(&link.name)));
        }
    }
    Ok(seen.ok_summary(match attached.len() {
        1 => "1 host link, up".to_owned(),
        count => format!("{count} host links, all up"),
    }))
}

fn netns_of(context: &Context<'_, '_>, mark: &AttachmentId) -> Option<String> {
    let entry = context.snapshot.remembered.iter().find(|entry| {
        let attachment = &entry.attachment;
        AttachmentId::new(&entry.network, &attachment.container_id, &attachment.ifname) == *mark
    })?;
    Some(entry.attachment.netns.clone()).filter(|netns| !netns.is_empty())
}

/// The container's end, if its namespace can be found.
fn inside(context: &Context<'_, '_>, mark: &AttachmentId) -> Option<Link> {
    let netns = Netns::open(Path::new(&netns_of(context, mark)?)).ok()?;
    Netlink::open().ok()?.open_in(&netns).ok()?.find_link(&mark.ifname).ok()?
}

fn is_container_up(context: &Context<'_, '_>, mark: &AttachmentId) -> Option<bool> {
    inside(context, mark).map(|link| link.up)
}

/// Whether both ends of each pair agree, and whether what leaves the host fits through its way out.
pub(super) fn mtu(context: &Context<'_, '_>) -> Result<CheckOutcome, Error> {
    let mut seen = CheckOutcome::new("mtu");
    let uplink = uplink(&context.snapshot.links)?;
    let mut told: Vec<String> = Vec::new();
    for (mark, link) in &context.snapshot.attached() {
        let Some(inside) = inside(context, mark) else { continue };
        let whose = format!("{} {} {}", mark.network, mark.container_id, mark.ifname);
        if inside.mtu != link.mtu {
            let what = format!(
                "{whose}: {} in the container has an MTU of {}, its host end {} one of {}: larger packets are lost",
                mark.ifname, inside.mtu, link.name, link.mtu
            );
            seen.problem(what, format!("ip link set dev {} mtu {}", quoted(&link.name), inside.mtu));
        }
        let bridge = context.snapshot.links.iter().find(|other| Some(other.index) == link.master);
        if let Some(bridge) = bridge.filter(|bridge| bridge.mtu < link.mtu && !told.contains(&bridge.name)) {
            told.push(bridge.name.clone());
            let what = format!(
                "bridge {} has an MTU of {}, its port {} one of {}: larger packets are lost",
                bridge.name, bridge.mtu, link.name, link.mtu
            );
            seen.problem(what, format!("ip link set dev {} mtu {}", quoted(&bridge.name), link.mtu));
        }
        if let Some(uplink) = uplink.as_ref().filter(|uplink| uplink.mtu < inside.mtu)
            && !told.contains(&mark.network)
        {
            told.push(mark.network.clone());
            let what = format!(
                "network {}: containers have an MTU of {}, but {}, the way out, has {}: what forbids fragmenting gets lost where \
                 ICMP is filtered; set \"mtu\": {} in the network for new containers",
                mark.network, inside.mtu, uplink.name, uplink.mtu, uplink.mtu
            );
            let netns = netns_of(context, mark).unwrap_or_default();
            let set =
                format!("nsenter --net={} ip link set dev {} mtu {}", quoted(&netns), quoted(&mark.ifname), uplink.mtu);
            seen.problem(what, format!("{set} && ip link set dev {} mtu {}", quoted(&link.name), uplink.mtu));
        }
    }
    Ok(seen.ok_summary("both ends of every pair agree, and fit through the way out"))
}

/// The interface of the default route.
fn uplink(links: &[Link]) -> Result<Option<Link>, Error> {
    let netlink = Netlink::open()?;
    for family in [Family::V4, Family::V6] {
        let mut routes = netlink.list_routes(family, None)?;
        routes.retain(|route| route.dst.is_default_route());
        routes.sort_by_key(cni_linux::Route::metric);
        if let Some(route) = routes.first() {
            return Ok(links.iter().find(|link| link.index == route.oif).cloned());
        }
    }
    Ok(None)
}

/// Whether a strict filter drops what containers send: the answer would leave by another interface
/// than the packet came in by.
pub(super) fn rp_filter(context: &Context<'_, '_>) -> Result<CheckOutcome, Error> {
    let mut seen = CheckOutcome::new("rp_filter");
    let (netlink, attached) = (Netlink::open()?, context.snapshot.attached());
    for bridge in context.snapshot.bridges() {
        let read = |name: &str| -> u8 {
            let value = sysctl::read(&format!("net/ipv4/conf/{name}/rp_filter"));
            value.ok().and_then(|value| value.parse().ok()).unwrap_or_default()
        };
        // The kernel takes the larger of both.
        if read("all").max(read(&bridge.name)) != 1 {
            continue;
        }
        for entry in &context.snapshot.remembered {
            let Some(result) = result_of(entry) else { continue };
            let is_port = attached.iter().any(|(mark, link)| {
                mark.network == entry.network
                    && mark.container_id == entry.attachment.container_id
                    && link.master == Some(bridge.index)
            });
            for ip in result.ips.iter().filter(|ip| is_port && ip.address.is_ipv4()) {
                let address = ip.address.address();
                if netlink.outgoing_interface(address).ok() != Some(bridge.index) {
                    let what = format!(
                        "{address} of network {} is behind {}, but the host's way to it leads elsewhere: the strict rp_filter \
                         drops what it sends to the host or through it",
                        entry.network, bridge.name
                    );
                    // 2 is the larger one whatever `all` says.
                    seen.problem(
                        what,
                        format!("sysctl -w {}=2", quoted(&dotted(&format!("net/ipv4/conf/{}/rp_filter", bridge.name)))),
                    );
                    break;
                }
            }
        }
    }
    seen.findings.dedup_by(|one, other| one.fix == other.fix);
    Ok(seen.ok_summary("no container's packets come in by another way than they are answered"))
}
