//! `ptp`: a container reaches its gateway, the host and, through them, everything else. DEL leaves
//! nothing.

use std::fs;
use std::path::Path;

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, probe, require};
use conformance::{HOST, OUTSIDE, VERSION, address, addresses, attach, ipam, patched, tentative, uplink};
use serde_json::{Value, json};

fn network(node: &Node, subnets: &[&str]) -> Value {
    json!({"cniVersion": VERSION, "name": "net1", "type": "ptp", "ipam": ipam(node, subnets)})
}

fn dual(node: &Node) -> Value {
    patched(
        network(node, &["10.1.0.0/24", "fd00:1::/64"]),
        json!({"ipam": {"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}),
    )
}

/// The host's ends of veth pairs.
fn host_ends(node: &Node) -> Vec<String> {
    let links = node.json(&["ip", "-j", "link", "show", "type", "veth"]);
    links.as_array().unwrap().iter().map(|link| link["ifname"].as_str().unwrap().to_owned()).collect()
}

fn ping(from: &Container, to: &str) {
    from.ping(to);
}

#[test]
fn the_gateway_and_other_containers_answer() {
    let node = Node::new();
    let all = attach(&node, &dual(&node), 2);
    let [(one, ..), (other, ..)] = &all[..] else { unreachable!() };
    for to in ["10.1.0.1", "fd00:1::1", "10.1.0.3", "fd00:1::3"] {
        ping(one, to);
    }
    ping(other, "10.1.0.2");
    for (_, attachment, result) in &all {
        attachment.check(result).success();
        attachment.del_with(result).success();
        attachment.del_with(result).success();
    }
    assert_eq!(host_ends(&node), [""; 0]);
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn the_host_s_end_can_ask_for_neighbours_at_once() {
    let node = Node::new();
    let (_c, attachment, result) = attach(&node, &dual(&node), 1).remove(0);
    let host_end = result["interfaces"][0]["name"].as_str().unwrap();
    assert_eq!(tentative(&node, host_end), [false], "whether its link-local address is tentative");
    attachment.del_with(&result).success();
}

#[test]
fn result_and_kernel_state_equal_those_of_go() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &dual(&node), 1).remove(0);
    let interfaces = result["interfaces"].as_array().unwrap();
    let outer = interfaces[0]["name"].as_str().unwrap();
    assert!(interfaces.len() == 2 && outer.starts_with("veth") && interfaces[0]["sandbox"].is_null(), "{result:#}");
    assert_eq!(interfaces[0]["mac"].as_str().unwrap().len(), 17);
    assert_eq!((&interfaces[1]["name"], result["ips"][1]["interface"].as_u64()), (&json!("eth0"), Some(1)));
    assert_eq!(host_ends(&node), [outer]);
    let routes = |argv: &[&str]| {
        let text = container.exec(argv);
        let mut lines: Vec<String> = text.lines().map(|line| line.trim().to_owned()).collect();
        lines.sort();
        lines
    };
    let expected = [
        "10.1.0.0/24 via 10.1.0.1 dev eth0 src 10.1.0.2",
        "10.1.0.1 dev eth0 scope link src 10.1.0.2",
        "default via 10.1.0.1 dev eth0",
    ];
    assert_eq!(routes(&["ip", "route"]), expected);
    assert!(container.exec(&["ip", "-6", "route"]).contains("fd00:1::/64 via fd00:1::1 dev eth0"));
    let host = node.exec(&["ip", "address", "show", outer]);
    assert!(host.contains("inet 10.1.0.1/32 ") && host.contains("inet6 fd00:1::1/128 "), "{host}");
    let route = node.exec(&["ip", "route", "show", "10.1.0.2"]);
    assert_eq!(route.trim(), format!("10.1.0.2 dev {outer} scope host"));
    attachment.del_with(&result).success();
}

#[test]
fn an_address_may_be_the_only_one_of_its_network() {
    let node = Node::new();
    let config = network(&node, &["10.1.0.0/24"]);
    let container = node.container();
    let addresses =
        json!([{"address": "10.1.0.5/32", "gateway": "10.1.0.1"}, {"address": "fd00:1::5/128", "gateway": "fe80::1"}]);
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let config = patched(config, json!({"ipam": {"type": "fixed", "addresses": addresses, "routes": routes}}));
    let answer = json!({"cniVersion": VERSION, "ips": addresses, "routes": routes});
    let folder = fixed_ipam(&node, &answer);
    let attachment = Attachment::new(&node, &container, config).by(&folder);
    let result = attachment.add().success();
    ping(&container, "10.1.0.1");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn an_address_without_a_gateway_is_refused() {
    let node = Node::new();
    let container = node.container();
    let answer = json!({"cniVersion": VERSION, "ips": [{"address": "10.1.0.5/24"}]});
    let folder = fixed_ipam(&node, &answer);
    let config = patched(network(&node, &[]), json!({"ipam": {"type": "fixed"}}));
    let attachment = Attachment::new(&node, &container, config).by(&folder);
    attachment.add().fails_naming(7, &["10.1.0.5/24", "gateway"]);
    assert_eq!(host_ends(&node), [""; 0]);
    assert!(container.link("eth0").is_none());
}

/// A folder with the plugin under test and an IPAM plugin `fixed` that always gives this answer.
fn fixed_ipam(node: &Node, answer: &Value) -> std::path::PathBuf {
    let folder = node.dir().join("bin");
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(bin_dir().join("ptp"), folder.join("ptp")).unwrap();
    let script = format!("#!/bin/sh\n[ \"$CNI_COMMAND\" = ADD ] || exit 0\ncat <<'END'\n{answer}\nEND\n");
    node.script("bin/fixed", &script);
    folder
}

#[test]
fn both_ends_have_the_configured_mtu() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &patched(dual(&node), json!({"mtu": 1380})), 1).remove(0);
    let outer = node.link(&host_ends(&node)[0]).unwrap();
    assert_eq!((&container.link("eth0").unwrap()["mtu"], &outer["mtu"]), (&json!(1380), &json!(1380)));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn del_without_netns_removes_link_and_masquerade() {
    require!(probe::nft());
    let node = Node::new();
    let outside = uplink(&node, "out0");
    let before = node.ruleset();
    let config = patched(dual(&node), json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    ping(&container, HOST[0]);
    ping(&container, OUTSIDE[0]);
    ping(&container, OUTSIDE[1]);
    attachment.check(&result).success();
    assert_ne!(node.ruleset(), before);
    attachment.clone().netns("").del().success();
    assert!(!node.ruleset().contains(&address(&result)), "{}", node.ruleset());
    assert_eq!((host_ends(&node), node.reservations("net1")), (vec!["out0".to_owned()], vec![]));
    drop(outside);
}

#[test]
fn an_add_that_fails_leaves_nothing_and_the_next_works() {
    let node = Node::new();
    let container = node.container();
    let full = Attachment::new(&node, &container, patched(network(&node, &[]), json!({"ipam": {"ranges": []}})));
    full.add().failure();
    assert!(container.link("eth0").is_none());
    assert_eq!(host_ends(&node), [""; 0]);
    let attachment = full.config(network(&node, &["10.1.0.0/24"]));
    let result = attachment.add().success();
    attachment.add().fails_naming(102, &["eth0"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

/// The host end of an earlier pair with the address still exists, but its container does not.
#[test]
fn a_stale_route_to_the_address_does_no_harm() {
    let node = Node::new();
    node.ip(&[
        "link add old0 type veth peer name old1",
        "link set old0 up",
        "link set old1 up",
        "route add 10.1.0.2/32 dev old0 scope host",
        "route add fd00:1::2/128 dev old0",
    ]);
    let (container, attachment, result) = attach(&node, &dual(&node), 1).remove(0);
    let outer = result["interfaces"][0]["name"].as_str().unwrap();
    for (gateway, address) in [("10.1.0.1", "10.1.0.2"), ("fd00:1::1", "fd00:1::2")] {
        ping(&container, gateway);
        assert!(node.exec(&["ip", "route", "get", address]).contains(&format!("dev {outer} ")), "{address}");
    }
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    node.exec(&["ip", "link", "del", "old0"]);
}

#[test]
fn the_route_to_the_container_precedes_a_blackhole() {
    let node = Node::new();
    node.ip(&["route add blackhole 10.1.0.2/32"]);
    let (_container, attachment, result) = attach(&node, &network(&node, &["10.1.0.0/24"]), 1).remove(0);
    let outer = result["interfaces"][0]["name"].as_str().unwrap();
    assert!(node.exec(&["ip", "route", "get", "10.1.0.2"]).contains(&format!("dev {outer} ")));
    attachment.del_with(&result).success();
    node.ip(&["route del blackhole 10.1.0.2/32"]);
}

#[test]
fn a_living_container_keeps_the_packets_to_its_address() {
    let node = Node::new();
    let (_living, first, first_result) = attach(&node, &dual(&node), 1).remove(0);
    let newcomer = node.container();
    // Another network, for example one that an author of pods configures.
    let ipam = json!({"type": "static", "addresses": [{"address": "10.1.0.2/24", "gateway": "10.1.0.9"},
        {"address": "fd00:1::2/64", "gateway": "fd00:1::9"}]});
    let second =
        Attachment::new(&node, &newcomer, json!({"cniVersion": VERSION, "name": "net2", "type": "ptp", "ipam": ipam}));
    let second_result = second.add().success();
    let outer = |result: &Value| result["interfaces"][0]["name"].as_str().unwrap().to_owned();
    let leaves_by = |address: &str, result: &Value| {
        node.exec(&["ip", "route", "get", address]).contains(&format!("dev {} ", outer(result)))
    };
    assert!(leaves_by("10.1.0.2", &first_result) && leaves_by("fd00:1::2", &first_result));
    first.check(&first_result).success();
    second.check(&second_result).fails_naming(101, &["10.1.0.2", "before", &outer(&second_result)]);
    first.del_with(&first_result).success();
    assert!(leaves_by("10.1.0.2", &second_result) && leaves_by("fd00:1::2", &second_result));
    second.check(&second_result).success();
    second.del_with(&second_result).success();
}

#[test]
fn check_reports_what_the_host_lacks() {
    let node = Node::new();
    let (_container, attachment, result) = attach(&node, &dual(&node), 1).remove(0);
    attachment.check(&result).success();
    let outer = result["interfaces"][0]["name"].as_str().unwrap().to_owned();
    node.exec(&["ip", "route", "del", "10.1.0.2"]);
    attachment.check(&result).fails_naming(101, &["10.1.0.2", &outer]);
    node.exec(&["ip", "route", "add", "10.1.0.2", "dev", &outer]);
    attachment.check(&result).success();
    node.exec(&["ip", "address", "del", "10.1.0.1/32", "dev", &outer]);
    attachment.check(&result).fails_naming(101, &["10.1.0.1", &outer]);
    attachment.del_with(&result).success();
}

/// What tc-redirect-tap makes of the result: the addresses are a virtual machine's, whose sandbox
/// is the container's ID.
#[test]
fn check_passes_when_a_virtual_machine_has_the_addresses() {
    let node = Node::new();
    let (container, attachment, mut result) = attach(&node, &dual(&node), 1).remove(0);
    for (name, sandbox) in [("tap0", container.netns().to_str().unwrap()), ("tap0", container.id.as_str())] {
        let interface = json!({"name": name, "mac": "0a:00:00:00:00:01", "sandbox": sandbox});
        result["interfaces"].as_array_mut().unwrap().push(interface);
    }
    let last = result["interfaces"].as_array().unwrap().len() - 1;
    for ip in result["ips"].as_array_mut().unwrap() {
        ip["interface"] = json!(last);
    }
    attachment.check(&result).success();
    container.ip(&["route del default"]);
    attachment.check(&result).fails_with(101, "");
    attachment.del_with(&result).success();
}

#[test]
fn gc_removes_invalid_attachments_and_status_succeeds() {
    let node = Node::new();
    let config = patched(network(&node, &["10.1.0.0/24"]), json!({"cniVersion": "1.1.0"}));
    let all = attach(&node, &config, 2);
    let keep = &all[1].1;
    keep.status().success();
    keep.gc(&[(&keep.id, "eth0")]).success();
    assert_eq!(host_ends(&node), [all[1].2["interfaces"][0]["name"].as_str().unwrap()]);
    assert_eq!(node.reservations("net1").len(), 1);
    keep.check(&all[1].2).success();
    keep.del_with(&all[1].2).success();
}

#[test]
fn what_one_side_added_the_other_checks_and_deletes() {
    require!(probe::go_plugins());
    let node = Node::new();
    let (ours, go) = (bin_dir(), go_bin_dir());
    for (adds, deletes) in [(&ours, &go), (&go, &ours)] {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, dual(&node)).by(Path::new(adds));
        let result = attachment.add().success();
        assert_eq!(addresses(&result).len(), 2);
        let attachment = attachment.by(Path::new(deletes));
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        assert!(container.link("eth0").is_none());
        assert_eq!((host_ends(&node), node.reservations("net1")), (vec![], vec![]));
    }
}

/// Before specification 0.4.0 a DEL has no result, and Go's interfaces have no mark.
#[test]
fn what_go_added_is_deleted_without_a_result() {
    require!(probe::go_plugins());
    let node = Node::new();
    let container = node.container();
    let config = patched(dual(&node), json!({"cniVersion": "0.3.1"}));
    let attachment = Attachment::new(&node, &container, config).by(go_bin_dir());
    attachment.add().success();
    attachment.by(bin_dir()).del().success();
    assert!(container.link("eth0").is_none());
    assert_eq!((host_ends(&node), node.reservations("net1")), (vec![], vec![]));
}

/// A DEL may get the host's namespace by mistake, or with CNI_NETNS_OVERRIDE.
#[test]
fn an_unmarked_interface_of_the_host_stays() {
    let node = Node::new();
    let container = node.container();
    node.ip(&["link add eth0 type veth peer name peer0"]);
    let attachment = Attachment::new(&node, &container, network(&node, &["10.1.0.0/24"])).netns(node.netns());
    attachment.del().fails_with(8, "plugin's netns and netns from CNI_NETNS should not be the same");
    attachment.invocation("DEL", None).env("CNI_NETNS_OVERRIDE", "1").run().success();
    assert!(node.link("eth0").is_some());
    node.ip(&["link del eth0"]);
}
