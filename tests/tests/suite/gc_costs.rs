//! GC of a network with many attachments: its requests to the kernel do not grow faster than the
//! attachments, and it holds the lock of iptables only while it changes rules.

use std::fmt::Write as _;

use cni_testkit::trace::{self, Act, Hit, Plan, Traced};
use cni_testkit::{Node, probe, require};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// Rules that a plugin writes.
#[derive(Clone, Copy, Debug)]
enum Rules {
    Portmap,
    Firewall,
    Masquerade,
    Spoof,
}

const IN_IPTABLES: [Rules; 3] = [Rules::Portmap, Rules::Firewall, Rules::Masquerade];

impl Rules {
    fn plugin(self) -> &'static str {
        match self {
            Rules::Portmap => "portmap",
            Rules::Firewall => "firewall",
            Rules::Masquerade | Rules::Spoof => "bridge",
        }
    }

    /// Writes the rules of this many attachments of `net1`: containers `c0`, `c1`, ...
    fn write(self, node: &Node, count: usize) {
        if let Rules::Spoof = self {
            return write_spoof_rules(node, count);
        }
        let (mut chains, mut rules) = (String::new(), String::new());
        for i in 0..count {
            let (address, name) =
                (format!("10.1.{}.{}", i / 250, i % 250 + 2), format!("name: \\\"net1\\\" id: \\\"c{i}\\\""));
            let alias = format!("-m comment --comment cni:net1/c{i}/eth0");
            let _ = match self {
                Rules::Portmap => {
                    let (chain, port) = (format!("CNI-DN-{i:021x}"), 8000 + i);
                    let _ = writeln!(chains, ":{chain} - [0:0]");
                    writeln!(
                        rules,
                        "-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment \"dnat {name}\" -m multiport --dports {port} -j {chain}\n\
                         -A {chain} {alias}\n\
                         -A {chain} -p tcp -m tcp --dport {port} -j DNAT --to-destination {address}:80"
                    )
                }
                Rules::Firewall => writeln!(
                    rules,
                    "-A CNI-FORWARD -d {address} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
                     -A CNI-FORWARD -s {address} -j ACCEPT\n\
                     -A CNI-FW-OWNERS -s {address} {alias}"
                ),
                Rules::Masquerade => {
                    let chain = format!("CNI-{i:024x}");
                    let _ = writeln!(chains, ":{chain} - [0:0]");
                    writeln!(
                        rules,
                        "-A POSTROUTING -s {address} -m comment --comment \"{name}\" -j {chain}\n\
                         -A {chain} -d 10.1.0.0/16 -m comment --comment \"{name}\" -j ACCEPT\n\
                         -A {chain} ! -d 224.0.0.0/4 -m comment --comment \"{name}\" -j MASQUERADE\n\
                         -A {chain} -s {address} -d 10.1.0.0/16 {alias}"
                    )
                }
                Rules::Spoof => unreachable!("these are not in iptables"),
            };
        }
        let shared = match self {
            Rules::Portmap => "*nat\n:CNI-HOSTPORT-DNAT - [0:0]",
            Rules::Firewall => "*filter\n:CNI-FORWARD - [0:0]\n:CNI-FW-OWNERS - [0:0]",
            Rules::Masquerade | Rules::Spoof => "*nat",
        };
        let file = node.file("rules", format!("{shared}\n{chains}{rules}COMMIT\n"));
        node.exec(&["/usr/sbin/xtables-nft-multi", "iptables-restore", "--noflush", file.to_str().unwrap()]);
    }

    /// Returns how many rules name a container.
    fn left(self, node: &Node) -> usize {
        node.ruleset().lines().filter(|line| line.contains("10.1.") || line.contains("macspoofchk-c")).count()
    }
}

/// Writes the rules of macspoofchk for as many containers as Go does, without a tag, for interfaces
/// that do not exist.
fn write_spoof_rules(node: &Node, count: usize) {
    let mut rules =
        "table bridge nat {\n chain PREROUTING { type filter hook prerouting priority dstnat; }\n".to_owned();
    let (mut chains, mut jumps) = (String::new(), String::new());
    for i in 0..count {
        let (chain, comment) = (format!("cni-br-iface-c{i}-eth0"), format!("comment \"macspoofchk-c{i}-eth0\""));
        let _ = writeln!(
            chains,
            " chain {chain}-mac {{ ether saddr 02:00:00:00:00:01 return {comment}; drop {comment}; }}\n\
             chain {chain} {{ jump {chain}-mac {comment}; }}"
        );
        let _ = writeln!(jumps, "add rule bridge nat PREROUTING iifname \"veth{i}\" jump {chain} {comment}");
    }
    let _ = write!(rules, "{chains}}}\n{jumps}");
    let file = node.file("rules", rules);
    node.exec(&["nft", "-f", file.to_str().unwrap()]);
}

/// Runs GC with the first `valid` containers as the valid ones.
fn gc(node: &Node, rules: Rules, valid: usize) -> Traced {
    let attachments: Vec<Value> =
        (0..valid).map(|i| json!({"containerID": format!("c{i}"), "ifname": "eth0"})).collect();
    let config = json!({"cniVersion": "1.1.0", "name": "net1", "type": rules.plugin(), "bridge": "br0",
        "ipMasq": true, "ipMasqBackend": "iptables", "backend": "iptables", "cni.dev/valid-attachments": attachments});
    let config = if let Rules::Masquerade = rules { config } else { without_keys_of_bridge(config) };
    let never = Plan { victim: rules.plugin().to_owned(), at: u64::MAX, act: Act::Signal(Signal::SIGKILL) };
    let traced = node.plugin(rules.plugin()).command("GC").config(&config).traced(&never);
    traced.outcome.success();
    traced
}

/// Returns the configuration without the keys that only bridge knows.
fn without_keys_of_bridge(mut config: Value) -> Value {
    for key in ["bridge", "ipMasq", "ipMasqBackend"] {
        config.as_object_mut().unwrap().remove(key);
    }
    config
}

fn requests(hits: &[Hit]) -> usize {
    hits.iter().filter(|hit| hit.call == "sendto" || hit.call == "sendmsg").count()
}

/// Returns the calls from the first time that the lock of iptables is taken; none if it never is.
fn under_lock(traced: &Traced) -> &[Hit] {
    let start = traced.all.iter().position(|hit| hit.call == "flock").unwrap_or(traced.all.len());
    &traced.all[start..]
}

#[test]
fn gc_sends_one_request_for_each_container_at_most() {
    require!(trace::supported());
    require!(probe::tool("xtables-nft-multi"));
    require!(probe::tool("nft"));
    for rules in [&IN_IPTABLES[..], &[Rules::Spoof]].concat() {
        let costs = [50, 200].map(|count| {
            let node = Node::new();
            rules.write(&node, count);
            let before = rules.left(&node);
            let with_all_valid = requests(&gc(&node, rules, count).all);
            assert_eq!(rules.left(&node), before, "{rules:?}: rules of valid attachments");
            let with_none_valid = requests(&gc(&node, rules, 0).all);
            assert_eq!(rules.left(&node), 0, "{rules:?}: rules of removed attachments");
            [with_all_valid, with_none_valid]
        });
        for (few, many) in costs[0].into_iter().zip(costs[1]) {
            assert!(many <= few + 150, "{rules:?}: {few} requests for 50 attachments, {many} for 200");
        }
    }
}

#[test]
fn gc_reads_the_rules_of_iptables_without_the_lock() {
    require!(trace::supported());
    require!(probe::tool("xtables-nft-multi"));
    for rules in IN_IPTABLES {
        let node = Node::new();
        rules.write(&node, 50);
        let traced = gc(&node, rules, 50);
        assert!(under_lock(&traced).is_empty(), "{rules:?}: the lock is taken to remove nothing");
        let traced = gc(&node, rules, 25);
        let requests = requests(under_lock(&traced));
        assert!((1..20).contains(&requests), "{rules:?}: {requests} requests under the lock");
        gc(&node, rules, 0);
    }
}
