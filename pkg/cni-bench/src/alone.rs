//! The cases with a single plugin: its configuration, and how its node and container are prepared.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cases::{FIREWALL, HOST_PORT, PLAIN, Side, backend, ipam, portmap, tuning};
use crate::error::{Doing as _, Result};
use crate::world::{Node, Process, feed, run};

/// A plugin as it is measured alone.
#[derive(Debug)]
pub(crate) struct Alone {
    pub(crate) name: &'static str,
    /// Returns the configuration for a side. The path is the side's folder for data, such as
    /// host-local's.
    conf: fn(Side, &Path) -> Value,
    place: Place,
    pub(crate) sides: &'static [Side],
    /// The arguments of `ip link add` for the plugin's kind of link, if some kernels lack that
    /// kind.
    probe: Option<&'static str>,
}

/// How the plugin is called, and what this program prepares for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// As the first plugin of a list. Nothing is prepared.
    First,
    /// After another plugin. This program creates the interface and the previous result.
    Chained,
    /// As an IPAM plugin, for an interface that leads to a DHCP server. This program creates the
    /// interface, and starts the server and the plugin's daemon.
    Dhcp,
}

/// Returns a plugin that is the first of a list.
const fn first_plugin(name: &'static str, conf: fn(Side, &Path) -> Value) -> Alone {
    Alone { name, conf, place: Place::First, sides: &PLAIN, probe: None }
}

/// Returns a plugin that is called after another one.
const fn chained_plugin(name: &'static str, conf: fn(Side, &Path) -> Value) -> Alone {
    Alone { place: Place::Chained, ..first_plugin(name, conf) }
}

impl Alone {
    /// Skips the plugin on a kernel that lacks its kind of link. `probe` are the arguments of `ip
    /// link add` for such a link.
    const fn on_kernels_with(self, probe: &'static str) -> Alone {
        Alone { probe: Some(probe), ..self }
    }

    /// Measures the plugin for these sides.
    const fn with_sides(self, sides: &'static [Side]) -> Alone {
        Alone { sides, ..self }
    }
}

pub(crate) const HOST_LOCAL: Alone =
    first_plugin("host-local", |_, data| json!({"type": "host-local", "ipam": ipam(data)}));

/// All plugins except bridge, which is measured in chains.
pub(crate) static ALL: &[Alone] = &[
    first_plugin("loopback", |_, _| json!({"type": "loopback"})),
    HOST_LOCAL,
    first_plugin("cluster-local", |_, data| {
        let mut ipam = ipam(data);
        ipam["type"] = "cluster-local".into();
        ipam["clusterConf"] = json!(data.join("cluster-local.json"));
        json!({"type": "cluster-local", "ipam": ipam})
    }),
    first_plugin(
        "static",
        |_, _| json!({"type": "static", "ipam": {"type": "static", "addresses": [{"address": "10.9.0.2/24"}]}}),
    ),
    first_plugin("ptp", |_, data| json!({"type": "ptp", "ipam": ipam(data)})),
    first_plugin(
        "ptp, ipMasq",
        |side, data| json!({"type": "ptp", "ipMasq": true, "ipMasqBackend": backend(side), "ipam": ipam(data)}),
    )
    .with_sides(&FIREWALL),
    first_plugin("macvlan", |_, data| on_master("macvlan", data)),
    first_plugin("macvlan without IPAM", |_, _| json!({"type": "macvlan", "master": "eth0", "ipam": {}})),
    first_plugin("ipvlan", |_, data| on_master("ipvlan", data)).on_kernels_with("link eth0 type ipvlan"),
    first_plugin("vlan", |_, data| on_master("vlan", data)).on_kernels_with("link eth0 type vlan id 5"),
    first_plugin("dummy", |_, data| json!({"type": "dummy", "ipam": ipam(data)})).on_kernels_with("type dummy"),
    first_plugin("bond", |_, data| {
        let links = json!([{"name": "dev0"}, {"name": "dev2"}]);
        json!({"type": "bond", "mode": "active-backup", "links": links, "ipam": ipam(data)})
    })
    .on_kernels_with("type bond"),
    first_plugin("flannel", |_, data| {
        let (subnet_file, stored) = (subnet_file(data), data.join("flannel"));
        json!({"type": "flannel", "subnetFile": subnet_file, "dataDir": stored, "ipam": {"dataDir": data}})
    }),
    first_plugin("tap", |_, data| json!({"type": "tap", "ipam": ipam(data)})),
    first_plugin("tap without IPAM", |_, _| json!({"type": "tap", "ipam": {}})),
    first_plugin("host-device", |_, data| json!({"type": "host-device", "device": "dev0", "ipam": ipam(data)})),
    first_plugin("host-device without IPAM", |_, _| json!({"type": "host-device", "device": "dev0"})),
    Alone {
        place: Place::Dhcp,
        ..first_plugin(
            "dhcp",
            |_, data| json!({"type": "dhcp", "ipam": {"type": "dhcp", "daemonSocketPath": dhcp_socket(data)}}),
        )
    },
    chained_plugin("tuning", |_, _| tuning()),
    chained_plugin("portmap", |side, _| portmap(side, HOST_PORT, 1)).with_sides(&FIREWALL),
    chained_plugin("firewall", |side, _| json!({"type": "firewall", "backend": backend(side)})).with_sides(&FIREWALL),
    chained_plugin("bandwidth", |_, _| {
        json!({"type": "bandwidth", "ingressRate": 10_000_000, "ingressBurst": 1_000_000,
               "egressRate": 10_000_000, "egressBurst": 1_000_000})
    }),
    chained_plugin(
        "route-override",
        |_, _| json!({"type": "route-override", "addroutes": [{"dst": "198.51.100.0/24"}]}),
    ),
    chained_plugin("sbr", |_, _| json!({"type": "sbr"})),
    chained_plugin("vrf", |_, _| json!({"type": "vrf", "vrfname": "red"})).on_kernels_with("type vrf table 10"),
];

impl Alone {
    /// Returns the plugin's configuration, with a `prevResult` for a chained plugin. `data` is the
    /// side's folder for data, `netns` the container's namespace.
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

    /// Returns why this machine cannot run the plugin, or `None` if it can. For a plugin with
    /// `probe`, tries to create such a link on a new node, which the calling thread enters; any
    /// error of ip(8) means that the kernel lacks this kind of link.
    pub(crate) fn obstacle(&self) -> Result<Option<&'static str>> {
        if self.place == Place::Dhcp && run(&["dnsmasq", "--version"]).is_err() {
            return Ok(Some("there is no dnsmasq in PATH (Debian's package dnsmasq-base)"));
        }
        let Some(link) = self.probe else { return Ok(None) };
        Node::create()?;
        ip(None, "link add eth0 type veth peer name outside")?;
        let added = ip(None, &format!("link add probe0 {link}"));
        Ok(added.err().map(|_| "this kernel does not support such links"))
    }

    /// Prepares the current node: `eth0` with the default route, and `dev0` and `dev2` for bond and
    /// host-device. For flannel, also writes the file that flanneld would write; for cluster-local,
    /// a block that the node holds. For dhcp, also creates the container's interface, which stays
    /// for all rounds, and starts a DHCP server at its other end and the daemon of the plugin in
    /// `dir`. Returns both processes, or nothing for other plugins.
    pub(crate) fn set_up_node(&self, dir: &Path, data: &Path, netns: &Path) -> Result<Vec<Process>> {
        ip(
            None,
            "link add eth0 type veth peer name outside\nlink set outside up\nlink set eth0 up\n\
             addr add 192.0.2.1/24 dev eth0\nroute add default via 192.0.2.2\nlink add dev0 type veth peer name dev1\n\
             link add dev2 type veth peer name dev3\n",
        )?;
        if self.name == "flannel" {
            let lease =
                "FLANNEL_NETWORK=10.9.0.0/16\nFLANNEL_SUBNET=10.9.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
            let file = subnet_file(data);
            std::fs::write(&file, lease).doing(format_args!("failed to write {}", file.display()))?;
        }
        if self.name == "cluster-local" {
            hold_block(data).doing(format_args!("failed to write to {}", data.display()))?;
        }
        if self.place != Place::Dhcp {
            return Ok(Vec::new());
        }
        create_interface(netns)?;
        let log = data.join("dnsmasq.log");
        let lease_file = format!("--dhcp-leasefile={}", data.join("leases").display());
        let server_argv = [
            "dnsmasq",
            "--no-daemon",
            "--conf-file=/dev/null",
            "--pid-file=",
            "--user=root",
            // No DNS.
            "--port=0",
            "--interface=host0",
            "--bind-interfaces",
            "--dhcp-authoritative",
            // Otherwise dnsmasq waits three seconds for the answer to a ping before each offer.
            "--no-ping",
            "--quiet-dhcp",
            "--dhcp-range=10.8.0.10,10.8.0.250,255.255.255.0,120",
            &lease_file,
        ];
        let is_started = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("started"));
        let server = Process::start(&server_argv, &log, is_started)?;
        let (program, socket) = (dir.join("dhcp").display().to_string(), dhcp_socket(data));
        let daemon_argv = [&program, "daemon", "-socketpath", &socket.display().to_string()];
        let is_accepting = || UnixStream::connect(&socket).is_ok();
        let daemon = Process::start(&daemon_argv, &data.join("daemon.log"), is_accepting)?;
        Ok(vec![server, daemon])
    }

    /// Runs `work` and returns its result. For a chained plugin, the container has an interface
    /// during `work`, as if an earlier plugin of the list had created it. The interface stays if
    /// `work` fails, because the case then ends and its node is removed.
    pub(crate) fn with_interface<T>(&self, netns: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.place != Place::Chained {
            return work();
        }
        create_interface(netns)?;
        let value = work()?;
        ip(None, "link del host0")?;
        Ok(value)
    }
}

/// The hardware address of the interface that [`create_interface`] creates.
const MAC: &str = "02:00:00:00:00:02";

/// Creates `eth0` in a container, with an address and a route, and its other end `host0` on the
/// current node.
fn create_interface(netns: &Path) -> Result<()> {
    let path = netns.display();
    let pair = format!("link add host0 type veth peer name eth0 address {MAC} netns {path}\n");
    ip(None, &format!("{pair}link set host0 up\naddr add 10.8.0.1/24 dev host0\n"))?;
    let route = "route add 10.7.0.0/16 via 10.8.0.1\n";
    ip(Some(netns), &format!("link set eth0 up\naddr add 10.8.0.2/24 dev eth0\n{route}"))
}

/// Writes what cluster-local has after it has claimed a block of the network in this boot: the
/// ledger. Also writes a node's file, whose store is never asked.
fn hold_block(data: &Path) -> std::io::Result<()> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let block = json!({"pool": "10.1.0.0-16", "first": "10.1.0.0", "last": "10.1.255.255"});
    let ledger = json!({"format": 1, "node": "node", "boot": boot.trim(), "trustedUntil": u32::MAX,
                        "pools": {"10.1.0.0-16": 65_536}, "entries": [{"block": block, "state": {"held": "1"}}]});
    let sidecar = data.join(".cni/benchnet");
    std::fs::create_dir_all(&sidecar)?;
    std::fs::write(sidecar.join("blocks"), ledger.to_string())?;
    let file = data.join("cluster-local.json");
    let store = json!({"server": "https://127.0.0.1:6443", "caFile": file, "tokenFile": file});
    std::fs::write(&file, json!({ "kubernetes": store }).to_string())
}

/// Returns the path of flanneld's file.
fn subnet_file(data: &Path) -> PathBuf {
    data.join("subnet.env")
}

/// Returns the path of the socket of dhcp's daemon.
fn dhcp_socket(data: &Path) -> PathBuf {
    data.join("dhcp.sock")
}

/// Runs commands of ip(8), one per line, in the namespace `netns`, or on the current node if
/// `netns` is `None`.
fn ip(netns: Option<&Path>, commands: &str) -> Result<()> {
    let net = netns.map(|path| format!("--net={}", path.display()));
    let mut argv: Vec<&str> = net.iter().flat_map(|net| ["nsenter", net.as_str()]).collect();
    argv.extend(["ip", "-batch", "-"]);
    feed(&argv, commands).map(drop)
}

/// Returns the configuration of a plugin whose link is on top of `eth0`. Only vlan reads `vlanId`.
fn on_master(plugin: &str, data: &Path) -> Value {
    json!({"type": plugin, "master": "eth0", "vlanId": 5, "ipam": ipam(data)})
}
