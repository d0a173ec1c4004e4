//! route-override: routes of earlier plugins are removed, others are added, and DEL restores all.
//!
//! The container is sbr's: `eth0` with the default routes, and `net1`, the plugin's interface.

use std::fs;

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Attachment, Container, Node, probe, require, rounds};
use conformance::{VERSION, patched};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::sbr::{routes, state};

/// A container whose `net1` has routes of an earlier plugin.
fn pod(node: &Node) -> (Container, [Container; 2]) {
    let (pod, networks) = crate::sbr::pod(node);
    pod.ip(&[
        "route add 10.8.0.0/16 via 10.2.0.1",
        "route add 10.9.0.0/16 via 10.2.0.9 metric 7 mtu 1300",
        "route add 10.10.0.0/16 nexthop via 10.2.0.8 nexthop via 10.2.0.9 weight 3",
        "route add 10.11.0.0/16 dev net1 scope link",
        "route add default via 10.2.0.1 metric 50",
        "route add fd08::/64 via fd02::1",
        "route add fd09::/64 dev net1",
    ]);
    (pod, networks)
}

/// The result of the plugin that has created `net1`.
fn prev(pod: &Container) -> Value {
    json!({
        "cniVersion": VERSION,
        "interfaces": [{"name": "net1", "sandbox": pod.netns()}],
        "ips": [
            {"address": "10.2.0.2/24", "gateway": "10.2.0.1", "interface": 0},
            {"address": "fd02::2/64", "gateway": "fd02::1", "interface": 0},
        ],
        "routes": [
            {"dst": "10.8.0.0/16"},
            {"dst": "10.9.0.0/16", "gw": "10.2.0.9"},
            {"dst": "10.11.0.0/16", "scope": 253},
            {"dst": "0.0.0.0/0", "gw": "10.2.0.1", "priority": 50},
            {"dst": "fd08::/64", "gw": "fd02::1"},
        ],
    })
}

fn attached<'n>(node: &'n Node, pod: &Container, keys: Value) -> Attachment<'n> {
    let config = json!({"cniVersion": VERSION, "name": "net1", "type": "route-override"});
    Attachment::new(node, pod, patched(config, keys)).ifname("net1")
}

/// The destinations of a result's routes, each with its gateway.
fn listed(result: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let routes = result["routes"].as_array().cloned().unwrap_or_default();
    routes.iter().map(|route| format!("{} {}", text(&route["dst"]), text(&route["gw"]))).collect()
}

/// The routes of `net1` in the main table, without those of its addresses.
fn of_net1(pod: &Container) -> Vec<String> {
    let all = [routes(pod, "-4", "main"), routes(pod, "-6", "main")].concat();
    all.into_iter().filter(|line| line.contains("net1") && !line.contains("proto kernel")).collect()
}

/// How many records are on the host.
fn records(node: &Node) -> usize {
    node.enter(|| fs::read_dir("/run/cni/route-override").map_or(0, |files| files.flatten().count()))
}

#[test]
fn flushed_routes_are_replaced_and_restored() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    let keys = json!({"flushroutes": true, "addroutes": [{"dst": "10.20.0.0/16", "gw": "10.2.0.5"},
                                                          {"dst": "fd20::/64", "gw": "fd02::5"}]});
    let attachment = attached(&node, &pod, keys);
    let result = attachment.add_after(&prev(&pod)).success();
    let shown = of_net1(&pod);
    assert!(shown.iter().any(|line| line.starts_with("10.11.0.0/16 dev net1 scope link")), "{shown:?}");
    assert!(shown.iter().any(|line| line.starts_with("10.20.0.0/16 via 10.2.0.5")), "{shown:?}");
    assert!(shown.iter().any(|line| line.starts_with("fd20::/64 via fd02::5")), "{shown:?}");
    assert!(
        !shown.iter().any(|line| ["10.8", "10.9", "10.10", "default", "fd08"].iter().any(|it| line.starts_with(it)))
    );
    assert_eq!(listed(&result), ["10.11.0.0/16 ", "10.20.0.0/16 10.2.0.5", "fd20::/64 fd02::5"]);
    assert_eq!(result["ips"], prev(&pod)["ips"]);
    assert!(routes(&pod, "-4", "main").iter().any(|line| line == "default via 10.1.0.1 dev eth0"));
    attachment.check(&result).success();
    for _ in 0..2 {
        attachment.del_with(&result).success();
        assert_eq!(state(&pod), before);
    }
    assert_eq!(records(&node), 0);
}

#[test]
fn each_key_and_its_copy_in_args_remove_their_routes() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    let all = of_net1(&pod).len();
    for (keys, gone) in [
        (json!({"flushgateway": true}), vec!["0.0.0.0/0 10.2.0.1"]),
        (json!({"delroutes": [{"dst": "10.9.0.0/16"}]}), vec!["10.9.0.0/16 10.2.0.9"]),
        (json!({"delroutes": [{"dst": "fd08::/64", "gw": "fd02::77"}]}), vec!["fd08::/64 fd02::1"]),
        (json!({"delroutes": [{"dst": "10.11.0.0/16"}]}), vec!["10.11.0.0/16 "]),
        (json!({}), vec![]),
    ] {
        for keys in
            [keys.clone(), json!({"flushroutes": true, "args": {"cni": patched(keys, json!({"flushroutes": false}))}})]
        {
            let attachment = attached(&node, &pod, keys.clone());
            let result = attachment.add_after(&prev(&pod)).success();
            let mut expected = listed(&prev(&pod));
            expected.retain(|route| !gone.contains(&route.as_str()));
            assert_eq!((listed(&result), of_net1(&pod).len()), (expected, all - gone.len()), "{keys}");
            let has_gateway = result["ips"][0].get("gateway").is_some();
            assert_eq!(has_gateway, !keys.to_string().contains("flushgateway"), "{result:#}");
            attachment.check(&result).success();
            attachment.del().success();
            assert_eq!(state(&pod), before, "{keys}");
        }
    }
    assert_eq!(records(&node), 0);
}

#[test]
fn several_gateways_of_a_destination_are_one_route() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    for keys in [
        json!({"addroutes": [{"dst": "10.20.0.0/16", "gw": "10.2.0.5"}, {"dst": "10.20.0.0/16", "gw": "10.2.0.6"}]}),
        json!({"addroutes": [{"dst": "10.20.0.0/16", "gws": ["10.2.0.5", "10.2.0.6"]}]}),
        json!({"addecmproutes": [{"dst": "10.20.0.0/16", "gws": ["10.2.0.5", "10.2.0.6"]}],
               "delecmproutes": [{"dst": "10.10.0.0/16"}]}),
    ] {
        let attachment = attached(&node, &pod, keys.clone());
        let result = attachment.add_after(&prev(&pod)).success();
        let shown = pod.exec(&["ip", "route", "show", "10.20.0.0/16"]);
        assert_eq!(shown.matches("nexthop via 10.2.0.").count(), 2, "{shown}");
        let existing = pod.exec(&["ip", "route", "show", "10.10.0.0/16"]);
        assert_eq!(existing.is_empty(), keys["delecmproutes"].is_array(), "{existing}");
        let listed: Vec<&Value> = result["routes"].as_array().unwrap()[5..].iter().collect();
        if keys["addroutes"][0]["gw"].is_null() {
            assert_eq!(listed, [&json!({"dst": "10.20.0.0/16", "gw": "10.2.0.5", "gws": ["10.2.0.5", "10.2.0.6"]})]);
        } else {
            assert_eq!(listed.iter().map(|route| &route["gw"]).collect::<Vec<_>>(), ["10.2.0.5", "10.2.0.6"]);
        }
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        assert_eq!(state(&pod), before);
    }
    assert_eq!(records(&node), 0);
}

#[test]
fn a_default_route_is_added_behind_another_interfaces() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    let attachment =
        attached(&node, &pod, json!({"flushgateway": true, "addroutes": [{"dst": "0.0.0.0/0", "gw": "10.2.0.5"}]}));
    let result = attachment.add_after(&prev(&pod)).success();
    let defaults: Vec<_> = routes(&pod, "-4", "main").into_iter().filter(|line| line.starts_with("default")).collect();
    assert_eq!(defaults, ["default via 10.1.0.1 dev eth0", "default via 10.2.0.5 dev net1 metric 1"]);
    let last = result["routes"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(last, json!({"dst": "0.0.0.0/0", "gw": "10.2.0.5", "priority": 1}));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(state(&pod), before);
    assert_eq!(records(&node), 0);
}

#[test]
fn a_route_without_a_gateway_is_on_the_link() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    let attachment = attached(&node, &pod, json!({"addroutes": [{"dst": "10.20.0.1/16"}, {"dst": "fd20::/64"}]}));
    let result = attachment.add_after(&prev(&pod)).success();
    assert_eq!(pod.exec(&["ip", "route", "show", "10.20.0.0/16"]).trim(), "10.20.0.0/16 dev net1 scope link");
    assert_eq!(result["routes"][5], json!({"dst": "10.20.0.0/16", "scope": 253}));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(state(&pod), before);
    assert_eq!(records(&node), 0);
}

/// Each entry has its own DEL, and the first one restores everything.
#[test]
fn two_entries_of_a_list_share_what_is_restored() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    let first = attached(
        &node,
        &pod,
        json!({"delroutes": [{"dst": "10.8.0.0/16"}],
                                             "addroutes": [{"dst": "10.20.0.0/16", "gw": "10.2.0.5"}]}),
    );
    let second = attached(
        &node,
        &pod,
        json!({"delroutes": [{"dst": "10.20.0.0/16"}, {"dst": "10.9.0.0/16"}],
                                              "addroutes": [{"dst": "10.8.0.0/16", "gw": "10.2.0.1"}]}),
    );
    let result = first.add_after(&prev(&pod)).success();
    let between = state(&pod);
    let unreachable = json!({"flushroutes": true, "addroutes": [{"dst": "10.30.0.0/16", "gw": "192.0.2.1"}]});
    attached(&node, &pod, unreachable).add_after(&result).fails_with(100, "");
    assert_eq!((state(&pod), records(&node)), (between, 1));
    let result = second.add_after(&result).success();
    first.check(&result).success();
    second.check(&result).success();
    second.del_with(&result).success();
    assert_eq!((state(&pod), records(&node)), (before.clone(), 0));
    first.del_with(&result).success();
    assert_eq!(state(&pod), before);
    assert_eq!(records(&node), 0);
}

#[test]
fn a_failed_add_restores_the_routes() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    let failing = json!({"flushroutes": true, "addroutes": [{"dst": "10.20.0.0/16", "gw": "10.2.0.5"},
                                                             {"dst": "10.21.0.0/16", "gw": "192.0.2.1"}]});
    let attachment = attached(&node, &pod, failing);
    attachment.add_after(&prev(&pod)).fails_with(100, "failed to add route 10.21.0.0/16 via 192.0.2.1");
    assert_eq!(state(&pod), before);
    let family = attached(&node, &pod, json!({"addroutes": [{"dst": "10.20.0.0/16", "gw": "fd02::1"}]}));
    family
        .add_after(&prev(&pod))
        .fails_with(7, "route 10.20.0.0/16 via fd02::1: the gateway is of the other address family");
    attached(&node, &pod, json!({})).add().fails_with(7, "Required prevResult missing");
    attached(&node, &pod, json!({})).ifname("net7").add_after(&prev(&pod)).fails_with(4, "");
    assert_eq!(state(&pod), before);
    assert_eq!(records(&node), 0);
}

/// The ADD is stopped, or gets an error, at each of its system calls.
#[test]
fn whatever_stops_a_verb_the_routes_come_back() {
    require!(probe::plugin("route-override"));
    require!(trace::supported());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let (before, prev) = (state(&pod), prev(&pod));
    let keys = json!({"flushroutes": true, "addroutes": [{"dst": "10.20.0.0/16", "gw": "10.2.0.5"}]});
    let attachment = attached(&node, &pod, keys);
    let attempt = |verb: &str, at, act| {
        let plan = Plan { victim: "route-override".to_owned(), at, act };
        if verb == "DEL" {
            attachment.add_after(&prev).success();
        }
        attachment.invocation(verb, Some(&prev)).traced(&plan)
    };
    let kill = Act::Signal(Signal::SIGKILL);
    // A DEL for which the kernel refuses a route succeeds, and only notes that.
    for (verb, act) in [("ADD", Act::Fail(Errno::ENOBUFS)), ("ADD", kill), ("DEL", kill)] {
        let honest = attempt(verb, u64::MAX, act);
        assert_eq!(honest.outcome.status, Some(0), "{}", honest.outcome.report());
        attachment.del_with(&prev).success();
        assert_eq!(state(&pod), before);
        let meant = ["openat", "setns", "sendto", "recvfrom", "socket", "write", "linkat"];
        let is_meant = |hit: &trace::Hit| !hit.starting && meant.contains(&hit.call.as_str());
        let points: Vec<u64> = (1..).zip(&honest.all).filter(|(_, hit)| is_meant(hit)).map(|(at, _)| at).collect();
        let some = usize::try_from(rounds(if verb == "ADD" { points.len() as u64 } else { 8 })).unwrap();
        assert!(points.len() > 10, "{:?}", honest.all);
        for at in points.iter().copied().step_by(points.len().div_ceil(some)) {
            let hurt = attempt(verb, at, act);
            let story = format!("{verb}: {act:?} at call {at}, {:?}\n{}", hurt.hit, hurt.outcome.report());
            if verb == "ADD" && hurt.outcome.status == Some(1) {
                assert_eq!((state(&pod), records(&node)), (before.clone(), 0), "{story}");
            }
            attachment.del_with(&prev).success();
            assert_eq!((state(&pod), records(&node)), (before.clone(), 0), "{story}");
        }
    }
    assert_eq!(records(&node), 0);
}

#[test]
fn check_finds_each_difference_unless_it_is_skipped() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let keys = json!({"flushgateway": true, "delroutes": [{"dst": "10.9.0.0/16"}],
                      "addroutes": [{"dst": "10.20.0.0/16", "gw": "10.2.0.5"}]});
    let attachment = attached(&node, &pod, keys.clone());
    let skipping = attached(&node, &pod, patched(keys, json!({"skipcheck": true})));
    let result = attachment.add_after(&prev(&pod)).success();
    for (broken, repaired, text) in [
        (
            "route del 10.20.0.0/16",
            "route add 10.20.0.0/16 via 10.2.0.5",
            "route 10.20.0.0/16 via 10.2.0.5 does not exist",
        ),
        (
            "route add 10.9.0.0/16 via 10.2.0.9",
            "route del 10.9.0.0/16",
            "route 10.9.0.0/16 via 10.2.0.9 exists, but ADD has removed it",
        ),
        (
            "route add default via 10.2.0.1 metric 60",
            "route del default via 10.2.0.1",
            "route 0.0.0.0/0 via 10.2.0.1 metric 60 exists, but ADD has removed it",
        ),
    ] {
        pod.ip(&[broken]);
        assert_eq!(attachment.check(&result).fails_with(101, "").msg, text);
        skipping.check(&result).success();
        pod.ip(&[repaired]);
        attachment.check(&result).success();
    }
    // sbr moves the routes into a table of its own.
    pod.ip(&["route del 10.20.0.0/16", "route add 10.20.0.0/16 via 10.2.0.5 table 100"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(records(&node), 0);
}

#[test]
fn del_restores_nothing_in_another_interface_or_namespace() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, networks) = pod(&node);
    let attachment = attached(&node, &pod, json!({"flushroutes": true}));
    let prev = prev(&pod);
    attachment.add_after(&prev).success();
    let (other, _others) = crate::sbr::pod(&node);
    let before = state(&other);
    let outcome = attachment.clone().netns(other.netns()).del();
    outcome.success();
    assert!(outcome.stderr.contains("no route was restored"), "{}", outcome.stderr);
    assert_eq!((state(&other), records(&node)), (before, 0));
    attachment.add_after(&prev).success();
    let netns = networks[1].netns().display().to_string();
    pod.ip(&[
        "link del net1",
        &format!("link add net1 type veth peer name port2 netns {netns}"),
        "link set net1 addrgenmode none up",
        "address add 10.2.0.2/24 dev net1",
    ]);
    let before = state(&pod);
    attachment.del().success();
    assert_eq!((state(&pod), records(&node)), (before, 0));
    attachment.clone().netns("").del().success();
    assert_eq!(records(&node), 0);
}

#[test]
fn gc_removes_the_records_that_are_not_valid() {
    require!(probe::plugin("route-override"));
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = attached(&node, &pod, json!({"cniVersion": "1.1.0", "flushroutes": true}));
    let prev = patched(prev(&pod), json!({"cniVersion": "1.1.0"}));
    attachment.add_after(&prev).success();
    attachment.gc(&[(&attachment.id, "net1")]).success();
    attached(&node, &pod, json!({"cniVersion": "1.1.0", "name": "net2"})).gc(&[]).success();
    assert_eq!(records(&node), 1);
    attachment.gc(&[]).success();
    attachment.status().success();
    assert_eq!(records(&node), 0);
}
