//! A node is switched between this plugin and Go's with pods running.

use cni_testkit::locks::wait_until_waiting;
use cni_testkit::{Node, bin_dir, go_bin_dir, probe, require};
use serde_json::json;

use super::{V4, V6, pod, prev, routed, rules};

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
fn go_s_lock_and_ours_are_the_same() {
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
