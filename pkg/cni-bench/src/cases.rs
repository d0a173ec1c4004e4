//! The measured cases: configurations, and the state before each.
//!
//! Every side of every case has a node, a data folder and containers of its own, so all can use the
//! same names and addresses.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::{Value, json};

use crate::alone::{self, Alone};
use crate::chain::{Attachment, Chain};
use crate::error::{Doing as _, Result};
use crate::floor::KernelAttacher;
use crate::full::FullNode;
use crate::world::{self, Node, Process};

/// One of the compared sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    /// Our plugins, with iptables where a firewall is involved.
    Ours,
    /// Our plugins with nftables.
    OursNft,
    /// The other plugins, as they are configured by default.
    Theirs,
    /// The kernel alone: this program makes the attachment, with the fewest requests.
    Kernel,
}

impl Side {
    /// Returns the name in the report.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Side::Ours => "ours",
            Side::OursNft => "ours, nftables",
            Side::Theirs => "theirs",
            Side::Kernel => "kernel alone",
        }
    }
}

/// The sides of a case without firewall rules.
pub(crate) const PLAIN: [Side; 2] = [Side::Ours, Side::Theirs];
/// The sides of a case with firewall rules.
pub(crate) const FIREWALL: [Side; 3] = [Side::Ours, Side::OursNft, Side::Theirs];

/// The plugins that a case runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Plugins {
    Alone(&'static Alone),
    Chain(ChainSpec),
    /// This plugin, for VERSION only.
    Version(&'static str),
}

impl Plugins {
    /// Whether this folder has the plugins. Only a plugin alone can be missing: the Go plugins have
    /// no flannel, for example.
    pub(crate) fn is_in(self, dir: &Path) -> bool {
        let Plugins::Alone(plugin) = self else { return true };
        plugin.name.split([',', ' ']).next().is_some_and(|program| dir.join(program).exists())
    }
}

/// A chain of bridge with host-local and the plugins after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChainSpec {
    pub(crate) masquerade: bool,
    pub(crate) tuning: bool,
    /// The number of host ports that portmap maps; no portmap if 0.
    pub(crate) ports: usize,
    /// Whether the attachment also has an IPv6 address.
    pub(crate) dual_stack: bool,
}

/// What is on the node before the measured calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    Nothing,
    /// This number of reservations in host-local's folder.
    Reservations(usize),
    /// Attached containers.
    Attached(FullNode),
}

/// A case to measure.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) group: &'static str,
    pub(crate) name: String,
    pub(crate) plugins: Plugins,
    pub(crate) before: Before,
    pub(crate) sides: Vec<Side>,
    /// The number of attachments to make at once; `None` for one after the other.
    pub(crate) at_once: Option<usize>,
}

pub(crate) const ALONE: &str = "each plugin alone";
pub(crate) const CHAINS: &str = "chains";
pub(crate) const AT_ONCE: &str = "at once";
pub(crate) const RESERVATIONS: &str = "host-local and reservations";
pub(crate) const FULL: &str = "full node";
pub(crate) const START: &str = "start-up";

/// bridge with host-local, ipMasq, tuning and one mapped port: the chain that most targets are
/// about.
pub(crate) const WHOLE: ChainSpec = ChainSpec { masquerade: true, tuning: true, ports: 1, dual_stack: false };
/// bridge with host-local only.
pub(crate) const SIMPLE: ChainSpec = ChainSpec { masquerade: false, tuning: false, ports: 0, dual_stack: false };
/// The plugins whose start-up is measured, and whose size has a target.
pub(crate) const FIVE: [&str; 5] = ["bridge", "host-local", "loopback", "portmap", "tuning"];
/// The other plugins, whose sizes are listed too.
pub(crate) const OTHERS: &str = "bandwidth bond cluster-local dhcp dummy firewall flannel host-device ipvlan macvlan \
                                 ptp route-override sbr slaac static tap vlan vrf";

impl ChainSpec {
    /// Returns the name in the report.
    pub(crate) fn name(self) -> String {
        let portmap = format!(" + portmap {}", self.ports);
        let parts = [
            (true, "bridge + host-local"),
            (self.masquerade, " + ipMasq"),
            (self.tuning, " + tuning"),
            (self.ports > 0, portmap.as_str()),
            (self.dual_stack, ", dual stack"),
        ];
        parts.into_iter().filter(|(is_part, _)| *is_part).map(|(_, part)| part).collect()
    }

    /// Returns the sides to compare: [`FIREWALL`] if the chain writes firewall rules.
    fn sides(self) -> &'static [Side] {
        if self.masquerade || self.ports > 0 { &FIREWALL } else { &PLAIN }
    }
}

impl Case {
    /// Returns a case with an empty node and one attachment after the other.
    pub(crate) fn new(group: &'static str, name: impl Into<String>, plugins: Plugins, sides: &[Side]) -> Case {
        Case { group, name: name.into(), plugins, before: Before::Nothing, sides: sides.to_vec(), at_once: None }
    }
}

/// Returns the name of a case with this number of attachments at once.
pub(crate) fn at_once_name(count: usize, spec: ChainSpec) -> String {
    format!("{count} of {}", spec.name())
}

/// Returns all cases, in the order of the report.
pub(crate) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for plugin in FIVE {
        cases.push(Case::new(START, format!("VERSION of {plugin}"), Plugins::Version(plugin), &PLAIN));
    }
    for plugin in alone::ALL {
        cases.push(Case::new(ALONE, plugin.name, Plugins::Alone(plugin), plugin.sides));
    }
    for dual_stack in [false, true] {
        for spec in [
            SIMPLE,
            ChainSpec { masquerade: true, ..SIMPLE },
            ChainSpec { ports: 0, ..WHOLE },
            WHOLE,
            ChainSpec { ports: 10, ..WHOLE },
            ChainSpec { ports: 50, ..WHOLE },
        ] {
            let spec = ChainSpec { dual_stack, ..spec };
            let mut sides = spec.sides().to_vec();
            if spec == SIMPLE || spec == WHOLE {
                sides.push(Side::Kernel);
            }
            cases.push(Case::new(CHAINS, spec.name(), Plugins::Chain(spec), &sides));
        }
    }
    for spec in [SIMPLE, WHOLE] {
        for count in [1, 8, 32, 64] {
            let case = Case::new(AT_ONCE, at_once_name(count, spec), Plugins::Chain(spec), spec.sides());
            cases.push(Case { at_once: Some(count), ..case });
        }
    }
    for count in [0, 1000, 10_000, 60_000] {
        let case = Case::new(RESERVATIONS, format!("{count} reservations"), Plugins::Alone(&alone::HOST_LOCAL), &PLAIN);
        cases.push(Case { before: Before::Reservations(count), ..case });
    }
    let with_masquerade = ChainSpec { masquerade: true, ..SIMPLE };
    let on_own_node: (&[&str], &[ChainSpec]) =
        (&["portmap", "firewall", "bandwidth", "tuning"], &[with_masquerade, WHOLE]);
    for (by_theirs, containers, name, sides, (plugins, chains)) in [
        (false, 600, "the same plugins", &FIREWALL[..2], on_own_node),
        // The other plugins need half a second for a container.
        (true, 100, "theirs", &FIREWALL[..], (&["portmap", "firewall"], &[WHOLE])),
    ] {
        let full = FullNode { by_theirs, containers, ports: 5 };
        let on = format!("{containers} containers made by {name}");
        for plugin in alone::ALL.iter().filter(|plugin| plugins.contains(&plugin.name)) {
            let sides: Vec<Side> = sides.iter().copied().filter(|side| plugin.sides.contains(side)).collect();
            cases.push(full.case(format!("{}, {on}", plugin.name), Plugins::Alone(plugin), &sides));
        }
        let with_kernel = [sides, &[Side::Kernel]].concat();
        for chain in chains {
            cases.push(full.case(format!("{}, {on}", chain.name()), Plugins::Chain(*chain), &with_kernel));
        }
    }
    cases
}

/// A side that is prepared for a case.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) side: Side,
    pub(crate) node: Node,
    plugins: Plugins,
    pub(crate) chain: Chain,
    pub(crate) containers: Vec<PathBuf>,
    /// Makes the attachments instead of plugins; only for [`Side::Kernel`].
    pub(crate) kernel_attacher: Option<KernelAttacher>,
    /// The programs that the plugin needs while it runs. They end with this value.
    _servers: Vec<Process>,
}

impl Ready {
    /// Returns the attachment of the container `number` in this round. Its container ID is
    /// different in each round.
    pub(crate) fn attachment(&self, round: usize, number: usize) -> Attachment {
        let netns = self.containers[number].clone();
        Attachment { container: format!("bench-{round}-{number}"), netns, number }
    }

    /// Runs `work` and returns its result. For a chained plugin, the first container has an
    /// interface during `work`.
    pub(crate) fn with_interface<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.plugins {
            Plugins::Alone(plugin) => plugin.with_interface(&self.containers[0], work),
            _ => work(),
        }
    }
}

/// The two folders under comparison.
#[derive(Clone, Debug)]
pub(crate) struct Folders {
    pub(crate) ours: PathBuf,
    pub(crate) theirs: PathBuf,
}

impl Folders {
    /// Returns the folder with the plugins of a side.
    pub(crate) fn of(&self, side: Side) -> &Path {
        if side == Side::Theirs { &self.theirs } else { &self.ours }
    }
}

/// Creates a node with the containers and the state that the case needs. The calling thread is in
/// the node's namespace afterwards.
pub(crate) fn prepare(folders: &Folders, case: &Case, side: Side) -> Result<Ready> {
    let node = Node::create()?;
    let containers = (0..case.at_once.unwrap_or(1)).map(|_| world::create_container()).collect::<Result<Vec<_>>>()?;
    let data = world::create_folder()?;
    let dir = folders.of(side).to_owned();
    let confs = configurations(case.plugins, side, &data, &containers[0]);
    let servers = match case.plugins {
        Plugins::Alone(plugin) => plugin.set_up_node(&dir, &data, &containers[0])?,
        _ => Vec::new(),
    };
    match case.before {
        Before::Nothing => {}
        Before::Reservations(count) => reserve(&data, count)?,
        Before::Attached(full) => full.attach(folders, side)?,
    }
    let kernel_attacher = if side == Side::Kernel { Some(KernelAttacher::new(&data)?) } else { None };
    let (plugins, chain) = (case.plugins, Chain { dir, plugins: confs });
    Ok(Ready { side, node, plugins, chain, containers, kernel_attacher, _servers: servers })
}

/// Returns a host-local configuration with one IPv4 range and its reservations in `data`.
pub(crate) fn ipam(data: &Path) -> Value {
    let ranges = json!([[{"subnet": "10.1.0.0/16"}]]);
    json!({"type": "host-local", "dataDir": data, "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]})
}

/// Returns the value of a backend option. The Go plugins get iptables, which is also their default.
pub(crate) fn backend(side: Side) -> Value {
    if side == Side::OursNft { "nftables".into() } else { "iptables".into() }
}

/// Sets the backend option `key` for our plugins. The compared plugins keep their default.
pub(crate) fn set_backend(conf: &mut Value, key: &str, side: Side) {
    if side != Side::Theirs {
        conf[key] = backend(side);
    }
}

/// Returns a configuration of tuning: two sysctls and the MTU.
pub(crate) fn tuning() -> Value {
    json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500", "net.ipv4.conf.all.arp_filter": "1"}, "mtu": 1400})
}

/// The first host port of the measured plugins.
pub(crate) const HOST_PORT: usize = 8080;

/// Returns a configuration of portmap with `count` mappings. Their host ports begin with
/// `first_port`.
pub(crate) fn portmap(side: Side, first_port: usize, count: usize) -> Value {
    let mappings: Vec<Value> = (0..count)
        .map(|index| json!({"hostPort": first_port + index, "containerPort": 80 + index, "protocol": "tcp"}))
        .collect();
    let mut conf = json!({"type": "portmap", "runtimeConfig": {"portMappings": mappings}});
    set_backend(&mut conf, "backend", side);
    conf
}

/// Returns the configurations of a case's plugins, in the order of their ADD. `data` is the side's
/// folder for data, such as host-local's; `netns` is the container's namespace.
fn configurations(plugins: Plugins, side: Side, data: &Path, netns: &Path) -> Vec<Value> {
    let mut list = match plugins {
        Plugins::Alone(plugin) => vec![plugin.conf(side, data, netns)],
        Plugins::Version(plugin) => vec![json!({"type": plugin})],
        Plugins::Chain(spec) => {
            let mut ipam = ipam(data);
            if spec.dual_stack {
                ipam["ranges"] = json!([[{"subnet": "10.1.0.0/16"}], [{"subnet": "fd00:1::/64"}]]);
                ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
            }
            let mut bridge = json!({"type": "bridge", "bridge": "br0", "isGateway": true, "ipam": ipam});
            if spec.masquerade {
                bridge["ipMasq"] = true.into();
                set_backend(&mut bridge, "ipMasqBackend", side);
            }
            let mut list = vec![bridge];
            if spec.tuning {
                list.push(tuning());
            }
            if spec.ports > 0 {
                list.push(portmap(side, HOST_PORT, spec.ports));
            }
            list
        }
    };
    set_network(&mut list, "benchnet");
    list
}

/// Sets the version and the network's name in the configurations of a list.
pub(crate) fn set_network(list: &mut [Value], name: &str) {
    for conf in list {
        conf["cniVersion"] = "1.0.0".into();
        conf["name"] = name.into();
    }
}

/// Writes reservations of `count` addresses of 10.1.0.0/16 in the format of every host-local
/// release. The first one is 10.1.0.2, after the gateway's. The last one becomes the last reserved
/// address.
fn reserve(data: &Path, count: usize) -> Result<()> {
    let folder = data.join("benchnet");
    let write = || -> io::Result<()> {
        fs::create_dir(&folder)?;
        for host in 2..2 + count {
            let address = format!("10.1.{}.{}", host / 256, host % 256);
            fs::write(folder.join(&address), format!("other-{host}\r\neth0"))?;
            fs::write(folder.join("last_reserved_ip.0"), address)?;
        }
        Ok(())
    };
    write().doing(format_args!("failed to reserve addresses in {}", folder.display()))
}
