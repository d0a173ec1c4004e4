//! The measured cases: configurations, and the state before each.
//!
//! Every side of every case has a node, a data folder and containers of its own, so all use the
//! same names and addresses, and no case is affected by another one.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::alone::{self, Alone};
use crate::chain::{Attachment, Chain};
use crate::error::{Doing as _, Error, Result};
use crate::floor::Floor;
use crate::options::Extent;
use crate::world::{Node, World, feed, run};

/// A competitor of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Side {
    /// Our plugins, with iptables where a firewall is involved.
    Ours,
    /// Our plugins with nftables.
    OursNft,
    /// The other plugins, as they are configured by default.
    Theirs,
    /// The kernel alone: no plugin, the fewest requests.
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
    Chain(Links),
    /// VERSION of this plugin, nothing else.
    Version(&'static str),
}

/// A chain of bridge with host-local, and the plugins behind bridge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Links {
    pub(crate) masquerade: bool,
    pub(crate) tuning: bool,
    /// How many host ports portmap maps; no portmap if 0.
    pub(crate) ports: usize,
    /// Whether there is IPv6 too.
    pub(crate) dual: bool,
}

/// What is on the node before the measured calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    Nothing,
    /// This number of reservations in the network's folder.
    Reservations(usize),
    /// All addresses but four are reserved, and the search begins half the range away from the
    /// four.
    AlmostFull,
    /// Rules for this number of mappings, or masqueraded addresses, of other containers, as the
    /// side itself writes them.
    OthersRules(usize),
    /// This number of rules of other programs, in the same tables.
    ForeignRules(usize),
}

/// A case to measure.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) group: &'static str,
    pub(crate) name: String,
    pub(crate) plugins: Plugins,
    pub(crate) before: Before,
    pub(crate) sides: Vec<Side>,
    /// How many attachments to make at once; `None` for one after the other.
    pub(crate) at_once: Option<usize>,
}

pub(crate) const ALONE: &str = "each plugin alone";
pub(crate) const CHAINS: &str = "chains";
pub(crate) const AT_ONCE: &str = "at once";
pub(crate) const RESERVATIONS: &str = "host-local and reservations";
pub(crate) const MAPPINGS: &str = "portmap and rules";
pub(crate) const MASQUERADE: &str = "ipMasq and rules";
pub(crate) const START: &str = "start-up";

/// The chain that most targets are about.
pub(crate) const WHOLE: Links = Links { masquerade: true, tuning: true, ports: 1, dual: false };
/// bridge with host-local only.
pub(crate) const SIMPLE: Links = Links { masquerade: false, tuning: false, ports: 0, dual: false };
/// The plugins whose start-up is measured, and whose size has a target.
pub(crate) const FIVE: [&str; 5] = ["bridge", "host-local", "loopback", "portmap", "tuning"];
/// The others, whose sizes are listed.
pub(crate) const OTHERS: [&str; 13] = [
    "bandwidth",
    "dhcp",
    "dummy",
    "firewall",
    "host-device",
    "ipvlan",
    "macvlan",
    "ptp",
    "sbr",
    "static",
    "tap",
    "vlan",
    "vrf",
];

impl Links {
    /// Returns the name in the report.
    pub(crate) fn name(self) -> String {
        let mut name = "bridge + host-local".to_owned();
        if self.masquerade {
            name.push_str(" + ipMasq");
        }
        if self.tuning {
            name.push_str(" + tuning");
        }
        if self.ports > 0 {
            name.push_str(&format!(" + portmap {}", self.ports));
        }
        if self.dual {
            name.push_str(", dual stack");
        }
        name
    }

    /// Whether the chain writes firewall rules.
    fn uses_firewall(self) -> bool {
        self.masquerade || self.ports > 0
    }
}

/// Returns all cases, in the order of the report.
pub(crate) fn all(extent: Extent) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |group, name: String, plugins, before, sides: &[Side], at_once| {
        cases.push(Case { group, name, plugins, before, sides: sides.to_vec(), at_once });
    };
    for plugin in FIVE {
        push(START, format!("VERSION of {plugin}"), Plugins::Version(plugin), Before::Nothing, &PLAIN, None);
    }
    for plugin in &alone::ALL {
        push(ALONE, plugin.name.to_owned(), Plugins::Alone(plugin), Before::Nothing, plugin.sides, None);
    }
    for dual in [false, true] {
        for (masquerade, tuning, ports) in
            [(false, false, 0), (true, false, 0), (true, true, 0), (true, true, 1), (true, true, 10), (true, true, 50)]
        {
            let links = Links { masquerade, tuning, ports, dual };
            let mut sides = if links.uses_firewall() { FIREWALL.to_vec() } else { PLAIN.to_vec() };
            // The kernel alone is a side of these cases, not a case of its own, because all sides
            // of a case are measured in the same rounds, at the same speed of the machine.
            if links == SIMPLE || links == WHOLE {
                sides.push(Side::Kernel);
            }
            push(CHAINS, links.name(), Plugins::Chain(links), Before::Nothing, &sides, None);
        }
    }
    for links in [SIMPLE, WHOLE] {
        let sides = if links.uses_firewall() { &FIREWALL[..] } else { &PLAIN };
        for count in extent.sizes(&[1, 8, 32, 64]) {
            push(AT_ONCE, links.name(), Plugins::Chain(links), Before::Nothing, sides, Some(count));
        }
    }
    let host_local = Plugins::Alone(&alone::HOST_LOCAL);
    for count in extent.sizes(&[0, 1000, 10_000, 60_000]) {
        let before = Before::Reservations(count);
        push(RESERVATIONS, format!("{} reservations", grouped(count)), host_local, before, &PLAIN, None);
    }
    push(RESERVATIONS, "4 of 4,093 addresses free".to_owned(), host_local, Before::AlmostFull, &PLAIN, None);
    for (group, plugins, what) in [
        (MAPPINGS, Plugins::Alone(&alone::PORTMAP), "mappings"),
        (MASQUERADE, Plugins::Chain(Links { masquerade: true, ..SIMPLE }), "masqueraded addresses"),
    ] {
        for count in extent.sizes(&[0, 100, 1000, 5000]) {
            push(group, format!("{} {what}", grouped(count)), plugins, Before::OthersRules(count), &FIREWALL, None);
        }
        for count in extent.sizes(&[100, 1000, 5000]) {
            push(
                group,
                format!("{} foreign rules", grouped(count)),
                plugins,
                Before::ForeignRules(count),
                &FIREWALL,
                None,
            );
        }
    }
    cases
}

/// Formats a number with commas: 60000 as `60,000`.
pub(crate) fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A side that is prepared for a case.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) side: Side,
    pub(crate) node: Node,
    plugins: Plugins,
    pub(crate) chain: Chain,
    pub(crate) containers: Vec<PathBuf>,
    /// For [`Side::Kernel`], what makes the attachments instead of plugins.
    pub(crate) floor: Option<Floor>,
}

impl Ready {
    /// Returns the attachment of the container `number` in this round. Each round has another
    /// container ID.
    pub(crate) fn attachment(&self, round: usize, number: usize) -> Attachment {
        let netns = self.containers.get(number).cloned().unwrap_or_default();
        Attachment { container: format!("bench-{round}-{number}"), netns, number }
    }

    /// Does `work` while the first container has the interface that the plugins before the measured
    /// one would have created, and returns its result. The interface stays if `work` fails.
    pub(crate) fn behind_others<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (Plugins::Alone(plugin), Some(netns)) = (self.plugins, self.containers.first()) else { return work() };
        plugin.attach(netns)?;
        let value = work()?;
        plugin.detach()?;
        Ok(value)
    }
}

/// The two folders under comparison.
#[derive(Clone, Debug)]
pub(crate) struct Folders {
    pub(crate) ours: PathBuf,
    pub(crate) theirs: PathBuf,
}

/// Creates a node with the containers and the state that the case needs. The calling thread is in
/// the node's namespace afterwards.
pub(crate) fn prepare(world: &World, folders: &Folders, case: &Case, side: Side) -> Result<Ready> {
    let node = world.node()?;
    let containers = (0..case.at_once.unwrap_or(1)).map(|_| world.container()).collect::<Result<Vec<_>>>()?;
    let data = world.folder()?;
    let dir = if side == Side::Theirs { folders.theirs.clone() } else { folders.ours.clone() };
    let first = containers.first().cloned().unwrap_or_default();
    let chain = Chain { dir, plugins: plugins(case.plugins, side, &data, &first) };
    if let Plugins::Alone(plugin) = case.plugins {
        plugin.set_up_node()?;
    }
    let plugins = case.plugins;
    let mut ready = Ready { side, node, plugins, chain, containers, floor: None };
    match case.before {
        Before::Nothing => {}
        Before::Reservations(count) => reserve(&data, "10.1", 2, count, None)?,
        // Host 1 is the gateway and never allocated. 2 to 5 are free; the search begins at 2050.
        Before::AlmostFull => reserve(&data, "10.1", 6, 4089, Some(2050))?,
        Before::OthersRules(count) => others_rules(&ready, count)?,
        Before::ForeignRules(count) => foreign_rules(side, count)?,
    }
    // Exactly this range has 4,093 addresses for containers.
    if matches!(case.before, Before::AlmostFull)
        && let Some(conf) = ready.chain.plugins.first_mut()
    {
        conf["ipam"]["ranges"] = json!([[{"subnet": "10.1.0.0/20"}]]);
    }
    if side == Side::Kernel {
        ready.floor = Some(match case.plugins {
            Plugins::Alone(Alone { link: Some(link), .. }) => Floor::of_link(&data, *link)?,
            _ => Floor::of_bridge(&data)?,
        });
    }
    Ok(ready)
}

/// Returns a host-local configuration with its reservations in `data`; with IPv6 too if `dual`.
pub(crate) fn ipam(data: &Path, dual: bool) -> Value {
    let mut ranges = vec![json!([{"subnet": "10.1.0.0/16"}])];
    let mut routes = vec![json!({"dst": "0.0.0.0/0"})];
    if dual {
        ranges.push(json!([{"subnet": "fd00:1::/64"}]));
        routes.push(json!({"dst": "::/0"}));
    }
    json!({"type": "host-local", "dataDir": data, "ranges": ranges, "routes": routes})
}

/// Returns a configuration of tuning: two sysctls and the MTU.
pub(crate) fn tuning() -> Value {
    json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500", "net.ipv4.conf.all.arp_filter": "1"}, "mtu": 1400})
}

/// Returns a configuration of portmap with `count` mappings.
pub(crate) fn portmap(side: Side, count: usize) -> Value {
    let mappings: Vec<Value> = (0..count)
        .map(|index| json!({"hostPort": 8080 + index, "containerPort": 80 + index, "protocol": "tcp"}))
        .collect();
    let mut conf = json!({"type": "portmap", "runtimeConfig": {"portMappings": mappings}});
    match side {
        Side::Ours => conf["backend"] = "iptables".into(),
        Side::OursNft => conf["backend"] = "nftables".into(),
        Side::Theirs | Side::Kernel => {}
    }
    conf
}

/// Returns the configurations of a case's plugins, in the order of their ADD.
fn plugins(plugins: Plugins, side: Side, data: &Path, container: &Path) -> Vec<Value> {
    let mut list = match plugins {
        Plugins::Alone(plugin) => vec![plugin.conf(side, data, container)],
        Plugins::Version(plugin) => vec![json!({"type": plugin})],
        Plugins::Chain(links) => {
            let mut bridge =
                json!({"type": "bridge", "bridge": "br0", "isGateway": true, "ipam": ipam(data, links.dual)});
            if links.masquerade {
                bridge["ipMasq"] = true.into();
                match side {
                    Side::Ours => bridge["ipMasqBackend"] = "iptables".into(),
                    Side::OursNft => bridge["ipMasqBackend"] = "nftables".into(),
                    Side::Theirs | Side::Kernel => {}
                }
            }
            let mut list = vec![bridge];
            list.extend(links.tuning.then(tuning));
            list.extend((links.ports > 0).then(|| portmap(side, links.ports)));
            list
        }
    };
    for conf in &mut list {
        conf["cniVersion"] = "1.0.0".into();
        conf["name"] = "benchnet".into();
    }
    list
}

/// Writes reservations in the format of every host-local release, for `count` hosts of the /16
/// network from the host `first` on. `last` is the host stored as last reserved, by default the
/// last one written.
fn reserve(data: &Path, network: &str, first: usize, count: usize, last: Option<usize>) -> Result<()> {
    let folder = data.join("benchnet");
    fs::create_dir(&folder).doing(format_args!("failed to make {}", folder.display()))?;
    let name = |host: usize| format!("{network}.{}.{}", host / 256, host % 256);
    for host in first..first + count {
        let path = folder.join(name(host));
        fs::write(&path, format!("other-{host}\r\neth0")).doing(format_args!("failed to write {}", path.display()))?;
    }
    let last = last.or((count > 0).then(|| first + count - 1));
    let Some(last) = last else { return Ok(()) };
    let path = folder.join("last_reserved_ip.0");
    fs::write(&path, name(last)).doing(format_args!("failed to write {}", path.display()))
}

/// Writes the firewall rules of `count` other attachments: makes one attachment, copies its rules
/// as text with other names, addresses and ports, and removes the attachment.
fn others_rules(ready: &Ready, count: usize) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let scratch = Path::new("/run");
    let at = ready.attachment(0, 0);
    let add = || ready.chain.run("ADD", &at, None, |call| call.run(scratch).map(|(output, _)| output));
    let result = ready.behind_others(add)?;
    let address = result["ips"][0]["address"].as_str().and_then(|text| text.split('/').next()).unwrap_or_default();
    if address.is_empty() {
        return Err(Error::new("the result of an ADD has no address"));
    }
    let rename = |text: &str, number: usize| {
        text.replace(&at.container, &format!("other-{number}"))
            .replace(address, &format!("10.1.{}.{}", 100 + number / 250, 2 + number % 250))
            .replace("8080", &(20_000 + number).to_string())
    };
    if ready.side == Side::OursNft {
        let rules = run(&["nft", "-n", "list", "ruleset"])?;
        let is_of_attachment = |line: &str| line.contains(&at.container) || line.contains(address);
        if !rules.lines().any(is_of_attachment) {
            return Err(Error::new("the attachment left no rule in nf_tables"));
        }
        let mut text = String::new();
        for line in rules.lines() {
            if is_of_attachment(line) {
                for number in 1..=count {
                    text.extend([rename(line, number).as_str(), "\n"]);
                }
            }
            text.extend([line, "\n"]);
        }
        feed(&["nft", "-f", "-"], &format!("flush ruleset\n{text}"))?;
    } else {
        let rules = run(&["iptables-save", "-t", "nat"])?;
        // The attachment's own chain is renamed too; it is the target of a jump that names the
        // container.
        let jump = rules
            .lines()
            .find(|line| line.starts_with("-A") && line.contains(&at.container) && line.contains(" -j CNI-"));
        let chain = jump.and_then(|line| line.rsplit(" -j ").next()).unwrap_or_default().trim().to_owned();
        if chain.is_empty() {
            return Err(Error::new("the attachment left no chain of its own in iptables"));
        }
        let mut text = String::new();
        for line in rules.lines() {
            if line.contains(&chain) {
                for number in 1..=count {
                    // The number replaces the end of the hash in the chain's name.
                    let name = format!("{}{number:06}", &chain[..chain.len() - 6]);
                    text.extend([rename(line, number).replace(&chain, &name).as_str(), "\n"]);
                }
            }
            text.extend([line, "\n"]);
        }
        feed(&["iptables-restore", "-w"], &text)?;
    }
    ready.chain.run("DEL", &at, Some(&result), |call| call.run(scratch).map(|(output, _)| output))?;
    Ok(())
}

/// Writes `count` rules like those of other programs: a chain of rules that match address and port.
fn foreign_rules(side: Side, count: usize) -> Result<()> {
    let address = |number: usize| format!("10.200.{}.{}", number / 250, 1 + number % 250);
    if side == Side::OursNft {
        let mut text = "table ip foreign {\n chain services {\n".to_owned();
        for number in 0..count {
            text.push_str(&format!("  ip daddr {} tcp dport 443 counter return\n", address(number)));
        }
        text.push_str(" }\n}\n");
        feed(&["nft", "-f", "-"], &text)?;
    } else {
        let mut text = "*nat\n:FOREIGN-SERVICES - [0:0]\n".to_owned();
        for number in 0..count {
            let address = address(number);
            text.push_str(&format!("-A FOREIGN-SERVICES -d {address}/32 -p tcp -m tcp --dport 443 -j RETURN\n"));
        }
        text.push_str("COMMIT\n");
        feed(&["iptables-restore", "-w", "--noflush"], &text)?;
    }
    Ok(())
}
