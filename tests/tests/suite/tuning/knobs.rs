//! Every setting of the interface, from every source, and the order of sources.

use cni_testkit::Node;
use serde_json::{Value, json};

use super::{MAC, backups, pod, prev, state, tuned};

const A: &str = "02:00:00:00:00:aa";
const B: &str = "02:00:00:00:00:bb";
const C: &str = "02:00:00:00:00:cc";
const D: &str = "02:00:00:00:00:dd";

/// Runs ADD, compares the state, runs CHECK and DEL, and asserts that the state is restored.
#[track_caller]
fn sets(keys: Value, args: Option<&str>, expected: (&str, u64, bool, bool, u64)) {
    let node = Node::new();
    let container = pod(&node);
    let before = state(&container);
    let mut attachment = tuned(&node, &container, keys);
    attachment.args = args.map(str::to_owned);
    let result = attachment.add_after(&prev(&container)).success();
    let (mac, mtu, promisc, allmulti, txqlen) = expected;
    assert_eq!(state(&container), (mac.to_owned(), mtu, promisc, allmulti, txqlen));
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    assert_eq!(state(&container), before);
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn the_mac_is_set() {
    sets(json!({"mac": A}), None, (A, 1500, false, false, 1000));
}

#[test]
fn the_mac_is_set_in_any_spelling() {
    for mac in ["02:00:00:00:00:AA", "02-00-00-00-00-aa", "0200.0000.00aa"] {
        sets(json!({"mac": mac}), None, (A, 1500, false, false, 1000));
    }
}

#[test]
fn the_mtu_is_set() {
    sets(json!({"mtu": 1400}), None, (MAC, 1400, false, false, 1000));
}

#[test]
fn promiscuous_mode_is_turned_on() {
    sets(json!({"promisc": true}), None, (MAC, 1500, true, false, 1000));
}

#[test]
fn all_multicast_mode_is_turned_on() {
    sets(json!({"allmulti": true}), None, (MAC, 1500, false, true, 1000));
}

#[test]
fn the_length_of_the_transmit_queue_is_set() {
    sets(json!({"txQLen": 77}), None, (MAC, 1500, false, false, 77));
}

#[test]
fn all_settings_are_changed_at_once() {
    let all = json!({"mac": A, "mtu": 1400, "promisc": true, "allmulti": true, "txQLen": 0});
    sets(all, None, (A, 1400, true, true, 0));
}

#[test]
fn all_settings_can_come_from_args() {
    let all = json!({"args": {"cni": {"mac": A, "mtu": 1400, "promisc": true, "allmulti": true, "txQLen": 77}}});
    sets(all, None, (A, 1400, true, true, 77));
}

#[test]
fn the_mac_is_taken_from_args_runtime_variable_configuration() {
    let runtime = json!({"mac": A, "runtimeConfig": {"mac": B}});
    let args = json!({"mac": A, "runtimeConfig": {"mac": B}, "args": {"cni": {"mac": C}}});
    let variable = Some("IgnoreUnknown=1;MAC=02:00:00:00:00:dd");
    sets(json!({"mac": A}), variable, (D, 1500, false, false, 1000));
    sets(runtime, variable, (B, 1500, false, false, 1000));
    sets(args, variable, (C, 1500, false, false, 1000));
}

#[test]
fn an_invalid_mac_is_reported_before_an_invalid_mtu() {
    let node = Node::new();
    let container = pod(&node);
    tuned(&node, &container, json!({"mac": "zz", "mtu": -5}))
        .add_after(&prev(&container))
        .fails_naming(7, &["zz", "MAC"]);
}

#[test]
fn args_override_the_configuration() {
    let keys = json!({"mtu": 1300, "args": {"cni": {"mtu": 1400}}});
    sets(keys, None, (MAC, 1400, false, false, 1000));
}

#[test]
fn false_in_args_overrides_true() {
    let no = json!({"mac": A, "mtu": 1300, "promisc": true,
                    "args": {"cni": {"mac": "", "mtu": 0, "promisc": false}}});
    sets(no, None, (MAC, 1500, false, false, 1000));
}

#[test]
fn promiscuous_mode_is_never_turned_off() {
    let node = Node::new();
    let container = pod(&node);
    container.exec(&["ip", "link", "set", "eth0", "promisc", "on"]);
    let attachment = tuned(&node, &container, json!({"promisc": false, "mtu": 1400}));
    let result = attachment.add_after(&prev(&container)).success();
    assert!(state(&container).2);
    attachment.del_with(&result).success();
    assert!(state(&container).2);
}

#[test]
fn an_empty_configuration_changes_nothing() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mtu": 0, "args": {"cni": {"not": "ours"}, "other": [1]}}));
    let result = attachment.add_after(&prev(&container)).success();
    assert_eq!(result, prev(&container));
    assert!(!super::data_dir(&node).exists());
    attachment.check(&result).success();
    attachment.del_with(&result).success();
}

#[test]
fn an_invalid_mac_is_refused_before_any_change() {
    for mac in ["zz", "02:00:00:00:00", "01:00:5e:00:00:01", "00:00:00:00:00:00"] {
        let node = Node::new();
        let container = pod(&node);
        let attachment = tuned(&node, &container, json!({"mac": mac, "mtu": 1400}));
        attachment.add_after(&prev(&container)).fails_naming(7, &[mac]);
        assert_eq!(state(&container), (MAC.to_owned(), 1500, false, false, 1000));
        assert_eq!(backups(&node), Vec::<String>::new());
    }
}

#[test]
fn invalid_numbers_are_refused() {
    let node = Node::new();
    let container = pod(&node);
    for (keys, word) in [(json!({"mtu": -1}), "mtu -1"), (json!({"txQLen": -5}), "txQLen -5")] {
        tuned(&node, &container, keys).add_after(&prev(&container)).fails_naming(7, &[word]);
    }
    assert_eq!(state(&container), (MAC.to_owned(), 1500, false, false, 1000));
}

#[test]
fn an_interface_that_does_not_exist_is_named() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mtu": 1400})).ifname("net7");
    attachment.add_after(&prev(&container)).fails_with(4, "failed to get \"net7\": Link not found");
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn unknown_variables_in_cni_args_are_refused() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mtu": 1400})).args("FOO=1");
    attachment.add_after(&prev(&container)).fails_with(4, "ARGS: unknown args [\"FOO=1\"]");
}
