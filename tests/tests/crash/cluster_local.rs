//! cluster-local is killed, or fails, at each call of an ADD that claims a block and of a DEL that
//! gives one back.
//!
//! A failed ADD leaves no reservation. Whatever happened, the next ADD and DEL succeed, and no
//! address of another node is allocated. Then the node has no claim left.

use cni_testkit::trace::{self, Act, Plan, Traced};
use cni_testkit::{Attachment, probe, require, rounds};
use conformance::cluster::Cluster;
use conformance::measure::{Dice, figure, seed, soak};
use conformance::{address, patched};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// The points that an ordinary run tries for each verb and act, on a machine that is not slow.
const SHARE: u64 = 8;

/// The plugin makes at least so many calls in each verb.
const FLOOR: usize = 80;

/// A network whose blocks have one address, so that each ADD claims and each DEL gives back. There
/// are three addresses: a lost block would soon be missed.
fn network(cluster: &Cluster, node: usize) -> Value {
    let set = json!([[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.2", "rangeEnd": "10.1.0.4"}]]);
    patched(cluster.network(node, &set), json!({"cniVersion": "1.1.0", "ipam": {"blockSize": 1}}))
}

/// Runs one trial on the first node, and checks that the node recovers. `other` is an address that
/// the second node uses.
fn attempt(cluster: &Cluster, verb: &str, plan: &Plan, other: &str) -> Traced {
    let node = &cluster.nodes[0];
    let container = node.container();
    let attachment = Attachment::new(node, &container, network(cluster, 0));
    if verb == "DEL" {
        attachment.add().success();
    }
    let traced = attachment.invocation(verb, None).traced(plan);
    let story = || format!("{:?} at {} of {verb}, {:?}\n{}", plan.act, plan.at, traced.hit, traced.outcome.report());
    if verb == "ADD" && traced.outcome.status.is_some_and(|status| status != 0) {
        assert_eq!(node.reservations("net1"), [], "a failed ADD: {}", story());
    }
    attachment.del().success();
    assert_eq!(node.reservations("net1"), [], "{}", story());
    let outcome = attachment.add();
    assert_eq!(outcome.status, Some(0), "the next ADD: {}{}", outcome.report(), story());
    assert_ne!(address(&outcome.success()), other, "{}", story());
    attachment.del().success();
    attachment.gc(&[]).success();
    let left: Vec<(String, String)> = cluster.claims().into_iter().filter(|(_, node)| node == "node0").collect();
    assert_eq!(left, [], "{}", story());
    traced
}

fn sweep(acts: &[Act]) {
    require!(trace::supported());
    require!(probe::tool("openssl"));
    let cluster = Cluster::new(2);
    let running = cluster.nodes[1].container();
    let running = Attachment::new(&cluster.nodes[1], &running, network(&cluster, 1));
    let other = address(&running.add().success());
    let (mut dice, mut tried, mut all_points) = (Dice::new(seed()), 0, 0);
    for verb in ["ADD", "DEL"] {
        for act in acts {
            let plan = |at| Plan { victim: "cluster-local".to_owned(), at, act: *act };
            let points = attempt(&cluster, verb, &plan(u64::MAX), &other).all.len();
            assert!(points >= FLOOR, "only {points} calls in {verb}");
            all_points += points;
            let step = if soak().is_some() { 1 } else { (points as u64 / rounds(SHARE)).max(1) };
            for at in (1 + dice.below(step)..=points as u64).step_by(step as usize) {
                tried += u64::from(attempt(&cluster, verb, &plan(at), &other).hit.is_some());
            }
        }
    }
    running.del().success();
    figure(&format!("{acts:?} of cluster-local: tried {tried} points of {all_points}, seed {}", seed()));
    assert!(tried >= acts.len() as u64, "only {tried} points were tried");
}

#[test]
fn is_killed() {
    sweep(&[Act::Signal(Signal::SIGKILL)]);
}

#[test]
fn meets_an_error() {
    sweep(&[Act::Fail(Errno::EPERM), Act::Fail(Errno::ENOSPC), Act::Signal(Signal::SIGTERM)]);
}
