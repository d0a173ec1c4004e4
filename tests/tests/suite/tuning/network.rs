//! GC and STATUS.

use cni_testkit::{Node, skip};
use serde_json::json;

use super::{backups, pod, prev, state, tuned};

#[test]
fn gc_removes_the_backups_of_invalid_attachments() {
    let node = Node::new();
    let all: Vec<_> = (0..3).map(|_| pod(&node)).collect();
    let keys = json!({"cniVersion": "1.1.0", "mtu": 1400});
    for container in &all {
        tuned(&node, container, keys.clone()).add_after(&prev(container)).success();
    }
    let attachment = tuned(&node, &all[0], keys);
    attachment.gc(&[(&all[1].id, "eth0"), (&all[2].id, "eth1")]).success();
    assert_eq!(backups(&node), [format!("{}_eth0.json", all[1].id)]);
    attachment.gc(&[]).success();
    assert_eq!(backups(&node), Vec::<String>::new());
    attachment.gc(&[]).success();
}

#[test]
fn gc_leaves_files_that_do_not_name_this_network() {
    let node = Node::new();
    let container = pod(&node);
    let other = tuned(&node, &container, json!({"cniVersion": "1.1.0", "name": "net2", "mtu": 1400}));
    other.add_after(&prev(&container)).success();
    node.file("tuning/gone_eth0.json", "{\n \"mtu\": 1500\n}");
    node.file("tuning/garbage_eth0.json", "garbage");
    node.file("tuning/notes.txt", "net1");
    let before = backups(&node);
    tuned(&node, &container, json!({"cniVersion": "1.1.0"})).gc(&[]).success();
    assert_eq!(backups(&node), before);
    other.del().success();
    assert_eq!(state(&container).1, 1500);
}

#[test]
fn gc_removes_the_temporary_file_of_a_killed_add() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"cniVersion": "1.1.0", "mtu": 1400}));
    attachment.add_after(&prev(&container)).success();
    let file = super::data_dir(&node).join(format!("{}_eth0.json", container.id));
    std::fs::copy(&file, super::data_dir(&node).join(".4711.tmp")).unwrap();
    attachment.gc(&[(&container.id, "eth0")]).success();
    assert_eq!(backups(&node), [format!("{}_eth0.json", container.id)]);
    attachment.del().success();
}

/// For file systems without O_TMPFILE. Only the second half of the temporary name shows the network
/// that the file belongs to.
#[test]
fn gc_removes_the_partial_file_of_a_killed_add() {
    let node = Node::new();
    let container = pod(&node);
    let half = "{\n \"mtu\": 15";
    node.file("tuning/.0123456789abcdef-e53f29baa031bbab.tmp", half);
    let left = [".0123456789abcdef-e53f2abaa031bd5e.tmp", "gone_eth0.tmp"];
    left.iter().for_each(|name| drop(node.file(&format!("tuning/{name}"), half)));
    tuned(&node, &container, json!({"cniVersion": "1.1.0"})).gc(&[]).success();
    assert_eq!(backups(&node), left, "what says another network, or none, stays");
}

#[test]
fn gc_without_a_list_touches_nothing() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"cniVersion": "1.1.0", "mtu": 1400}));
    attachment.add_after(&prev(&container)).success();
    let outcome = node.plugin("tuning").command("GC").config(&attachment.config).run();
    outcome.fails_naming(7, &["cni.dev/valid-attachments"]);
    assert_eq!(backups(&node).len(), 1);
    attachment.del().success();
}

#[test]
fn status_of_a_ready_node_prints_and_creates_nothing() {
    let node = Node::new();
    let container = pod(&node);
    let keys = json!({"cniVersion": "1.1.0", "mtu": 1400, "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}});
    tuned(&node, &container, keys).status().success();
    assert!(!super::data_dir(&node).exists());
}

#[test]
fn status_reports_what_would_fail_every_add() {
    let node = Node::new();
    let container = pod(&node);
    let file = node.file("file", "");
    let at = |keys| tuned(&node, &container, keys).status();
    at(json!({"cniVersion": "1.1.0", "dataDir": file})).fails_naming(50, &["file"]);
    at(json!({"cniVersion": "1.1.0", "sysctl": {"kernel.hostname": "x"}})).fails_naming(50, &["kernel.hostname"]);
    at(json!({"cniVersion": "1.1.0", "mac": "zz"})).fails_naming(50, &["zz"]);
}

#[test]
fn status_checks_the_allowlist() {
    let node = Node::new();
    if !node.run(&["mount", "-t", "tmpfs", "tmpfs", "/etc"]).ok {
        skip!("no private /etc can be mounted here");
    }
    let container = pod(&node);
    let keys = json!({"cniVersion": "1.1.0", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}});
    let attachment = tuned(&node, &container, keys);
    for (list, words) in [("arp_filter\n(", &["line 2"][..]), ("arp_notify", &["arp_filter", "not allowed"])] {
        node.enter(|| {
            std::fs::create_dir_all("/etc/cni/tuning").unwrap();
            std::fs::write("/etc/cni/tuning/allowlist.conf", list).unwrap();
        });
        attachment.status().fails_naming(50, words);
    }
}
