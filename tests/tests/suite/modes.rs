//! Only root can write the files that the plugins create, also if the runtime that starts them has
//! no umask.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use cni_testkit::{Invocation, Node, bin_dir, probe, require};
use conformance::{bridge, patched};
use serde_json::json;

/// Returns a call of the program without a umask.
fn without_umask<'n>(node: &'n Node, program: &str) -> Invocation<'n> {
    Invocation::new(node, "/bin/sh").arg("-c").arg("umask 0; exec \"$0\" \"$@\"").arg(bin_dir().join(program))
}

/// Returns everything in the folder, including itself, with its mode. Omits symbolic links: their
/// mode is always 777 and means nothing.
fn modes(folder: &Path) -> Vec<(PathBuf, u32)> {
    let mode = |path: &Path| fs::symlink_metadata(path).map(|metadata| metadata.permissions().mode() & 0o7777);
    let mut found = vec![(folder.to_owned(), mode(folder).unwrap_or_else(|_| panic!("{} is there", folder.display())))];
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.path().is_dir() {
            found.extend(modes(&entry.path()));
        } else if !entry.path().is_symlink() {
            found.push((entry.path(), mode(&entry.path()).unwrap()));
        }
    }
    found
}

#[track_caller]
fn are_root_s_to_write(node: &Node, folders: &[&Path]) {
    let all: Vec<(PathBuf, u32)> = node.enter(|| folders.iter().flat_map(|folder| modes(folder)).collect());
    let open: Vec<String> = all
        .iter()
        .filter(|(_, mode)| mode & 0o022 != 0)
        .map(|(path, mode)| format!("{} is {mode:o}", path.display()))
        .collect();
    assert!(open.is_empty() && all.len() > folders.len(), "{open:#?}");
}

/// tuning runs before other users of /run/cni: the lock of iptables does not trust a folder that
/// others can write.
#[test]
fn files_are_writable_by_root_only_without_a_umask() {
    require!(probe::iptables());
    let node = Node::new();
    let container = node.container();
    let (backups, log) = (Path::new("/run/cni/tuning"), node.dir().join("log"));
    let add = |config: serde_json::Value| {
        let call = without_umask(&node, config["type"].as_str().unwrap()).command("ADD").cni_path(bin_dir());
        let outcome =
            call.container(&container).env("CNI_LOG", "debug").env("CNI_LOG_FILE", &log).config(&config).run();
        (outcome.success(), outcome.stderr)
    };
    let network = bridge(&node, &["10.1.0.0/24"]);
    let data_dir = node.dir().join("made/by/the/plugin");
    let network = patched(network, json!({"ipam": {"dataDir": data_dir}}));
    let (result, _) = add(network.clone());
    let chained =
        |kind: &str| json!({"cniVersion": "1.0.0", "name": "net1", "type": kind, "prevResult": result.clone()});
    let tuned = patched(chained("tuning"), json!({"mtu": 1400}));
    add(tuned.clone());
    let ports = json!({"backend": "iptables", "runtimeConfig": {
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}});
    let ports = patched(chained("portmap"), ports);
    let (_, said) = add(ports.clone());
    assert!(!said.contains("cannot be used"), "the lock is had: {said}");
    are_root_s_to_write(&node, &[Path::new("/run/cni"), backups, &node.dir().join("made")]);
    let log = fs::metadata(log).map(|metadata| metadata.permissions().mode() & 0o777);
    assert!(log.is_err() || log.is_ok_and(|mode| mode == 0o600));
    for config in [ports, tuned, network] {
        let plugin = config["type"].as_str().unwrap();
        node.plugin(plugin).command("DEL").container(&container).config(&config).run().success();
    }
}

#[test]
fn the_cnitool_cache_is_writable_by_root_only_without_a_umask() {
    require!(probe::plugin("cnitool"));
    let node = Node::new();
    let container = node.container();
    let list = json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [bridge(&node, &["10.1.0.0/24"])]});
    node.file("net.d/net1.conflist", list.to_string());
    let cnitool = |verb: &str| {
        let call = without_umask(&node, "cnitool").cni_path(bin_dir()).env("NETCONFPATH", node.dir().join("net.d"));
        let outcome = call.arg(verb).arg("net1").arg(container.netns()).run();
        assert_eq!(outcome.status, Some(0), "{}", outcome.report());
    };
    cnitool("add");
    are_root_s_to_write(&node, &[Path::new("/var/lib/cni"), &node.data_dir()]);
    cnitool("del");
}
