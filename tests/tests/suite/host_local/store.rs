//! The files on disk: a node may be switched between the Go plugins and these at any time, with
//! running pods.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use cni_testkit::locks::{wait_until_locked, wait_until_waiting};
use cni_testkit::{Attachment, Invocation, Node, probe, require};
use conformance::{address, addresses, attach, host_local, patched};
use serde_json::json;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_reservation_is_a_file_named_by_its_address() {
    let node = Node::new();
    let (container, attachment, _) = attach(&node, &host_local(&node, &["10.1.0.0/24", "fd00:1::/64"]), 1).remove(0);
    let content = format!("{}\r\neth0", container.id);
    assert_eq!(
        node.reservations("net1"),
        [("10.1.0.2".to_owned(), content.clone()), ("fd00:1::2".to_owned(), content)]
    );
    let folder = node.data_dir().join("net1");
    assert_eq!(mode(&folder.join("10.1.0.2")), 0o600);
    attachment.del().success();
}

#[test]
fn the_lock_and_the_last_addresses_are_where_go_looks_for_them() {
    let node = Node::new();
    let (_c, attachment, _) = attach(&node, &host_local(&node, &["10.1.0.0/24", "fd00:1::/64"]), 1).remove(0);
    let folder = node.data_dir().join("net1");
    assert_eq!(mode(&folder), 0o755);
    assert_eq!(fs::read(folder.join("lock")).unwrap(), b"");
    assert_eq!(fs::read_to_string(folder.join("last_reserved_ip.0")).unwrap(), "10.1.0.2");
    assert_eq!(fs::read_to_string(folder.join("last_reserved_ip.1")).unwrap(), "fd00:1::2");
    assert_eq!(mode(&folder.join("last_reserved_ip.0")), 0o600);
    attachment.del().success();
}

#[test]
fn nothing_else_is_in_the_folder_of_the_network() {
    let node = Node::new();
    let (_c, attachment, _) = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 1).remove(0);
    let entries = fs::read_dir(node.data_dir().join("net1")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["10.1.0.2", "last_reserved_ip.0", "lock"]);
    attachment.del().success();
}

#[test]
fn the_default_data_dir_is_where_go_s_is() {
    let node = Node::new();
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"dataDir": null}}));
    let (_c, attachment, _) = attach(&node, &config, 1).remove(0);
    node.exec(&["test", "-f", "/var/lib/cni/networks/net1/10.1.0.2"]);
    attachment.del().success();
}

#[test]
fn a_file_with_only_the_id_is_a_reservation() {
    let node = Node::new();
    let container = node.container();
    for content in [container.id.clone(), format!("{}\n", container.id), format!("  {} \r\n", container.id)] {
        node.file("networks/net1/10.1.0.2", &content);
        let config = host_local(&node, &["10.1.0.0/24"]);
        let (_c, other, result) = attach(&node, &config, 1).remove(0);
        assert_ne!(address(&result), "10.1.0.2", "it is taken by {content:?}");
        other.del().success();
        Attachment::new(&node, &container, config).del().success();
        assert_eq!(node.reservations("net1"), [], "after {content:?}");
    }
}

#[test]
fn an_id_only_reservation_is_released_after_the_exact_one() {
    let node = Node::new();
    let container = node.container();
    node.file("networks/net1/10.1.0.2", &container.id);
    node.file("networks/net1/10.1.0.3", format!("{}\r\neth0", container.id));
    let attachment = Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"]));
    attachment.del().success();
    assert_eq!(node.reservations("net1"), [("10.1.0.2".to_owned(), container.id.clone())]);
    attachment.del().success();
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn an_empty_reservation_is_free_again() {
    for content in ["", "\0\0\0\0\0\0\0\0", " \r\n"] {
        let node = Node::new();
        node.file("networks/net1/10.1.0.2", content);
        let config = host_local(&node, &["10.1.0.0/30"]);
        let (_c, attachment, result) = attach(&node, &config, 1).remove(0);
        assert_eq!(addresses(&result), ["10.1.0.2/30"], "a crash must not lose the address forever");
        attachment.del().success();
    }
}

#[test]
fn a_container_id_that_looks_like_an_address_does_no_harm() {
    let node = Node::new();
    let config = host_local(&node, &["10.1.0.0/24"]);
    let (_c, other, result) = attach(&node, &config, 1).remove(0);
    let container = node.container();
    let mut odd = Attachment::new(&node, &container, config);
    odd.id = address(&result);
    odd.del().success();
    let last = fs::read_to_string(node.data_dir().join("net1/last_reserved_ip.0")).unwrap();
    assert_eq!((last.as_str(), node.reservations("net1").len()), ("10.1.0.2", 1));
    odd.add().success();
    odd.del().success();
    other.del().success();
}

#[test]
fn foreign_files_and_folders_do_no_harm_and_stay() {
    let node = Node::new();
    let container = node.container();
    let content = format!("{}\r\neth0", container.id);
    for name in ["notes.txt", "10.1.0.2.bak", "folder/10.1.0.9"] {
        node.file(&format!("networks/net1/{name}"), &content);
    }
    let config = host_local(&node, &["10.1.0.0/24"]);
    let attachment = Attachment::new(&node, &container, config);
    let result = attachment.add().success();
    assert_eq!(addresses(&result), ["10.1.0.2/24"]);
    attachment.check(&result).success();
    attachment.del().success();
    for name in ["notes.txt", "10.1.0.2.bak", "folder/10.1.0.9"] {
        let path = node.data_dir().join("net1").join(name);
        assert_eq!(fs::read_to_string(&path).ok().as_deref(), Some(content.as_str()), "{name}");
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn networks_do_not_see_each_other() {
    let node = Node::new();
    let container = node.container();
    let here = Attachment::new(&node, &container, host_local(&node, &["10.1.0.0/24"]));
    let there = here.clone().config(patched(here.config.clone(), json!({"name": "net2"})));
    assert_eq!(addresses(&here.add().success()), ["10.1.0.2/24"]);
    assert_eq!(addresses(&there.add().success()), ["10.1.0.2/24"]);
    here.del().success();
    assert_eq!(node.reservations("net2").len(), 1);
    there.del().success();
}

#[test]
fn a_lock_that_is_held_is_waited_for() {
    require!(probe::tool("flock"));
    let node = Node::new();
    let lock = node.file("networks/net1/lock", "");
    let holder = Invocation::new(&node, "/usr/bin/flock").arg(&lock).arg("-c").arg("echo held; read x").start();
    wait_until_locked(&lock);
    let container = node.container();
    let config = host_local(&node, &["10.1.0.0/24"]);
    let waiting = node.plugin("host-local").command("ADD").container(&container).config(&config);
    let mut waiting = waiting.start();
    waiting.release();
    wait_until_waiting(waiting.pid());
    assert_eq!(node.reservations("net1"), [], "no call reserves without the lock");
    holder.finish();
    waiting.finish().success();
    Attachment::new(&node, &container, config).del().success();
}

#[test]
fn a_lock_that_is_never_released_fails_at_the_deadline() {
    require!(probe::tool("flock"));
    let node = Node::new();
    let lock = node.file("networks/net1/lock", "");
    let holder = Invocation::new(&node, "/usr/bin/flock").arg(&lock).arg("-c").arg("echo held; read x").start();
    wait_until_locked(&lock);
    let container = node.container();
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"lockTimeout": 1}}));
    let began = Instant::now();
    let call = node.plugin("host-local").command("ADD").container(&container).config(&config);
    let failure = std::panic::catch_unwind(|| call.timeout(Duration::from_secs(10)).run().fails_naming(11, &["lock"]));
    holder.finish();
    assert!(failure.is_ok(), "see above");
    assert!(began.elapsed() < cni_testkit::patience(Duration::from_secs(8)));
}
