//! A node is switched between this plugin and Go's with pods running.

use cni_testkit::locks::wait_until_waiting;
use cni_testkit::{Attachment, Node, bin_dir, go_bin_dir, probe, require};
use conformance::{bridge, patched};
use serde_json::json;

use super::{V4, V6, pod, prev, routed, rules, sbr};

/// The Go plugin, of any release.
fn go_sbr() -> probe::Probed {
    let path = go_bin_dir().join("sbr");
    if path.is_file() { Ok(()) } else { Err(format!("no Go plugin at {}; set CNI_GO_BIN_DIR", path.display())) }
}

#[test]
fn what_one_has_added_the_other_checks_and_deletes() {
    require!(go_sbr());
    for go_first in [true, false] {
        let node = Node::new();
        let (pod, _networks) = pod(&node);
        for keys in [json!({}), json!({"table": 5000})] {
            let attachment = routed(&node, &pod, keys);
            let (ours, go) = (attachment.clone().by(bin_dir()), attachment.by(go_bin_dir()));
            let (first, second) = if go_first { (&go, &ours) } else { (&ours, &go) };
            let result = first.add_after(&prev(&pod, &[V4, V6])).success();
            assert_eq!(rules(&pod).len(), 2);
            second.check(&result).success();
            second.del_with(&result).success();
            assert_eq!(rules(&pod), [""; 0], "Go first: {go_first}");
        }
    }
}

#[test]
fn bridge_finds_its_routes_in_the_tables() {
    let node = Node::new();
    node.expect_left("br0");
    let container = node.container();
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "10.9.0.0/16", "gw": "10.1.0.9"}]);
    let config = patched(bridge(&node, &["10.1.0.0/24"]), json!({"ipam": {"routes": routes}}));
    let attachment = Attachment::new(&node, &container, config);
    let result = attachment.add().success();
    let chained = Attachment::new(&node, &container, sbr(json!({})));
    chained.add_after(&result).success();
    attachment.check(&result).success();
    container.ip(&["route del 10.9.0.0/16 table 100"]);
    attachment.check(&result).fails_with(101, "Expected Route 10.9.0.0/16 via 10.1.0.9 not found in routing table");
    chained.del_with(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn the_lock_excludes_go_s_plugin() {
    require!(go_sbr());
    let node = Node::new();
    let (pod, _networks) = pod(&node);
    let held = std::fs::File::open(pod.netns()).unwrap();
    held.lock().unwrap();
    let mut deleting = routed(&node, &pod, json!({})).by(go_bin_dir()).invocation("DEL", None).start();
    deleting.release();
    wait_until_waiting(deleting.pid());
    held.unlock().unwrap();
    deleting.finish().success();
}
