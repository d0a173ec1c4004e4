//! `bond`: an interface over several others, which DEL returns as they were.

use std::fs;

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Attachment, Container, Invocation, Node, bin_dir, probe, require, rounds};
use conformance::{VERSION, addresses, ipam, patched};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// A node with the interfaces `dev0`, which is up, and `dev1`, whose other ends are ports of the
/// bridge `lan` with the gateway's address.
fn node() -> Node {
    let node = Node::new();
    for name in ["dev0", "dev1", "peer0", "peer1", "lan"] {
        node.expect_left(name);
    }
    node.ip(&[
        "link add lan type bridge",
        "address add 10.1.0.1/24 dev lan",
        "link set lan up",
        "link add dev0 address 02:00:00:00:00:d0 mtu 1600 type veth peer name peer0 mtu 1600",
        "link add dev1 address 02:00:00:00:00:d1 type veth peer name peer1",
        "link set dev0 alias uplink",
        "link set dev0 up",
        "link set peer0 master lan up",
        "link set peer1 master lan up",
    ]);
    node
}

fn network(node: &Node, keys: Value) -> Value {
    let base = json!({"cniVersion": VERSION, "name": "net1", "type": "bond", "mode": "active-backup", "miimon": "50",
                      "links": [{"name": "dev0"}, {"name": "dev1"}], "ipam": ipam(node, &["10.1.0.0/24"])});
    patched(base, keys)
}

/// What DEL must restore of an interface of `ip -j -d link`: MAC, MTU, alias, master, up.
fn properties(link: Option<Value>) -> Value {
    let link = link.unwrap_or_else(|| panic!("an interface is missing"));
    let up = link["flags"].as_array().unwrap().contains(&json!("UP"));
    json!([link["address"], link["mtu"], link["ifalias"], link["master"], up])
}

/// The properties of both interfaces on the host.
fn on_host(node: &Node) -> [Value; 2] {
    ["dev0", "dev1"].map(|name| properties(node.link(name)))
}

/// How many records are on the host.
fn records(node: &Node) -> usize {
    node.enter(|| fs::read_dir("/run/cni/bond").map_or(0, |files| files.flatten().count()))
}

/// The port that the bond of the container uses.
fn active(container: &Container) -> Value {
    container.link("eth0").expect("the bond exists")["linkinfo"]["info_data"]["active_slave"].clone()
}

#[test]
fn a_kernel_without_bonds_keeps_the_ports_on_the_host() {
    require!(probe::plugin("bond"));
    let node = node();
    let container = node.container();
    let before = on_host(&node);
    let attachment = Attachment::new(&node, &container, network(&node, json!({})));
    let outcome = attachment.add();
    if probe::bond().is_ok() {
        outcome.success();
    } else {
        let failure = outcome.failure();
        assert!(failure.msg.starts_with("failed to create bond eth0: "), "{}", failure.msg);
        assert_eq!((on_host(&node), records(&node)), (before.clone(), 0));
    }
    attachment.del().success();
    assert_eq!((on_host(&node), records(&node)), (before, 0));
}

/// Needs no bond: the ADD is killed before it creates one.
#[test]
fn a_port_that_has_returned_is_restored_once() {
    require!(probe::plugin("bond"));
    require!(trace::supported());
    let node = node();
    let (container, elsewhere) = (node.container(), node.container());
    let attachment = Attachment::new(&node, &container, network(&node, json!({})));
    let add = |at| {
        let plan = Plan { victim: "bond".to_owned(), at, act: Act::Signal(Signal::SIGKILL) };
        attachment.invocation("ADD", None).traced(&plan)
    };
    let all = add(u64::MAX).all;
    attachment.del().success();
    // The record gets its name by `linkat`.
    let recorded = (1..).zip(&all).find(|(_, hit)| hit.call == "linkat").expect("a record is written").0;
    add(recorded + 1);
    node.ip(&[&format!("link set dev1 netns {}", elsewhere.netns().display()), "link set dev0 mtu 1500"]);
    attachment.del().success();
    assert_eq!((&node.link("dev0").unwrap()["mtu"], records(&node)), (&json!(1600), 1));
    // The administrator changes the port that has returned.
    node.ip(&["link set dev0 mtu 1400"]);
    attachment.del().success();
    assert_eq!((&node.link("dev0").unwrap()["mtu"], records(&node)), (&json!(1400), 1));
    elsewhere.ip(&[&format!("link set dev1 netns {}", node.netns().display())]);
    attachment.del().success();
    assert_eq!((&node.link("dev0").unwrap()["mtu"], records(&node)), (&json!(1400), 0));
}

#[test]
fn what_cannot_be_bonded_is_refused_and_stays() {
    require!(probe::plugin("bond"));
    let node = node();
    let container = node.container();
    node.ip(&["link add half0 type veth peer name half1"]);
    node.expect_left("half0");
    node.expect_left("half1");
    let before = on_host(&node);
    for (keys, code, text) in [
        (json!({"links": [{"name": "dev0"}]}), 7, "Bonding requires at least two links, we have 1"),
        (json!({"links": [{"name": "dev0"}, {"name": "dev7"}]}), 7, "Failed to confirm that link (dev7) exists"),
        (
            json!({"links": [{"name": "dev0"}, {"name": "peer1"}]}),
            102,
            "peer1 is attached to another interface already",
        ),
        (
            json!({"links": [{"name": "dev1"}, {"name": "half0"}, {"name": "half1"}]}),
            7,
            "links: half1 is the other end of half0",
        ),
        (json!({"mtu": 1550}), 7, "invalid MTU 1550, must be at most that of dev1, 1500"),
        (json!({"linksInContainer": true}), 7, "Failed to confirm that link (dev0) exists"),
        (json!({"ifname": "bond0"}), 7, "ifname \"bond0\" is not CNI_IFNAME, \"eth0\""),
    ] {
        let attachment = Attachment::new(&node, &container, network(&node, keys));
        attachment.add().fails_with(code, text);
        attachment.del().success();
        assert_eq!((on_host(&node), records(&node)), (before.clone(), 0), "{text}");
    }
}

#[test]
fn traffic_continues_when_a_port_fails_and_ports_return() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    for keys in [json!({}), json!({"failOverMac": 1, "miimon": 50, "mtu": 1400, "ifname": "eth0"})] {
        let node = node();
        let container = node.container();
        let before = on_host(&node);
        let attachment = Attachment::new(&node, &container, network(&node, keys.clone()));
        let result = attachment.add().success();
        assert_eq!((node.link("dev0"), node.link("dev1")), (None, None));
        assert_eq!(container.addresses("eth0"), addresses(&result));
        let bond = container.link("eth0").unwrap();
        assert_eq!(
            result["interfaces"],
            json!([{"name": "eth0", "mac": bond["address"], "sandbox": container.netns()}])
        );
        assert_eq!(bond["mtu"], keys["mtu"].as_u64().unwrap_or(1500));
        let info = &bond["linkinfo"]["info_data"];
        assert_eq!((&info["mode"], &info["miimon"]), (&json!("active-backup"), &json!(50)));
        attachment.check(&result).success();
        container.ping("10.1.0.1");
        assert_eq!(active(&container), "dev0");
        node.ip(&["link set peer0 down"]);
        container.ping("10.1.0.1");
        assert_eq!(active(&container), "dev1");
        node.ip(&["link set peer0 up", "link set peer1 down"]);
        container.ping("10.1.0.1");
        assert_eq!(active(&container), "dev0");
        node.ip(&["link set peer1 up"]);
        for _ in 0..2 {
            attachment.del_with(&result).success();
            assert_eq!((on_host(&node), container.link("eth0"), records(&node)), (before.clone(), None, 0));
        }
        assert_eq!(node.reservations("net1"), []);
    }
}

#[test]
fn every_mode_and_option_reaches_the_kernel() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    let node = node();
    let container = node.container();
    let before = on_host(&node);
    for (keys, option, value) in [
        (json!({"mode": "balance-rr"}), "mode", json!("balance-rr")),
        (json!({"mode": "balance-xor", "xmitHashPolicy": "layer3+4"}), "xmit_hash_policy", json!("layer3+4")),
        (json!({"mode": "broadcast"}), "mode", json!("broadcast")),
        (json!({"mode": "802.3ad", "xmitHashPolicy": "layer2+3"}), "xmit_hash_policy", json!("layer2+3")),
        (json!({"mode": "balance-tlb", "tlbDynamicLb": 0}), "tlb_dynamic_lb", json!(0)),
        (json!({"mode": "balance-alb", "allSlavesActive": true}), "all_slaves_active", json!(1)),
        (json!({"failOverMac": 2}), "fail_over_mac", json!("follow")),
    ] {
        let attachment = Attachment::new(&node, &container, network(&node, keys.clone()));
        let result = attachment.add().success();
        let info = container.link("eth0").unwrap()["linkinfo"]["info_data"].clone();
        assert_eq!(info[option], value, "{keys}: {info:#}");
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        assert_eq!((on_host(&node), records(&node)), (before.clone(), 0), "{keys}");
    }
}

#[test]
fn ports_of_the_container_stay_there() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    let node = node();
    let container = node.container();
    container.ip(&[
        "link add net1 mtu 1450 type veth peer name far1",
        "link add net2 type veth peer name far2",
        "link set net1 up",
        "link set far1 up",
        "link set far2 up",
    ]);
    let state = || ["net1", "net2"].map(|name| properties(container.link(name)));
    let before = state();
    let keys = json!({"linksInContainer": true, "links": [{"name": "net1"}, {"name": "net2"}]});
    let attachment = Attachment::new(&node, &container, network(&node, keys)).ifname("bond0");
    let result = attachment.add().success();
    assert_eq!(container.link("net1").unwrap()["master"], "bond0");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!((state(), container.link("bond0"), records(&node)), (before.clone(), None, 0));
    // The DEL of another plugin has removed one.
    let result = attachment.add().success();
    container.ip(&["link del net1"]);
    attachment.del_with(&result).success();
    assert_eq!((properties(container.link("net2")), records(&node)), (before[1].clone(), 0));
    // Without a namespace there is nothing to return.
    container.ip(&["link add net1 type veth peer name far1"]);
    attachment.add().success();
    attachment.clone().netns("").del().success();
    assert_eq!(records(&node), 0);
    container.ip(&["link del bond0"]);
}

#[test]
fn check_finds_a_lost_port_and_another_mode() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node, json!({})));
    let result = attachment.add().success();
    container.ip(&["link set dev1 nomaster"]);
    attachment.check(&result).fails_with(101, "dev1 is not a port of bond eth0");
    container.ip(&["link set dev1 down", "link set dev1 master eth0"]);
    attachment.check(&result).success();
    // Configured by an alternative name, as udev gives it.
    container.ip(&["link property add dev dev1 altname enp7s0"]);
    let links = json!({"links": [{"name": "dev0"}, {"name": "enp7s0"}]});
    attachment.clone().config(network(&node, links)).check(&result).success();
    let other = attachment.clone().config(network(&node, json!({"mode": "balance-rr"})));
    other.check(&result).fails_with(101, "bond eth0 has mode active-backup, expected balance-rr");
    container.ip(&["link set eth0 down"]);
    attachment.check(&result).fails_with(101, "Interface eth0 is down");
    attachment.del_with(&result).success();
}

/// The record decides, not names, aliases and addresses that the pod can write.
#[test]
fn the_pod_does_not_decide_what_returns_to_the_host() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    let node = node();
    let container = node.container();
    let before = on_host(&node);
    let attachment = Attachment::new(&node, &container, network(&node, json!({})));
    attachment.add().success();
    container.ip(&[
        "link set dev0 nomaster",
        "link set dev0 down",
        "link set dev0 name hidden0 alias wg0 address 02:00:00:00:00:99 mtu 1300",
        "link set eth0 down",
        "link set eth0 name hidden1",
        "link add eth0 type bond",
        "link add dev0 address 02:00:00:00:00:d0 type veth peer name mine0",
        "link set dev0 master eth0",
    ]);
    attachment.del().success();
    assert_eq!((on_host(&node), records(&node)), (before, 0));
    assert!(container.link("dev0").is_some(), "the pod's own veth stays in the container");
    assert_eq!(node.link("dev0").unwrap()["link"], "peer0");
}

/// Another container's namespace, or none: the ports stay in the container until a DEL finds them.
#[test]
fn ports_return_when_a_later_del_finds_their_namespace() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    let node = node();
    let (container, other) = (node.container(), node.container());
    let before = on_host(&node);
    let attachment = Attachment::new(&node, &container, network(&node, json!({})));
    attachment.add().success();
    attachment.clone().netns("").del().success();
    attachment.clone().netns(other.netns()).del().success();
    assert_eq!((records(&node), node.link("dev0")), (1, None));
    // The name of a port is taken on the host until the operator repairs that.
    node.ip(&["link add dev1 type bridge"]);
    attachment.del().fails_with(102, "failed to move \"dev1\" to hostNS: file exists");
    node.ip(&["link del dev1"]);
    attachment.del().success();
    assert_eq!((on_host(&node), records(&node)), (before, 0));
}

/// The kernel moves hardware to the host when the namespace ends, under the name in the container.
#[test]
fn gc_completes_the_return_of_the_ports() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    let node = node();
    let container = node.container();
    let before = on_host(&node);
    let attachment = Attachment::new(&node, &container, network(&node, json!({"cniVersion": "1.1.0"})));
    attachment.add().success();
    attachment.gc(&[(&attachment.id, "eth0")]).success();
    attachment.gc(&[]).success();
    assert_eq!(records(&node), 1);
    let host = node.netns().display().to_string();
    container.ip(&[
        "link del eth0",
        "link set dev0 address 02:00:00:00:00:99 mtu 1300 name hidden0 alias ''",
        &format!("link set hidden0 netns {host}"),
        &format!("link set dev1 netns {host}"),
    ]);
    attachment.gc(&[(&attachment.id, "eth0")]).success();
    assert_eq!((records(&node), node.link("dev0")), (1, None));
    attachment.gc(&[]).success();
    attachment.status().success();
    let mut expected = before;
    // The kernel has no place for the alias of an interface that the pod has renamed.
    expected[0][2] = Value::Null;
    assert_eq!((on_host(&node), records(&node)), (expected, 0));
    attachment.del().success();
}

/// The plugin of k8snetworkplumbingwg records nothing.
#[test]
fn a_bond_without_a_record_is_removed_by_the_configuration() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    let node = node();
    let container = node.container();
    let attachment = Attachment::new(&node, &container, network(&node, json!({})));
    let result = attachment.add().success();
    node.exec(&["rm", "-rf", "/run/cni/bond"]);
    container.ip(&["link set eth0 alias ''"]);
    attachment.del_with(&result).success();
    for (name, mac) in [("dev0", "02:00:00:00:00:d0"), ("dev1", "02:00:00:00:00:d1")] {
        assert_eq!(node.link(name).expect("it is on the host")["address"], mac);
    }
    assert_eq!(container.link("eth0"), None);
}

/// Adds as Multus does: by libcni, with a result cache of its own for all networks but the first.
/// The links come before the bond, and go after it.
#[test]
fn a_second_network_bonds_the_links_of_others() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    let node = node();
    node.expect_left("br0");
    let container = node.container();
    // host-device returns an interface down and without its alias, as Go's does.
    node.ip(&["link set dev0 down", "link set dev0 alias ''"]);
    let before = on_host(&node);
    let bond = json!({"type": "bond", "mode": "active-backup", "miimon": "50", "linksInContainer": true,
                      "links": [{"name": "net1"}, {"name": "net2"}], "ipam": ipam(&node, &["10.1.0.0/24"])});
    let networks = [
        (
            "pods",
            "eth0",
            json!({"type": "bridge", "bridge": "br0", "isGateway": true, "ipam": ipam(&node, &["10.9.0.0/24"])}),
        ),
        ("link0", "net1", json!({"type": "host-device", "device": "dev0"})),
        ("link1", "net2", json!({"type": "host-device", "device": "dev1"})),
        ("bonded", "net3", bond),
    ];
    for (name, _, plugin) in &networks {
        let list = json!({"cniVersion": VERSION, "name": name, "plugins": [plugin]});
        node.file(&format!("net.d/{name}.conflist"), list.to_string());
    }
    let cnitool = |verb: &str, (name, ifname, _): &(&str, &str, Value)| {
        let call = Invocation::new(&node, bin_dir().join("cnitool")).cni_path(bin_dir());
        let call = call.env("NETCONFPATH", node.dir().join("net.d")).arg(verb).arg(name).arg(container.netns());
        let call = call.arg("--container-id").arg(&container.id).arg("--ifname").arg(ifname);
        let cache = if *ifname == "eth0" { "/var/lib/cni" } else { "/var/lib/cni/multus" };
        let outcome = call.arg("--cache-dir").arg(cache).run();
        assert_eq!(outcome.status, Some(0), "{verb} of {name}: {}", outcome.report());
    };
    let cached = || node.run(&["sh", "-c", "ls /var/lib/cni/multus/results"]).stdout;
    for _ in 0..2 {
        networks.iter().for_each(|network| cnitool("add", network));
        assert_eq!(cached().lines().count(), 3);
        for link in ["net1", "net2"] {
            assert_eq!(container.link(link).unwrap()["master"], "net3");
        }
        for network in [&networks[0], &networks[3]] {
            cnitool("check", network);
        }
        container.ping("10.1.0.1");
        container.ping("10.9.0.1");
        networks.iter().rev().for_each(|network| cnitool("del", network));
        assert_eq!((on_host(&node), records(&node), cached()), (before.clone(), 0, String::new()));
        assert_eq!((container.link("net3"), container.link("eth0")), (None, None));
    }
    // The bond's DEL comes last, or not at all: the links were gone already.
    networks.iter().for_each(|network| cnitool("add", network));
    networks.iter().for_each(|network| cnitool("del", network));
    assert_eq!((on_host(&node), records(&node), container.link("net3")), (before, 0, None));
    assert_eq!((node.reservations("bonded"), node.reservations("pods")), (vec![], vec![]));
}

#[test]
fn whatever_stops_a_verb_the_ports_return() {
    require!(probe::plugin("bond"));
    require!(probe::bond());
    require!(trace::supported());
    let node = node();
    let container = node.container();
    let before = on_host(&node);
    let attachment = Attachment::new(&node, &container, network(&node, json!({"ipam": null})));
    let attempt = |verb: &str, at, act| {
        let plan = Plan { victim: "bond".to_owned(), at, act };
        if verb == "DEL" {
            attachment.add().success();
        }
        attachment.invocation(verb, None).traced(&plan)
    };
    let (fail, kill) = (Act::Fail(Errno::ENOBUFS), Act::Signal(Signal::SIGKILL));
    for (verb, act) in [("ADD", fail), ("ADD", kill), ("DEL", fail), ("DEL", kill)] {
        let honest = attempt(verb, u64::MAX, act);
        assert_eq!(honest.outcome.status, Some(0), "{}", honest.outcome.report());
        attachment.del().success();
        assert_eq!(on_host(&node), before);
        let meant = ["openat", "setns", "sendto", "recvfrom", "socket", "write", "linkat"];
        let is_meant = |hit: &trace::Hit| !hit.starting && meant.contains(&hit.call.as_str());
        let points: Vec<u64> = (1..).zip(&honest.all).filter(|(_, hit)| is_meant(hit)).map(|(at, _)| at).collect();
        let some = usize::try_from(rounds(if verb == "ADD" { points.len() as u64 } else { 8 })).unwrap();
        assert!(points.len() > 15, "{:?}", honest.all);
        for at in points.iter().copied().step_by(points.len().div_ceil(some)) {
            let hurt = attempt(verb, at, act);
            let story = format!("{verb}: {act:?} at call {at}, {:?}\n{}", hurt.hit, hurt.outcome.report());
            if verb == "ADD" && hurt.outcome.status == Some(1) {
                assert_eq!((on_host(&node), container.link("eth0")), (before.clone(), None), "{story}");
            }
            attachment.del().success();
            assert_eq!((on_host(&node), container.link("eth0"), records(&node)), (before.clone(), None, 0), "{story}");
        }
    }
}
