//! Files that a configuration names: `resolvConf` and `dataDir` are paths by design, and symlinks
//! in them are followed as in Go. Whatever they are, no call blocks, and only reservations are
//! written, in the configured folder.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use cni_testkit::{Attachment, Container, Invocation, Node, bin_dir, probe, require};
use conformance::{attach, host_local, patched};
use nix::sys::stat::Mode;
use serde_json::{Value, json};

use crate::paths::{files, harmless};

fn call<'n>(node: &'n Node, verb: &str, container: &Container, config: &Value) -> Invocation<'n> {
    let call = node.plugin("host-local").command(verb).container(container);
    call.bad_config(config).timeout(Duration::from_secs(10))
}

fn resolving(node: &Node, path: &Path) -> Value {
    patched(host_local(node, &["10.1.0.0/24"]), json!({"ipam": {"resolvConf": path}}))
}

#[test]
fn a_resolv_conf_is_found_behind_links_and_dots() {
    let node = Node::new();
    let file = node.file("etc/resolv.conf", "nameserver 192.0.2.1\n");
    let link = node.dir().join("link");
    symlink("etc/resolv.conf", &link).unwrap();
    let again = node.dir().join("again");
    symlink(&link, &again).unwrap();
    for path in [file, link, again, node.dir().join("etc/../etc/./resolv.conf")] {
        let (_c, attachment, result) = attach(&node, &resolving(&node, &path), 1).remove(0);
        assert_eq!(result["dns"]["nameservers"], json!(["192.0.2.1"]), "{}", path.display());
        attachment.del().success();
    }
}

#[test]
fn a_resolv_conf_not_a_file_is_named_and_reserves_nothing() {
    let node = Node::new();
    let container = node.container();
    let dangling = node.dir().join("dangling");
    symlink("nowhere", &dangling).unwrap();
    let loops = node.dir().join("loops");
    symlink("loops", &loops).unwrap();
    let folder = node.dir().join("folder");
    fs::create_dir(&folder).unwrap();
    let file = node.file("file", "nameserver 192.0.2.1\n");
    let long = Path::new("/").join("r".repeat(5000));
    for path in [dangling, loops, folder, file.join("below"), long] {
        let outcome = call(&node, "ADD", &container, &resolving(&node, &path)).run();
        outcome.fails_naming(5, &[path.to_str().unwrap()]);
        assert_eq!(node.reservations("net1"), []);
        call(&node, "DEL", &container, &resolving(&node, &path)).run().success();
    }
}

/// The pipe has no process at its other end.
#[test]
fn a_resolv_conf_that_is_a_pipe_is_not_waited_for() {
    let node = Node::new();
    let pipe = node.dir().join("pipe");
    nix::unistd::mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    let container = node.container();
    let config = resolving(&node, &pipe);
    let result = call(&node, "ADD", &container, &config).run().success();
    assert!(result["dns"].get("nameservers").is_none(), "{result:#}");
    call(&node, "DEL", &container, &config).run().success();
}

/// Every spelling of a folder leads to it, and nothing changes beside and above it.
#[test]
fn a_data_dir_is_found_behind_links_and_dots() {
    let node = Node::new();
    node.file("above/beside/file", "untouched");
    let real = node.dir().join("above/real");
    fs::create_dir(&real).unwrap();
    symlink("above/real", node.dir().join("link")).unwrap();
    symlink("above", node.dir().join("up")).unwrap();
    let before = files(&node);
    for written in ["above/real", "link", "up/real", "above/beside/../real", "above/./real/"] {
        let data_dir = format!("{}/{written}", node.dir().display());
        let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"dataDir": data_dir}}));
        let (container, attachment, result) = attach(&node, &config, 1).remove(0);
        let reserved = fs::read_to_string(real.join("net1").join(conformance::address(&result))).unwrap();
        assert_eq!(reserved, format!("{}\r\neth0", container.id), "{written}");
        // Each spelling leads to the same reservations.
        let plain = patched(config, json!({"ipam": {"dataDir": real}}));
        Attachment::new(&node, &container, plain).check(&result).success();
        attachment.del().success();
        assert!(!real.join("net1").join(conformance::address(&result)).exists(), "{written}");
    }
    let after = files(&node);
    let network = real.display().to_string();
    let outside = |file: &(&String, &(u32, Vec<u8>))| {
        let name = file.0.strip_prefix(&network);
        !name.is_some_and(|name| name.starts_with('/')) && !file.0.contains("/netns/")
    };
    assert!(after.iter().filter(outside).eq(before.iter().filter(outside)), "{before:?}\n{after:?}");
}

/// A node switched from Go finds its reservations in Go's folder: the kernel would apply `..` to
/// the link's target.
#[test]
fn a_data_dir_with_dot_dot_is_resolved_lexically() {
    let node = Node::new();
    fs::create_dir_all(node.dir().join("above/beside")).unwrap();
    symlink("above/beside", node.dir().join("link")).unwrap();
    let data_dir = node.dir().join("link/../networks");
    let config = patched(host_local(&node, &["10.1.0.0/24"]), json!({"ipam": {"dataDir": data_dir}}));
    let (_container, attachment, _) = attach(&node, &config, 1).remove(0);
    assert_eq!(node.reservations("net1").len(), 1);
    assert!(!node.dir().join("above/networks").exists());
    attachment.del().success();
    assert_eq!(node.reservations("net1"), []);
}

/// A symlink in place of a network's folder is the administrator's choice and followed; nothing is
/// written to the folder that contains the link.
#[test]
fn the_folder_of_a_network_may_be_a_link() {
    let node = Node::new();
    fs::create_dir_all(node.dir().join("elsewhere")).unwrap();
    fs::create_dir(node.data_dir()).unwrap();
    symlink("../elsewhere", node.data_dir().join("net1")).unwrap();
    let (container, attachment, _) = attach(&node, &host_local(&node, &["10.1.0.0/24"]), 1).remove(0);
    let reserved = fs::read_to_string(node.dir().join("elsewhere/10.1.0.2")).unwrap();
    assert_eq!(reserved, format!("{}\r\neth0", container.id));
    attachment.del().success();
    assert!(!node.dir().join("elsewhere/10.1.0.2").exists());
}

/// A cached result is replaced, never written through a symlink in its place.
#[test]
fn cnitool_follows_no_symlink_in_its_result_cache() {
    require!(probe::plugin("cnitool"));
    for target in ["victim", "nowhere"] {
        let node = Node::new();
        let container = node.container();
        let victim = node.file("victim", "untouched");
        let list = json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [{"type": "loopback"}]});
        node.file("net.d/net1.conflist", list.to_string());
        let tool = |verb: &str| {
            let call = Invocation::new(&node, bin_dir().join("cnitool")).cni_path(bin_dir());
            call.env("NETCONFPATH", node.dir().join("net.d")).arg(verb).arg("net1").arg(container.netns())
        };
        let results = Path::new("/var/lib/cni/results");
        // The file name that the result will have.
        assert_eq!(tool("add").run().status, Some(0));
        let name = node.enter(|| {
            let entries = fs::read_dir(results).unwrap().map(|entry| entry.unwrap().file_name());
            entries.into_iter().find(|name| name != ".cni").unwrap()
        });
        assert_eq!(tool("del").run().status, Some(0));
        let place = results.join(name);
        node.enter(|| symlink(node.dir().join(target), &place).unwrap());
        let outcome = tool("add").run();
        assert_eq!(outcome.status, Some(0), "{}", outcome.report());
        assert!(node.enter(|| place.symlink_metadata().unwrap().is_file()), "{}", outcome.report());
        assert_eq!(tool("del").run().status, Some(0));
        node.enter(|| symlink(node.dir().join(target), &place).unwrap());
        tool("del").run();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        assert!(!node.dir().join("nowhere").exists());
        node.enter(|| {
            fs::remove_file(&place).or_else(|error| if place.exists() { Err(error) } else { Ok(()) }).unwrap()
        });
    }
}

/// A network name that would be a path is refused too.
#[test]
fn cnitool_takes_no_name_that_leads_out_of_its_folder() {
    require!(probe::plugin("cnitool"));
    let node = Node::new();
    let container = node.container();
    node.file("net.d/a.conflist", "{}");
    for name in ["../victim", "..", "/victim", "net1/x", "net1\0"] {
        let list = json!({"cniVersion": "1.0.0", "name": name, "plugins": [{"type": "loopback"}]});
        node.file("net.d/a.conflist", list.to_string());
        for verb in ["add", "check", "del"] {
            let call = Invocation::new(&node, bin_dir().join("cnitool")).cni_path(bin_dir());
            let call = call.env("NETCONFPATH", node.dir().join("net.d")).arg(verb);
            let outcome = harmless(&node, call.arg(name.trim_end_matches('\0')).arg(container.netns()));
            assert_eq!(outcome.status, Some(1), "{}", outcome.report());
        }
    }
    let list = json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [{"type": "loopback"}]});
    node.file("net.d/a.conflist", list.to_string());
    for ifname in ["../x", "..", "a/b"] {
        let call = Invocation::new(&node, bin_dir().join("cnitool")).cni_path(bin_dir()).env("CNI_IFNAME", ifname);
        let call = call.env("NETCONFPATH", node.dir().join("net.d")).arg("add").arg("net1");
        let outcome = harmless(&node, call.arg(container.netns()));
        assert_eq!(outcome.status, Some(1), "{}", outcome.report());
    }
}
