//! `ipMasq` as an object: families and destinations that are not masqueraded.

use super::*;
use crate::operator::Operator;

/// The destinations that are not masqueraded: the server's first addresses, and others.
fn exclude() -> Value {
    json!(["192.0.2.9/32", "198.51.100.0/22", "2001:db8::9/128", "fd00:9::/61"])
}

/// Further addresses of the server, which are masqueraded.
const OTHERS: [&str; 2] = ["192.0.2.20", "2001:db8::20"];

fn excluding(keeper: Keeper, node: &Node) -> Value {
    patched(keeper.config(node), json!({"ipMasq": {"exclude": exclude()}}))
}

/// A server that also has [`OTHERS`].
fn two_addresses(node: &Node) -> Container {
    let server = server(node);
    for address in [format!("{}/24", OTHERS[0]), format!("{}/64", OTHERS[1])] {
        server.exec(&["ip", "addr", "add", &address, "dev", "eth0", "nodad"]);
    }
    server
}

/// Asserts which source the server sees of packets to the excluded and to the other addresses.
#[track_caller]
fn assert_excluded(server: &Container, from: &Container, own: &[String], node: &Node) {
    for (position, own) in own.iter().enumerate() {
        let at = |to: &str| seen(&listen(server, to), from, to);
        assert_eq!(&at(OUTSIDE[position]), own, "{}", rules(node));
        assert_eq!(at(OTHERS[position]), HOST[position], "{}", rules(node));
    }
}

#[test]
fn packets_to_an_excluded_destination_keep_their_source() {
    require_both!();
    each(|keeper, node| {
        let server = two_addresses(node);
        let (container, attachment, result) = attach(node, &excluding(keeper, node), 1).remove(0);
        assert_excluded(&server, &container, &own(&result), node);
        attachment.check(&result).success();
        attachment.del_with(&result).success();
        assert!(!rules(node).contains(&container.id), "{keeper:?}\n{}", rules(node));
        assert!(!rules(node).contains("198.51.100.0"), "{keeper:?}\n{}", rules(node));
    });
}

#[test]
fn a_family_that_is_turned_off_is_not_masqueraded() {
    require_both!();
    each(|keeper, node| {
        let server = server(node);
        for (position, keys) in [json!({"ipv4": true, "ipv6": false}), json!({"ipv4": false})].iter().enumerate() {
            let config = patched(keeper.config(node), json!({ "ipMasq": keys }));
            let (container, attachment, result) = attach(node, &config, 1).remove(0);
            let mut expected = own(&result);
            expected[position] = HOST[position].to_owned();
            assert_eq!(seen_outside(&server, &container).to_vec(), expected, "{keeper:?} {keys}\n{}", rules(node));
            attachment.check(&result).success();
            attachment.del_with(&result).success();
        }
    });
}

/// CHECK fails if the rules have other exclusions than the configuration, more or fewer.
#[test]
fn check_compares_the_exclusions() {
    require_both!();
    each(|keeper, node| {
        let config = excluding(keeper, node);
        let plain = patched(keeper.config(node), json!({"ipMasq": {"ipv4": true}}));
        let (_container, attachment, result) = attach(node, &config, 1).remove(0);
        attachment.clone().config(plain.clone()).check(&result).fails_with(101, "");
        let more = patched(config.clone(), json!({"ipMasq": {"exclude": ["203.0.113.0/24"]}}));
        attachment.clone().config(more).check(&result).fails_naming(101, &["203.0.113.0/24"]);
        attachment.del_with(&result).success();
        let (_container, attachment, result) = attach(node, &plain, 1).remove(0);
        attachment.check(&result).success();
        attachment.clone().config(config).check(&result).fails_naming(101, &["198.51.100.0/22"]);
        attachment.del_with(&result).success();
    });
}

/// One container with two interfaces in the network: each has its own exclusions, until its DEL.
#[test]
fn exclusions_of_two_interfaces_are_removed_one_by_one() {
    require_both!();
    each(|keeper, node| {
        let server = two_addresses(node);
        let (container, eth0, result) = attach(node, &excluding(keeper, node), 1).remove(0);
        let keys = json!({"isDefaultGateway": false, "ipMasq": {"exclude": ["203.0.113.0/24", "198.51.100.0/22"]}});
        let second = Attachment::new(node, &container, patched(keeper.config(node), keys)).ifname("eth1");
        let second_result = second.add().success();
        eth0.check(&result).success();
        second.check(&second_result).success();
        second.del_with(&second_result).success();
        assert!(!rules(node).contains("203.0.113.0"), "{keeper:?}\n{}", rules(node));
        eth0.check(&result).success();
        assert_excluded(&server, &container, &own(&result), node);
        eth0.clone().config(patched(keeper.config(node), json!({"cniVersion": "1.1.0"}))).gc(&[]).success();
        assert!(!rules(node).contains("198.51.100.0"), "{keeper:?}\n{}", rules(node));
    });
}

/// Go's plugins do not accept the object, so its network has `true` after the switch.
#[test]
fn go_deletes_rules_with_exclusions() {
    require_both!();
    require!(probe::go_plugins());
    for keeper in shared() {
        let node = keeper.node();
        let (container, attachment, result) = attach(&node, &excluding(*keeper, &node), 1).remove(0);
        if *keeper == Nftables {
            // Debian's build of 1.9.1 fails if iptables is installed and has no such chain.
            without_iptables(&node);
        }
        attachment.config(keeper.config(&node)).by(go_bin_dir()).del_with(&result).success();
        let rules = rules(&node);
        assert!(!rules.contains(&container.id) && !rules.contains("198.51.100.0"), "{keeper:?}\n{rules}");
    }
}

#[test]
fn ptp_knows_the_object_and_a_wrong_prefix_is_refused() {
    require!(probe::nft());
    let node = Node::new();
    let server = two_addresses(&node);
    let base = patched(Nftables.config(&node), json!({"type": "ptp", "isDefaultGateway": null, "bridge": null}));
    let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let base = patched(base, json!({"ipam": {"routes": routes}}));
    let config = patched(base.clone(), json!({"ipMasq": {"exclude": exclude()}}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_excluded(&server, &container, &own(&result), &node);
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    for kind in ["ptp", "bridge"] {
        let config = patched(base.clone(), json!({"type": kind, "ipMasq": {"exclude": ["10.0.0.1/8"]}}));
        let other = node.container();
        Attachment::new(&node, &other, config).add().fails_naming(7, &["10.0.0.1/8", "the network is 10.0.0.0/8"]);
    }
    let config = patched(base, json!({"ipMasq": {"ipv4": null, "exclude": null}}));
    let (container, attachment, result) = attach(&node, &config, 1).remove(0);
    assert_eq!(seen_outside(&server, &container), HOST);
    attachment.del_with(&result).success();
}

#[test]
fn rules_restore_writes_the_exclusions_again() {
    require!(probe::plugin("cnitool"));
    require!(probe::nft());
    let operator = Operator::new();
    let keys = json!({"ipMasqBackend": "nftables", "isDefaultGateway": true, "ipMasq": {"exclude": exclude()}});
    operator.configure(keys, &[]);
    let container = operator.attach();
    let before = operator.node.ruleset();
    assert!(before.contains("198.51.100.0/22"), "{before}");
    operator.node.exec(&["nft", "flush", "chain", "inet", "cni_plugins_masquerade", "masq_checks"]);
    let missing = operator.call(&["inspect"]).run().stdout;
    assert!(missing.contains("has no such rule"), "{missing}");
    operator.done(&["rules", "restore"]);
    assert_eq!(operator.node.ruleset(), before);
    operator.detach(&container);
}
