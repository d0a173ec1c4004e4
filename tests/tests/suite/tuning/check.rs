//! CHECK: the values that plugins of this list set are unchanged, whichever of them set a value
//! last. Other values are not checked.

use cni_testkit::Node;
use serde_json::{Value, json};

use super::{ARP_FILTER, pod, prev, state, tuned};

/// Damages the interface by `ip link set eth0 …` after ADD and asserts that CHECK reports the
/// expected and the actual value.
#[track_caller]
fn sees(keys: Value, sabotage: &[&str], words: &[&str]) {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, keys);
    let result = attachment.add_after(&prev(&container)).success();
    attachment.check(&result).success();
    container.exec(&[&["ip", "link", "set", "eth0"], sabotage].concat());
    attachment.check(&result).fails_naming(101, words);
    attachment.del_with(&result).success();
}

#[test]
fn a_changed_mac_is_reported() {
    let words = ["Error: Tuning configured Ethernet of eth0 is 02:00:00:00:00:aa, current value is 02:00:00:00:00:bb"];
    sees(json!({"mac": "02:00:00:00:00:aa"}), &["address", "02:00:00:00:00:bb"], &words);
}

#[test]
fn a_changed_mtu_is_reported() {
    let words = ["Error: Tuning configured MTU of eth0 is 1400, current value is 1300"];
    sees(json!({"mtu": 1400}), &["mtu", "1300"], &words);
}

#[test]
fn promiscuous_mode_turned_off_is_reported() {
    let words = ["Error: Tuning link eth0 configured promisc is true, current value is 0"];
    sees(json!({"promisc": true}), &["promisc", "off"], &words);
}

#[test]
fn all_multicast_mode_turned_off_is_reported() {
    let words = ["Error: Tuning configured all-multicast mode of eth0 is true, current value is false"];
    sees(json!({"allmulti": true}), &["allmulticast", "off"], &words);
}

#[test]
fn differences_that_lose_no_packet_are_only_printed() {
    for (keys, change, words) in [
        (json!({"txQLen": 77}), ["txqueuelen", "78"], "eth0 is 77, current value is 78"),
        (json!({"allmulti": false}), ["allmulticast", "on"], "eth0 is false, current value is true"),
    ] {
        let node = Node::new();
        let container = pod(&node);
        let attachment = tuned(&node, &container, keys);
        let result = attachment.add_after(&prev(&container)).success();
        container.exec(&[&["ip", "link", "set", "eth0"], &change[..]].concat());
        let outcome = attachment.check(&result);
        outcome.success();
        assert!(outcome.stderr.contains(words), "{}", outcome.report());
        attachment.del_with(&result).success();
    }
}

#[test]
fn a_changed_sysctl_is_reported_with_all_other_changes() {
    let node = Node::new();
    let container = pod(&node);
    let sysctls = json!({"net.ipv4.conf.eth0.arp_filter": "1", "net.ipv4.conf.lo.arp_filter": "1"});
    let attachment = tuned(&node, &container, json!({"mtu": 1400, "sysctl": sysctls}));
    let result = attachment.add_after(&prev(&container)).success();
    let of_lo = "Error: Tuning configured value of /proc/sys/net/ipv4/conf/lo/arp_filter is 1, current value is 0";
    container.set_sysctl(ARP_FILTER, "0");
    container.set_sysctl("net/ipv4/conf/lo/arp_filter", "0");
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1300"]);
    let words = [
        "Error: Tuning configured value of /proc/sys/net/ipv4/conf/eth0/arp_filter is 1, current value is 0",
        of_lo,
        "is 1400, current value is 1300",
    ];
    attachment.check(&result).fails_naming(101, &words);
    container.exec(&["ip", "link", "del", "eth0"]);
    let failure = attachment.check(&result).fails_with(3, "Cannot find container link eth0; ");
    assert!(failure.msg.contains(of_lo), "{}", failure.msg);
    attachment.del_with(&result).success();
}

#[test]
fn promiscuity_added_by_others_is_accepted() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mtu": 1400}));
    let result = attachment.add_after(&prev(&container)).success();
    container.exec(&["ip", "link", "set", "eth0", "promisc", "on"]);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert!(state(&container).2, "and it is left to them");
}

#[test]
fn a_missing_interface_is_named() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mtu": 1400}));
    let result = attachment.add_after(&prev(&container)).success();
    container.exec(&["ip", "link", "del", "eth0"]);
    attachment.check(&result).fails_with(3, "Cannot find container link eth0");
    attachment.del_with(&result).success();
}

#[test]
fn it_needs_the_earlier_result_as_add_does() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mtu": 1400}));
    attachment.add().fails_with(7, "Required prevResult missing");
    attachment.invocation("CHECK", None).run().fails_with(7, "Required prevResult missing");
    assert_eq!(state(&container).1, 1500);
}

#[test]
fn two_entries_pass_check_and_the_first_del_restores_all() {
    let node = Node::new();
    let container = pod(&node);
    let before = state(&container);
    let first = tuned(
        &node,
        &container,
        json!({"mac": "02:00:00:00:00:aa", "mtu": 1400, "allmulti": true, "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}}),
    );
    let second = tuned(
        &node,
        &container,
        json!({"mtu": 1300, "promisc": true, "allmulti": false,
               "sysctl": {"net/ipv4/conf/eth0/arp_filter": "0", "net.ipv4.conf.IFNAME.arp_announce": "2"}}),
    );
    let result = first.add_after(&prev(&container)).success();
    let result = second.add_after(&result).success();
    assert_eq!(state(&container), ("02:00:00:00:00:aa".to_owned(), 1300, true, false, before.4));
    first.check(&result).success();
    second.check(&result).success();
    // Only the last value that the list set is accepted like one's own.
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1200"]);
    first.check(&result).fails_naming(101, &["1400", "1200"]);
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1400"]);
    second.check(&result).fails_naming(101, &["1300", "1400"]);
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1300"]);
    second.del_with(&result).success();
    assert_eq!(state(&container), before);
    assert_eq!(container.sysctl("net/ipv4/conf/eth0/arp_announce"), "0");
    first.del_with(&result).success();
    assert_eq!(state(&container), before);
}

#[test]
fn check_refuses_a_value_that_the_list_never_set() {
    let node = Node::new();
    let container = pod(&node);
    let keys = |mtu, value| json!({"mtu": mtu, "sysctl": {"net.ipv4.conf.eth0.arp_announce": value}});
    let attachment = tuned(&node, &container, keys(1400, "1"));
    let result = attachment.add_after(&prev(&container)).success();
    let changed = tuned(&node, &container, keys(1300, "2"));
    changed.check(&result).fails_naming(101, &["is 1300, current value is 1400", "is 2, current value is 1"]);
    attachment.del_with(&result).success();
}
