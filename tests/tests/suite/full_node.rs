//! bridge with ipMasq and firewall on a node with the rules of many containers: a call reads what
//! belongs to its own attachment, and finds what the Go plugins have changed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{Attachment, Container, Node, bin_dir, go_bin_dir, probe, require};
use conformance::{bridge, patched};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// More containers than a chain without an index has.
const MANY: usize = 100;

const BACKENDS: [&str; 2] = ["iptables", "nftables"];

/// A list of bridge with ipMasq and firewall.
struct List<'n> {
    node: &'n Node,
    plugins: Vec<Value>,
}

impl<'n> List<'n> {
    fn new(node: &'n Node, backend: &str) -> List<'n> {
        let patch = json!({"isGateway": true, "ipMasq": true, "ipMasqBackend": backend});
        let bridge = patched(bridge(node, &["10.1.0.0/24"]), patch);
        let firewall = json!({"cniVersion": bridge["cniVersion"], "name": bridge["name"],
                              "type": "firewall", "backend": backend});
        List { node, plugins: vec![bridge, firewall] }
    }

    fn attachment(&self, dir: &Path, container: &Container, plugin: &Value) -> Attachment<'n> {
        Attachment::new(self.node, container, plugin.clone()).by(dir)
    }

    /// Attaches a new container.
    fn add(&self, dir: &Path) -> (Container, Value) {
        let container = self.node.container();
        let mut result = None;
        for plugin in &self.plugins {
            let attachment = self.attachment(dir, &container, plugin);
            result = Some(attachment.invocation("ADD", result.as_ref()).run().success());
        }
        (container, result.unwrap())
    }

    fn check(&self, dir: &Path, (container, result): &(Container, Value)) {
        for plugin in &self.plugins {
            self.attachment(dir, container, plugin).invocation("CHECK", Some(result)).run().success();
        }
    }

    fn del(&self, dir: &Path, (container, result): &(Container, Value)) {
        for plugin in self.plugins.iter().rev() {
            let outcome = self.attachment(dir, container, plugin).invocation("DEL", Some(result)).run();
            // Go's bridge also wants to remove rules of iptables, and fails where there are none.
            if dir == bin_dir() || plugin["ipMasqBackend"] != "nftables" {
                outcome.success();
            }
        }
    }

    /// Removes the rules of all attachments that a plugin's records name.
    fn gc(&self) {
        for plugin in &self.plugins {
            let plugin = patched(plugin.clone(), json!({"cniVersion": "1.1.0"}));
            Attachment::new(self.node, &self.node.container(), plugin).gc(&[]).success();
        }
    }

    /// Returns the numbers of datagrams that the plugins receive in ADD, CHECK and DEL.
    fn received(&self) -> Vec<(String, usize)> {
        let (container, mut result, mut counts) = (self.node.container(), None, Vec::new());
        for verb in ["ADD", "CHECK", "DEL"] {
            for plugin in &self.plugins {
                let victim = plugin["type"].as_str().unwrap().to_owned();
                let call = self.attachment(&bin_dir(), &container, plugin).invocation(verb, result.as_ref());
                let plan = Plan { victim: victim.clone(), at: u64::MAX, act: Act::Signal(Signal::SIGKILL) };
                let traced = call.traced(&plan);
                let printed = traced.outcome.success();
                if verb == "ADD" {
                    result = Some(printed);
                }
                let count = traced.all.iter().filter(|hit| hit.call == "recvfrom").count();
                counts.push((format!("{verb} of {victim}"), count));
            }
        }
        counts
    }
}

/// Writes the rules of this many containers of other networks, and lets attachments come and go, so
/// that the chains have an index.
fn fill(node: &Node, list: &List<'_>, backend: &str, count: usize) {
    let first = list.add(&bin_dir());
    let (mut nft, mut nat, mut filter) = (String::new(), String::from("*nat\n"), String::from("*filter\n"));
    for i in 0..count {
        let address = format!("10.77.{}.{}", i / 250, i % 250 + 2);
        let _ = writeln!(
            nft,
            "add rule inet cni_plugins_masquerade masq_checks ip saddr {address} ip daddr != 10.77.0.0/16 \
             masquerade comment \"{i:016x}-{i:016x}, net: far, if: eth0, id: c{i}\"\n\
             add rule inet cni_firewall cni_owners ip saddr {address} comment \"cni:far/c{i}/eth0\"\n\
             add element inet cni_firewall cni_pods4 {{ {address} }}"
        );
        let (chain, name) = (format!("CNI-{i:024x}"), format!("name: \\\"far\\\" id: \\\"c{i}\\\""));
        let _ = writeln!(
            nat,
            ":{chain} - [0:0]\n\
             -A POSTROUTING -s {address} -m comment --comment \"{name}\" -j {chain}\n\
             -A {chain} ! -d 224.0.0.0/4 -m comment --comment \"{name}\" -j MASQUERADE"
        );
        let _ = writeln!(
            filter,
            "-A CNI-FORWARD -d {address} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
             -A CNI-FORWARD -s {address} -j ACCEPT\n\
             -A CNI-FW-OWNERS -s {address} -m comment --comment cni:far/c{i}/eth0"
        );
    }
    if backend == "nftables" {
        node.exec(&["nft", "-f", node.file("rules", nft).to_str().unwrap()]);
    } else {
        let file = node.file("rules", format!("{nat}COMMIT\n{filter}COMMIT\n"));
        node.exec(&["xtables-nft-multi", "iptables-restore", "-n", file.to_str().unwrap()]);
    }
    list.del(&bin_dir(), &first);
    let second = list.add(&bin_dir());
    list.del(&bin_dir(), &second);
    let indexes = node.exec(&["sh", "-c", "ls /run/cni | grep ^rules-"]);
    assert_eq!(indexes.lines().count(), if backend == "nftables" { 2 } else { 3 }, "{indexes}");
}

/// Does [`fill`] for the rules of `macspoofchk`.
fn fill_spoof_checks(node: &Node, list: &List<'_>, count: usize) {
    let first = list.add(&bin_dir());
    let mut nft = String::new();
    for i in 0..count {
        let (chain, id) = (format!("cni-br-iface-c{i}-eth0"), format!("macspoofchk-c{i}-eth0"));
        let _ = writeln!(
            nft,
            "add chain bridge nat {chain}\n\
             add rule bridge nat PREROUTING iifname \"veth{i:08x}\" jump {chain} comment \"{id}\""
        );
    }
    node.exec(&["nft", "-f", node.file("spoof-rules", nft).to_str().unwrap()]);
    list.del(&bin_dir(), &first);
    let second = list.add(&bin_dir());
    list.del(&bin_dir(), &second);
}

/// Removes all rules: the node must have none of containers at its end.
fn clear(node: &Node) {
    node.exec(&["nft", "flush", "ruleset"]);
}

/// Returns all rules, without numbers.
fn rules(node: &Node) -> String {
    node.ruleset().lines().map(|line| line.split(" counter").next().unwrap_or_default().to_owned() + "\n").collect()
}

#[test]
fn calls_read_as_much_on_a_full_node_as_on_an_empty_one() {
    require!(trace::supported());
    for backend in BACKENDS {
        let node = Node::new();
        let mut list = List::new(&node, backend);
        list.plugins[0]["macspoofchk"] = true.into();
        list.received();
        let empty = list.received();
        fill(&node, &list, backend, 1000);
        fill_spoof_checks(&node, &list, 1000);
        for ((what, empty), (_, full)) in empty.into_iter().zip(list.received()) {
            // A list of 1,000 rules is 10 datagrams or more.
            assert!(full <= empty + 6, "{backend}, {what}: {full} datagrams, {empty} on the empty node");
        }
        clear(&node);
    }
}

/// The numbers of rules are the same as before, but one attachment is gone and another is there.
#[test]
fn attachments_that_go_exchanged_on_a_full_node_are_found() {
    require!(probe::go_nftables());
    let (ours, theirs): (PathBuf, PathBuf) = (bin_dir(), go_bin_dir());
    for backend in BACKENDS {
        let node = Node::new();
        let mut list = List::new(&node, backend);
        fill(&node, &list, backend, MANY);
        if backend == "nftables" {
            // Go's firewall does not have this backend.
            list.plugins.pop();
        }
        let before = rules(&node);
        for goes_first in [true, false] {
            let (gone, kept) = (list.add(&ours), list.add(&ours));
            let new = if goes_first {
                list.del(&theirs, &gone);
                list.add(&theirs)
            } else {
                let new = list.add(&theirs);
                list.del(&theirs, &gone);
                new
            };
            list.check(&ours, &new);
            list.check(&ours, &kept);
            list.check(&theirs, &kept);
            let late = list.add(&ours);
            list.check(&ours, &late);
            for attachment in [&new, &kept, &late] {
                list.del(&ours, attachment);
            }
            // Go's DEL leaves this plugin's records.
            list.gc();
            assert_eq!(rules(&node), before, "{backend}, {goes_first}");
        }
        clear(&node);
    }
}

/// As after a flush of the chains: no rule that the index names exists.
#[test]
fn a_flush_on_a_full_node_is_found_and_repaired() {
    for backend in BACKENDS {
        let node = Node::new();
        let list = List::new(&node, backend);
        fill(&node, &list, backend, MANY);
        let old = list.add(&bin_dir());
        let flush: &[&str] = if backend == "nftables" {
            &["inet cni_plugins_masquerade masq_checks"]
        } else {
            &["ip nat POSTROUTING", "ip filter CNI-FORWARD", "ip filter CNI-FW-OWNERS"]
        };
        for chain in flush {
            node.exec(&["nft", &format!("flush chain {chain}")]);
        }
        for plugin in &list.plugins[..flush.len().min(2)] {
            let attachment = list.attachment(&bin_dir(), &old.0, plugin);
            attachment.invocation("CHECK", Some(&old.1)).run().fails_naming(101, &[]);
        }
        let new = list.add(&bin_dir());
        list.check(&bin_dir(), &new);
        list.del(&bin_dir(), &new);
        list.del(&bin_dir(), &old);
        assert!(!rules(&node).contains("10.1.0."), "{}", rules(&node));
        clear(&node);
    }
}
