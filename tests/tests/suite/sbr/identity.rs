//! DEL changes only what belongs to its attachment, whatever CNI_NETNS leads to: the PID in a path
//! like `/proc/PID/ns/net` may be that of another container's process.

use std::fs::File;

use cni_testkit::{Attachment, Node, bin_dir, probe, require};
use conformance::bridge;
use serde_json::json;

use super::{V4, V6, pod, prev, routed, rules, sbr};

#[test]
fn del_that_leads_to_another_container_leaves_its_rules() {
    for keys in [json!({}), json!({"table": 5000})] {
        let node = Node::new();
        let (other, _networks) = pod(&node);
        let theirs = routed(&node, &other, keys.clone());
        let result = theirs.add_after(&prev(&other, &[V4, V6])).success();
        let before = rules(&other);
        assert_eq!(before.len(), 2);
        let mut dead = routed(&node, &other, keys);
        dead.id = "dead".to_owned();
        let mut dead_prev = prev(&other, &[("10.2.0.77/24", "10.2.0.1"), ("fd02::77/64", "fd02::1")]);
        dead.del_with(&dead_prev).success();
        assert_eq!(rules(&other), before);
        dead_prev["interfaces"][1]["mac"] = "02:00:00:00:00:77".into();
        dead.del_with(&dead_prev).success();
        assert_eq!(rules(&other), before);
        // No address of the attachment: nothing is removed.
        dead.del_with(&prev(&other, &[])).success();
        assert_eq!(rules(&other), before);
        theirs.del_with(&result).success();
        assert_eq!(rules(&other), [""; 0]);
    }
}

#[test]
fn del_leaves_an_interface_marked_for_another_attachment() {
    require!(probe::plugin("bridge"));
    let node = Node::new();
    node.expect_left("br0");
    let other = node.container();
    let interface = Attachment::new(&node, &other, bridge(&node, &["10.1.0.0/24"]));
    let result = interface.add().success();
    let theirs = Attachment::new(&node, &other, sbr(json!({})));
    theirs.add_after(&result).success();
    let before = rules(&other);
    assert_eq!(before.len(), 1);
    // The address was released to the other container after an earlier DEL of this attachment.
    let mut dead = theirs.clone();
    dead.id = "dead".to_owned();
    let mut dead_prev = result.clone();
    dead_prev["interfaces"][2]["mac"] = "02:00:00:00:00:77".into();
    for prev in [Some(&dead_prev), None] {
        let deleted = dead.invocation("DEL", prev).run();
        deleted.success();
        assert!(deleted.stderr.contains("belongs to another attachment"), "{}", deleted.report());
        assert_eq!(rules(&other), before);
    }
    theirs.del_with(&result).success();
    assert_eq!(rules(&other), [""; 0]);
    interface.del_with(&result).success();
}

#[test]
fn del_does_not_wait_for_a_process_that_holds_the_lock() {
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let attachment = routed(&node, &pod, json!({})).by(bin_dir());
    let result = attachment.add_after(&prev(&pod, &[V4, V6])).success();
    // Any process of the pod can open this file.
    let held = File::open(pod.netns()).unwrap();
    held.lock().unwrap();
    attachment.del_with(&result).success();
    held.unlock().unwrap();
    assert_eq!(rules(&pod), [""; 0]);
}
