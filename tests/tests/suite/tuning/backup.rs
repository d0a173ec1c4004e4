//! The backup file keeps the originals until DEL, whatever happens between, and DEL removes it.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use cni_testkit::{Container, Node};
use serde_json::{Value, json};

use super::{ARP_FILTER, MAC, backup_of, backups, data_dir, equip, pod, prev, state, tuned, tuning};

fn all() -> Value {
    json!({"mac": "02:00:00:00:00:aa", "mtu": 1400, "promisc": true, "allmulti": true, "txQLen": 77,
           "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}})
}

#[track_caller]
fn is_untouched(container: &Container) {
    assert_eq!(state(container), (MAC.to_owned(), 1500, false, false, 1000));
    assert_eq!(container.sysctl(ARP_FILTER), "0");
}

#[test]
fn a_backup_has_gos_keys_and_names_its_attachment() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, all());
    attachment.add_after(&prev(&container)).success();
    let path = data_dir(&node).join(format!("{}_eth0.json", container.id));
    let text = fs::read_to_string(&path).unwrap();
    let go = format!(
        "{{\n \"mac\": \"{MAC}\",\n \"promisc\": false,\n \"mtu\": 1500,\n \"allmulti\": false,\n \"txQLen\": 1000,\n"
    );
    assert!(text.starts_with(&go), "{text}");
    let backup = backup_of(&node, &container);
    let whose = &backup["attachment"];
    assert_eq!(whose["network"], "net1");
    assert_eq!((&whose["containerID"], &whose["ifname"]), (&json!(container.id), &json!("eth0")));
    let namespace = fs::metadata(container.netns()).unwrap();
    assert_eq!(whose["namespace"]["inode"], namespace.ino());
    assert_eq!(whose["namespace"]["device"], namespace.dev());
    let saved = &backup["sysctls"][0];
    assert_eq!((&saved["path"], &saved["original"]), (&json!(ARP_FILTER), &json!("0")));
    assert_eq!(saved["written"], json!(["1"]));
    attachment.del().success();
}

#[test]
fn folder_and_file_are_for_root_only() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mtu": 1400, "dataDir": node.dir().join("a/b/c")}));
    attachment.add_after(&prev(&container)).success();
    let mode = |path: &str| fs::metadata(node.dir().join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("a/b/c"), mode(&format!("a/b/c/{}_eth0.json", container.id))), (0o700, 0o600));
    assert_eq!(mode("a/b") & 0o500, 0o500);
    attachment.del().success();
}

#[test]
fn a_folder_that_exists_keeps_its_mode() {
    let node = Node::new();
    let container = pod(&node);
    fs::create_dir(data_dir(&node)).unwrap();
    fs::set_permissions(data_dir(&node), fs::Permissions::from_mode(0o600)).unwrap();
    let attachment = tuned(&node, &container, all());
    attachment.add_after(&prev(&container)).success();
    assert_eq!(fs::metadata(data_dir(&node)).unwrap().permissions().mode() & 0o777, 0o600);
    attachment.del().success();
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn the_default_folder_is_that_of_go() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mtu": 1400, "dataDir": null}));
    attachment.add_after(&prev(&container)).success();
    let files = || node.enter(|| fs::read_dir("/run/cni/tuning").unwrap().count());
    assert_eq!(files(), 1);
    attachment.del().success();
    assert_eq!(files(), 0);
    is_untouched(&container);
}

#[test]
fn a_second_add_keeps_the_original_values() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, all());
    let first = attachment.add_after(&prev(&container)).success();
    assert_eq!(attachment.add_after(&prev(&container)).success(), first);
    attachment.check(&first).success();
    // Another value, and one more key than the first time.
    let more = tuned(&node, &container, json!({"mtu": 1300, "sysctl": {"net.ipv4.conf.IFNAME.arp_announce": "2"}}));
    more.add_after(&prev(&container)).success();
    attachment.del().success();
    is_untouched(&container);
    assert_eq!(container.sysctl("net/ipv4/conf/eth0/arp_announce"), "0");
}

#[test]
fn the_second_del_succeeds_and_changes_nothing() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, all());
    let result = attachment.add_after(&prev(&container)).success();
    attachment.del_with(&result).success();
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1234"]);
    attachment.del_with(&result).success();
    assert_eq!(state(&container).1, 1234);
}

#[test]
fn del_without_an_earlier_add_succeeds() {
    let node = Node::new();
    let container = pod(&node);
    tuned(&node, &container, all()).del().success();
    assert!(!data_dir(&node).exists());
    is_untouched(&container);
}

#[test]
fn a_del_without_a_namespace_removes_the_file() {
    for path in [None, Some(""), Some("/nowhere/ns")] {
        let node = Node::new();
        let container = pod(&node);
        let attachment = tuned(&node, &container, all());
        attachment.add_after(&prev(&container)).success();
        let call = attachment.invocation("DEL", None);
        match path {
            None => call.without("CNI_NETNS").run().success(),
            Some(path) => call.netns(path).run().success(),
        };
        assert_eq!(backups(&node), Vec::<String>::new(), "{path:?}");
        assert_eq!(state(&container).1, 1400);
    }
}

#[test]
fn a_del_of_a_path_that_was_unmounted_removes_the_file() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, all());
    attachment.add_after(&prev(&container)).success();
    container.unmount();
    attachment.del().success();
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn del_without_the_interface_restores_the_sysctls() {
    let node = Node::new();
    let container = pod(&node);
    let keys =
        json!({"mtu": 1400, "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1", "net.ipv4.conf.all.arp_filter": "1"}});
    let attachment = tuned(&node, &container, keys);
    attachment.add_after(&prev(&container)).success();
    container.exec(&["ip", "link", "del", "eth0"]);
    attachment.del().success();
    assert_eq!(container.sysctl("net/ipv4/conf/all/arp_filter"), "0");
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn an_id_used_again_after_a_lost_del_gets_its_own_originals() {
    let node = Node::new();
    let lost = pod(&node);
    let first = tuned(&node, &lost, all());
    first.add_after(&prev(&lost)).success();
    // The same ID in another namespace, with other originals.
    let again = node.container();
    equip(&again);
    again.exec(&["ip", "link", "set", "eth0", "mtu", "1450"]);
    let mut second = tuned(&node, &again, json!({"mtu": 1400}));
    second.id = lost.id.clone();
    second.add_after(&prev(&again)).success();
    second.del().success();
    assert_eq!(state(&again), (MAC.to_owned(), 1450, false, false, 1000));
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn a_failed_add_into_another_namespace_leaves_the_backup() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, all());
    attachment.add_after(&prev(&container)).success();
    let before = backup_of(&node, &container);
    let other = pod(&node);
    let second = attachment.clone().netns(other.netns());
    let call = second.invocation("ADD", Some(&prev(&other)));
    assert_ne!(call.with_closed_stdout().run().status, Some(0));
    assert_eq!(backup_of(&node, &container), before);
    is_untouched(&other);
    attachment.del().success();
    is_untouched(&container);
}

#[test]
fn values_of_an_earlier_namespace_are_not_restored() {
    let node = Node::new();
    let lost = pod(&node);
    tuned(&node, &lost, all()).add_after(&prev(&lost)).success();
    let again = node.container();
    equip(&again);
    again.exec(&["ip", "link", "set", "eth0", "mtu", "1400"]);
    let mut attachment = tuned(&node, &again, all());
    attachment.id = lost.id.clone();
    attachment.del().success();
    assert_eq!(state(&again).1, 1400);
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn a_recreated_interface_gets_new_originals() {
    let node = Node::new();
    let container = pod(&node);
    let keys =
        json!({"mtu": 1400, "sysctl": {"net.ipv4.conf.all.arp_filter": "1", "net.ipv4.conf.IFNAME.arp_filter": "1"}});
    let attachment = tuned(&node, &container, keys);
    attachment.add_after(&prev(&container)).success();
    container.exec(&["ip", "link", "del", "eth0"]);
    equip(&container);
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1450"]);
    attachment.add_after(&prev(&container)).success();
    attachment.del().success();
    assert_eq!(state(&container).1, 1450);
    assert_eq!(container.sysctl("net/ipv4/conf/all/arp_filter"), "0");
    assert_eq!(container.sysctl(ARP_FILTER), "0");
}

#[test]
fn a_recreated_interface_is_not_given_the_old_originals() {
    let node = Node::new();
    let container = pod(&node);
    let attachment = tuned(&node, &container, json!({"mtu": 1400}));
    attachment.add_after(&prev(&container)).success();
    container.exec(&["ip", "link", "del", "eth0"]);
    equip(&container);
    container.exec(&["ip", "link", "set", "eth0", "mtu", "1450"]);
    let outcome = attachment.del();
    outcome.success();
    assert!(outcome.stderr.contains("the settings of eth0 are not restored: "), "{}", outcome.report());
    assert_eq!(state(&container).1, 1450);
    assert_eq!(backups(&node), Vec::<String>::new());
}

#[test]
fn a_damaged_backup_stops_neither_add_nor_del() {
    for garbage in ["", "{", "[]", "{\"mtu\":\"many\"}"] {
        let node = Node::new();
        let container = pod(&node);
        let attachment = tuned(&node, &container, all());
        node.file(&format!("tuning/{}_eth0.json", container.id), garbage);
        attachment.add_after(&prev(&container)).success();
        attachment.del().success();
        is_untouched(&container);
        node.file(&format!("tuning/{}_eth0.json", container.id), garbage);
        attachment.del().success();
        assert_eq!(backups(&node), Vec::<String>::new());
    }
}

#[test]
fn no_name_and_no_link_leads_out_of_the_folder() {
    let node = Node::new();
    let container = pod(&node);
    let victim = node.file("victim.json", "{\"mtu\": 1234}");
    let attachment = tuned(&node, &container, json!({"mtu": 1400}));
    for id in ["../victim", "..", "a/../../victim", "/victim"] {
        let outcome = attachment.invocation("ADD", Some(&prev(&container))).id(id).run();
        outcome.fails_with(4, "invalid characters in containerID");
        attachment.invocation("DEL", None).id(id).run().failure();
    }
    attachment.invocation("ADD", Some(&prev(&container))).ifname("../../x").run().failure();
    fs::create_dir_all(data_dir(&node)).unwrap();
    symlink(&victim, data_dir(&node).join(format!("{}_eth0.json", container.id))).unwrap();
    attachment.add_after(&prev(&container)).success();
    attachment.del().success();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "{\"mtu\": 1234}");
    assert_eq!(state(&container).1, 1500);
    symlink(&victim, data_dir(&node).join(format!("{}_eth0.json", container.id))).unwrap();
    attachment.del().success();
    assert_eq!((victim.exists(), state(&container).1), (true, 1500));
}

#[test]
fn attachments_with_ambiguous_file_names_are_kept_apart() {
    let node = Node::new();
    let container = pod(&node);
    container.exec(&["ip", "link", "set", "eth0", "name", "b_c"]);
    let one = |id: &str, container: &Container, ifname: &str| {
        let mut attachment = tuned(&node, container, json!({"mtu": 1400})).ifname(ifname);
        attachment.id = id.to_owned();
        attachment
    };
    let first = one("a", &container, "b_c");
    first.add_after(&prev(&container)).success();
    let other = pod(&node);
    other.exec(&["ip", "link", "set", "eth0", "name", "c"]);
    let second = one("a_b", &other, "c");
    second.add_after(&prev(&other)).fails_naming(102, &["container a,", "b_c"]);
    second.del().success();
    first.del().success();
    assert_eq!(container.link("b_c").unwrap()["mtu"], 1500);
}

#[test]
fn an_id_too_long_for_a_file_fails_before_any_change() {
    let node = Node::new();
    let container = pod(&node);
    let mut attachment = tuned(&node, &container, all());
    attachment.id = "c".repeat(300);
    attachment.add_after(&prev(&container)).failure();
    is_untouched(&container);
    attachment.del().success();
}

#[test]
fn a_folder_that_cannot_be_made_fails_before_any_change() {
    let node = Node::new();
    let container = pod(&node);
    let file = node.file("file", "");
    let attachment =
        tuned(&node, &container, all()).config(tuning(&node, json!({"mtu": 1400, "dataDir": file.join("x")})));
    attachment.add_after(&prev(&container)).fails_naming(5, &["file/x"]);
    is_untouched(&container);
    attachment.del().success();
}

#[test]
fn without_a_backup_del_accepts_a_read_only_folder() {
    let node = Node::new();
    let container = pod(&node);
    let folder = data_dir(&node);
    fs::create_dir_all(&folder).unwrap();
    let path = folder.to_str().unwrap();
    node.exec(&["mount", "--bind", path, path]);
    node.exec(&["mount", "-o", "remount,bind,ro", path]);
    let attachment = tuned(&node, &container, json!({"mtu": 1400}));
    attachment.add_after(&prev(&container)).fails_naming(5, &[path]);
    attachment.del().success();
    node.exec(&["umount", path]);
}
