//! Tests STATUS. Runtimes call it every few seconds, so it must be cheap and must not wait.
//!
//! If STATUS fails, the node becomes unready and Kubernetes evicts its pods, so a shortage that
//! passes is only reported.

use std::time::Duration;

use cni_testkit::{Attachment, Invocation, Node, probe, require};
use conformance::{attach, bridge, host_local, layer2, loopback, patched};
use serde_json::{Value, json};

fn newest(config: Value) -> Value {
    patched(config, json!({"cniVersion": "1.1.0"}))
}

#[track_caller]
fn status(node: &Node, config: &Value) -> cni_testkit::Outcome {
    let plugin = config["type"].as_str().unwrap().to_owned();
    node.plugin(&plugin).command("STATUS").config(config).timeout(Duration::from_secs(10)).run()
}

#[test]
fn status_of_ready_plugins_prints_and_creates_nothing() {
    let node = Node::new();
    for config in [host_local(&node, &["10.1.0.0/24"]), bridge(&node, &["10.1.0.0/24"]), layer2(), loopback()] {
        status(&node, &newest(config)).success();
    }
    assert!(node.link("br0").is_none());
    assert!(!node.data_dir().exists());
}

/// Returns the same network with a STATUS that fails if a range is used up.
fn strict(config: &Value) -> Value {
    patched(config.clone(), json!({"ipam": {"fullIsUnavailable": true}}))
}

/// Returns what a successful STATUS writes to stderr.
#[track_caller]
fn notes(node: &Node, config: &Value) -> String {
    let outcome = status(node, config);
    outcome.success();
    outcome.stderr
}

#[test]
fn a_full_range_is_reported_and_is_code_50_if_configured() {
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/29"]));
    let all = attach(&node, &config, 5);
    let used_up = "no IP addresses available in range set: 10.1.0.1-10.1.0.6: 5 of 5 used";
    let said = notes(&node, &config);
    assert!(said.starts_with(used_up) && said.contains("fullIsUnavailable") && said.lines().count() == 1, "{said}");
    status(&node, &strict(&config)).fails_with(50, used_up);
    status(&node, &patched(config.clone(), json!({"ipam": {"fullIsUnavailable": false}}))).success();
    all[0].1.del().success();
    assert_eq!(notes(&node, &strict(&config)), "");
    assert_eq!(notes(&node, &config), "");
    for one in &all[1..] {
        one.1.del().success();
    }
}

#[test]
fn one_full_set_of_two_is_reported() {
    let node = Node::new();
    let config = newest(host_local(&node, &["fd00:1::/64", "10.1.0.0/30"]));
    let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
    assert!(notes(&node, &config).contains("10.1.0.1-10.1.0.2: 1 of 1 used"));
    status(&node, &strict(&config)).fails_with(50, "");
    attachment.del().success();
    status(&node, &strict(&config)).success();
}

/// A killed runtime leaves reservations, and CRI-O runs GC only after a STATUS that succeeds.
#[test]
fn gc_releases_the_leftovers_of_a_full_range() {
    let node = Node::new();
    let config = newest(bridge(&node, &["10.1.0.0/29"]));
    let mut all = attach(&node, &config, 5);
    let (_c, staying, kept) = all.remove(0);
    let late = node.container();
    let late = Attachment::new(&node, &late, config.clone());
    late.add().fails_with(11, "failed to allocate for range 0: no IP addresses available");
    status(&node, &config).success();
    staying.gc(&[(&staying.id, "eth0")]).success();
    assert_eq!(node.reservations("net1").len(), 1);
    let result = late.add().success();
    late.del_with(&result).success();
    staying.check(&kept).success();
    staying.del_with(&kept).success();
}

/// Empty files are left by a Go plugin that was killed between creating and writing a file, and by
/// a crash that lost the content.
#[test]
fn blank_files_are_free_addresses() {
    let node = Node::new();
    let config = strict(&newest(host_local(&node, &["10.1.0.0/29"])));
    let folder = node.data_dir().join("net1");
    std::fs::create_dir_all(&folder).unwrap();
    for host in 2..=5 {
        std::fs::write(folder.join(format!("10.1.0.{host}")), format!("c{host}\r\neth0")).unwrap();
    }
    // Without an index, and then with one that the killed plugin has made wrong.
    for blank in ["", "\0\0\0\0\r\n"] {
        let file = folder.join("10.1.0.6");
        std::fs::write(&file, blank).unwrap();
        status(&node, &config).success();
        std::fs::write(&file, "c6\r\neth0").unwrap();
        status(&node, &config).fails_with(50, "");
        std::fs::write(&file, blank).unwrap();
        let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
        status(&node, &config).fails_with(50, "");
        attachment.del().success();
        status(&node, &config).success();
    }
    for host in 2..=5 {
        std::fs::remove_file(folder.join(format!("10.1.0.{host}"))).unwrap();
    }
}

#[test]
fn without_ranges_status_succeeds() {
    let node = Node::new();
    let config = newest(patched(host_local(&node, &[]), json!({"ipam": {"ranges": null}})));
    status(&node, &config).success();
}

#[test]
fn ranges_of_the_runtime_are_not_checked() {
    let node = Node::new();
    let bare = strict(&newest(patched(host_local(&node, &[]), json!({"ipam": {"ranges": null}}))));
    let of = |subnet: &str| patched(bare.clone(), json!({"runtimeConfig": {"ipRanges": [[{"subnet": subnet}]]}}));
    let (_c, one, _) = attach(&node, &of("10.1.0.0/30"), 1).remove(0);
    assert_eq!(notes(&node, &bare), "");
    status(&node, &of("10.1.0.0/30")).fails_with(50, "no IP addresses available in range set: 10.1.0.1-10.1.0.2");
    one.config(bare.clone()).del().success();
    status(&node, &of("10.1.0.0/30")).success();
}

#[test]
fn a_full_disk_is_reported_and_is_code_50_if_configured() {
    let node = Node::new();
    let (blocks, inodes) = (node.dir().join("blocks"), node.dir().join("inodes"));
    for (folder, options) in [(&blocks, "size=64k"), (&inodes, "nr_inodes=12")] {
        std::fs::create_dir(folder).unwrap();
        node.exec(&["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder.to_str().unwrap()]);
    }
    for (folder, fill) in
        [(blocks, "head -c 200000 /dev/zero > fill"), (inodes, "for n in $(seq 20); do : > f$n; done")]
    {
        let config = newest(patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"dataDir": folder}})));
        let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
        assert_eq!(notes(&node, &config), "");
        node.run(&["sh", "-c", &format!("cd {}; {fill}", folder.display())]);
        let said = notes(&node, &config);
        assert!(said.contains("net1 cannot be written: no storage space"), "{said}");
        status(&node, &strict(&config)).fails_naming(50, &["net1", "no storage space"]);
        let late = node.container();
        let failure = Attachment::new(&node, &late, config.clone()).add().fails_with(5, "");
        assert!(failure.msg.contains("No space left"), "{failure:?}");
        attachment.del().success();
    }
}

/// tuning tests the file system by creating a file without a name.
#[test]
fn a_full_disk_does_not_fail_the_status_of_tuning() {
    let node = Node::new();
    let folder = node.dir().join("inodes");
    std::fs::create_dir(&folder).unwrap();
    node.exec(&["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", folder.to_str().unwrap()]);
    let config =
        json!({"cniVersion": "1.1.0", "name": "net1", "type": "tuning", "mtu": 1400, "dataDir": folder.join("x")});
    let said = notes(&node, &config);
    assert!(said.contains("No space left on device") && said.contains("the next ADD may fail"), "{said}");
}

#[test]
fn errors_that_only_an_operator_can_repair_are_code_50() {
    let node = Node::new();
    let wrong = [
        (json!({"lockTimeout": 0}), "ipam.lockTimeout"),
        (json!({"lockTimeout": "5"}), "ipam.lockTimeout"),
        (json!({"releaseCooldown": -1}), "ipam.releaseCooldown"),
        (json!({"reuse": "yes"}), "ipam.reuse"),
        (json!({"reclaimAfterReboot": 1}), "ipam.reclaimAfterReboot"),
        (json!({"fullIsUnavailable": "no"}), "ipam.fullIsUnavailable"),
        (json!({"routes": [{"dst": "nonsense"}]}), "nonsense"),
        (json!({"ranges": [[{"subnet": "10.1.0.7/24"}]]}), "host bits"),
        (json!({"resolvConf": "/nonexistent/resolv.conf"}), "failed to read /nonexistent/resolv.conf"),
        (json!({"resolvConf": "/"}), "failed to read /"),
    ];
    for (ipam, words) in wrong {
        for base in [host_local(&node, &["10.1.0.0/24"]), bridge(&node, &["10.1.0.0/24"])] {
            let config = newest(patched(base, json!({ "ipam": ipam })));
            status(&node, &config).fails_naming(50, &[words]);
            let container = node.container();
            let add = Attachment::new(&node, &container, config.clone()).add();
            assert_ne!(add.status, Some(0), "STATUS fails where ADD works\n{}", add.report());
        }
    }
}

#[test]
fn bridge_passes_on_the_error_of_its_ipam_plugin() {
    let node = Node::new();
    let config = newest(bridge(&node, &["10.1.0.0/30"]));
    let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
    assert!(notes(&node, &config).contains("1 of 1 used"));
    status(&node, &strict(&config)).fails_with(50, "no IP addresses available in range set: ");
    attachment.del_with(&result).success();
    assert_eq!(notes(&node, &strict(&config)), "");
}

#[test]
fn bridge_without_its_ipam_is_not_available() {
    let node = Node::new();
    let config = newest(patched(bridge(&node, &[]), json!({"ipam": {"type": "not-there"}})));
    let failure = status(&node, &config).fails_with(50, "");
    assert!(failure.msg.contains("not-there"), "{failure:?}");
}

#[test]
fn a_name_of_a_link_that_is_not_a_bridge_is_not_available() {
    let node = Node::new();
    node.exec(&["ip", "link", "add", "br0", "type", "veth", "peer", "name", "other"]);
    status(&node, &newest(layer2())).fails_with(50, "");
    node.exec(&["ip", "link", "del", "br0"]);
}

/// STATUS asks the kernel, not an existing bridge.
#[test]
fn vlans_that_the_kernel_cannot_filter_are_not_available() {
    let node = Node::new();
    let cases = [(json!({"vlan": 100}), "\"vlan\": 100"), (json!({"vlanTrunk": [{"id": 5}]}), "\"vlanTrunk\": [5]")];
    for bridge in ["missing", "there"] {
        for (keys, words) in &cases {
            let outcome = status(&node, &newest(patched(layer2(), keys.clone())));
            match probe::vlan_filtering() {
                Ok(()) => drop(outcome.success()),
                Err(_) => drop(outcome.fails_naming(50, &[words, "bridge VLAN filtering"])),
            }
        }
        let links = node.json(&["ip", "-j", "link", "show", "type", "bridge"]);
        let left = links.as_array().map_or(0, Vec::len);
        assert_eq!(left, usize::from(bridge == "there"), "STATUS makes no bridge on the host: {links}");
        if bridge == "missing" {
            node.exec(&["ip", "link", "add", "br0", "type", "bridge"]);
        }
    }
}

#[test]
fn status_does_not_wait_for_a_held_lock() {
    require!(probe::tool("flock"));
    let node = Node::new();
    let config = newest(host_local(&node, &["10.1.0.0/24"]));
    let (container, attachment, _) = attach(&node, &config, 1).remove(0);
    let lock = node.data_dir().join("net1/lock");
    let holder = Invocation::new(&node, "/usr/bin/flock").arg(&lock).arg("-c").arg("read x").start();
    cni_testkit::locks::wait_until_locked(&lock);
    let answer = std::panic::catch_unwind(|| status(&node, &config).success());
    holder.finish();
    assert!(answer.is_ok(), "see above");
    Attachment::new(&node, &container, config.clone()).del().success();
    drop(attachment);
}
