//! Refusals, the undo of a failed ADD, CHECK, and DEL in every state of the container.

use std::fs::File;

use cni_testkit::locks::wait_until_waiting;
use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Node, require, rounds};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::json;

use super::{V4, V6, empty, pod, prev, routed, routes, rules, state};

#[test]
fn a_bad_configuration_is_refused_before_any_change() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let (before, prev) = (state(&pod), prev(&pod, &[V4]));
    for (keys, msg) in [
        (
            json!({"gateways": ["10.2.0.1", "fd02::1", "10.2.0.9"]}),
            "gateways list cannot contain more than 2 entries (one IPv4, one IPv6)",
        ),
        (json!({"gateways": ["x"]}), "invalid static gateway IP address: x"),
        (
            json!({"gateways": ["10.2.0.1", "10.2.0.9"]}),
            "gateways list contains multiple IPv4 addresses: 10.2.0.1 and 10.2.0.9",
        ),
        (
            json!({"gateways": ["fd02::1", "fd02::9"]}),
            "gateways list contains multiple IPv6 addresses: fd02::1 and fd02::9",
        ),
    ] {
        assert_eq!(routed(&node, &pod, keys).add_after(&prev).fails_with(7, "").msg, msg);
    }
    for table in [0, -1, 4_294_967_296_i64] {
        routed(&node, &pod, json!({ "table": table })).add_after(&prev).fails_with(7, "table must be a number");
    }
    assert_eq!(state(&pod), before);
}

#[test]
fn without_prev_result_or_address_nothing_is_changed() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let before = state(&pod);
    for version in ["0.2.0", "1.0.0"] {
        let alone = routed(&node, &pod, json!({ "cniVersion": version })).add();
        assert_eq!(alone.fails_with(7, "").msg, "This plugin must be called as chained plugin");
    }
    let mut none = prev(&pod, &[]);
    none["ips"] = json!([]);
    let refused = routed(&node, &pod, json!({})).add_after(&none);
    assert_eq!(refused.fails_with(7, "").msg, "No IP addresses supplied on interface: net1");
    assert_eq!(state(&pod), before);
}

#[test]
fn addresses_of_other_interfaces_are_not_an_error() {
    for keys in [json!({}), json!({"table": 5000})] {
        let node = Node::new();
        let (pod, _networks) = pod(&node);
        let (before, prev) = (state(&pod), prev(&pod, &[]));
        let attachment = routed(&node, &pod, keys);
        let added = attachment.add_after(&prev);
        let result = added.success();
        assert_eq!(result["ips"], prev["ips"]);
        assert!(added.stderr.contains("no routing rule was added"), "{}", added.report());
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        assert_eq!(state(&pod), before);
    }
}

#[test]
fn a_missing_interface_is_named() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let prev = prev(&pod, &[V4]);
    pod.ip(&["link del net1"]);
    let refused = routed(&node, &pod, json!({})).add_after(&prev);
    refused.fails_with(4, "Cannot find network interface net1: Link not found");
}

#[test]
fn a_second_add_is_refused_and_leaves_the_first() {
    for keys in [json!({}), json!({"table": 5000})] {
        let node = Node::new();
        let (pod, _networks) = pod(&node);
        let attachment = routed(&node, &pod, keys);
        attachment.add_after(&prev(&pod, &[V4, V6])).success();
        let first = state(&pod);
        attachment.add_after(&prev(&pod, &[V4, V6])).fails_naming(102, &["10.2.0.2", "exists already"]);
        assert_eq!(state(&pod), first);
    }
}

#[test]
fn a_failed_add_puts_everything_back() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["route add 10.9.0.0/16 via 10.2.0.9 mtu 1300 metric 7", "route append 10.9.0.0/16 via 10.2.0.8 metric 7"]);
    let before = state(&pod);
    let unreachable = prev(&pod, &[V4, ("fd02::2/64", "fd77::1")]);
    let failed = routed(&node, &pod, json!({})).add_after(&unreachable);
    failed.fails_naming(100, &["fd77::1", "net1", "os error"]);
    assert_eq!(state(&pod), before);
    for hints in [false, true] {
        let attachment = routed(&node, &pod, json!({ "addSourceHints": hints }));
        let unread = attachment.invocation("ADD", Some(&prev(&pod, &[V4, V6]))).with_closed_stdout().run();
        assert_ne!(unread.status, Some(0), "{}", unread.report());
        assert_eq!(state(&pod), before);
    }
}

#[test]
fn whichever_call_fails_an_add_changes_all_or_nothing() {
    require!(trace::supported());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    pod.ip(&["route add 10.9.0.0/16 via 10.2.0.9"]);
    let (before, prev) = (state(&pod), prev(&pod, &[V4, V6]));
    let attachment = routed(&node, &pod, json!({"addSourceHints": true}));
    let attempt =
        |at, act| attachment.invocation("ADD", Some(&prev)).traced(&Plan { victim: "sbr".to_owned(), at, act });
    let put_back = || {
        attachment.del().success();
        pod.ip(&["address flush dev net1", "route flush dev net1"]);
        // A killed ADD leaves its routes in the main table to the end of the interface.
        pod.run(&["ip", "-6", "route", "flush", "dev", "net1", "proto", "boot"]);
        pod.ip(&[
            "address add 10.2.0.2/24 dev net1",
            "address add fd02::2/64 dev net1 nodad",
            "route add 10.9.0.0/16 via 10.2.0.9",
        ]);
        empty(&pod);
        assert_eq!(state(&pod), before);
    };
    // Each act has points of its own, because calls that cannot fail are not counted.
    for act in [Act::Fail(Errno::ENOBUFS), Act::Signal(Signal::SIGKILL)] {
        let honest = attempt(u64::MAX, act);
        honest.outcome.success();
        put_back();
        let meant = ["openat", "setns", "sendto", "recvfrom", "socket", "write", "flock"];
        let is_meant = |hit: &trace::Hit| !hit.starting && meant.contains(&hit.call.as_str());
        let points: Vec<u64> = (1..).zip(&honest.all).filter(|(_, hit)| is_meant(hit)).map(|(at, _)| at).collect();
        let some = usize::try_from(rounds(points.len() as u64)).unwrap();
        assert!(points.len() > 20, "{:?}", honest.all);
        for at in points.iter().copied().step_by(points.len().div_ceil(some)) {
            let hurt = attempt(at, act);
            let story = format!("{act:?} at call {at}, {:?}\n{}", hurt.hit, hurt.outcome.report());
            match hurt.outcome.status {
                Some(0) => put_back(),
                Some(_) => assert_eq!(state(&pod), before, "{story}"),
                None => {
                    attachment.del_with(&prev).success();
                    assert_eq!(rules(&pod), [""; 0], "{story}");
                    put_back();
                }
            }
        }
    }
}

#[test]
fn check_finds_what_is_missing() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = routed(&node, &pod, json!({}));
    let result = attachment.add_after(&prev(&pod, &[V4, V6])).success();
    attachment.check(&result).success();
    pod.ip(&["route del default via fd02::1 table 101"]);
    attachment.check(&result).fails_naming(101, &["table 101", "fd02::2", "net1"]);
    pod.ip(&["route add default via fd02::1 table 101"]);
    attachment.check(&result).success();
    pod.ip(&["rule del from 10.2.0.2"]);
    attachment.check(&result).fails_naming(101, &["no routing rule", "10.2.0.2"]);
    // A later plugin may have removed the address.
    pod.ip(&["address del 10.2.0.2/24 dev net1"]);
    attachment.check(&result).success();
    pod.ip(&["link del net1"]);
    attachment.check(&result).failure();
}

#[test]
fn check_of_a_configured_table_looks_for_its_rule() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = routed(&node, &pod, json!({"table": 5000}));
    let result = attachment.add_after(&prev(&pod, &[V4])).success();
    attachment.check(&result).success();
    pod.ip(&["rule del from 10.2.0.2", "rule add from 10.2.0.2 lookup 5001"]);
    attachment.check(&result).fails_naming(101, &["table 5000", "10.2.0.2"]);
}

#[test]
fn del_without_a_namespace_succeeds_and_creates_nothing() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = routed(&node, &pod, json!({}));
    let result = attachment.add_after(&prev(&pod, &[V4])).success();
    attachment.clone().netns("").del().success();
    let gone = node.dir().join("netns/gone");
    attachment.clone().netns(&gone).del_with(&result).success();
    assert!(!gone.exists());
    pod.unmount();
    attachment.del_with(&result).success();
    pod.unlink();
    attachment.del().success();
    assert!(!pod.netns().exists());
}

#[test]
fn del_removes_the_rules_of_an_interface_that_has_gone() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = routed(&node, &pod, json!({}));
    let result = attachment.add_after(&prev(&pod, &[V4, V6])).success();
    pod.ip(&["link del net1"]);
    attachment.del().success();
    assert_eq!(rules(&pod).len(), 2);
    attachment.del_with(&result).success();
    assert_eq!(rules(&pod), [""; 0]);
}

#[test]
fn del_with_a_bad_configuration_removes_the_rules() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    routed(&node, &pod, json!({})).add_after(&prev(&pod, &[V4])).success();
    routed(&node, &pod, json!({"gateways": ["x"]})).del().success();
    assert_eq!(rules(&pod), [""; 0]);
}

#[test]
fn gc_and_status_find_nothing_to_do() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = routed(&node, &pod, json!({"cniVersion": "1.1.0"}));
    let mut prev = prev(&pod, &[V4]);
    prev["cniVersion"] = "1.1.0".into();
    attachment.add_after(&prev).success();
    let before = state(&pod);
    attachment.gc(&[]).success();
    attachment.status().success();
    assert_eq!(state(&pod), before);
    let bad = routed(&node, &pod, json!({"cniVersion": "1.1.0", "gateways": ["x"]}));
    bad.status().fails_with(50, "invalid static gateway IP address: x");
}

#[test]
fn calls_for_one_namespace_wait_for_each_other() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let held = File::open(pod.netns()).unwrap();
    held.lock().unwrap();
    let attachment = routed(&node, &pod, json!({}));
    let mut adding = attachment.invocation("ADD", Some(&prev(&pod, &[V4]))).start();
    adding.release();
    wait_until_waiting(adding.pid());
    assert_eq!(rules(&pod), [""; 0]);
    held.unlock().unwrap();
    adding.finish().success();
    assert_eq!(rules(&pod), ["from 10.2.0.2 lookup 100"]);
}

#[test]
fn two_adds_at_once_take_different_tables() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let prev = prev(&pod, &[V4]);
    let first = routed(&node, &pod, json!({})).invocation("ADD", Some(&prev)).start();
    let second = routed(&node, &pod, json!({})).ifname("eth0").invocation("ADD", Some(&prev)).start();
    let (first, second) = (first, second);
    let outcomes = std::thread::scope(|scope| {
        let first = scope.spawn(|| first.finish());
        [second.finish(), first.join().unwrap()]
    });
    outcomes.iter().for_each(|outcome| drop(outcome.success()));
    let mut tables: Vec<String> = rules(&pod).iter().map(|rule| rule.rsplit(' ').next().unwrap().to_owned()).collect();
    tables.sort();
    assert_eq!(tables, ["100", "101"]);
    assert_eq!(routes(&pod, "-4", "main"), [""; 0]);
}
