//! The cases with a single plugin: its configuration, and how node and container are prepared.

use std::path::Path;

use serde_json::{Value, json};

use crate::cases::{FIREWALL, PLAIN, Side, ipam, portmap, tuning};
use crate::error::Result;
use crate::floor::Link;
use crate::world::{World, feed};

/// A plugin as it is measured alone.
#[derive(Debug)]
pub(crate) struct Alone {
    pub(crate) name: &'static str,
    conf: fn(Side, &Path) -> Value,
    place: Place,
    pub(crate) sides: &'static [Side],
    /// The link that the kernel makes with one request for the same attachment.
    pub(crate) link: Option<Link>,
    /// If some kernels lack the plugin's kind of link, the arguments of `ip link add` for that
    /// kind.
    kind: Option<&'static str>,
}

/// The position of the plugin in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    First,
    /// Behind another plugin: this program creates the interface and the previous result.
    Chained,
}

const WITH_KERNEL: [Side; 3] = [Side::Ours, Side::Theirs, Side::Kernel];
const FIREWALL_WITH_KERNEL: [Side; 4] = [Side::Ours, Side::OursNft, Side::Theirs, Side::Kernel];

/// Returns a plugin that is the first of a list.
const fn first(name: &'static str, conf: fn(Side, &Path) -> Value) -> Alone {
    Alone { name, conf, place: Place::First, sides: &PLAIN, link: None, kind: None }
}

/// Returns a plugin that is behind another one.
const fn chained(name: &'static str, conf: fn(Side, &Path) -> Value) -> Alone {
    Alone { place: Place::Chained, ..first(name, conf) }
}

/// Returns an interface plugin that is measured with host-local and against the kernel alone.
const fn link(name: &'static str, conf: fn(Side, &Path) -> Value, link: Link) -> Alone {
    Alone { sides: &WITH_KERNEL, link: Some(link), ..first(name, conf) }
}

pub(crate) const HOST_LOCAL: Alone =
    first("host-local", |_, data| json!({"type": "host-local", "ipam": ipam(data, false)}));

/// One host port.
pub(crate) const PORTMAP: Alone = Alone { sides: &FIREWALL, ..chained("portmap", |side, _| portmap(side, 1)) };

/// All plugins but bridge, which the chains begin with, and dhcp, which needs a server.
pub(crate) static ALL: [Alone; 20] = [
    first("loopback", |_, _| json!({"type": "loopback"})),
    HOST_LOCAL,
    first(
        "static",
        |_, _| json!({"type": "static", "ipam": {"type": "static", "addresses": [{"address": "10.9.0.2/24"}]}}),
    ),
    link("ptp", |_, data| json!({"type": "ptp", "ipam": ipam(data, false)}), Link::Pair),
    Alone {
        sides: &FIREWALL_WITH_KERNEL,
        ..link(
            "ptp, ipMasq",
            |side, data| {
                let mut conf = json!({"type": "ptp", "ipMasq": true, "ipam": ipam(data, false)});
                conf["ipMasqBackend"] = backend(side);
                conf
            },
            Link::Pair,
        )
    },
    link("macvlan", |_, data| on_master("macvlan", data), Link::Macvlan),
    first("macvlan without IPAM", |_, _| json!({"type": "macvlan", "master": "eth0", "ipam": {}})),
    Alone { kind: Some("link eth0 type ipvlan"), ..link("ipvlan", |_, data| on_master("ipvlan", data), Link::Ipvlan) },
    Alone {
        kind: Some("link eth0 type vlan id 5"),
        ..link(
            "vlan",
            |_, data| {
                let mut conf = on_master("vlan", data);
                conf["vlanId"] = 5.into();
                conf
            },
            Link::Vlan,
        )
    },
    Alone {
        kind: Some("type dummy"),
        ..link("dummy", |_, data| json!({"type": "dummy", "ipam": ipam(data, false)}), Link::Dummy)
    },
    first("tap", |_, data| json!({"type": "tap", "ipam": ipam(data, false)})),
    first("tap without IPAM", |_, _| json!({"type": "tap", "ipam": {}})),
    first("host-device", |_, data| json!({"type": "host-device", "device": "dev0", "ipam": ipam(data, false)})),
    first("host-device without IPAM", |_, _| json!({"type": "host-device", "device": "dev0"})),
    chained("tuning", |_, _| tuning()),
    PORTMAP,
    Alone { sides: &FIREWALL, ..chained("firewall", |side, _| json!({"type": "firewall", "backend": backend(side)})) },
    chained("bandwidth", |_, _| {
        json!({"type": "bandwidth", "ingressRate": 10_000_000, "ingressBurst": 1_000_000,
               "egressRate": 10_000_000, "egressBurst": 1_000_000})
    }),
    chained("sbr", |_, _| json!({"type": "sbr"})),
    Alone { kind: Some("type vrf table 10"), ..chained("vrf", |_, _| json!({"type": "vrf", "vrfname": "red"})) },
];

impl Alone {
    /// Returns the plugin's configuration. `data` is host-local's folder, `netns` the container's
    /// namespace.
    pub(crate) fn conf(&self, side: Side, data: &Path, netns: &Path) -> Value {
        let mut conf = (self.conf)(side, data);
        if self.place == Place::Chained {
            conf["prevResult"] = json!({
                "cniVersion": "1.0.0",
                "interfaces": [{"name": "host0"}, {"name": "eth0", "mac": MAC, "sandbox": netns}],
                "ips": [{"address": "10.8.0.2/24", "gateway": "10.8.0.1", "interface": 1}],
                "routes": [{"dst": "10.7.0.0/16", "gw": "10.8.0.1"}],
            });
        }
        conf
    }

    /// Whether the kernel supports the kind of link that the plugin creates. Tries it on a new
    /// node.
    pub(crate) fn kernel_has_kind(&self, world: &World) -> Result<bool> {
        let Some(kind) = self.kind else { return Ok(true) };
        world.node()?;
        ip(None, "link add eth0 type veth peer name outside")?;
        Ok(ip(None, &format!("link add probe0 {kind}")).is_ok())
    }

    /// Prepares the node: `eth0` with the default route, and `dev0` for host-device.
    pub(crate) fn set_up_node(&self) -> Result<()> {
        ip(
            None,
            "link add eth0 type veth peer name outside\nlink set outside up\nlink set eth0 up\n\
             addr add 192.0.2.1/24 dev eth0\nroute add default via 192.0.2.2\nlink add dev0 type veth peer name dev1\n",
        )
    }

    /// Creates the interface that the previous plugin of the list would have created. Does nothing
    /// for the first plugin.
    pub(crate) fn attach(&self, netns: &Path) -> Result<()> {
        if self.place == Place::First {
            return Ok(());
        }
        let path = netns.display();
        let pair = format!("link add host0 type veth peer name eth0 address {MAC} netns {path}\n");
        ip(None, &format!("{pair}link set host0 up\naddr add 10.8.0.1/24 dev host0\n"))?;
        let routed = "route add 10.7.0.0/16 via 10.8.0.1\n";
        ip(Some(netns), &format!("link set eth0 up\naddr add 10.8.0.2/24 dev eth0\n{routed}"))
    }

    /// Removes the interface that [`attach`](Alone::attach) created.
    pub(crate) fn detach(&self) -> Result<()> {
        if self.place == Place::First { Ok(()) } else { ip(None, "link del host0") }
    }
}

/// The hardware address of the interface that [`Alone::attach`] creates.
const MAC: &str = "02:00:00:00:00:02";

/// Runs commands of ip(8), one in each line, in the namespace `netns` or on the node.
fn ip(netns: Option<&Path>, commands: &str) -> Result<()> {
    let net = netns.map(|path| format!("--net={}", path.display()));
    let mut argv: Vec<&str> = net.iter().flat_map(|net| ["nsenter", net.as_str()]).collect();
    argv.extend(["ip", "-batch", "-"]);
    feed(&argv, commands).map(drop)
}

/// Returns the configuration of a plugin whose link is on top of `eth0`.
fn on_master(plugin: &str, data: &Path) -> Value {
    json!({"type": plugin, "master": "eth0", "ipam": ipam(data, false)})
}

/// Returns the value of a backend option. The Go plugins get iptables, which is also their default.
fn backend(side: Side) -> Value {
    if side == Side::OursNft { "nftables".into() } else { "iptables".into() }
}
