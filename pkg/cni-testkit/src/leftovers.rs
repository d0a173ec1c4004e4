//! Finds leftovers on a node at the end of a test: links, reservations, firewall rules.
//!
//! Some things stay by design, because they do not belong to one container: bridges without ports,
//! the empty base chains of the firewall, and the rules that all host ports and all forwarded
//! packets share. Everything else must be removed by the last DEL.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Node;

/// Returns a line for each thing that is left. Waits up to 10 s for links to vanish: the kernel
/// removes a namespace and its links some time after it was closed, one after the other for all
/// running tests.
pub(crate) fn of(node: &Node) -> Vec<String> {
    let deadline = Instant::now() + crate::patience(Duration::from_secs(10)).min(Duration::from_secs(60));
    loop {
        let left: Vec<String> = [links(node), stored(node), nft(node), legacy(node)].concat();
        if left.is_empty() || Instant::now() > deadline {
            return left;
        }
        sleep(Duration::from_millis(50));
    }
}

/// Returns the links that are left on the host.
fn links(node: &Node) -> Vec<String> {
    let expected = node.inner.expected.lock().unwrap().clone();
    let links = node.json(&["ip", "-j", "-d", "link", "show"]);
    let mut left = Vec::new();
    for link in links.as_array().into_iter().flatten() {
        let name = link["ifname"].as_str().unwrap_or_default();
        let is_expected = link["linkinfo"]["info_kind"] == "bridge" || expected.iter().any(|e| e == name);
        if !is_expected {
            left.push(format!("link {name} (master {}, alias {})", link["master"], link["ifalias"]));
        }
    }
    left
}

/// Returns the reservations and cached results that are left.
fn stored(node: &Node) -> Vec<String> {
    let mut left = Vec::new();
    for network in subfolders(&node.data_dir()) {
        left.extend(reservations(&node.data_dir().join(&network)).into_iter().map(|r| format!("in {network}: {r:?}")));
    }
    let defaults = node.enter(|| {
        let networks = Path::new("/var/lib/cni/networks");
        let mut found: Vec<String> = Vec::new();
        for network in subfolders(networks) {
            let held = reservations(&networks.join(&network));
            found.extend(held.into_iter().map(|r| format!("in {}/{network}: {r:?}", networks.display())));
        }
        let results = fs::read_dir("/var/lib/cni/results").into_iter().flatten().flatten();
        let results = results.filter(|entry| entry.file_name() != ".cni");
        found.extend(results.map(|entry| format!("cached result {}", entry.path().display())));
        found
    });
    left.extend(defaults);
    left
}

/// Returns the folders of networks in a folder of host-local.
fn subfolders(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter(|entry| entry.path().is_dir()).filter_map(|entry| entry.file_name().into_string().ok());
    // Only a cache of these plugins, which may be deleted at any time.
    names.filter(|name| name != ".cni").collect()
}

/// Returns the reservations in the folder of a network, each as its address and content.
pub(crate) fn reservations(dir: &Path) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == "lock" || name.starts_with("last_reserved_ip.") || entry.path().is_dir() {
            continue;
        }
        let content = fs::read(entry.path()).unwrap_or_default();
        found.push((name, String::from_utf8_lossy(&content).into_owned()));
    }
    found.sort();
    found
}

/// Returns the rules, chains and elements of sets in nf_tables that belong to a container. The
/// rules of `iptables-nft` are in nf_tables too.
fn nft(node: &Node) -> Vec<String> {
    const BASE: [&str; 5] = ["PREROUTING", "POSTROUTING", "INPUT", "FORWARD", "OUTPUT"];
    if !crate::probe::has_tool("nft") {
        return Vec::new();
    }
    let ruleset = node.json(&["nft", "-j", "list", "ruleset"]);
    let mut left = Vec::new();
    for object in ruleset["nftables"].as_array().into_iter().flatten() {
        if let Some(rule) = object.get("rule")
            && !is_portmaps_shared_rule(rule)
            && !is_masquerades_shared_rule(rule)
            && !is_firewalls_shared_rule(rule)
        {
            left.push(format!("nft rule {rule}"));
        }
        if let Some(chain) = object.get("chain")
            && !BASE.contains(&chain["name"].as_str().unwrap_or_default())
            && !is_portmaps_shared_chain(chain)
            && !is_firewalls_shared_chain(chain)
            && !(chain["table"] == MASQUERADE
                && ["postrouting", "masq_checks"].iter().any(|name| chain["name"] == *name))
        {
            left.push(format!("nft chain {chain}"));
        }
        if let Some(set) = object.get("set")
            && set["name"].as_str().is_some_and(|name| name.starts_with("cni_pods"))
            && set["elem"].as_array().is_some_and(|elements| !elements.is_empty())
        {
            left.push(format!("nft set {set}"));
        }
    }
    left
}

/// The nf_tables table of masquerading.
const MASQUERADE: &str = "cni_plugins_masquerade";

/// Whether a rule is the one that leads to the chain with the containers' rules.
fn is_masquerades_shared_rule(rule: &Value) -> bool {
    rule["table"] == MASQUERADE && rule["chain"] == "postrouting"
}

/// Whether a rule is shared by all host ports. The first ADD creates it and it stays, as with Go's
/// plugin.
fn is_portmaps_shared_rule(rule: &Value) -> bool {
    if rule["table"] == "cni_hostport" {
        // The rules of a container have its ID as the comment.
        return rule.get("comment").is_none();
    }
    let in_chain = ["CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"].iter().any(|name| rule["chain"] == *name);
    in_chain || rule["expr"].to_string().contains("\"target\":\"CNI-HOSTPORT-")
}

/// Whether a chain is shared by all host ports.
fn is_portmaps_shared_chain(chain: &Value) -> bool {
    chain["table"] == "cni_hostport" || chain["name"].as_str().is_some_and(|name| name.starts_with("CNI-HOSTPORT-"))
}

/// The iptables chains of the plugin firewall that all containers share.
const FIREWALL: [&str; 5] =
    ["CNI-FORWARD", "CNI-ADMIN", "CNI-FW-OWNERS", "CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2"];
/// The same in nf_tables.
const FIREWALL_NFT: [&str; 4] = ["cni_forward", "cni_owners", "cni_isolation_1", "cni_isolation_2"];

/// Whether a chain of the plugin firewall is shared by all containers.
fn is_firewalls_shared_chain(chain: &Value) -> bool {
    let name = chain["name"].as_str().unwrap_or_default();
    // The chain of a network with egress rules has a hash in its name.
    let is_of_network = name.strip_prefix("cni_egress_").is_some_and(|end| end != "owners");
    (chain["table"] == "cni_firewall" && !is_of_network) || FIREWALL.contains(&name) || FIREWALL_NFT.contains(&name)
}

/// Whether a rule leads to a chain of the plugin firewall that all containers share, or ends one.
fn is_firewalls_shared_rule(rule: &Value) -> bool {
    let (chain, exprs) = (rule["chain"].as_str().unwrap_or_default(), rule["expr"].to_string());
    let leads = FIREWALL.iter().chain(&FIREWALL_NFT).any(|to| exprs.contains(&format!("\"target\":\"{to}\"")));
    let of_bridge = exprs.contains("ifname");
    let of_egress = match chain {
        "egress_forward" | "egress_input" => true,
        "cni_egress" => exprs.contains("\"return\""),
        _ => false,
    };
    (leads && !of_bridge)
        || of_egress
        || chain == "cni_forward"
        || (FIREWALL.contains(&chain) && exprs.contains("\"return\""))
}

/// Returns the rules of containers in legacy iptables. Its tables exist only if it has been used.
fn legacy(node: &Node) -> Vec<String> {
    let mut left = Vec::new();
    for (names, save) in [("ip_tables_names", "iptables-legacy-save"), ("ip6_tables_names", "ip6tables-legacy-save")] {
        if !node.proc_net(names).trim().is_empty() && crate::probe::has_tool(save) {
            let rules = node.exec(&[save]);
            let leads = |line: &str| FIREWALL.iter().any(|to| line.ends_with(&format!("-j {to}")));
            let of_firewall = |line: &str| {
                !line.contains(" -i ") && (leads(line) || line.contains("CNI-ISOLATION") && line.ends_with("-j RETURN"))
            };
            let is_shared =
                |line: &str| (line.contains(" CNI-HOSTPORT-") && !line.contains(" -j CNI-DN-")) || of_firewall(line);
            let rules = rules.lines().filter(|line| line.starts_with("-A") && !is_shared(line));
            left.extend(rules.map(|line| format!("{save}: {line}")));
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_and_the_last_address_are_not_reservations() {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in [("lock", ""), ("last_reserved_ip.0", "10.0.0.2"), ("10.0.0.2", "c\r\neth0")] {
            fs::write(dir.path().join(name), content).unwrap();
        }
        assert_eq!(reservations(dir.path()), [("10.0.0.2".to_owned(), "c\r\neth0".to_owned())]);
    }

    #[test]
    fn a_node_with_a_stray_link_does_not_pass() {
        let node = Node::new();
        node.exec(&["ip", "link", "add", "stray", "type", "veth", "peer", "name", "other"]);
        assert_eq!(links(&node).len(), 2, "{:?}", links(&node));
        node.exec(&["ip", "link", "del", "stray"]);
    }
}
