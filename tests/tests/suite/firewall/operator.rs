//! cnitool's reports on firewall: its configuration, its rules and its leftovers.

use cni_testkit::{probe, require};
use serde_json::json;

use crate::operator::Operator;

#[test]
fn its_configuration_is_judged_as_by_an_add() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let judged = |firewall: serde_json::Value| {
        operator.configure(json!({}), &[firewall]);
        let file = operator.node.dir().join("net.d/10-net1.conflist");
        let outcome = operator.call(&["validate", file.to_str().unwrap()]).run();
        format!("{}{}", outcome.stdout, outcome.stderr)
    };
    assert!(judged(json!({"type": "firewall", "ingressPolicy": "isolated"})).contains("has no errors"));
    assert!(judged(json!({"type": "firewall", "ingressPolicy": "closed"})).contains("unknown ingress policy"));
    assert!(judged(json!({"type": "firewall", "nftablesChain": "filter"})).contains("nftablesChain"));
    // A valid configuration, on a host without a bus.
    let text = judged(json!({"type": "firewall", "backend": "firewalld"}));
    assert!(text.contains("cannot handle an ADD") && text.contains("failed to connect to the system bus"), "{text}");
    assert!(
        judged(json!({"type": "firewall", "backend": "firewalld", "nftablesChain": "inet a b"}))
            .contains("nftablesChain")
    );
    assert!(judged(json!({"type": "firewall", "ingresPolicy": "open"})).contains("unknown key"));
    let egress = |egress: serde_json::Value| judged(json!({"type": "firewall", "egress": egress}));
    assert!(egress(json!({"deny": ["10.0.0.0/8"]})).contains("has no errors"));
    assert!(egress(json!({"denied": ["10.0.0.0/8"]})).contains("unknown key \"denied\" in egress"));
    assert!(egress(json!({"deny": ["10.0.0.1/8"]})).contains("the network is 10.0.0.0/8"));
}

#[test]
fn inspect_shows_what_egress_has_dropped() {
    require!(probe::plugin("cnitool"));
    require!(probe::nft());
    require!(probe::iptables());
    for backend in ["nftables", "iptables"] {
        let operator = Operator::new();
        let egress = json!({"deny": ["10.1.0.1/32"]});
        operator.configure(json!({}), &[json!({"type": "firewall", "backend": backend, "egress": egress})]);
        let container = operator.attach();
        let shown = |packets: u64| {
            let text = operator.done(&["inspect"]);
            let rules = "egress       connections of 10.1.0.2 are checked by the rules of its network";
            let line = format!("{rules}, which dropped {packets} packets  [nft inet cni_firewall cni_egress_");
            assert!(text.contains(&line), "{backend} {text}");
        };
        shown(0);
        container.enter(|| {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
            for _ in 0..3 {
                socket.send_to(b"?", "10.1.0.1:53").unwrap();
            }
        });
        shown(3);
        operator.node.exec(&["nft", "delete table inet cni_firewall"]);
        operator.failed(
            &["inspect"],
            &["! egress       the attachment has no such rule, although its configuration needs one"],
        );
        operator.done(&["rules", "restore"]);
        shown(0);
        operator.detach(&container);
    }
}

#[test]
fn its_rules_are_shown_missed_and_removed_when_left_over() {
    require!(probe::plugin("cnitool"));
    require!(probe::nft());
    require!(probe::iptables());
    for (backend, flush) in
        [("nftables", "nft delete table inet cni_firewall"), ("iptables", "iptables -w -F; iptables -w -X")]
    {
        let operator = Operator::new();
        let plugin = json!({"type": "firewall", "backend": backend, "ingressPolicy": "same-bridge"});
        operator.configure(json!({}), &[plugin]);
        let container = operator.attach();
        let text = operator.done(&["inspect"]);
        assert!(
            text.contains("firewall     packets of 10.1.0.2 are accepted; br0 has ingressPolicy same-bridge  ["),
            "{backend} {text}"
        );
        operator.node.exec(&["sh", "-ec", flush]);
        operator.failed(
            &["inspect"],
            &["! firewall     the attachment has no such rule, although its configuration needs one"],
        );
        operator.detach(&container);
        let lost = operator.attach();
        operator.node.exec(&["sh", "-c", "rm /var/lib/cni/results/net1-*"]);
        let link = operator.node.ports("br0").pop().unwrap();
        operator.node.exec(&["ip", "link", "delete", &link]);
        let seen = operator.json(&["inspect"]);
        let rule = seen["leftOver"].as_array().unwrap().iter().find(|one| one["kind"] == "rule").cloned();
        operator.paste(rule.unwrap_or_else(|| panic!("{backend} {seen:#}"))["command"].as_str().unwrap());
        assert_eq!(operator.done(&["inspect"]), "0 attachments; nothing is left over.\n", "{backend}");
        drop(lost);
    }
}
