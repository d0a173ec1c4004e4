//! Names with path separators. Environment and configuration determine names of files and programs:
//! no name may lead out of the intended folder or run a program that the administrator has not put
//! on CNI_PATH.
//!
//! After each refusal the node's folder and the plugins' default data folders are unchanged, and no
//! decoy has run.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use cni_testkit::{Invocation, Node, Outcome, bin_dir, probe, require};
use conformance::{PLUGINS, bridge, host_local, ipam, patched};
use nix::sys::stat::Mode;
use serde_json::{Value, json};

/// Returns every name below a folder with its mode, and the file's content or the link's target.
fn tree(folder: &Path) -> BTreeMap<String, (u32, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let metadata = path.symlink_metadata().unwrap();
        let content = if metadata.is_file() {
            fs::read(&path).unwrap()
        } else if metadata.is_symlink() {
            fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
        } else {
            Vec::new()
        };
        found.insert(path.display().to_string(), (metadata.permissions().mode(), content));
        if metadata.is_dir() {
            found.extend(tree(&path));
        }
    }
    found
}

fn config(node: &Node, plugin: &str) -> Value {
    let tuned = json!({"type": plugin, "mtu": 1400, "dataDir": node.dir().join("tuning")});
    patched(json!({"cniVersion": "1.0.0", "name": "net1", "ipam": ipam(node, &["10.1.0.0/24"])}), tuned)
}

/// Returns everything that a plugin could write by a path: the node's folder, and the plugins'
/// folders on the node.
pub(crate) fn files(node: &Node) -> BTreeMap<String, (u32, Vec<u8>)> {
    let mut found = tree(node.dir());
    found.extend(node.enter(|| [tree(Path::new("/run")), tree(Path::new("/var/lib"))].into_iter().flatten()));
    found
}

/// Runs the call and asserts that it changed no file.
#[track_caller]
pub(crate) fn harmless(node: &Node, call: Invocation<'_>) -> Outcome {
    let before = files(node);
    let outcome = call.run();
    let after = files(node);
    assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>(), "{}", outcome.report());
    assert_eq!(after, before, "{}", outcome.report());
    outcome
}

/// Runs the call and asserts that it refused the name and changed nothing.
#[track_caller]
fn refused(node: &Node, call: Invocation<'_>) -> Outcome {
    let outcome = harmless(node, call);
    assert_ne!(outcome.failure().code, Some(0), "{}", outcome.report());
    outcome
}

/// Names that would lead to files outside the attachment's.
const IDS: [&str; 9] = ["..", ".", "../victim", "/victim", "a/../../net1", "a\nb", "a b", "", "\u{2024}."];
const IFNAMES: [&str; 8] = ["..", ".", "../../x", "/x", "a/b", "a\nb", "sixteen-bytes-xx", ""];
const NETWORKS: [&str; 10] =
    ["..", ".", "../victim", "/victim", "net1/../../victim", ".cni", "net1\0", "net1/", "", "n\u{e9}t"];

#[test]
fn no_container_interface_or_network_is_a_path() {
    for plugin in PLUGINS {
        let node = Node::new();
        let container = node.container();
        node.file("victim/10.1.0.2", "victim\r\neth0");
        node.file("tuning/victim_eth0.json", "{}");
        let config = config(&node, plugin);
        // CHECK uses the same validation, so a few are enough.
        for (verb, some) in [("ADD", usize::MAX), ("DEL", usize::MAX), ("CHECK", 3)] {
            let call = || node.plugin(plugin).command(verb).container(&container);
            for id in IDS.into_iter().take(some) {
                refused(&node, call().id(id).bad_config(&config)).fails_with(4, "");
            }
            for ifname in IFNAMES.into_iter().take(some) {
                refused(&node, call().ifname(ifname).bad_config(&config)).fails_with(4, "");
            }
            for name in NETWORKS.into_iter().take(some) {
                refused(&node, call().bad_config(&patched(config.clone(), json!({ "name": name })))).fails_with(7, "");
            }
        }
    }
}

/// STATUS has no attachment, and GC has many: each is only compared with existing names, and none
/// is used as a file name.
#[test]
fn status_and_gc_use_no_network_or_attachment_as_a_path() {
    for plugin in PLUGINS {
        let node = Node::new();
        node.file("victim/10.1.0.2", "victim\r\neth0");
        node.file("tuning/victim_eth0.json", "{}");
        let config = patched(config(&node, plugin), json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": []}));
        for (verb, name) in ["STATUS", "GC"].into_iter().flat_map(|verb| NETWORKS.map(|name| (verb, name))) {
            let config = patched(config.clone(), json!({ "name": name }));
            refused(&node, node.plugin(plugin).command(verb).bad_config(&config)).fails_with(7, "");
        }
        let pairs = IDS
            .into_iter()
            .zip(IFNAMES.into_iter().cycle())
            .filter(|(id, ifname)| !id.is_empty() && !ifname.is_empty());
        let valid: Vec<Value> = pairs.map(|(id, ifname)| json!({"containerID": id, "ifname": ifname})).collect();
        let config = patched(config, json!({"cni.dev/valid-attachments": valid}));
        let before = files(&node);
        node.plugin(plugin).command("GC").bad_config(&config).run().success();
        let after = files(&node);
        assert!(before.iter().all(|file| after.get(file.0) == Some(file.1)), "{plugin}: {before:?} {after:?}");
        let made: Vec<&String> = after.keys().filter(|name| !before.contains_key(*name)).collect();
        let network = node.data_dir().display().to_string();
        assert!(made.iter().all(|name| name.starts_with(&network)), "{plugin}: {made:?}");
    }
}

#[test]
fn a_nul_never_shortens_a_name() {
    let node = Node::new();
    let container = node.container();
    let resolv = node.file("resolv.conf", "nameserver 192.0.2.1\n");
    let nul = |path: &Path| format!("{}\0x", path.display());
    let call = |config: &Value| {
        node.plugin(config["type"].as_str().unwrap()).command("ADD").container(&container).bad_config(config)
    };
    let direct = host_local(&node, &["10.1.0.0/24"]);
    refused(&node, call(&patched(direct.clone(), json!({"ipam": {"dataDir": nul(&node.data_dir())}}))));
    refused(&node, call(&patched(direct, json!({"ipam": {"resolvConf": nul(&resolv)}}))));
    let bridged = bridge(&node, &["10.1.0.0/24"]);
    refused(&node, call(&patched(bridged.clone(), json!({"bridge": "br0\0x"}))));
    assert!(node.link("br0").is_none());
    refused(&node, call(&patched(bridged, json!({"ipam": {"type": "host-local\0x"}}))));
    assert!(container.link("eth0").is_none());
}

#[test]
fn del_succeeds_where_the_data_folder_cannot_exist() {
    let node = Node::new();
    let container = node.container();
    for folder in
        [format!("{}\0x", node.data_dir().display()), format!("/{}", "d".repeat(5000)), "/dev/null/x".to_owned()]
    {
        let direct = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"dataDir": folder}}));
        refused(&node, node.plugin("host-local").command("ADD").container(&container).bad_config(&direct));
        node.plugin("host-local").command("DEL").container(&container).bad_config(&direct).run().success();
        let tuned = patched(config(&node, "tuning"), json!({"dataDir": folder}));
        node.plugin("tuning").command("DEL").container(&container).bad_config(&tuned).run().success();
    }
}

#[test]
fn a_very_long_container_id_is_never_used_as_a_file_name() {
    let node = Node::new();
    let container = node.container();
    let id = "c".repeat(5000);
    let direct = host_local(&node, &["10.1.0.0/24"]);
    let call = |verb: &str| node.plugin("host-local").command(verb).container(&container).id(&id).config(&direct);
    call("ADD").run().success();
    assert_eq!(node.reservations("net1"), [("10.1.0.2".to_owned(), format!("{id}\r\neth0"))]);
    call("DEL").run().success();
    assert_eq!(node.reservations("net1"), []);
    let tuned = config(&node, "tuning");
    node.plugin("tuning").command("DEL").container(&container).id(&id).config(&tuned).run().success();
}

/// A program that must never run, and records if it does.
pub(crate) fn decoy(node: &Node, path: &str, mode: u32) {
    let script = format!("#!/bin/sh\necho {path} >> {}\n", node.dir().join("ran").display());
    fs::set_permissions(node.script(path, &script), fs::Permissions::from_mode(mode)).unwrap();
}

/// Returns types that do not name a regular, executable file on CNI_PATH, and creates decoys where
/// they might lead.
pub(crate) fn wrong_types(node: &Node) -> Vec<String> {
    for (path, mode) in [("outside", 0o755), ("bin/plain", 0o644), ("bin/folder/inner", 0o755), ("bin/good", 0o755)] {
        decoy(node, path, mode);
    }
    symlink("nowhere", node.dir().join("bin/dangling")).unwrap();
    symlink("folder", node.dir().join("bin/link-to-folder")).unwrap();
    symlink("plain", node.dir().join("bin/link-to-plain")).unwrap();
    nix::unistd::mkfifo(&node.dir().join("bin/fifo"), Mode::S_IRWXU).unwrap();
    let outside = node.dir().join("outside").display().to_string();
    let there = "../outside ./good folder/inner bin/good . .. / good/ plain folder dangling link-to-folder link-to-plain \
                 fifo absent Good";
    let mut types: Vec<String> = there.split(' ').map(str::to_owned).collect();
    types.extend([outside, "good\0".to_owned(), "good ".to_owned(), "g".repeat(5000), "good;ran".to_owned()]);
    types
}

#[test]
fn nothing_runs_but_a_plain_name_on_the_path() {
    let node = Node::new();
    let container = node.container();
    let types = wrong_types(&node);
    let path = node.dir().join("bin");
    for kind in types {
        let config = patched(bridge(&node, &[]), json!({"ipam": {"type": kind, "ranges": null, "dataDir": null}}));
        let call = node.plugin("bridge").command("ADD").container(&container).cni_path(&path).bad_config(&config);
        let outcome = refused(&node, call);
        assert!(!node.dir().join("ran").exists(), "{kind:?}\n{}", outcome.report());
    }
    // The decoys can run if they are named. Go has left an interface in the other container.
    let container = node.container();
    let config = patched(bridge(&node, &[]), json!({"ipam": {"type": "good", "ranges": null, "dataDir": null}}));
    node.plugin("bridge").command("ADD").container(&container).cni_path(&path).bad_config(&config).run().failure();
    assert!(fs::read_to_string(node.dir().join("ran")).unwrap().starts_with("bin/good\n"));
}

#[test]
fn cnitool_runs_nothing_but_a_plain_name_on_the_path() {
    require!(probe::plugin("cnitool"));
    let node = Node::new();
    let container = node.container();
    for kind in wrong_types(&node) {
        let list = json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [{ "type": kind }]});
        node.file("net.d/net1.conflist", list.to_string());
        let call = Invocation::new(&node, bin_dir().join("cnitool"))
            .cni_path(node.dir().join("bin"))
            .env("NETCONFPATH", node.dir().join("net.d"))
            .arg("add")
            .arg("net1")
            .arg(container.netns());
        let outcome = call.run();
        assert_eq!(outcome.status, Some(1), "{}", outcome.report());
        assert!(!node.dir().join("ran").exists(), "{kind:?}\n{}", outcome.report());
    }
}
