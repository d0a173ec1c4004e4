//! Tests the rules in nf_tables, and compares their expressions with those that `nft` writes.

use std::thread;

use super::*;
use crate::engine;
use crate::testing::{nft, on_a_host, ruleset};

const KEY: &str = "net, if: eth0, id: c1";

/// Makes the attachment's rules those of `addresses`. Returns whether anything had to change.
fn ensure(attachment: &AttachmentId, addresses: &[&str]) -> bool {
    ensure_except(attachment, addresses, &[])
}

fn ensure_except(attachment: &AttachmentId, addresses: &[&str], exclude: &[Cidr]) -> bool {
    let machine = machine();
    let masquerade = Masquerade::new(&machine, Notes::silent()).excluding(exclude);
    masquerade.ensure(attachment, Some(Backend::Nftables), &cidrs(addresses)).unwrap().is_some()
}

fn check(attachment: &AttachmentId, addresses: &[&str]) -> Vec<String> {
    check_except(attachment, addresses, &[])
}

fn check_except(attachment: &AttachmentId, addresses: &[&str], exclude: &[Cidr]) -> Vec<String> {
    let wanted = Wanted { attachment, addresses: cidrs(addresses), exclude: exclude.to_vec() };
    nftables::check(&mut Nft::open().unwrap(), &wanted).unwrap()
}

fn purge(attachment: &AttachmentId) {
    purge_selected(AttachmentFilter::one(attachment));
}

fn gc(valid: &[(&str, &str)]) {
    let valid = valid.iter().copied().collect();
    purge_selected(AttachmentFilter::Garbage { network: "net", valid: &valid });
}

fn purge_selected(filter: AttachmentFilter<'_>) {
    engine::change(&mut Nft::open().unwrap(), |nft, batch| nftables::purge(nft, batch, filter)).unwrap();
}

fn rules() -> Vec<String> {
    let listed = shell("nft list chain inet cni_plugins_masquerade masq_checks");
    listed.lines().filter(|line| line.contains("masquerade comment")).map(|line| line.trim().to_owned()).collect()
}

/// Writes the rules of [`ADDRESSES`] with `nft`, as the Go plugin does.
fn write_with_nft(comment: &str) {
    nft(&format!(
        r#"table inet cni_plugins_masquerade {{
            comment "Masquerading for plugins from github.com/containernetworking/plugins"
            chain masq_checks {{
                comment "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet"
                ip saddr 10.88.0.2 ip daddr != 10.88.0.0/24 masquerade comment "{comment}"
                ip saddr 10.90.0.2 ip daddr != 10.90.0.0/20 masquerade comment "{comment}"
                ip6 saddr fd00:88::2 ip6 daddr != fd00:88::/64 masquerade comment "{comment}"
            }}
            chain postrouting {{
                type nat hook postrouting priority 100;
                ip daddr == 224.0.0.0/4 return
                ip6 daddr == ff00::/8 return
                goto masq_checks
            }}
        }}"#
    ));
}

const ADDRESSES: [&str; 3] = [NET4, "10.90.0.2/20", NET6];

#[test]
fn the_rules_are_those_of_the_shape_in_the_kernels_terms() {
    on_a_host(|| {
        ensure(&attachment("c1", "eth0"), &ADDRESSES);
        let ours = (ruleset(), shell("nft --debug=netlink list ruleset"), shell("nft -j list ruleset"));
        nft("flush ruleset");
        let comment = ours.0.split("comment \"").find(|part| part.contains(KEY)).unwrap();
        write_with_nft(comment.split('"').next().unwrap());
        let theirs = (ruleset(), shell("nft --debug=netlink list ruleset"), shell("nft -j list ruleset"));
        // The heading of a rule ends in its handle and the handle of the rule before it.
        let unnumbered = |text: &str| {
            let heading = |line: &str| line.split(' ').take(3).collect::<Vec<_>>().join(" ");
            let line = |line: &str| if line.starts_with("inet ") { heading(line) } else { line.to_owned() };
            text.lines().map(line).collect::<Vec<_>>()
        };
        assert_eq!(ours.0, theirs.0);
        assert_eq!(unnumbered(&ours.1), unnumbered(&theirs.1));
        assert_eq!(ours.2.matches("\"masquerade\": null").count(), 3, "{}", ours.2);
        assert_eq!(check(&attachment("c1", "eth0"), &ADDRESSES), Vec::<String>::new());
    });
}

#[test]
fn exclusions_are_conditions_of_the_one_rule() {
    on_a_host(|| {
        let (c1, addresses) = (attachment("c1", "eth0"), [NET4, NET6]);
        let most: Vec<String> = (0..32).map(|n| format!("10.{n}.{}.0/22", 4 * n)).collect();
        let most: Vec<&str> = most.iter().map(String::as_str).collect();
        for exclude in [&["10.0.0.0/8", "192.0.2.0/25", "fd00::/8"][..], &["192.0.2.0/25"], &[], &most] {
            let exclude = cidrs(exclude);
            assert!(ensure_except(&c1, &addresses, &exclude), "{exclude:?}");
            assert!(!ensure_except(&c1, &addresses, &exclude), "{exclude:?}: in place");
            assert_eq!(check_except(&c1, &addresses, &exclude), Vec::<String>::new());
            assert_eq!(rules().len(), 2, "{:#?}", rules());
            for excluded in &exclude {
                assert!(rules().concat().contains(&format!("daddr != {excluded} ")), "{excluded}: {:#?}", rules());
            }
        }
        purge(&c1);
        assert_eq!(rules(), Vec::<String>::new());
    });
}

#[test]
fn a_repeat_adds_no_duplicates_and_leaves_other_rules_alone() {
    on_a_host(|| {
        ensure(&attachment("c1", "eth0"), &[NET4, NET6]);
        ensure(&attachment("c1", "eth1"), &["10.88.0.3/24"]);
        let before = rules();
        assert_eq!(before.len(), 3);
        assert!(!ensure(&attachment("c1", "eth0"), &[NET4, NET6]), "in place");
        assert_eq!(rules(), before);
        ensure(&attachment("c1", "eth0"), &["10.88.0.9/24"]);
        assert_eq!(rules().iter().filter(|rule| rule.contains("if: eth0")).count(), 1);
        purge(&attachment("c1", "eth0"));
        assert_eq!((rules().len(), rules()[0].contains("if: eth1")), (1, true));
        purge(&attachment("c1", "eth0"));
        purge(&attachment("c1", "eth1"));
        assert_eq!(rules(), Vec::<String>::new());
    });
}

#[test]
fn a_change_that_is_planned_again_is_still_reported() {
    on_a_host(|| {
        let many: Vec<String> = (10..90).map(|number| format!("10.88.0.{number}/24")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        ensure(&attachment("c1", "eth0"), &many);
        // Writes the index of the chain, which is long now.
        ensure(&attachment("c2", "eth0"), &["10.88.0.3/24"]);
        // Another program removes a rule and appends one, so the index has as many rules as the
        // chain.
        let listed = shell("nft -a list chain inet cni_plugins_masquerade masq_checks");
        let first = listed.lines().find(|line| line.contains("masquerade comment")).unwrap();
        let handle = first.rsplit(' ').next().unwrap();
        nft(&format!("delete rule inet cni_plugins_masquerade masq_checks handle {handle}"));
        nft("add rule inet cni_plugins_masquerade masq_checks ip saddr 10.9.9.9 masquerade comment \"foreign\"");
        assert!(ensure(&attachment("c3", "eth0"), &["10.88.0.4/24"]), "its undo must remove the rule");
        assert_eq!(rules().iter().filter(|rule| rule.contains("id: c3")).count(), 1);
        assert!(!ensure(&attachment("c3", "eth0"), &["10.88.0.4/24"]), "in place");
    });
}

#[test]
fn a_damaged_base_chain_is_repaired_and_a_sound_one_unchanged() {
    on_a_host(|| {
        ensure(&attachment("c1", "eth0"), &[NET4]);
        let postrouting = || shell("nft -a list chain inet cni_plugins_masquerade postrouting");
        let before = postrouting();
        ensure(&attachment("c2", "eth0"), &["10.88.0.3/24"]);
        assert_eq!(postrouting(), before, "handles included");
        nft("flush chain inet cni_plugins_masquerade postrouting");
        let missing = check(&attachment("c1", "eth0"), &[NET4]);
        assert!(missing[0].contains("does not lead to masq_checks"), "{missing:?}");
        ensure(&attachment("c2", "eth0"), &["10.88.0.3/24"]);
        assert_eq!(check(&attachment("c1", "eth0"), &[NET4]), Vec::<String>::new());
        assert!(!check(&attachment("c1", "eth0"), &["10.88.0.9/24"]).is_empty());
        assert!(!check(&attachment("c1", "eth0"), &["10.88.0.2/16"]).is_empty());
    });
}

#[test]
fn a_collection_takes_what_is_not_valid_in_this_network_alone() {
    on_a_host(|| {
        for (container, ifname) in [("c1", "eth0"), ("c1", "eth1"), ("c2", "eth0")] {
            ensure(&attachment(container, ifname), &[NET4, NET6]);
        }
        ensure(&AttachmentId::new("net2", "c2", "eth0"), &[NET4]);
        nft("add rule inet cni_plugins_masquerade masq_checks ip saddr 10.9.9.9 masquerade comment \"foreign\"");
        // A comment that contains the key, but not at its beginning.
        let key = rules().iter().find_map(|rule| Some(rule.split("comment \"").nth(1)?[..33].to_owned())).unwrap();
        nft(&format!(
            "add rule inet cni_plugins_masquerade masq_checks ip saddr 10.9.9.8 masquerade comment \"not {key}\""
        ));
        gc(&[("c1", "eth1")]);
        let left = rules();
        assert_eq!(left.len(), 5, "{left:#?}");
        assert!(!left.iter().any(|rule| rule.contains(", net: net, if: eth0")));
        gc(&[]);
        assert_eq!(rules().len(), 3);
    });
}

#[test]
fn of_fifty_first_ensures_at_once_none_is_lost_and_none_doubled() {
    on_a_host(|| {
        thread::scope(|scope| {
            for number in 0..50 {
                scope.spawn(move || ensure(&attachment(&format!("c{number}"), "eth0"), &[NET4, NET6]));
            }
        });
        assert_eq!(rules().len(), 100);
        assert_eq!(ruleset().matches("goto masq_checks").count(), 1);
        thread::scope(|scope| {
            for number in 0..50 {
                scope.spawn(move || purge(&attachment(&format!("c{number}"), "eth0")));
            }
        });
        assert_eq!(rules(), Vec::<String>::new());
    });
}

#[test]
fn where_there_is_nothing_nothing_is_made() {
    on_a_host(|| {
        purge(&attachment("c1", "eth0"));
        gc(&[]);
        nftables::probe().unwrap();
        assert!(!check(&attachment("c1", "eth0"), &[NET4]).is_empty());
        assert_eq!(ruleset(), "");
    });
}
