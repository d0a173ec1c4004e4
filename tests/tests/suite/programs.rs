//! The only programs that run: delegates by a plain name on CNI_PATH, and those of iptables and nft
//! from the absolute folders of PATH and then the system's. Decoys are where every other
//! search would lead; each records if it runs.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use cni_testkit::{Invocation, Node, Outcome, bin_dir, probe, require};
use conformance::{attach, bridge, patched};
use serde_json::{Value, json};

use crate::paths::{decoy, wrong_types};

#[track_caller]
fn nothing_ran(node: &Node, outcome: &Outcome) {
    assert!(!node.dir().join("ran").exists(), "{}", outcome.report());
}

fn with_ipam(node: &Node, kind: &str) -> Value {
    let keys = json!({"cniVersion": "1.1.0", "ipam": {"type": kind, "ranges": null, "dataDir": null}});
    patched(bridge(node, &[]), keys)
}

#[test]
fn no_verb_runs_a_type_that_is_not_a_plain_name() {
    let node = Node::new();
    let types = wrong_types(&node);
    let path = node.dir().join("bin");
    let good = patched(bridge(&node, &["10.1.0.0/24"]), json!({"cniVersion": "1.1.0"}));
    let (container, attachment, result) = attach(&node, &good, 1).remove(0);
    let call = |verb: &str, kind: &str| {
        let mut config = with_ipam(&node, kind);
        let call = node.plugin("bridge").command(verb).cni_path(&path);
        match verb {
            "STATUS" => call.bad_config(&config).run(),
            "GC" => {
                config["cni.dev/valid-attachments"] = json!([{"containerID": container.id, "ifname": "eth0"}]);
                call.bad_config(&config).run()
            }
            _ => {
                config["prevResult"] = result.clone();
                call.container(&container).bad_config(&config).run()
            }
        }
    };
    for kind in &types {
        for verb in ["CHECK", "GC", "STATUS"] {
            let outcome = call(verb, kind);
            let code = outcome.failure().code;
            assert!(matches!(code, Some(4 | 7 | 50)), "{kind:?}\n{}", outcome.report());
            nothing_ran(&node, &outcome);
        }
    }
    attachment.check(&result).success();
    // DEL does its own part, and reports that IPAM's reservations are not released.
    for kind in &types {
        let outcome = call("DEL", kind);
        assert!(matches!(outcome.failure().code, Some(4 | 7)), "{kind:?}\n{}", outcome.report());
        nothing_ran(&node, &outcome);
        assert!(container.link("eth0").is_none() && node.ports("br0").is_empty(), "{}", outcome.report());
        assert_eq!(node.reservations("net1").len(), 1);
    }
    // The decoys can run in each of these verbs.
    for verb in ["DEL", "GC", "STATUS"] {
        call(verb, "good");
        assert!(fs::remove_file(node.dir().join("ran")).is_ok(), "{verb}");
    }
    attachment.del_with(&result).success();
}

/// When Go joins paths, an empty folder is the current one, which a plugin inherits from the
/// runtime.
#[test]
fn an_empty_folder_in_cni_path_is_not_searched() {
    let node = Node::new();
    decoy(&node, "here/good", 0o755);
    let container = node.container();
    let empty = node.dir().join("empty");
    fs::create_dir(&empty).unwrap();
    for path in [":".to_owned(), "::".to_owned(), format!(":{}", empty.display()), format!("{}:", empty.display())] {
        for verb in ["ADD", "DEL"] {
            let call = run_in(&node, &node.dir().join("here"), &bin_dir().join("bridge")).command(verb).cni_path(&path);
            let config = patched(with_ipam(&node, "good"), json!({"cniVersion": "1.0.0"}));
            let outcome = call.container(&container).bad_config(&config).run();
            outcome.fails_with(4, "");
            nothing_ran(&node, &outcome);
        }
    }
    assert!(container.link("eth0").is_none());
}

/// Returns a call of a program with this current folder.
fn run_in<'n>(node: &'n Node, folder: &Path, program: &Path) -> Invocation<'n> {
    Invocation::new(node, "/bin/sh").arg("-c").arg("cd \"$0\" && exec \"$1\"").arg(folder).arg(program)
}

const PROGRAMS: [&str; 4] = ["iptables", "ip6tables", "nft", "xtables"];

/// Creates decoys of every program that plugins run, in `here` and in `here/bin`; returns the
/// latter.
fn decoys(node: &Node) -> std::path::PathBuf {
    for base in PROGRAMS {
        for variant in ["", "-nft", "-legacy"] {
            for job in ["", "-save", "-restore", "-multi"] {
                for folder in ["here", "here/bin"] {
                    decoy(node, &format!("{folder}/{base}{variant}{job}"), 0o755);
                }
            }
        }
    }
    node.dir().join("here/bin")
}

/// The plugins that run programs: masquerading, and port mapping by either backend, the latter with
/// a condition that only nft understands.
fn users(node: &Node, prev: &Value) -> [Value; 3] {
    let forwarding = |keys: Value| {
        let base = json!({"cniVersion": "1.0.0", "name": "net1", "type": "portmap", "prevResult": prev,
            "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}});
        patched(base, keys)
    };
    [
        patched(
            bridge(node, &["10.2.0.0/24"]),
            json!({"name": "net2", "bridge": "br1", "ipMasq": true, "ipMasqBackend": "iptables"}),
        ),
        forwarding(json!({"backend": "iptables"})),
        forwarding(json!({"backend": "nftables",
            "conditionsV4": ["ip", "saddr", "{ 192.0.2.9, 192.0.2.10 }", "ct", "state", "new"]})),
    ]
}

#[test]
fn relative_folders_in_path_are_not_searched() {
    require!(probe::iptables());
    require!(probe::nft());
    require!(probe::plugin("portmap"));
    let node = Node::new();
    let absolute = decoys(&node);
    let here = node.dir().join("here");
    // A link in the parent folder, where another user may create one.
    symlink("here/bin", node.dir().join("sideways")).unwrap();
    let (_living, first, prev) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    for config in users(&node, &prev) {
        // Each plugin gets another container, because masquerading creates an interface.
        let container = node.container();
        let run = |verb: &str, path: &str| {
            let plugin = bin_dir().join(config["type"].as_str().unwrap());
            let call = run_in(&node, &here, &plugin).command(verb).cni_path(bin_dir()).env("PATH", path);
            call.container(&container).bad_config(&config).run()
        };
        for path in ["", "::.:bin:./bin:bin/:../sideways:../here/bin:bin/../bin:./.:"] {
            for verb in ["ADD", "DEL"] {
                let outcome = run(verb, path);
                assert_eq!(outcome.status, Some(0), "PATH={path:?}\n{}", outcome.report());
                nothing_ran(&node, &outcome);
            }
        }
        // The runtime trusts an absolute folder: the decoys can run.
        run("ADD", absolute.to_str().unwrap());
        assert!(fs::remove_file(node.dir().join("ran")).is_ok(), "{config:#}");
        run("DEL", "/usr/sbin:/usr/bin").success();
    }
    first.del_with(&prev).success();
}
