//! The default route of a container's second network: it is behind that of the first network, which
//! keeps the traffic.

use std::path::{Path, PathBuf};

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, probe, require};
use conformance::{VERSION, ipam, patched, uplink};
use serde_json::{Value, json};

/// The network `net<number>` of this kind, with default routes of both families.
fn network(node: &Node, kind: &str, number: u8) -> Value {
    let subnets = [format!("10.{number}.0.0/24"), format!("fd0{number}::/64")];
    let ipam =
        patched(ipam(node, &[&subnets[0], &subnets[1]]), json!({"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}));
    let base = json!({"cniVersion": VERSION, "name": format!("net{number}"), "type": kind, "ipam": ipam});
    match kind {
        "bridge" => patched(base, json!({"bridge": format!("br{number}"), "isGateway": true})),
        "macvlan" => patched(base, json!({"master": "up0"})),
        _ => base,
    }
}

/// Returns the attachment of the container's interface `net<number>`.
fn attachment<'n>(node: &'n Node, container: &Container, kind: &str, number: u8) -> Attachment<'n> {
    Attachment::new(node, container, network(node, kind, number)).ifname(&format!("net{number}"))
}

/// Returns gateway, interface and metric of the default routes of a family in a table.
fn defaults(container: &Container, family: &str, table: &str) -> Vec<(String, String, u64)> {
    let ran = container.run(&["ip", "-j", family, "route", "show", "table", table, "default"]);
    let routes: Value = serde_json::from_str(&ran.stdout).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let fields =
        |route: &Value| (text(&route["gateway"]), text(&route["dev"]), route["metric"].as_u64().unwrap_or_default());
    routes.as_array().into_iter().flatten().map(fields).collect()
}

fn route(number: u8, family: &str, metric: u64) -> (String, String, u64) {
    let gateway = if family == "-4" { format!("10.{number}.0.1") } else { format!("fd0{number}::1") };
    (gateway, format!("net{number}"), metric)
}

/// Returns the interface that packets to a host outside take.
fn way_out(container: &Container, family: &str) -> String {
    let to = if family == "-4" { "198.51.100.1" } else { "2001:db8:99::1" };
    let found = container.json(&["ip", "-j", family, "route", "get", to]);
    found[0]["dev"].as_str().unwrap_or_default().to_owned()
}

/// The folders of these plugins and of the Go plugins, if they are installed.
fn sides() -> Vec<PathBuf> {
    let go = go_bin_dir();
    if go.join("macvlan").is_file() { vec![bin_dir(), go] } else { vec![bin_dir()] }
}

/// Attaches a first network by the plugins in `first_bin` and a second one by these plugins.
#[track_caller]
fn second_is_behind(first_kind: &str, second_kind: &str, first_bin: &Path) {
    let node = Node::new();
    let _outside = uplink(&node, "up0");
    ["br1", "br2"].iter().for_each(|name| node.expect_left(name));
    let container = node.container();
    let first = attachment(&node, &container, first_kind, 1).by(first_bin);
    let second = attachment(&node, &container, second_kind, 2);
    let first_result = first.add().success();
    let added = second.add();
    let result = added.success();
    for (family, metric) in [("-4", 0), ("-6", 1024)] {
        assert_eq!(
            defaults(&container, family, "main"),
            [route(1, family, metric), route(2, family, metric + 1)],
            "{}",
            added.report()
        );
        assert_eq!(way_out(&container, family), "net1");
    }
    assert!(added.stderr.contains("behind the default route of another network"), "{}", added.report());
    let priorities: Vec<&Value> = result["routes"].as_array().unwrap().iter().map(|route| &route["priority"]).collect();
    assert_eq!(priorities, [1, 1025], "{result:#}");
    for side in sides() {
        first.clone().by(&side).check(&first_result).success();
        second.clone().by(&side).check(&result).success();
    }
    // Without the first network, the second one has the traffic.
    first.del_with(&first_result).success();
    for (family, metric) in [("-4", 1), ("-6", 1025)] {
        assert_eq!(defaults(&container, family, "main"), [route(2, family, metric)]);
        assert_eq!(way_out(&container, family), "net2");
    }
    second.check(&result).success();
    second.del_with(&result).success();
}

#[test]
fn a_second_networks_default_route_is_behind_the_first() {
    for (first, second) in [("bridge", "macvlan"), ("ptp", "bridge"), ("macvlan", "ptp")] {
        second_is_behind(first, second, &bin_dir());
    }
}

#[test]
fn the_first_network_may_be_gos() {
    require!(probe::go_plugins());
    for (first, second) in [("bridge", "macvlan"), ("ptp", "bridge"), ("macvlan", "ptp")] {
        second_is_behind(first, second, &go_bin_dir());
    }
}

/// Go adds the IPv4 route of the second network before the first one, and combines those of IPv6.
#[test]
fn the_second_network_may_be_gos() {
    require!(probe::go_plugins());
    let node = Node::new();
    node.expect_left("br1");
    let container = node.container();
    let first = attachment(&node, &container, "bridge", 1);
    let second = attachment(&node, &container, "ptp", 2).by(go_bin_dir());
    let first_result = first.add().success();
    let result = second.add().success();
    first.check(&first_result).success();
    second.clone().by(bin_dir()).check(&result).success();
    second.clone().by(bin_dir()).del_with(&result).success();
    assert_eq!(defaults(&container, "-4", "main"), [route(1, "-4", 0)]);
    assert_eq!(defaults(&container, "-6", "main"), [route(1, "-6", 1024)]);
    first.check(&first_result).success();
    first.del_with(&first_result).success();
}

#[test]
fn a_third_networks_default_route_is_behind_both() {
    let node = Node::new();
    ["br1", "br2", "br3"].iter().for_each(|name| node.expect_left(name));
    let container = node.container();
    let attachments = [1, 2, 3].map(|number| attachment(&node, &container, "bridge", number));
    let results = attachments.each_ref().map(|attachment| attachment.add().success());
    for (family, metric) in [("-4", 0), ("-6", 1024)] {
        let expected = [0, 1, 2].map(|place| route(place + 1, family, metric + u64::from(place)));
        assert_eq!(defaults(&container, family, "main"), expected);
    }
    for (attachment, result) in attachments.iter().zip(&results) {
        attachment.check(result).success();
        attachment.del_with(result).success();
    }
}

#[test]
fn a_default_route_conflicts_only_within_its_table() {
    let node = Node::new();
    ["br1", "br2", "br3"].iter().for_each(|name| node.expect_left(name));
    let container = node.container();
    let in_table = |number: u8| {
        let routes = json!([{"dst": "0.0.0.0/0", "table": 100}, {"dst": "::/0", "table": 100}]);
        let attachment = attachment(&node, &container, "bridge", number);
        let config = patched(attachment.config.clone(), json!({"ipam": {"routes": routes}}));
        attachment.config(config)
    };
    let attachments = [attachment(&node, &container, "bridge", 1), in_table(2), in_table(3)];
    let results = attachments.each_ref().map(|attachment| attachment.add().success());
    for (family, metric) in [("-4", 0), ("-6", 1024)] {
        assert_eq!(defaults(&container, family, "main"), [route(1, family, metric)]);
        assert_eq!(defaults(&container, family, "100"), [route(2, family, metric), route(3, family, metric + 1)]);
    }
    for (attachment, result) in attachments.iter().zip(&results) {
        attachment.check(result).success();
        attachment.del_with(result).success();
    }
}

/// The administrator's route stays in force, and is not a reason for a failed ADD.
#[test]
fn a_blackhole_default_route_stays_in_front() {
    let node = Node::new();
    node.expect_left("br1");
    let container = node.container();
    container.ip(&["route add blackhole default", "route add blackhole ::/0"]);
    let attachment = attachment(&node, &container, "bridge", 1);
    let result = attachment.add().success();
    assert!(!container.run(&["ip", "route", "get", "198.51.100.1"]).ok);
    let shown = container.exec(&["ip", "-6", "route", "show", "default"]);
    assert!(shown.contains("via fd01::1 dev net1 metric 1025"), "{shown}");
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn sbr_moves_a_default_route_that_is_behind() {
    let node = Node::new();
    ["br1", "br2"].iter().for_each(|name| node.expect_left(name));
    let container = node.container();
    let first = attachment(&node, &container, "bridge", 1);
    let second = attachment(&node, &container, "bridge", 2);
    let first_result = first.add().success();
    let result = second.add().success();
    let sbr = second.clone().config(json!({"cniVersion": VERSION, "name": "net2", "type": "sbr"}));
    sbr.add_after(&result).success();
    for (family, metric, table, from) in [("-4", 0, "100", "10.2.0.2"), ("-6", 1024, "101", "fd02::2")] {
        assert_eq!(defaults(&container, family, "main"), [route(1, family, metric)]);
        assert_eq!(defaults(&container, family, table)[0].1, "net2");
        let to = if family == "-4" { "198.51.100.1" } else { "2001:db8:99::1" };
        let found = container.json(&["ip", "-j", family, "route", "get", to, "from", from]);
        assert_eq!(found[0]["dev"], "net2", "{found}");
        assert_eq!(way_out(&container, family), "net1");
    }
    second.check(&result).success();
    sbr.check(&result).success();
    sbr.del_with(&result).success();
    second.del_with(&result).success();
    first.check(&first_result).success();
    first.del_with(&first_result).success();
}

/// In the VRF, the route has the metric that it would have without the first network's route.
#[test]
fn vrf_gives_the_default_route_its_metric_back() {
    require!(probe::vrf());
    for first_bin in sides() {
        let node = Node::new();
        let _outside = uplink(&node, "up0");
        ["br1", "br3"].iter().for_each(|name| node.expect_left(name));
        let container = node.container();
        let first = attachment(&node, &container, "bridge", 1).by(&first_bin);
        let first_result = first.add().success();
        let mut later = Vec::new();
        for (number, kind) in [(2, "macvlan"), (3, "bridge")] {
            let interface = attachment(&node, &container, kind, number);
            let result = interface.add().success();
            let config = json!({"cniVersion": VERSION, "name": format!("net{number}"), "type": "vrf",
                "vrfname": "red", "table": 77});
            let vrf = interface.clone().config(config);
            vrf.add_after(&result).success();
            interface.check(&result).success();
            vrf.check(&result).success();
            later.push((interface, vrf, result));
        }
        for (family, metric) in [("-4", 0), ("-6", 1024)] {
            assert_eq!(defaults(&container, family, "main"), [route(1, family, metric)]);
            // The second interface of the VRF does not take over the traffic of its first one.
            assert_eq!(defaults(&container, family, "77"), [route(2, family, metric), route(3, family, metric + 1)]);
            assert_eq!(way_out(&container, family), "net1");
        }
        for (interface, vrf, result) in later.iter().rev() {
            interface.check(result).success();
            vrf.check(result).success();
            vrf.del_with(result).success();
            interface.del_with(result).success();
        }
        first.check(&first_result).success();
        first.del_with(&first_result).success();
    }
}
