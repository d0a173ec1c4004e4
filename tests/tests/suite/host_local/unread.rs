//! A reservation that cannot be read, temporarily or permanently, hides no address and does not
//! stop a container from ending.
//!
//! The links are removed first, so that the next call has to read the whole folder, which may fail.

use std::fs;
use std::os::unix::fs::chown;

use cni_testkit::trace::{self, Act, Hit, Plan};
use cni_testkit::{Attachment, Node, Outcome, probe, require};
use conformance::attach;
use nix::errno::Errno;
use serde_json::{Value, json};

use super::bad_disks::{POWERLESS, config, run};

/// Runs a verb without links and with a failure at its `at`-th call.
fn failing(
    node: &Node,
    attachment: &Attachment<'_>,
    verb: &str,
    prev: Option<&Value>,
    at: u64,
) -> (Outcome, Option<Hit>) {
    fs::remove_dir_all(node.data_dir().join(".cni/net1/links")).unwrap();
    let plan = Plan { victim: "host-local".into(), at, act: Act::Fail(Errno::EIO) };
    let traced = attachment.invocation(verb, prev).traced(&plan);
    (traced.outcome, traced.hit)
}

#[test]
fn a_del_that_fails_to_read_reports_it_or_leaves_nothing() {
    require!(trace::supported());
    let node = Node::new();
    let (_staying, staying, _) = attach(&node, &config(&node), 1).remove(0);
    let before = node.reservations("net1");
    let mut succeeded = 0;
    for at in 1.. {
        let (_container, attachment, _) = attach(&node, &staying.config, 1).remove(0);
        let (outcome, hit) = failing(&node, &attachment, "DEL", None, at);
        if outcome.status != Some(0) {
            attachment.del().success();
        }
        assert_eq!(node.reservations("net1"), before, "{hit:?} failed at {at}: {}", outcome.report());
        if hit.is_none() {
            break;
        }
        succeeded += u32::from(outcome.status == Some(0));
    }
    assert!(succeeded > 10, "only {succeeded} failures were got over");
    staying.del().success();
}

#[test]
fn what_another_one_failed_to_read_is_found_by_del_and_by_gc() {
    require!(trace::supported());
    let node = Node::new();
    let (_staying, staying, result) = attach(&node, &config(&node), 1).remove(0);
    let before = node.reservations("net1");
    let mut at = 1;
    loop {
        let mut hit = None;
        for verb in ["DEL", "GC"] {
            let (_container, attachment, _) = attach(&node, &staying.config, 1).remove(0);
            hit = failing(&node, &staying, "CHECK", Some(&result), at).1;
            match verb {
                "DEL" => attachment.del().success(),
                _ => attachment.gc(&[(&staying.id, "eth0")]).success(),
            };
            assert_eq!(node.reservations("net1"), before, "after {verb}, {hit:?} failed at {at}");
        }
        if hit.is_none() {
            break;
        }
        at += 1;
    }
    assert!(at > 40, "only {at} calls");
    staying.del().success();
}

/// Two containers; another user owns the file of the first one's IPv4 reservation.
fn with_a_foreign_file(node: &Node) -> Vec<(cni_testkit::Container, Attachment<'_>, Value)> {
    let all = attach(node, &config(node), 2);
    chown(node.data_dir().join("net1/10.1.0.2"), Some(4321), Some(4321)).unwrap();
    all
}

fn addresses(node: &Node) -> Vec<String> {
    node.reservations("net1").into_iter().map(|(address, _)| address).collect()
}

#[test]
fn a_del_releases_what_it_can_read_and_names_the_rest() {
    require!(probe::tool("setpriv"));
    let node = Node::new();
    let all = with_a_foreign_file(&node);
    let (container, attachment, _) = &all[0];
    for _ in 0..2 {
        let outcome = run(&node, "DEL", container, &attachment.config, POWERLESS);
        outcome.fails_naming(5, &["net1/10.1.0.2", "Permission denied"]);
        assert_eq!(addresses(&node), ["10.1.0.2", "10.1.0.3", "fd00:1::3"]);
    }
    for (_, attachment, _) in &all {
        attachment.del().success();
    }
    assert_eq!(addresses(&node), [""; 0]);
}

#[test]
fn del_ignores_an_unreadable_file_and_rereads_it_later() {
    require!(probe::tool("setpriv"));
    for verb in ["DEL", "GC"] {
        let node = Node::new();
        let all = with_a_foreign_file(&node);
        fs::remove_dir_all(node.data_dir().join(".cni/net1/links")).unwrap();
        for (container, attachment, _) in all.iter().rev() {
            // The file may belong to any container. It is only logged: as an error it would fail
            // every DEL of this network.
            let outcome = run(&node, "DEL", container, &attachment.config, POWERLESS);
            outcome.success();
            assert!(outcome.stderr.contains("net1/10.1.0.2: Permission denied"), "{}", outcome.report());
        }
        assert_eq!(addresses(&node), ["10.1.0.2"]);
        let (container, attachment, _) = &all[0];
        let mut gc = attachment.config.clone();
        gc["cni.dev/valid-attachments"] = json!([]);
        run(&node, "GC", container, &gc, POWERLESS).fails_naming(5, &["net1/10.1.0.2", "Permission denied"]);
        match verb {
            "DEL" => attachment.del().success(),
            _ => attachment.gc(&[]).success(),
        };
        assert_eq!(addresses(&node), [""; 0], "after {verb}");
    }
}
