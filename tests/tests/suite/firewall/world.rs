//! Shared helpers: configurations of firewall after bridge, and the rules in table filter.

pub(crate) use crate::portmap::world::{BACKENDS, Backend, IPTABLES, Pod, World, each, go};
use conformance::{VERSION, patched};
use serde_json::{Value, json};

/// firewall's configuration in `net1`.
pub(crate) fn config(world: &World, patch: Value) -> Value {
    named(world, "net1", patch)
}

/// The same in another network.
pub(crate) fn named(world: &World, network: &str, patch: Value) -> Value {
    patched(json!({"cniVersion": VERSION, "name": network, "type": "firewall", "backend": world.backend.key()}), patch)
}

/// The rules of both families in their order, without counters: table `filter`, or all of
/// nf_tables.
pub(crate) fn rules(world: &World) -> Vec<String> {
    let text = match world.backend {
        Backend::Nftables => world.node.ruleset(),
        backend => {
            let multi = format!("/usr/sbin/{}", backend.multi());
            let save = |family: &str| {
                let names = if family == "iptables" { "ip_tables_names" } else { "ip6_tables_names" };
                // The save program of iptables-legacy creates the table that it looks for.
                let is_absent = backend == Backend::IptablesLegacy && !world.node.proc_net(names).contains("filter");
                if is_absent {
                    return String::new();
                }
                world.node.exec(&[&multi, &format!("{family}-save"), "-t", "filter"])
            };
            save("iptables") + &save("ip6tables")
        }
    };
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.trim().split(" [").next().unwrap_or_default().to_owned()).collect()
}

/// Returns the rules of iptables in this chain.
pub(crate) fn chain(world: &World, name: &str) -> Vec<String> {
    let prefix = format!("-A {name} ");
    rules(world).into_iter().filter_map(|line| line.strip_prefix(&prefix).map(str::to_owned)).collect()
}

/// Returns the number of rules, or set elements, that contain one of these addresses.
pub(crate) fn naming(world: &World, pod: &Pod<'_>) -> usize {
    let addresses = [0, 1].map(|family| pod.address(family).to_string());
    let names = |line: &String| line.split([' ', ',', '/']).any(|word| addresses.iter().any(|address| address == word));
    rules(world).into_iter().filter(names).count()
}

/// Runs a script with the backend's programs.
#[track_caller]
pub(crate) fn shell(world: &World, script: &str) {
    let path = format!("PATH={}", world.backend.path(&world.node));
    world.node.exec(&["env", &path, "sh", "-ec", script]);
}

/// Removes the rules of isolated bridges, which the Go plugin never does.
pub(crate) fn end_isolation(world: &World) {
    shell(
        world,
        "for i in iptables ip6tables; do for n in 1 2; do $i -w -F CNI-ISOLATION-STAGE-$n 2>/dev/null || :; done; done",
    );
}
