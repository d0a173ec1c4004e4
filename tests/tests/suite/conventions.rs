//! What a runtime sends besides the configuration: the table of docs/conventions.md, each row tried
//! with each plugin. What a plugin uses has an effect, and all else changes nothing.

use cni_testkit::probe::{self, Probed};
use cni_testkit::{Attachment, Container, Node, require};
use conformance::cluster::hold;
use conformance::lan::Lan;
use conformance::{VERSION, bridge, ipam, patched, uplink};
use serde_json::{Value, json};

const PAGE: &str = include_str!("../../../docs/conventions.md");

/// The plugins that hand everything on to their IPAM plugin, which is host-local here.
const INTERFACES: [&str; 9] = ["bond", "bridge", "dummy", "host-device", "ipvlan", "macvlan", "ptp", "tap", "vlan"];

/// The plugins that need the result of another one.
const CHAINED: [&str; 8] = ["bandwidth", "firewall", "portmap", "route-override", "sbr", "slaac", "tuning", "vrf"];

/// The plugins that are neither.
const OTHERS: [&str; 6] = ["cluster-local", "dhcp", "flannel", "host-local", "loopback", "static"];

/// A row of the table.
struct Row {
    sent: &'static str,
    users: Vec<&'static str>,
}

/// What is sent to try a row.
struct Sample {
    config: Value,
    args: &'static str,
    /// What is seen if it is used: in the result, in the kernel, or in the error.
    seen: &'static str,
    use_fails: bool,
}

fn rows() -> Vec<Row> {
    let cells = |line: &'static str| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | ");
    let rows = PAGE.lines().filter_map(cells).skip(2).map(|(sent, users)| {
        let users = users.strip_prefix("refused by ").unwrap_or(users).split(", ").filter(|user| *user != "none");
        Row { sent, users: users.collect() }
    });
    rows.collect()
}

fn sample(row: &Row) -> Sample {
    let sample = |config, args, seen| Sample { config, args, seen, use_fails: false };
    let runtime = |key: &str, value: Value, seen| sample(json!({"runtimeConfig": {key: value}}), "", seen);
    let args = |key: &str, value: Value, seen| sample(json!({"args": {"cni": {key: value}}}), "", seen);
    let environment = |args, seen| sample(json!({}), args, seen);
    match row.sent.replace('`', "").as_str() {
        "runtimeConfig.portMappings" => {
            let mappings = json!([{"hostPort": 48099, "containerPort": 48098, "protocol": "tcp"}]);
            runtime("portMappings", mappings, ":48098")
        }
        "runtimeConfig.ipRanges" => runtime("ipRanges", json!([[{"subnet": "10.9.0.0/24"}]]), "\"10.9.0."),
        "runtimeConfig.ips" => runtime("ips", json!(["10.1.0.77/24"]), "10.1.0.77/24"),
        "runtimeConfig.mac" => runtime("mac", json!("02:11:22:33:44:55"), "02:11:22:33:44:55"),
        "runtimeConfig.bandwidth" => {
            let limits = json!({"ingressRate": 987_654_400, "ingressBurst": 8_000_000});
            runtime("bandwidth", limits, "123456800")
        }
        "runtimeConfig.dns" => runtime("dns", json!({"servers": ["192.0.2.55"]}), "192.0.2.55"),
        "runtimeConfig.deviceID" => {
            Sample { use_fails: true, ..runtime("deviceID", json!("0000:99:1f.6"), "0000:99:1f.6") }
        }
        "runtimeConfig.infinibandGUID" => {
            let guid = "c2:11:22:33:44:55:66:77";
            runtime("infinibandGUID", json!(guid), guid)
        }
        "runtimeConfig.aliases" => runtime("aliases", json!({"net1": ["a-name"]}), "a-name"),
        "runtimeConfig.cgroupPath" => runtime("cgroupPath", json!("/a-group"), "a-group"),
        "runtimeConfig io.kubernetes.cri.pod-annotations" => {
            runtime("io.kubernetes.cri.pod-annotations", json!({"a": "an-annotation"}), "an-annotation")
        }
        "runtimeConfig with another key" => {
            runtime("vendor.example/a-key", json!({"a": "vendor-value"}), "vendor-value")
        }
        "args.cni.labels" => args("labels", json!([{"key": "app", "value": "a-label"}]), "a-label"),
        "args.cni.ips" => args("ips", json!(["10.1.0.77/24"]), "10.1.0.77/24"),
        "args.cni.mac" => args("mac", json!("02:11:22:33:44:55"), "02:11:22:33:44:55"),
        "CNI_ARGS IP" => environment("IgnoreUnknown=1;IP=10.1.0.77/24", "10.1.0.77/24"),
        "CNI_ARGS GATEWAY" => environment("IgnoreUnknown=1;IP=10.1.0.88/24;GATEWAY=10.1.0.251", "10.1.0.251"),
        "CNI_ARGS MAC" => environment("IgnoreUnknown=1;MAC=02:11:22:33:44:55", "02:11:22:33:44:55"),
        "CNI_ARGS K8S_POD_NAME and other K8S_*" => {
            environment("K8S_POD_NAMESPACE=a-space;K8S_POD_NAME=a-pod;K8S_POD_UID=1-2-3", "a-pod")
        }
        "CNI_ARGS with another key, without IgnoreUnknown=1" => {
            Sample { use_fails: true, ..environment("A_KEY=a-value", "A_KEY=a-value") }
        }
        other => panic!("no sample for the row {other:?}"),
    }
}

#[test]
fn the_table_names_plugins_that_exist() {
    let rows = rows();
    assert_eq!(rows.len(), 20);
    for row in rows {
        sample(&row);
        let known = |user: &&str| [&INTERFACES[..], &CHAINED, &OTHERS].concat().contains(user);
        assert!(row.users.iter().all(known), "{}: {:?}", row.sent, row.users);
    }
}

/// What `plugin` needs besides `ipam`, and whether the kernel has it.
fn keys(plugin: &str) -> (Value, Probed) {
    match plugin {
        "bandwidth" => (json!({}), probe::tool("tc")),
        "bond" => (json!({"mode": "active-backup", "links": [{"name": "dev0"}, {"name": "dev1"}]}), probe::bond()),
        "bridge" => (json!({"bridge": "br0"}), Ok(())),
        "dhcp" => (json!({}), probe::dnsmasq().map(drop)),
        "dummy" => (json!({}), probe::dummy()),
        "firewall" => (json!({}), probe::iptables()),
        "host-device" => (json!({"device": "dev0"}), Ok(())),
        "ipvlan" => (json!({"master": "eth0"}), probe::ipvlan()),
        "macvlan" => (json!({"master": "eth0"}), Ok(())),
        "portmap" => (json!({"backend": "nftables"}), probe::nft()),
        // No router advertises anything.
        "slaac" => (json!({"timeout": 1, "required": false}), Ok(())),
        "vlan" => (json!({"master": "eth0", "vlanId": 5}), probe::vlan_links()),
        "vrf" => (json!({"vrfname": "red"}), probe::vrf()),
        _ => (json!({}), Ok(())),
    }
}

/// The result without what is another one for each container.
fn same(result: &Value) -> Value {
    let mut result = result.clone();
    for interface in result["interfaces"].as_array_mut().into_iter().flatten() {
        let interface = interface.as_object_mut().unwrap();
        interface.retain(|key, _| key == "mtu");
    }
    result
}

/// All that can show that something was used.
fn shown(node: &Node, container: &Container, ifname: &str, result: &Value) -> String {
    let link = container.link(ifname).map(|link| link["address"].to_string()).unwrap_or_default();
    let limits = node.run(&["tc", "-j", "qdisc", "show"]).stdout;
    let rules = node.run(&["nft", "list", "ruleset"]).stdout;
    format!("{} {link}\n{limits}\n{rules}", same(result))
}

/// Calls a plugin in a fresh container as a row wants it. Returns the result, unless the call is to
/// fail, and what it shows.
fn play(world: &World<'_>, plugin: &str, sample: &Sample) -> (Option<Value>, String) {
    let container = world.container(plugin);
    let ifname = if plugin == "loopback" { "lo" } else { "eth0" };
    let base = |config| Attachment::new(world.node, &container, config).ifname(ifname);
    let chained = CHAINED.contains(&plugin);
    let maker = base(bridge(world.node, &["10.1.0.0/24"]));
    let prev = chained.then(|| maker.add().success());
    let attachment = base(patched(world.config(plugin), sample.config.clone())).args(sample.args);
    let outcome = match &prev {
        Some(prev) => attachment.add_after(prev),
        None => attachment.add(),
    };
    let seen = if sample.use_fails && outcome.report().contains("\"code\"") {
        (None, outcome.failure().msg)
    } else {
        let result = outcome.success();
        if plugin != "dhcp" {
            attachment.check(&result).success();
        }
        let shown = shown(world.node, &container, ifname, &result);
        (Some(result), shown)
    };
    match &seen.0 {
        Some(result) => attachment.del_with(result).success(),
        None => attachment.del().success(),
    };
    if chained {
        maker.del().success();
    }
    seen
}

/// The node, and for dhcp what it has besides.
struct World<'n> {
    node: &'n Node,
    lan: Option<&'n Lan>,
}

impl World<'_> {
    fn container(&self, plugin: &str) -> Container {
        match self.lan {
            Some(lan) if plugin == "dhcp" => lan.container(&["eth0"]),
            _ => self.node.container(),
        }
    }

    fn config(&self, plugin: &str) -> Value {
        let base = patched(json!({"cniVersion": VERSION, "name": "net2", "type": plugin}), keys(plugin).0);
        let ipam = match (plugin, self.lan) {
            // The network has a block of each subnet that a sample uses, so no store is needed.
            ("cluster-local", _) => {
                hold(self.node, "net2", &["10.1.0.0/24", "10.9.0.0/24"]);
                patched(ipam(self.node, &["10.1.0.0/24"]), json!({"type": "cluster-local"}))
            }
            ("static", _) => json!({"type": "static", "addresses": [{"address": "10.1.0.5/24"}]}),
            ("dhcp", Some(lan)) => json!({"type": "dhcp", "daemonSocketPath": lan.socket()}),
            ("flannel", _) => {
                let subnet =
                    "FLANNEL_NETWORK=10.0.0.0/8\nFLANNEL_SUBNET=10.1.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
                let file = self.node.file("subnet.env", subnet);
                let keys = json!({"subnetFile": file, "dataDir": self.node.dir().join("flannel"),
                    "delegate": {"bridge": "br0"}, "ipam": {"type": "host-local", "dataDir": self.node.data_dir()}});
                return patched(base, keys);
            }
            _ if INTERFACES.contains(&plugin) || plugin == "host-local" => ipam(self.node, &["10.1.0.0/24"]),
            _ => return base,
        };
        patched(base, json!({"ipam": ipam}))
    }
}

/// Tries every row of the table with `plugin`.
fn every_row(plugin: &str) {
    require!(keys(plugin).1);
    require!(probe::plugin(plugin));
    let lan = (plugin == "dhcp").then(|| Lan::new(90, &["--dhcp-option=3,192.168.1.1"]));
    let _daemon = lan.as_ref().map(Lan::daemon);
    let own;
    let node = match &lan {
        Some(lan) => &lan.node,
        None => {
            own = Node::new();
            &own
        }
    };
    let _outside = lan.is_none().then(|| uplink(node, "eth0"));
    if lan.is_none() {
        node.ip(&["link add dev0 type veth peer name peer0", "link add dev1 type veth peer name peer1"]);
    }
    for left in ["br0", "dev0", "dev1", "peer0", "peer1"] {
        node.expect_left(left);
    }
    let world = World { node, lan: lan.as_ref() };
    let nothing = Sample { config: json!({}), args: "", seen: "nothing of this kind", use_fails: false };
    let (plain, _) = play(&world, plugin, &nothing);
    let plain = without_addresses(&plain.unwrap());
    for row in rows() {
        let mut sample = sample(&row);
        let used = row.users.contains(&plugin) || (INTERFACES.contains(&plugin) && row.users.contains(&"host-local"));
        if used && row.sent == "`runtimeConfig.deviceID`" {
            // A name on the host goes before it.
            sample.config["device"] = Value::Null;
        }
        let (result, shown) = play(&world, plugin, &sample);
        assert_eq!(shown.contains(sample.seen), used, "{} and {plugin}: {shown}", row.sent);
        assert_eq!(result.is_none(), used && sample.use_fails, "{} and {plugin}", row.sent);
        if let Some(result) = result.filter(|_| !used) {
            assert_eq!(without_addresses(&result), plain, "{} changed the result of {plugin}", row.sent);
        }
    }
}

/// The result without what host-local and a DHCP server give out in turn.
fn without_addresses(result: &Value) -> Value {
    let mut result = same(result);
    for ip in result["ips"].as_array_mut().into_iter().flatten() {
        ip["address"] = Value::Null;
    }
    result
}

macro_rules! for_each_plugin {
    ($($name:ident: $plugin:literal)*) => {
        mod every_row {
            $(#[test]
            fn $name() {
                super::every_row($plugin);
            })*

            #[test]
            fn of_every_plugin() {
                let mut listed = [&super::INTERFACES[..], &super::CHAINED, &super::OTHERS].concat();
                listed.sort_unstable();
                let mut tried = vec![$($plugin),*];
                tried.sort_unstable();
                let folders = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins")).unwrap();
                let mut all: Vec<String> =
                    folders.map(|folder| folder.unwrap().file_name().into_string().unwrap()).collect();
                all.sort_unstable();
                assert_eq!((&listed, &tried), (&tried, &all.iter().map(String::as_str).collect()));
            }
        }
    };
}

for_each_plugin! {
    bandwidth: "bandwidth"
    bond: "bond"
    bridge: "bridge"
    cluster_local: "cluster-local"
    dhcp: "dhcp"
    dummy: "dummy"
    firewall: "firewall"
    flannel: "flannel"
    host_device: "host-device"
    host_local: "host-local"
    ipvlan: "ipvlan"
    loopback: "loopback"
    macvlan: "macvlan"
    portmap: "portmap"
    ptp: "ptp"
    route_override: "route-override"
    sbr: "sbr"
    slaac: "slaac"
    ipam_static: "static"
    tap: "tap"
    tuning: "tuning"
    vlan: "vlan"
    vrf: "vrf"
}
