//! tap and host-device are killed, or fail, at their system calls. A failed ADD undoes everything,
//! and after a kill the next DEL does.

use std::collections::BTreeSet;

use cni_testkit::trace::{self, Act, Hit, Plan, Traced};
use cni_testkit::{Attachment, Container, Node, require, rounds};
use conformance::measure::{Dice, seed, soak};
use conformance::{ipam, patched};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const KILL: Act = Act::Signal(Signal::SIGKILL);
const FAIL: Act = Act::Fail(Errno::ENOMEM);

fn config(node: &Node, plugin: &str) -> Value {
    let keys = if plugin == "tap" { json!({"owner": 1, "mtu": 1400}) } else { json!({"device": "dev0"}) };
    let base = json!({"cniVersion": "1.0.0", "name": "net1", "type": plugin, "ipam": ipam(node, &["10.1.0.0/24"])});
    patched(base, keys)
}

/// A node whose `dev0` is up.
fn node() -> Node {
    let node = Node::new();
    node.ip(&["link add dev0 type veth peer name peer0", "link set dev0 up"]);
    node.expect_left("dev0");
    node.expect_left("peer0");
    node
}

/// The names and aliases of a namespace's links.
fn names(links: &Value) -> BTreeSet<String> {
    let links = links.as_array().into_iter().flatten();
    links.map(|link| format!("{} {}", link["ifname"].as_str().unwrap(), link["ifalias"])).collect()
}

fn inside(container: &Container) -> BTreeSet<String> {
    names(&container.json(&["ip", "-j", "link", "show"]))
}

fn on_host(node: &Node) -> BTreeSet<String> {
    names(&node.json(&["ip", "-j", "link", "show"]))
}

fn run(attachment: &Attachment<'_>, verb: &str, act: Act, at: u64, prev: Option<&Value>) -> Traced {
    let victim = attachment.config["type"].as_str().unwrap().to_owned();
    attachment.invocation(verb, prev).traced(&Plan { victim, at, act })
}

/// Returns the points to try: a share of the calls after the start, in a soak run all of them.
fn points(all: &[Hit]) -> Vec<u64> {
    let calls: Vec<u64> = (1..).zip(all).filter(|(_, hit)| !hit.starting).map(|(at, _)| at).collect();
    assert!(calls.len() > 40, "only {} calls", calls.len());
    let step = if soak().is_some() { 1 } else { (calls.len() / rounds(20) as usize).max(1) };
    let first = Dice::new(seed()).below(step as u64) as usize;
    calls.into_iter().skip(first).step_by(step).collect()
}

/// Applies `act` to ADD at each of its points and calls the container's DEL afterwards.
#[track_caller]
fn adding(plugin: &str, act: Act) {
    require!(trace::supported());
    let node = node();
    let begin = on_host(&node);
    let attempt = |at: u64, kept: usize| {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, config(&node, plugin));
        let empty = inside(&container);
        let traced = run(&attachment, "ADD", act, at, None);
        let story = format!("{plugin} with {act:?} at {at}, {:?}:\n{}", traced.hit, traced.outcome.report());
        if act == FAIL && traced.outcome.status != Some(0) {
            assert_eq!((inside(&container), on_host(&node)), (empty.clone(), begin.clone()), "before DEL: {story}");
            assert_eq!(node.reservations("net1"), [], "before DEL: {story}");
        }
        if plugin == "tap" && traced.outcome.status.is_none() {
            let stays = ioctls(&traced.all) >= kept;
            assert!(stays || inside(&container) == empty, "before DEL: {story}");
        }
        attachment.del().success();
        assert_eq!((inside(&container), on_host(&node)), (empty, begin.clone()), "{story}");
        assert_eq!(node.reservations("net1"), [], "{story}");
        node.ip(&["link set dev0 up"]);
        traced.all
    };
    let whole = attempt(u64::MAX, 0);
    for at in points(&whole) {
        attempt(at, ioctls(&whole));
    }
}

/// Counts the ioctl calls. The last one of tap's ADD makes the tap persistent.
fn ioctls(all: &[Hit]) -> usize {
    all.iter().filter(|hit| hit.call == "ioctl").count()
}

/// Applies `act` to DEL at each of its points and calls DEL again afterwards.
#[track_caller]
fn deleting(plugin: &str, act: Act) {
    require!(trace::supported());
    let node = node();
    let begin = on_host(&node);
    let attempt = |at: u64| {
        let container = node.container();
        let attachment = Attachment::new(&node, &container, config(&node, plugin));
        let empty = inside(&container);
        let result = attachment.add().success();
        let traced = run(&attachment, "DEL", act, at, Some(&result));
        attachment.del_with(&result).success();
        let story = format!("{plugin} with {act:?} at {at}, {:?}:\n{}", traced.hit, traced.outcome.report());
        assert_eq!((inside(&container), on_host(&node)), (empty, begin.clone()), "{story}");
        assert_eq!(node.reservations("net1"), [], "{story}");
        node.ip(&["link set dev0 up"]);
        traced.all
    };
    for at in points(&attempt(u64::MAX)) {
        attempt(at);
    }
}

#[test]
fn a_killed_add_of_tap_leaves_nothing() {
    adding("tap", KILL);
}

#[test]
fn a_failing_add_of_tap_undoes_everything() {
    adding("tap", FAIL);
}

#[test]
fn a_killed_del_of_tap_is_completed_by_the_next() {
    deleting("tap", KILL);
}

#[test]
fn after_a_killed_add_del_gives_the_device_back() {
    adding("host-device", KILL);
}

#[test]
fn a_failing_add_gives_the_device_back() {
    adding("host-device", FAIL);
}

#[test]
fn a_killed_del_of_a_device_is_completed_by_the_next() {
    deleting("host-device", KILL);
}

#[test]
fn a_failing_del_of_a_device_is_completed_by_the_next() {
    deleting("host-device", FAIL);
}
