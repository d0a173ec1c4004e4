//! Tests the rules in iptables, also together with rules that Go's bridge plugin has written.

use std::thread;

use super::*;

const NONE: [&str; 0] = [];

fn c1() -> AttachmentId {
    attachment("c1", "eth0")
}

fn chain() -> String {
    iptables::chain_name("net", "c1")
}

#[test]
fn the_rules_are_those_that_go_makes_but_for_our_own_line() {
    with_each(|rig| {
        let Some(go) = Go::new("c1", "eth0", &[NET4, NET6]) else { return };
        go.add(rig);
        let theirs = rig.saved();
        assert_eq!(theirs.len(), 8, "{theirs:#?}");
        assert_eq!(rig.missing(&c1(), &[NET4, NET6]), NONE, "what Go made passes");
        rig.purge(&c1(), &["10.88.0.2", "fd00:88::2"]);
        assert_eq!(rig.saved(), NONE);
        rig.ensure(&c1(), &[NET4, NET6]);
        assert_eq!(rig.saved_as_go(), theirs);
        let own: Vec<String> = rig.saved().into_iter().filter(|line| !theirs.contains(line)).collect();
        let tag = |address: &str, network: &str| {
            format!("-A {} -s {address} -d {network} -m comment --comment \"cni:net/c1/eth0\"", chain())
        };
        assert_eq!(own, [tag("10.88.0.2/32", "10.88.0.0/24"), tag("fd00:88::2/128", "fd00:88::/64")]);
        assert_eq!(rig.missing(&c1(), &[NET4, NET6]), NONE);
    });
}

#[test]
fn go_removes_what_we_made() {
    with_each(|rig| {
        let Some(go) = Go::new("c1", "eth0", &[NET4, NET6]) else { return };
        rig.ensure(&c1(), &[NET4, NET6]);
        go.create_interface();
        assert!(go.run(rig, "DEL"));
        assert_eq!(rig.saved(), NONE);
    });
}

#[test]
fn we_remove_what_go_made_with_and_without_its_addresses() {
    with_each(|rig| {
        for addresses in [&["10.88.0.2", "fd00:88::2"][..], &[]] {
            let Some(go) = Go::new("c1", "eth0", &[NET4, NET6]) else { return };
            go.add(rig);
            assert!(!rig.saved().is_empty());
            rig.purge(&c1(), addresses);
            assert_eq!(rig.saved(), NONE, "{addresses:?}");
            shell("ip link del br0");
        }
    });
}

#[test]
fn the_form_of_older_releases_is_understood() {
    with_each(|rig| {
        rig.iptables(&format!("-t nat -N {}", chain()));
        let comment = "-m comment --comment 'name: \"net\" id: \"c1\"'";
        for rule in ["-d 10.88.0.0/24 -j ACCEPT", "! -d 224.0.0.0/4 -j MASQUERADE"] {
            let (matches, target) = rule.split_once(" -j").unwrap();
            rig.iptables(&format!("-t nat -A {} {matches} {comment} -j {target}", chain()));
        }
        rig.iptables(&format!("-t nat -A POSTROUTING -s 10.88.0.2/24 {comment} -j {}", chain()));
        assert_eq!(rig.missing(&c1(), &[NET4]), NONE);
        rig.purge(&c1(), &["10.77.0.2"]);
        assert_eq!(rig.saved().len(), 4, "another attachment's address");
        rig.purge(&c1(), &["10.88.0.2"]);
        assert_eq!(rig.saved(), NONE);
    });
}

/// The writer of rules.
enum Writer {
    Go,
    ThisModule,
}

/// Writes the rules of two interfaces of one container on one network. Returns Go's plugin for each
/// interface; `None` if it is not installed.
fn add_two_interfaces(rig: &Rig, writer: Writer) -> Option<[Go; 2]> {
    let go = [Go::new("c1", "eth0", &[NET4])?, Go::new("c1", "eth1", &["10.88.0.3/24"])?];
    match writer {
        Writer::Go => go.iter().for_each(|go| go.add(rig)),
        Writer::ThisModule => {
            rig.ensure(&c1(), &[NET4]);
            rig.ensure(&attachment("c1", "eth1"), &["10.88.0.3/24"]);
        }
    }
    Some(go)
}

#[test]
fn two_interfaces_on_one_network_go_one_after_the_other() {
    with_each(|rig| {
        let (eth0, eth1) = (("eth0", NET4), ("eth1", "10.88.0.3/24"));
        for (writer, first, known_addresses, second) in [
            (Writer::ThisModule, eth0, &[][..], eth1),
            (Writer::ThisModule, eth1, &[], eth0),
            (Writer::ThisModule, eth0, &["10.88.0.2"], eth1),
            (Writer::Go, eth0, &["10.88.0.2"], eth1),
            (Writer::Go, eth1, &["10.88.0.3"], eth0),
        ] {
            if add_two_interfaces(rig, writer).is_none() {
                return;
            }
            assert_eq!(rig.saved_as_go().len(), 5, "two jumps, the chain, its two rules: {:#?}", rig.saved());
            let address = first.1.split('/').next().unwrap();
            rig.purge(&attachment("c1", first.0), known_addresses);
            assert_eq!(rig.missing(&attachment("c1", second.0), &[second.1]), NONE, "{first:?} took it away");
            assert!(!rig.saved().iter().any(|line| line.contains(address)), "{:#?}", rig.saved());
            rig.purge(&attachment("c1", second.0), &[]);
            assert_eq!(rig.saved(), NONE);
            shell("ip link del br0 2>/dev/null || true");
        }
    });
}

#[test]
fn an_interface_without_rules_takes_none_of_anothers() {
    with_each(|rig| {
        rig.ensure(&c1(), &[NET4]);
        rig.purge(&attachment("c1", "eth1"), &[]);
        rig.purge(&attachment("c1", "eth1"), &["10.88.0.3"]);
        assert_eq!(rig.missing(&c1(), &[NET4]), NONE);
        // Also not with the address of the other interface.
        rig.purge(&attachment("c1", "eth1"), &["10.88.0.2"]);
        assert_eq!(rig.missing(&c1(), &[NET4]), NONE);
    });
}

#[test]
fn purge_with_own_rules_removes_none_of_gos() {
    with_each(|rig| {
        let Some(go) = Go::new("c1", "eth1", &["10.88.0.3/24"]) else { return };
        go.add(rig);
        rig.ensure(&c1(), &[NET4]);
        rig.purge(&c1(), &[]);
        assert_eq!(rig.missing(&attachment("c1", "eth1"), &["10.88.0.3/24"]), NONE, "{:#?}", rig.saved());
        rig.purge(&attachment("c1", "eth1"), &[]);
        assert_eq!(rig.saved(), NONE);
    });
}

#[test]
fn undo_removes_what_ensure_wrote_and_none_of_gos_rules() {
    with_each(|rig| {
        // An older release of Go wrote the network as the source of another interface's jump.
        let comment = "-m comment --comment 'name: \"net\" id: \"c1\"'";
        rig.iptables(&format!("-t nat -N {}", chain()));
        rig.iptables(&format!("-t nat -A {} -d 10.88.0.0/24 {comment} -j ACCEPT", chain()));
        rig.iptables(&format!("-t nat -A {} ! -d 224.0.0.0/4 {comment} -j MASQUERADE", chain()));
        rig.iptables(&format!("-t nat -A POSTROUTING -s 10.88.0.0/24 {comment} -j {}", chain()));
        let before = rig.saved();
        rig.masquerade(|masquerade| {
            assert_eq!(masquerade.ensure(&c1(), None, &cidrs(&[NET4])).unwrap(), Some(Backend::Iptables));
            assert_ne!(rig.saved(), before);
            assert_eq!(masquerade.ensure(&c1(), None, &cidrs(&[NET4])).unwrap(), None, "in place");
            masquerade.undo(&c1(), None).unwrap();
        });
        assert_eq!(rig.saved(), before);
    });
}

#[test]
fn deleting_an_interface_removes_only_its_own_rules() {
    with_each(|rig| {
        let eth1 = attachment("c1", "eth1");
        rig.ensure(&c1(), &[NET4]);
        rig.ensure(&eth1, &["10.99.0.2/24"]);
        rig.iptables(&format!(
            "-t nat -D POSTROUTING -s 10.99.0.2 -m comment --comment 'name: \"net\" id: \"c1\"' -j {}",
            chain()
        ));
        rig.purge(&c1(), &[]);
        let saved = rig.saved();
        assert!(!saved.iter().any(|line| line.contains("10.88")), "{saved:#?}");
        assert!(saved.iter().any(|line| line.contains("-d 10.99.0.0/24") && line.contains("ACCEPT")), "{saved:#?}");
        rig.ensure(&eth1, &["10.99.0.2/24"]);
        assert_eq!(rig.missing(&eth1, &["10.99.0.2/24"]), NONE);
    });
}

#[test]
fn after_go_has_flushed_the_chain_of_two_the_rest_still_goes() {
    with_each(|rig| {
        let Some([go, _other]) = add_two_interfaces(rig, Writer::ThisModule) else { return };
        go.create_interface();
        assert!(!go.run(rig, "DEL"), "a known limit of Go's: its DEL of one fails, and has emptied the chain of both");
        assert!(!rig.missing(&attachment("c1", "eth1"), &["10.88.0.3/24"]).is_empty());
        rig.purge(&attachment("c1", "eth1"), &[]);
        assert_eq!(rig.saved(), NONE);
    });
}

#[test]
fn two_networks_of_one_container_do_not_touch_each_other() {
    with_each(|rig| {
        rig.ensure(&c1(), &[NET4]);
        rig.ensure(&AttachmentId::new("net2", "c1", "eth1"), &["10.99.0.2/24"]);
        rig.purge(&c1(), &[]);
        assert_eq!(rig.missing(&AttachmentId::new("net2", "c1", "eth1"), &["10.99.0.2/24"]), NONE);
        assert!(!rig.saved().iter().any(|line| line.contains("10.88")));
    });
}

#[test]
fn networks_with_one_hash_do_not_touch_each_other() {
    with_each(|rig| {
        // Go joins both names without a separator between them.
        let (one, other) = (AttachmentId::new("ab", "c", "eth0"), AttachmentId::new("a", "bc", "eth0"));
        assert_eq!(iptables::chain_name("ab", "c"), iptables::chain_name("a", "bc"));
        rig.ensure(&one, &[NET4]);
        rig.ensure(&other, &["10.99.0.2/24"]);
        // The jump of an address without a tag, as Go writes it.
        let theirs = format!(
            "POSTROUTING -s 10.77.0.2 -m comment --comment 'name: \"a\" id: \"bc\"' -j {}",
            iptables::chain_name("a", "bc")
        );
        rig.iptables(&format!("-t nat -A {theirs}"));
        rig.purge(&one, &["10.88.0.2"]);
        rig.purge(&one, &[]);
        assert_eq!(rig.missing(&other, &["10.99.0.2/24"]), NONE, "{:#?}", rig.saved());
        rig.iptables(&format!("-t nat -D {theirs}"));
        rig.purge(&other, &[]);
        assert_eq!(rig.saved(), NONE);
    });
}

#[test]
fn a_repeat_changes_nothing_and_a_new_address_replaces_the_old() {
    with_each(|rig| {
        rig.ensure(&c1(), &[NET4]);
        let once = rig.saved();
        rig.ensure(&c1(), &[NET4]);
        assert_eq!(rig.saved(), once);
        rig.ensure(&c1(), &["10.99.0.7/16"]);
        assert_eq!(rig.missing(&c1(), &["10.99.0.7/16"]), NONE);
        assert!(!rig.saved().iter().any(|line| line.contains("10.88.0.")), "{:#?}", rig.saved());
        rig.ensure(&c1(), &["10.99.0.7/24"]);
        assert_eq!(rig.missing(&c1(), &["10.99.0.7/24"]), NONE);
        assert!(!rig.saved().iter().any(|line| line.contains("/16")), "{:#?}", rig.saved());
        rig.ensure(&c1(), &[NET4, "10.99.0.7/16"]);
        let saved = rig.saved();
        let at = |word: &str| saved.iter().rposition(|line| line.contains(word)).unwrap();
        assert!(at("-j ACCEPT") < at("-j MASQUERADE"), "{saved:#?}");
        rig.purge(&c1(), &[]);
        assert_eq!(rig.saved(), NONE);
    });
}

/// Masquerades `addresses` except to `exclude`, and returns all rules.
fn excluding(rig: &Rig, exclude: &[&str], addresses: &[&str]) -> Vec<String> {
    let machine = machine();
    let masquerade = with_folders(&machine, Notes::silent(), rig.folders()).excluding(&cidrs(exclude));
    masquerade.ensure(&c1(), None, &cidrs(addresses)).unwrap();
    assert_eq!(masquerade.check(&c1(), &cidrs(addresses)).unwrap(), NONE, "{:#?}", rig.saved());
    rig.saved()
}

#[test]
fn exclusions_follow_the_configuration() {
    with_each(|rig| {
        rig.ensure(&c1(), &[NET4, NET6]);
        let plain = rig.saved();
        let saved = excluding(rig, &["10.0.0.0/8", "192.0.2.0/25", "fd00::/8"], &[NET4, NET6]);
        assert_eq!(saved.len(), plain.len() + 3, "{saved:#?}");
        assert_eq!(excluding(rig, &["10.0.0.0/8", "192.0.2.0/25", "fd00::/8"], &[NET4, NET6]), saved, "a repeat");
        let at = |word: &str| saved.iter().rposition(|line| line.contains(word)).unwrap();
        assert!(at("192.0.2.0/25") < at("! -d 224.0.0.0/4") && at("-d fd00::/8") < at("! -d ff00::/8"), "{saved:#?}");
        let fewer = excluding(rig, &["192.0.2.0/25"], &[NET4, NET6]);
        assert!(fewer.len() == plain.len() + 1 && fewer.iter().any(|line| line.contains("192.0.2.0/25")), "{fewer:#?}");
        let moved = excluding(rig, &["192.0.2.0/25"], &["10.99.0.7/16", NET6]);
        assert!(!moved.iter().any(|line| line.contains("10.88.0.")), "{moved:#?}");
        rig.ensure(&c1(), &["10.99.0.7/16", NET6]);
        assert!(!rig.saved().iter().any(|line| line.contains("192.0.2.0")), "{:#?}", rig.saved());
        excluding(rig, &["10.0.0.0/8", "fd00::/8"], &[NET4, NET6]);
        rig.gc(&[("c2", "eth0")]);
        assert_eq!(rig.saved(), NONE);
    });
}

#[test]
fn duplicate_jumps_of_go_are_removed() {
    with_each(|rig| {
        rig.ensure(&c1(), &[NET4]);
        let once = rig.saved();
        let jump = format!("-s 10.88.0.2 -m comment --comment 'name: \"net\" id: \"c1\"' -j {}", chain());
        rig.iptables(&format!("-t nat -A POSTROUTING {jump}"));
        rig.iptables(&format!("-t nat -I POSTROUTING {jump}"));
        rig.ensure(&c1(), &[NET4]);
        assert_eq!(rig.saved(), once);
        rig.iptables(&format!("-t nat -A POSTROUTING {jump}"));
        rig.ensure(&c1(), &["10.88.0.9/24"]);
        assert!(!rig.saved().iter().any(|line| line.contains("10.88.0.2/32")), "{:#?}", rig.saved());
        rig.ensure(&c1(), &[NET4]);
        rig.iptables(&format!("-t nat -A POSTROUTING {jump}"));
        rig.purge(&c1(), &[]);
        assert_eq!(rig.saved(), NONE);
    });
}

#[test]
fn missing_rules_are_reported_and_restored() {
    with_each(|rig| {
        rig.ensure(&c1(), &[NET4]);
        let comment = "-m comment --comment 'name: \"net\" id: \"c1\"'";
        for (rule, expected) in [
            (format!("POSTROUTING -s 10.88.0.2 {comment} -j {}", chain()), "sends 10.88.0.2 to CNI-"),
            (format!("{} -d 10.88.0.0/24 {comment} -j ACCEPT", chain()), "-j ACCEPT"),
            (format!("{} ! -d 224.0.0.0/4 {comment} -j MASQUERADE", chain()), "-j MASQUERADE"),
        ] {
            rig.iptables(&format!("-t nat -D {rule}"));
            let missing = rig.missing(&c1(), &[NET4]);
            assert!(missing.len() == 1 && missing[0].contains(expected), "{missing:?}");
            rig.ensure(&c1(), &[NET4]);
            assert_eq!(rig.missing(&c1(), &[NET4]), NONE);
        }
        assert!(!rig.missing(&c1(), &["10.88.0.9/24"]).is_empty());
        assert!(!rig.missing(&attachment("c2", "eth0"), &[NET4]).is_empty());
    });
}

#[test]
fn a_collection_takes_what_is_not_valid_in_this_network_alone() {
    with_each(|rig| {
        let Some(go) = Go::new("g1", "eth0", &["10.88.0.20/24"]) else { return };
        let Some(gone) = Go::new("g2", "eth0", &["10.88.0.21/24"]) else { return };
        go.add(rig);
        gone.add(rig);
        rig.ensure(&c1(), &[NET4]);
        rig.ensure(&attachment("c1", "eth1"), &["10.88.0.3/24"]);
        rig.ensure(&attachment("c2", "eth0"), &["10.88.0.4/24", NET6]);
        rig.ensure(&AttachmentId::new("net2", "c2", "eth0"), &["10.99.0.2/24"]);
        rig.iptables("-t nat -N CNI-0123456789abcdef01234567");
        rig.iptables("-t nat -A POSTROUTING -s 10.7.7.7 -j CNI-0123456789abcdef01234567");
        rig.gc(&[("c1", "eth1"), ("g1", "eth9")]);
        let saved = rig.saved();
        let jumps: Vec<&str> = saved
            .iter()
            .filter_map(|line| line.strip_prefix("-A POSTROUTING -s "))
            .map(|line| line.split('/').next().unwrap())
            .collect();
        assert_eq!(jumps, ["10.88.0.20", "10.88.0.3", "10.99.0.2", "10.7.7.7"], "{saved:#?}");
        assert_eq!(rig.missing(&attachment("c1", "eth1"), &["10.88.0.3/24"]), NONE);
        assert!(!saved.iter().any(|line| line.contains("cni:net/c1/eth0")));
        rig.gc(&[]);
        assert_eq!(
            rig.saved().iter().filter(|line| line.starts_with(":CNI")).count(),
            2,
            "another network's, a stranger's"
        );
    });
}

#[test]
fn of_fifty_first_ensures_at_once_none_is_lost_and_none_doubled() {
    with_each(|rig| {
        let crowd = cni_testkit::crowd(50);
        let all = |work: &(dyn Fn(&AttachmentId, &str) + Sync)| {
            thread::scope(|scope| {
                for number in 0..crowd {
                    scope.spawn(move || {
                        work(&attachment(&format!("c{number}"), "eth0"), &format!("10.88.1.{number}/16"))
                    });
                }
            });
        };
        all(&|attachment, address| rig.ensure(attachment, &[address]));
        let saved = rig.saved();
        assert_eq!(saved.iter().filter(|line| line.starts_with("-A POSTROUTING")).count(), crowd);
        assert_eq!(saved.len(), crowd * 5);
        all(&|attachment, _| rig.purge(attachment, &[]));
        assert_eq!(rig.saved(), NONE);
    });
}

#[test]
fn programs_are_started_only_where_something_is_wanted_or_found() {
    with_each(|rig| {
        let legacy = rig.variant == Some(Variant::Legacy);
        let purge_nothing = || rig.programs_of(|| rig.purge(&c1(), &[]));
        assert_eq!(purge_nothing(), NONE, "no table yet");
        assert_eq!(rig.programs_of(|| rig.gc(&[])), NONE);
        let (reads, writes, reads_and_writes) = if legacy {
            (vec!["iptables-save"], vec!["iptables-restore"], vec!["iptables-save", "iptables-restore"])
        } else {
            (vec![], vec![], vec![])
        };
        assert_eq!(rig.programs_of(|| rig.ensure(&c1(), &[NET4])), writes);
        assert_eq!(rig.programs_of(|| rig.ensure(&c1(), &[NET4])), reads, "again");
        assert_eq!(rig.programs_of(|| drop(rig.missing(&c1(), &[NET4]))), reads, "CHECK");
        let second = rig.programs_of(|| rig.ensure(&attachment("c2", "eth0"), &["10.88.0.3/24"]));
        assert_eq!(second, reads_and_writes, "beside another");
        assert_eq!(rig.programs_of(|| rig.purge(&c1(), &[])), reads_and_writes, "DEL");
        assert_eq!(purge_nothing(), reads, "DEL again");
        let dual = rig.programs_of(|| rig.ensure(&c1(), &[NET4, NET6]));
        assert_eq!(dual.len(), if legacy { 3 } else { 0 }, "{dual:?}");
        assert_eq!(rig.programs_of(|| rig.masquerade(|masquerade| masquerade.probe(None).unwrap())), NONE, "STATUS");
    });
}
