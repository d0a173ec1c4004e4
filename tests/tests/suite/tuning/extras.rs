//! `ethtool` and `staticNeighbors`: features and permanent neighbours of the interface.

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{probe, require};
use nix::errno::Errno;
use nix::sys::signal::Signal;

use super::*;

/// The feature that the tests turn off. A veth has it on.
const CHECKSUM: &str = "tx-checksum-ip-generic";
/// An entry that the tests add to the neighbours, as the kernel lists it.
const ENTRIES: [&str; 2] =
    ["10.1.0.9 dev eth0 lladdr 02:00:00:00:00:09 PERMANENT", "fd00::9 dev eth0 lladdr 02:00:00:00:00:19 PERMANENT"];

/// The other feature of a veth that [`ASK`] asks for.
const SCTP_CHECKSUM: &str = "tx-checksum-sctp";

/// Asks the kernel, by the older command ETHTOOL_GTXCSUM, whether eth0 computes any checksums.
const ASK: &str = "
import array, fcntl, socket, struct
value = array.array('I', [0x16, 0])
fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8946, struct.pack('16sP', b'eth0', value.buffer_info()[0]))
print(value[1])
";

fn computes_checksums(container: &Container) -> bool {
    container.exec(&["python3", "-c", ASK]).trim() == "1"
}

fn neighbours(container: &Container) -> Vec<String> {
    let text = container.exec(&["ip", "neigh", "show", "dev", "eth0", "nud", "permanent"]);
    let mut all: Vec<String> =
        text.lines().map(|line| line.trim().replacen(" lladdr", " dev eth0 lladdr", 1)).collect();
    all.sort();
    all
}

/// A container whose eth0 is up: a neighbour needs that.
fn pod_up(node: &Node) -> Container {
    let container = pod(node);
    container.ip(&["link set peer0 up", "link set eth0 up"]);
    container
}

fn keys() -> Value {
    json!({
        "ethtool": {CHECKSUM: false, SCTP_CHECKSUM: false, "vlan-challenged": false, "tx-gre-segmentation": null},
        "staticNeighbors": [
            {"ip": "10.1.0.9", "mac": "02:00:00:00:00:09"}, {"ip": "fd00::9", "mac": "02:00:00:00:00:19"},
        ],
    })
}

#[track_caller]
fn assert_tuned(container: &Container) {
    assert!(!computes_checksums(container));
    assert_eq!(neighbours(container), ENTRIES);
}

#[track_caller]
fn assert_original(container: &Container, what: &str) {
    assert!(computes_checksums(container), "{what}");
    assert_eq!(neighbours(container), Vec::<String>::new(), "{what}");
}

#[test]
fn features_and_neighbours_are_set_and_put_back() {
    require!(probe::tool("python3"));
    let node = Node::new();
    let container = pod_up(&node);
    assert_original(&container, "before");
    let attachment = tuned(&node, &container, keys());
    for _ in 0..2 {
        let result = attachment.add_after(&prev(&container)).success();
        assert_tuned(&container);
        attachment.check(&result).success();
    }
    attachment.del_with(&prev(&container)).success();
    assert_original(&container, "after DEL");
    assert!(fs::read_dir(data_dir(&node)).unwrap().next().is_none(), "the backup");
    attachment.del_with(&prev(&container)).success();
}

#[test]
fn a_list_with_two_entries_puts_the_first_values_back() {
    require!(probe::tool("python3"));
    let node = Node::new();
    let container = pod_up(&node);
    let first = tuned(&node, &container, keys());
    let second = tuned(&node, &container, json!({"ethtool": {CHECKSUM: true}}));
    let result = first.add_after(&prev(&container)).success();
    second.add_after(&result).success();
    assert!(computes_checksums(&container));
    first.check(&result).success();
    second.check(&result).success();
    container.exec(&["ip", "neigh", "del", "10.1.0.9", "dev", "eth0"]);
    second.del_with(&result).success();
    assert_original(&container, "after the first DEL");
    first.del_with(&result).success();
}

#[test]
fn check_names_the_feature_and_the_neighbour_that_differ() {
    require!(probe::tool("python3"));
    let node = Node::new();
    let container = pod_up(&node);
    let attachment = tuned(&node, &container, keys());
    let result = attachment.add_after(&prev(&container)).success();
    container.exec(&["ip", "neigh", "replace", "10.1.0.9", "dev", "eth0", "lladdr", "02:00:00:00:00:0a"]);
    let words = ["neighbour 10.1.0.9 of eth0 is 02:00:00:00:00:09", "02:00:00:00:00:0a"];
    attachment.check(&result).fails_naming(101, &words);
    let other = tuned(&node, &container, json!({"ethtool": {CHECKSUM: true}}));
    let words = ["feature tx-checksum-ip-generic of eth0 is on, current value is off"];
    other.check(&result).fails_naming(101, &words);
    attachment.del_with(&result).success();
    let text = container.exec(&["ip", "neigh", "show", "dev", "eth0"]);
    assert!(text.contains("02:00:00:00:00:0a") && !text.contains("fd00::9"), "another program's stays: {text}");
}

#[test]
fn unknown_and_fixed_features_and_bad_neighbours_are_refused() {
    require!(probe::tool("python3"));
    let node = Node::new();
    let container = pod_up(&node);
    let neighbour = |ip: &str, mac: &str| json!({"staticNeighbors": [{"ip": ip, "mac": mac}]});
    let twice = json!({"ip": "10.1.0.9", "mac": "02:00:00:00:00:09"});
    for (keys, code, words) in [
        (json!({"ethtool": {"tx-checksum-nothing": true}}), 7, "tx-checksum-nothing"),
        (json!({"ethtool": {CHECKSUM: false, "vlan-challenged": true}}), 7, "vlan-challenged"),
        (json!({"ethtool": {CHECKSUM: "off"}}), 6, CHECKSUM),
        (neighbour("10.1.0.9/24", "02:00:00:00:00:09"), 7, "10.1.0.9/24"),
        (neighbour("224.0.0.1", "02:00:00:00:00:09"), 7, "224.0.0.1"),
        (neighbour("10.1.0.9", "ff:ff:ff:ff:ff:ff"), 7, "ff:ff:ff:ff:ff:ff"),
        (json!({"staticNeighbors": [{"ip": "10.1.0.9"}]}), 7, "unicast MAC"),
        (json!({"staticNeighbors": [twice, twice]}), 7, "10.1.0.9 occurs twice"),
    ] {
        tuned(&node, &container, keys).add_after(&prev(&container)).fails_naming(code, &[words]);
        assert_original(&container, words);
    }
    container.exec(&[
        "ip",
        "neigh",
        "add",
        "10.1.0.9",
        "dev",
        "eth0",
        "lladdr",
        "02:00:00:00:00:0a",
        "nud",
        "permanent",
    ]);
    tuned(&node, &container, keys()).add_after(&prev(&container)).fails_naming(102, &["02:00:00:00:00:0a"]);
    assert!(computes_checksums(&container));
}

/// An entry that existed before ADD is not this attachment's.
#[test]
fn an_existing_neighbour_with_the_same_mac_stays() {
    require!(probe::tool("python3"));
    let node = Node::new();
    let container = pod_up(&node);
    container.exec(&[
        "ip",
        "neigh",
        "add",
        "10.1.0.9",
        "dev",
        "eth0",
        "lladdr",
        "02:00:00:00:00:09",
        "nud",
        "permanent",
    ]);
    let attachment = tuned(&node, &container, keys());
    attachment.add_after(&prev(&container)).success();
    assert_tuned(&container);
    attachment.del_with(&prev(&container)).success();
    assert_eq!(neighbours(&container), ENTRIES[..1]);
}

/// Interrupts a verb at every third system call. After a failed ADD nothing is left, and after a
/// DEL that follows a killed verb neither.
fn interrupted(verb: &str, act: Act) -> usize {
    let node = Node::new();
    let container = pod_up(&node);
    let attachment = tuned(&node, &container, keys());
    let (mut at, mut half_done) = (1, 0);
    loop {
        if verb == "DEL" {
            attachment.add_after(&prev(&container)).success();
        }
        let plan = Plan { victim: "tuning".into(), at, act };
        let traced = attachment.invocation(verb, Some(&prev(&container))).traced(&plan);
        if traced.hit.is_none() {
            attachment.del_with(&prev(&container)).success();
            return half_done;
        }
        let state = (computes_checksums(&container), neighbours(&container).len());
        half_done += usize::from(!matches!(state, (true, 0) | (false, 2)));
        if verb == "ADD" && act != Act::Signal(Signal::SIGKILL) && traced.outcome.status != Some(0) {
            assert_original(&container, &format!("call {at}\n{}", traced.outcome.report()));
        }
        attachment.del_with(&prev(&container)).success();
        assert_original(&container, &format!("call {at}\n{}", traced.outcome.report()));
        at += 3;
    }
}

#[test]
fn after_a_killed_add_del_puts_features_and_neighbours_back() {
    require!(probe::tool("python3"));
    require!(trace::supported());
    assert!(interrupted("ADD", Act::Signal(Signal::SIGKILL)) > 0, "no kill left a part of the changes");
}

#[test]
fn after_a_killed_del_another_puts_features_and_neighbours_back() {
    require!(probe::tool("python3"));
    require!(trace::supported());
    assert!(interrupted("DEL", Act::Signal(Signal::SIGKILL)) > 0, "no kill left a part of the changes");
}

#[test]
fn a_failed_add_leaves_no_feature_and_no_neighbour() {
    require!(probe::tool("python3"));
    require!(trace::supported());
    interrupted("ADD", Act::Fail(Errno::EIO));
}

/// A value that cannot be restored does not make DEL fail, but DEL names it.
#[test]
fn a_del_with_failing_calls_restores_or_prints_what_stays() {
    require!(probe::tool("python3"));
    require!(trace::supported());
    let node = Node::new();
    let (mut at, mut kept) = (1, 0);
    loop {
        let container = pod_up(&node);
        let attachment = tuned(&node, &container, keys());
        attachment.add_after(&prev(&container)).success();
        let plan = Plan { victim: "tuning".into(), at, act: Act::Fail(Errno::EIO) };
        let traced = attachment.invocation("DEL", Some(&prev(&container))).traced(&plan);
        let (outcome, is_original) =
            (traced.outcome, computes_checksums(&container) && neighbours(&container).is_empty());
        let has_failed = outcome.status != Some(0);
        assert!(is_original || has_failed || !outcome.stderr.is_empty(), "call {at}\n{}", outcome.report());
        kept += usize::from(!is_original);
        attachment.del_with(&prev(&container)).success();
        if has_failed {
            assert_original(&container, &format!("call {at}\n{}", outcome.report()));
        }
        if traced.hit.is_none() {
            break;
        }
        at += 3;
    }
    assert!(kept > 0, "no failing call kept a value");
}
