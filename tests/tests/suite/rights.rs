//! Missing capabilities give a clear error with a code and leave nothing.

use cni_testkit::{Container, Invocation, Node, Outcome, probe, require};
use conformance::{bridge, patched};
use serde_json::{Value, json};

fn call(node: &Node, verb: &str, container: &Container, config: &Value, without: &str) -> Outcome {
    let plugin = cni_testkit::bin_dir().join(config["type"].as_str().unwrap());
    let call = match without {
        "" => Invocation::new(node, plugin),
        _ => Invocation::new(node, "/usr/bin/setpriv").arg("--bounding-set").arg(without).arg(plugin),
    };
    call.command(verb).cni_path(cni_testkit::bin_dir()).container(container).config(config).run()
}

/// Returns links, rules, sysctls and reservations: everything that a plugin could leave.
pub(crate) fn state(node: &Node, container: &Container) -> String {
    let links = |json: Value| {
        let mut names: Vec<String> =
            json.as_array().into_iter().flatten().map(|link| link["ifname"].to_string()).collect();
        names.sort();
        names.join(" ")
    };
    let rules = node.ruleset();
    let (host, inside) = (links(node.json(&["ip", "-j", "link"])), links(container.json(&["ip", "-j", "link"])));
    let somaxconn = container.sysctl("net/core/somaxconn");
    format!("{host}\n{inside}\n{somaxconn}\n{:?}\n{rules}", node.reservations("net1"))
}

/// Returns what the plugin of this configuration has created and not removed.
fn left(node: &Node, container: &Container, config: &Value) -> Vec<&'static str> {
    let rules = node.ruleset();
    let left: &[(&str, bool)] = match config["type"].as_str().unwrap() {
        "tuning" => &[
            ("the sysctl", container.sysctl("net/core/somaxconn") == "77"),
            ("the MTU", container.link("eth0").is_some_and(|link| link["mtu"] == 1400)),
        ],
        "portmap" => &[("the rules", rules.contains("8080"))],
        _ => &[
            ("the interface", container.link("eth0").is_some()),
            ("the masquerading", rules.contains("10.1.0.2")),
            ("the address", !node.reservations("net1").is_empty()),
        ],
    };
    left.iter().filter(|(_, is_there)| *is_there).map(|(what, _)| *what).collect()
}

#[test]
fn without_a_capability_add_leaves_nothing_after_a_later_del() {
    require!(probe::tool("setpriv"));
    require!(probe::nft());
    for plugin in ["bridge", "portmap", "tuning"] {
        require!(probe::plugin(plugin));
    }
    for without in ["-net_admin", "-sys_admin", "-net_admin,-sys_admin"] {
        let node = Node::new();
        let container = node.container();
        let network = patched(bridge(&node, &["10.1.0.0/24"]), json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
        let before = state(&node, &container);
        let refused = |config: &Value| {
            let failure = call(&node, "ADD", &container, config, without).failure();
            let what = format!("{} {without}: {failure:?}", config["type"]);
            assert!(failure.code != Some(999) && failure.msg.contains("ot permitted"), "{what}");
        };
        refused(&network);
        assert_eq!(state(&node, &container), before, "after bridge {without}");

        let result = call(&node, "ADD", &container, &network, "").success();
        let after = state(&node, &container);
        assert_eq!(left(&node, &container, &network).len(), 3, "{after}");
        let chained = |kind: &str, keys: Value| {
            patched(json!({"cniVersion": "1.0.0", "name": "net1", "type": kind, "prevResult": result.clone()}), keys)
        };
        let ports = json!({"backend": "nftables",
            "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}});
        let (ports, sysctls) = (
            chained("portmap", ports),
            chained("tuning", json!({"sysctl": {"net.core.somaxconn": "77"}, "mtu": 1400})),
        );
        // portmap never enters the container: only its changes of the host's rules can fail.
        for config in [&ports, &sysctls] {
            if config["type"] == "portmap" && without == "-sys_admin" {
                continue;
            }
            refused(config);
            assert_eq!(state(&node, &container), after, "after {} {without}", config["type"]);
        }
        call(&node, "ADD", &container, &ports, "").success();
        call(&node, "ADD", &container, &sysctls, "").success();
        assert_eq!((left(&node, &container, &ports).len(), left(&node, &container, &sysctls).len()), (1, 2));
        // A DEL without capabilities may fail with an error; with them it finds everything. A DEL
        // that succeeds must have removed everything, because the runtime calls no other.
        for config in [&sysctls, &ports, &network] {
            let outcome = call(&node, "DEL", &container, config, without);
            let what = format!("{} {without}: {}", config["type"], outcome.report());
            if outcome.status != Some(0) {
                assert!(outcome.failure().msg.contains("ot permitted"), "{what}");
                continue;
            }
            // A value that the kernel does not take back is logged; it ends with the container.
            let told = outcome.stderr.contains("not restored: ") && outcome.stderr.contains("ot permitted");
            let left = left(&node, &container, config);
            assert!(left.is_empty() || (told && config["type"] == "tuning"), "{left:?} after {what}");
        }
        for config in [&sysctls, &ports, &network] {
            call(&node, "DEL", &container, config, "").success();
        }
        assert!(!container.run(&["ip", "link", "show", "eth0"]).ok, "{without}");
    }
}
