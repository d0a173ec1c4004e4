//! A node is switched between this plugin and Go's with pods running: each restores what the other
//! has saved.

use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, probe, require};
use serde_json::{Value, json};

use super::{ARP_FILTER, MAC, backups, pod, prev, state, tuned};

/// The Go plugin, of any release.
fn go_tuning() -> probe::Probed {
    let path = go_bin_dir().join("tuning");
    if path.is_file() { Ok(()) } else { Err(format!("no Go plugin at {}; set CNI_GO_BIN_DIR", path.display())) }
}

/// Settings that Debian's release supports too.
fn link_keys() -> Value {
    json!({"mac": "02:00:00:00:00:aa", "mtu": 1400, "promisc": true, "allmulti": true})
}

#[track_caller]
fn both_ways(then: impl Fn(&Node, &Container, &Attachment<'_>, &Attachment<'_>, bool)) {
    for go_first in [true, false] {
        let node = Node::new();
        let container = pod(&node);
        let attachment = tuned(&node, &container, link_keys());
        let (ours, go) = (attachment.clone().by(bin_dir()), attachment.by(go_bin_dir()));
        let (first, second) = if go_first { (&go, &ours) } else { (&ours, &go) };
        then(&node, &container, first, second, go_first);
        assert_eq!(state(&container), (MAC.to_owned(), 1500, false, false, 1000), "Go first: {go_first}");
        assert_eq!(backups(&node), Vec::<String>::new(), "Go first: {go_first}");
    }
}

#[test]
fn what_one_has_saved_the_other_checks_and_restores() {
    require!(go_tuning());
    both_ways(|_, container, first, second, _| {
        let result = first.add_after(&prev(container)).success();
        assert_eq!(state(container), ("02:00:00:00:00:aa".to_owned(), 1400, true, true, 1000));
        second.check(&result).success();
        second.del_with(&result).success();
    });
}

#[test]
fn repeated_adds_of_both_implementations() {
    require!(go_tuning());
    both_ways(|_, container, first, second, go_first| {
        first.add_after(&prev(container)).success();
        if !go_first {
            // Go's second ADD overwrites the originals, so the test does not call it.
            second.del().success();
            return;
        }
        second.add_after(&prev(container)).success();
        second.add_after(&prev(container)).success();
        second.del().success();
    });
}

#[test]
fn go_removes_a_backup_that_has_sysctls_only() {
    require!(go_tuning());
    let node = Node::new();
    let container = pod(&node);
    let ours = tuned(&node, &container, json!({"sysctl": {"net.ipv4.conf.eth0.arp_filter": "1"}})).by(bin_dir());
    let result = ours.add_after(&prev(&container)).success();
    assert_eq!(backups(&node).len(), 1);
    let go = ours.clone().by(go_bin_dir());
    go.check(&result).success();
    go.del_with(&result).success();
    assert_eq!(backups(&node), Vec::<String>::new());
    // Go never restores sysctls.
    assert_eq!(container.sysctl(ARP_FILTER), "1");
    ours.del_with(&result).success();
}

#[test]
fn del_leaves_go_s_sysctls_as_go_does() {
    require!(go_tuning());
    let node = Node::new();
    let container = pod(&node);
    let ours =
        tuned(&node, &container, json!({"mtu": 1400, "sysctl": {"net.ipv4.conf.eth0.arp_filter": "1"}})).by(bin_dir());
    let result = ours.clone().by(go_bin_dir()).add_after(&prev(&container)).success();
    ours.check(&result).success();
    ours.del_with(&result).success();
    assert_eq!((container.sysctl(ARP_FILTER).as_str(), state(&container).1), ("1", 1500));
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn a_go_backup_goes_with_its_namespace() {
    require!(go_tuning());
    let node = Node::new();
    let container = pod(&node);
    let ours = tuned(&node, &container, link_keys()).by(bin_dir());
    ours.clone().by(go_bin_dir()).add_after(&prev(&container)).success();
    container.unlink();
    ours.del().success();
    assert_eq!(backups(&node), Vec::<String>::new());
}
