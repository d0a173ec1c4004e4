//! The variables that each verb requires, and their valid values.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use cni_testkit::Node;
use conformance::{PLUGINS, host_local, loopback, patched};
use serde_json::{Value, json};

/// A configuration that `plugin` accepts.
fn config(node: &Node, plugin: &str) -> Value {
    // Keys that some of the plugins need.
    let keys = json!({"type": plugin, "device": "lo", "master": "lo", "vlanId": 7, "vrfname": "red"});
    patched(host_local(node, &["10.1.0.0/24"]), keys)
}

#[test]
fn all_missing_variables_are_named_at_once() {
    let node = Node::new();
    for plugin in PLUGINS {
        for (verb, names) in [
            ("ADD", "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"),
            ("CHECK", "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"),
            ("DEL", "CNI_CONTAINERID,CNI_IFNAME,CNI_PATH"),
        ] {
            let call = node.plugin(plugin).command(verb).without("CNI_PATH").config(&config(&node, plugin));
            call.run().fails_with(4, &format!("required env variables [{names}] missing"));
        }
    }
}

#[test]
fn gc_and_status_require_the_path_alone() {
    let node = Node::new();
    for plugin in PLUGINS {
        let config = patched(config(&node, plugin), json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": []}));
        for verb in ["GC", "STATUS"] {
            let call = node.plugin(plugin).command(verb).config(&config);
            call.clone().without("CNI_PATH").run().fails_with(4, "required env variables [CNI_PATH] missing");
            // Variables that are not required are not validated.
            call.id("not/an id").ifname("far-too-long-for-an-interface").run().success();
        }
    }
}

#[test]
fn an_empty_variable_is_a_missing_one() {
    let node = Node::new();
    let call =
        node.plugin("host-local").command("ADD").id("").netns("").ifname("eth0").config(&config(&node, "bridge"));
    call.run().fails_with(4, "required env variables [CNI_CONTAINERID,CNI_NETNS] missing");
}

#[test]
fn a_container_id_of_other_characters_is_refused() {
    let node = Node::new();
    for plugin in PLUGINS {
        for id in ["some-%%container-id", "../up", "-a", ".a", "a b", "a/b", "ä"] {
            let call = node.plugin(plugin).command("DEL").id(id).ifname("eth0").config(&config(&node, plugin));
            let failure = call.run().fails_with(4, "invalid characters in containerID");
            assert!(failure.details.contains(id) || failure.msg.contains(id), "{failure:?} should name {id}");
        }
    }
}

#[test]
fn an_invalid_container_id_wins_over_missing_variables_after_it() {
    let node = Node::new();
    let call = node.plugin("bridge").command("ADD").id("a/b").config(&config(&node, "bridge"));
    call.run().fails_with(4, "invalid characters in containerID");
}

#[test]
fn short_and_long_container_ids_are_fine() {
    let node = Node::new();
    for id in ["a", "7", &"x".repeat(255), "a_b.c-d"] {
        for plugin in ["host-local", "loopback"] {
            node.plugin(plugin).command("DEL").id(id).ifname("e").config(&config(&node, plugin)).run().success();
        }
    }
}

#[test]
fn an_invalid_interface_name_is_refused_before_any_work() {
    let node = Node::new();
    let container = node.container();
    for plugin in PLUGINS {
        for (name, text) in [
            ("sixteen-bytes-xx", "interface name is too long"),
            (".", "interface name is . or .."),
            ("..", "interface name is . or .."),
            ("a/b", "interface name contains / or : or whitespace characters"),
            ("a:b", "interface name contains / or : or whitespace characters"),
            ("a b", "interface name contains / or : or whitespace characters"),
            ("a\tb", "interface name contains / or : or whitespace characters"),
            ("a\u{a0}b", "interface name contains / or : or whitespace characters"),
        ] {
            let call = node.plugin(plugin).command("ADD").container(&container).ifname(name);
            call.config(&config(&node, plugin)).run().fails_with(4, text);
        }
    }
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn an_interface_name_of_fifteen_bytes_is_accepted() {
    let node = Node::new();
    let call = node.plugin("host-local").command("DEL").id("a").ifname("fifteen-bytes-x");
    call.config(&config(&node, "host-local")).run().success();
}

#[test]
fn an_unknown_command_is_refused() {
    let node = Node::new();
    let container = node.container();
    for plugin in PLUGINS {
        for verb in ["add", "UPDATE", " ADD"] {
            let call = node.plugin(plugin).command(verb).container(&container).config(&config(&node, plugin));
            call.run().fails_with(4, &format!("unknown CNI_COMMAND: {verb}"));
        }
    }
    assert_eq!(node.reservations("net1"), []);
}

#[test]
fn without_a_command_the_plugin_prints_its_name() {
    let node = Node::new();
    for plugin in PLUGINS {
        let outcome = node.plugin(plugin).run();
        assert_eq!(outcome.status, Some(0), "{}", outcome.report());
        assert_eq!(outcome.stdout, "", "standard output belongs to the protocol");
        assert!(outcome.stderr.starts_with(&format!("CNI {plugin} plugin")), "{}", outcome.report());
        let versions = "CNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0";
        assert!(outcome.stderr.contains(versions), "{}", outcome.report());
    }
}

#[test]
fn a_variable_that_is_not_utf8_is_refused() {
    let node = Node::new();
    let container = node.container();
    let call = node.plugin("loopback").command("ADD").container(&container).config(&loopback());
    let failure = call.env("CNI_ARGS", OsStr::from_bytes(b"A=\xff")).run().fails_naming(4, &["CNI_ARGS"]);
    assert_eq!(failure.code, Some(4));
}

#[test]
fn a_missing_or_invalid_namespace_is_refused() {
    let node = Node::new();
    let plain = node.file("plain", "");
    for (plugin, text) in [("bridge", "failed to open netns"), ("loopback", "")] {
        let config = patched(config(&node, plugin), json!({"bridge": "br0"}));
        for path in [node.dir().join("nowhere"), plain.clone(), node.dir().to_owned(), "/dev/null".into()] {
            let call = node.plugin(plugin).command("ADD").id("c").ifname("eth0").netns(&path).config(&config);
            let failure = call.run().fails_with(4, text);
            assert!(failure.msg.contains(path.to_str().unwrap()), "{failure:?} should name {}", path.display());
        }
    }
    assert_eq!(node.reservations("net1"), []);
    assert!(node.link("br0").is_none(), "nothing is created before the namespace is known to be one");
}
