//! Full, read-only and foreign disks and files of the wrong type give a clear error or have no
//! effect, and nothing is lost. `store` tests foreign files in a readable folder, `status` a disk
//! without space.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::time::Duration;

use cni_testkit::{Attachment, Container, Invocation, Node, Outcome, probe, require};
use conformance::{attach, host_local, patched};
use serde_json::{Value, json};

pub(super) fn config(node: &Node) -> Value {
    patched(host_local(node, &["10.1.0.0/24", "fd00:1::/64"]), json!({"cniVersion": "1.1.0"}))
}

/// Runs a verb of host-local with a short timeout and without these capabilities
/// (`-dac_override,...`).
pub(super) fn run(node: &Node, verb: &str, container: &Container, config: &Value, without: &str) -> Outcome {
    let plugin = cni_testkit::bin_dir().join("host-local");
    let call = if without.is_empty() {
        Invocation::new(node, plugin)
    } else {
        Invocation::new(node, "/usr/bin/setpriv").arg("--bounding-set").arg(without).arg(plugin)
    };
    let call = call.command(verb).cni_path(cni_testkit::bin_dir()).config(config).timeout(Duration::from_secs(15));
    match verb {
        "STATUS" | "GC" => call.run(),
        _ => call.container(container).run(),
    }
}

/// The path of the network's folder is something else: the error names it, no call blocks, and DEL
/// has nothing to do.
#[test]
fn no_folder_where_one_should_be() {
    type Prepare = fn(&Path);
    let cases: [(&str, Prepare); 4] = [
        ("the data dir is a file", |data| fs::write(data, "x").unwrap()),
        ("the data dir leads nowhere", |data| symlink("/nonexistent/folder", data).unwrap()),
        ("the network is a file", |data| {
            fs::create_dir(data).unwrap();
            fs::write(data.join("net1"), "x").unwrap();
        }),
        ("the network leads nowhere", |data| {
            fs::create_dir(data).unwrap();
            symlink("/nonexistent/folder", data.join("net1")).unwrap();
        }),
    ];
    for (name, prepare) in cases {
        let node = Node::new();
        let (container, config) = (node.container(), config(&node));
        prepare(&node.data_dir());
        run(&node, "ADD", &container, &config, "").fails_naming(5, &["networks"]);
        run(&node, "STATUS", &container, &config, "").fails_naming(50, &["networks"]);
        run(&node, "DEL", &container, &config, "").success();
        let here = fs::symlink_metadata(node.data_dir()).unwrap();
        assert!(here.is_dir() || here.is_symlink() || fs::read(node.data_dir()).unwrap() == b"x", "{name}");
    }
}

/// The signal of the file size limit (`ulimit -f`) does not end an ADD half-way, nor every DEL.
#[test]
fn a_file_size_limit_fails_add_but_not_del() {
    let node = Node::new();
    let limited = |verb: &str, container: &Container, blocks: &str| {
        let call =
            Invocation::new(&node, "/bin/sh").arg("-c").arg("ulimit -f \"$1\"; exec \"$2\"").arg("sh").arg(blocks);
        let call = call.arg(cni_testkit::bin_dir().join("host-local")).command(verb).container(container);
        call.cni_path(cni_testkit::bin_dir()).config(&config(&node)).run()
    };
    let mut all = attach(&node, &config(&node), 40);
    let before = node.reservations("net1");
    let late = node.container();
    let outcome = limited("ADD", &late, "0");
    assert!(outcome.status.is_some(), "{}", outcome.report());
    limited("DEL", &late, "0").success();
    assert_eq!(node.reservations("net1"), before);
    for (container, ..) in all.drain(..) {
        limited("DEL", &container, "1").success();
    }
    assert_eq!(node.reservations("net1"), []);
}

/// The lock's path is something else: no call changes anything without the lock, and the error says
/// so.
#[test]
fn no_lock_where_one_should_be() {
    type Prepare = fn(&Path);
    let cases: [(&str, Prepare); 2] = [
        ("a folder", |lock| fs::create_dir(lock).unwrap()),
        ("a link that leads nowhere", |lock| symlink("/nonexistent/lock", lock).unwrap()),
    ];
    for (name, prepare) in cases {
        let node = Node::new();
        let (container, attachment, _) = attach(&node, &config(&node), 1).remove(0);
        let lock = node.data_dir().join("net1/lock");
        fs::remove_file(&lock).unwrap();
        prepare(&lock);
        let late = node.container();
        run(&node, "ADD", &late, &attachment.config, "").fails_naming(5, &["net1/lock"]);
        run(&node, "DEL", &container, &attachment.config, "").fails_naming(5, &["net1/lock"]);
        assert_eq!(node.reservations("net1").len(), 2, "{name}");
        fs::remove_file(&lock).or_else(|_| fs::remove_dir(&lock)).unwrap();
        attachment.del().success();
    }
}

/// The content of the files beside the reservations has no effect.
#[test]
fn garbage_beside_the_reservations() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &config(&node), 1).remove(0);
    let folder = node.data_dir().join("net1");
    let sidecar = node.data_dir().join(".cni/net1");
    let [links, boot] = ["links", "boot"].map(|name| sidecar.join(name));
    let names =
        [folder.join("lock"), folder.join("last_reserved_ip.0"), folder.join("last_reserved_ip.1"), links, boot];
    for name in names {
        let remove = || drop(fs::remove_dir_all(&name).or_else(|_| fs::remove_file(&name)));
        for content in ["", "garbage", "\0\0\0\0\0\0\0\0"] {
            if name.starts_with(&sidecar) {
                remove();
            }
            fs::write(&name, content).unwrap();
            other_life(&node, &attachment);
        }
        let others = [Some(Path::new("/nonexistent/x")), None];
        for other in others.into_iter().filter(|_| !name.ends_with("lock")) {
            remove();
            match other {
                Some(target) => symlink(target, &name).unwrap(),
                None => fs::create_dir(&name).unwrap(),
            }
            other_life(&node, &attachment);
            remove();
        }
    }
    attachment.check(&result).success();
    assert!(!Path::new("/nonexistent").exists());
    run(&node, "DEL", &container, &attachment.config, "").success();
}

/// Adds and deletes another container while this one stays.
#[track_caller]
fn other_life(node: &Node, staying: &Attachment<'_>) {
    let before = node.reservations("net1");
    let other = node.container();
    let attachment = Attachment::new(node, &other, staying.config.clone());
    let result = attachment.add().success();
    attachment.check(&result).success();
    staying.status().success();
    attachment.del().success();
    assert_eq!(node.reservations("net1"), before);
}

#[test]
fn a_read_only_disk_loses_nothing_and_is_reported() {
    let node = Node::new();
    let (container, attachment, result) = attach(&node, &config(&node), 1).remove(0);
    let before = node.reservations("net1");
    let data = node.data_dir();
    let data = data.to_str().unwrap();
    node.exec(&["mount", "--bind", data, data]);
    node.exec(&["mount", "-o", "remount,bind,ro", data]);
    let late = node.container();
    run(&node, "ADD", &late, &attachment.config, "").fails_naming(5, &["net1", "Read-only file system"]);
    run(&node, "STATUS", &late, &attachment.config, "").fails_naming(50, &["net1", "Read-only file system"]);
    run(&node, "DEL", &container, &attachment.config, "").fails_naming(5, &["10.1.0.2", "fd00:1::2", "Read-only"]);
    attachment.gc(&[]).fails_naming(5, &["10.1.0.2", "Read-only file system"]);
    attachment.check(&result).success();
    run(&node, "DEL", &late, &attachment.config, "").success();
    assert_eq!(node.reservations("net1"), before);
    node.exec(&["umount", data]);
    attachment.del().success();
}

#[test]
fn files_that_cannot_be_removed_are_named_and_others_removed() {
    let node = Node::new();
    let (container, attachment, _) = attach(&node, &config(&node), 1).remove(0);
    let stubborn = node.data_dir().join("net1/10.1.0.2");
    let stubborn = stubborn.to_str().unwrap();
    require!(probe::tool("chattr"));
    if !node.run(&["chattr", "+i", stubborn]).ok {
        attachment.del().success();
        cni_testkit::skip!("no immutable files in {}", node.dir().display());
    }
    let outcome = run(&node, "DEL", &container, &attachment.config, "");
    // Before anything can fail, because the node's folder could not be removed.
    node.exec(&["chattr", "-i", stubborn]);
    let failure = outcome.fails_naming(5, &["net1/10.1.0.2"]);
    assert!(!failure.msg.contains("fd00:1::2"), "{failure:?}");
    assert_eq!(node.reservations("net1").len(), 1);
    attachment.del().success();
}

/// Drops the capabilities to read and to change files of other users.
pub(super) const POWERLESS: &str = "-dac_override,-dac_read_search,-fowner";

#[test]
fn files_of_another_user_without_the_right_to_read_them() {
    require!(probe::tool("setpriv"));
    let node = Node::new();
    let (_one, one, _) = attach(&node, &config(&node), 1).remove(0);
    let path = node.data_dir().join("net1/10.1.0.2");
    let content = fs::read(&path).unwrap();
    chown(&path, Some(4321), Some(4321)).unwrap();
    // The folder must be read again, and this address is the next candidate.
    fs::remove_dir_all(node.data_dir().join(".cni/net1/links")).unwrap();
    fs::write(node.data_dir().join("net1/last_reserved_ip.0"), "10.1.0.1").unwrap();
    let late = node.container();
    let result = run(&node, "ADD", &late, &one.config, POWERLESS).success();
    assert_eq!(result["ips"][0]["address"], "10.1.0.3/24", "what cannot be read is taken");
    run(&node, "STATUS", &late, &one.config, POWERLESS).success();
    run(&node, "DEL", &late, &one.config, POWERLESS).success();
    let mut gc = one.config.clone();
    gc["cni.dev/valid-attachments"] = json!([{"containerID": one.id, "ifname": "eth0"}]);
    // Its owner is unknown, so GC cannot decide whether it is valid.
    run(&node, "GC", &late, &gc, POWERLESS).fails_naming(5, &["net1/10.1.0.2", "Permission denied"]);
    assert_eq!(fs::read(&path).unwrap(), content, "and stays");
    one.del().success();
}

#[test]
fn a_folder_of_another_user_without_the_right_to_enter_it() {
    require!(probe::tool("setpriv"));
    let node = Node::new();
    let (container, attachment, _) = attach(&node, &config(&node), 1).remove(0);
    let before = node.reservations("net1");
    let folder = node.data_dir().join("net1");
    chown(&folder, Some(4321), Some(4321)).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
    for (verb, code) in [("ADD", 5), ("DEL", 5), ("STATUS", 50)] {
        let outcome = run(&node, verb, &container, &attachment.config, POWERLESS);
        outcome.fails_naming(code, &["net1", "Permission denied"]);
    }
    assert_eq!(node.reservations("net1"), before);
    attachment.del().success();
}
