//! Tests the nft backend on the real kernel.

use std::cell::RefCell;
use std::rc::Rc;

use super::super::{Mapping, PortMap, Protocol, SetMark};
use super::*;
use crate::Backend;
use crate::nft::raced;
use crate::testing::machine;
use crate::testing::{nft, on_a_host, ruleset};
use cni::rollback::Notes;

fn forwarding(container: &str, ifname: &str, number: u8, port: u16) -> Forwarding {
    let cidr = |text: String| text.parse().unwrap();
    Forwarding {
        attachment: AttachmentId::new("net", container, ifname),
        containers: vec![cidr(format!("10.9.0.{number}/16")), cidr(format!("fd00:9::{number}/64"))],
        mappings: vec![Mapping { protocol: Protocol::Tcp, host_ip: None, host_port: port, container_port: 80 }],
        snat: Snat::Hairpin,
        set_mark: SetMark::Bit(13),
        conditions_v4: Vec::new(),
        conditions_v6: Vec::new(),
        policy: Policy::RefuseIfAlive,
        links: Vec::new(),
    }
}

/// Calls `work` with the port mappings of the calling thread's namespace.
fn with_portmap<T>(work: impl FnOnce(&PortMap<'_>) -> T) -> T {
    work(&PortMap::new(&machine(), Notes::silent()))
}

/// Writes the rules, which must succeed. Returns whether rules were changed.
#[track_caller]
fn changes(wanted: &Forwarding) -> bool {
    let mut changed = None;
    with_portmap(|portmap| portmap.ensure(wanted, Some(Backend::Nftables), &mut changed).unwrap());
    changed.is_some()
}

/// Returns the differences from the rules, of which there must be some.
#[track_caller]
fn differences(wanted: &Forwarding) -> Vec<String> {
    with_portmap(|portmap| portmap.check(wanted, Backend::Nftables).unwrap().unwrap())
}

/// Removes rules, and returns their claims.
#[track_caller]
fn purge(filter: AttachmentFilter<'_>) -> BTreeSet<ClaimedPort> {
    let mut claims = BTreeSet::new();
    with_portmap(|portmap| portmap.purge(filter, &mut claims).unwrap());
    claims
}

#[test]
fn every_verb_is_one_transaction_or_none() {
    on_a_host(|| {
        let mut wanted = forwarding("c", "eth0", 2, 8080);
        let mut observer = Nft::open().unwrap();
        let mut transactions = |work: &dyn Fn()| {
            let before = observer.generation().unwrap().0;
            work();
            observer.generation().unwrap().0 - before
        };
        let del = || drop(purge(AttachmentFilter::for_del(&AttachmentId::new("net", "c", "eth0"), &[])));
        let add = |wanted: Forwarding| {
            move || {
                changes(&wanted);
            }
        };
        assert_eq!(transactions(&del), 0);
        assert_eq!(transactions(&add(wanted.clone())), 1, "both families, the shared chains too");
        assert_eq!(transactions(&add(wanted.clone())), 0, "all is in place");
        wanted.mappings[0].host_port = 9090;
        assert_eq!(transactions(&add(wanted)), 1);
        assert!(!ruleset().contains("8080"));
        assert_eq!(transactions(&|| drop(differences(&forwarding("c", "eth0", 2, 9090)))), 0);
        assert_eq!(transactions(&del), 1);
        assert_eq!(transactions(&del), 0);
    });
}

#[test]
fn thirty_concurrent_adds_leave_thirty_mappings_once_each() {
    on_a_host(|| {
        let all = |what: &(dyn Fn(u8) + Sync)| {
            std::thread::scope(|scope| (1..=30).for_each(|number| drop(scope.spawn(move || what(number)))));
        };
        let wanted = |number: u8| forwarding(&format!("c{number}"), "eth0", number, 8000 + u16::from(number));
        all(&|number| assert!(changes(&wanted(number))));
        for number in 1..=30 {
            assert_eq!(differences(&wanted(number)), Vec::<String>::new());
        }
        assert_eq!(ruleset().matches("jump hostports_all").count(), 4, "{}", ruleset());
        assert_eq!(ruleset().matches("dnat to").count(), 60);
        // Concurrent ADDs of the same attachment write its rules once.
        all(&|_| {
            changes(&wanted(1));
        });
        assert_eq!(ruleset().matches("dnat to").count(), 60);
        all(&|number| drop(purge(AttachmentFilter::for_del(&wanted(number).attachment, &[]))));
        assert!(!ruleset().contains("comment \"c"), "{}", ruleset());
    });
}

#[test]
fn first_adds_that_start_together_make_what_is_shared_once() {
    on_a_host(|| {
        for round in 0..20 {
            let start = std::sync::Barrier::new(8);
            std::thread::scope(|scope| {
                for number in 1..=8_u8 {
                    let (start, wanted) =
                        (&start, forwarding(&format!("c{number}"), "eth0", number, 8000 + u16::from(number)));
                    scope.spawn(move || {
                        start.wait();
                        changes(&wanted)
                    });
                }
            });
            assert_eq!(ruleset().matches("jump hostports_all").count(), 4, "round {round}: {}", ruleset());
            nft("flush ruleset");
        }
    });
}

#[test]
fn a_batch_for_an_older_ruleset_is_refused() {
    on_a_host(|| {
        let mut socket = Nft::open().unwrap();
        let table = shape::table(Family::V4);
        for (is_outdated, is_empty) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut batch = Batch::new();
            batch.only_at(socket.wait_for_generation().unwrap());
            if is_outdated {
                nft("add table ip x");
                nft("delete table ip x");
            }
            if !is_empty {
                batch.ensure_table(table, None);
            }
            let done = socket.commit(batch);
            assert_eq!(done.as_ref().is_err_and(raced), is_outdated, "{done:?}");
            assert_eq!(done.is_ok(), !is_outdated, "{done:?}");
        }
    });
}

#[test]
fn concurrent_adds_of_one_port_all_see_each_other() {
    on_a_host(|| {
        std::thread::scope(|scope| {
            for number in 1..=20_u8 {
                scope.spawn(move || changes(&forwarding(&format!("c{number}"), "eth0", number, 8080)));
            }
        });
        // Whether the other containers are alive is unknown, so all rules stay, and each ADD has a
        // remark about each earlier one.
        assert_eq!(ruleset().matches("dnat to").count(), 40);
        let (machine, lines) = (machine(), Rc::new(RefCell::new(0)));
        let counter = Rc::clone(&lines);
        let portmap = PortMap::new(&machine, Notes::new(move |_| *counter.borrow_mut() += 1));
        let late = forwarding("late", "eth0", 99, 8080);
        portmap.ensure(&late, Some(Backend::Nftables), &mut None).unwrap();
        assert_eq!(*lines.borrow(), 40);
    });
}

#[test]
fn rules_that_have_lost_their_tags_go_by_their_address() {
    on_a_host(|| {
        let (one, other) = (forwarding("c", "eth0", 2, 8080), forwarding("c", "eth1", 3, 8081));
        assert!(changes(&one) && changes(&other));
        let listing = ruleset();
        nft(&format!("flush ruleset\n{listing}"));
        let addresses = one.addresses();
        assert_eq!(differences(&one), Vec::<String>::new());
        assert_eq!(purge(AttachmentFilter::for_del(&one.attachment, &addresses)).len(), 2);
        assert!(!ruleset().contains("8080") && ruleset().contains("8081"), "{}", ruleset());
        // Without a known address, all rules of the container are removed, as by Go.
        assert_eq!(purge(AttachmentFilter::for_del(&one.attachment, &[])).len(), 2);
        assert!(!ruleset().contains("comment \"c\""), "{}", ruleset());
    });
}

#[test]
fn a_long_container_id_works() {
    on_a_host(|| {
        for len in [128, 129, 200, 300] {
            let mut wanted = forwarding(&"x".repeat(len), "eth0", 2, 8080);
            let valid = ValidAttachments::from_iter([("x".repeat(len), "eth0")]);
            let none = ValidAttachments::default();
            wanted.policy = Policy::Ignore;
            assert!(changes(&wanted));
            assert_eq!(differences(&wanted), Vec::<String>::new(), "{len}");
            assert_eq!(purge(AttachmentFilter::Garbage { network: "net", valid: &valid }).len(), 0);
            assert_eq!(purge(AttachmentFilter::Garbage { network: "ne", valid: &none }).len(), 0);
            assert_eq!(purge(AttachmentFilter::Garbage { network: "net", valid: &none }).len(), 2);
            assert!(!ruleset().contains("xxx"), "{}", ruleset());
        }
    });
}

#[test]
fn a_base_chain_with_another_hook_is_an_error_and_unchanged() {
    on_a_host(|| {
        nft("table ip cni_hostport { chain prerouting { type filter hook prerouting priority 0; }; }");
        let before = ruleset();
        let wanted = forwarding("c", "eth0", 2, 1);
        let refusal = with_portmap(|portmap| portmap.ensure(&wanted, Some(Backend::Nftables), &mut None).unwrap_err());
        let Refusal::Failed(error) = refusal else { panic!("{refusal:?}") };
        assert!(error.to_string().starts_with("failed to use nft chain ip cni_hostport prerouting"), "{error}");
        assert_eq!(ruleset(), before);
    });
}

#[test]
fn undo_keeps_the_rules_of_other_attachments() {
    on_a_host(|| {
        assert!(changes(&forwarding("c", "eth1", 3, 9090)));
        // The rule that Go's plugin writes for another interface, which has no IPv4 address.
        nft("add rule ip6 cni_hostport hostports tcp dport 7070 dnat to [fd00:9::4]:80 comment \"c\"");
        let before = ruleset();
        let mut wanted = forwarding("c", "eth0", 2, 8080);
        wanted.containers.truncate(1);
        assert!(changes(&wanted));
        assert!(ruleset().contains("8080"));
        with_portmap(|portmap| portmap.undo(&wanted, Backend::Nftables).unwrap());
        assert_eq!(ruleset(), before);
    });
}

#[test]
fn the_input_of_nft_is_a_rule_for_each_mapping() {
    let claim = ClaimedPort {
        protocol: Protocol::Udp,
        host_ip: "fd00::1".parse().ok(),
        host_port: 53,
        container: "[fd00::2]:5353".parse().unwrap(),
    };
    let conditions = ["ct".to_owned(), "state new".to_owned()];
    assert_eq!(
        program_text(Family::V6, &conditions, &[claim], "c1"),
        "add rule ip6 cni_hostport hostports ct state new ip6 daddr fd00::1 udp dport 53 dnat to [fd00::2]:5353 \
         comment \"c1\"\n"
    );
}
