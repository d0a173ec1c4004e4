//! Tests the spoof rules on the real kernel, in new network namespaces, also with Go's bridge
//! plugin.

mod refusals;

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;
use crate::testing::new_netns;
use crate::testing::{GoBridge, nft, on_a_host, ruleset, shell};

const MAC: Mac = Mac([2, 0, 0, 0, 0, 0x0a]);
/// The ruleset after the last attachment is deleted.
const SHARED: &str = "table bridge nat {
	chain PREROUTING {
		type filter hook prerouting priority dstnat; policy accept;
	}
}
";

fn attachment(container: &str) -> AttachmentId {
    AttachmentId::new("net", container, "eth0")
}

fn ensure(container: &str) {
    SpoofCheck::open().unwrap().ensure(&attachment(container), "veth0", MAC).unwrap();
}

fn purge(container: &str) {
    assert_eq!(SpoofCheck::open().unwrap().purge(&attachment(container)).unwrap(), None);
}

/// Returns the owner of each ID that has rules.
fn list(spoof: &mut SpoofCheck) -> Vec<SpoofOwner> {
    IdRules::list(&mut spoof.nft).unwrap().iter().map(IdRules::owner).collect()
}

fn differences(container: &str) -> Vec<String> {
    SpoofCheck::open().unwrap().check(container, "eth0", "veth0", MAC).unwrap()
}

#[test]
fn the_rules_are_those_that_go_makes() {
    on_a_host(|| {
        let Some(go) = GoBridge::new("c1") else { return };
        go.run("ADD");
        let (host_veth, mac) = GoBridge::guarded();
        let theirs = (ruleset(), shell("nft --debug=netlink list ruleset"));
        assert_eq!(SpoofCheck::open().unwrap().check("c1", "eth0", &host_veth, mac).unwrap(), Vec::<String>::new());
        nft("flush ruleset");
        SpoofCheck::open().unwrap().ensure(&attachment("c1"), &host_veth, mac).unwrap();
        let ours = (ruleset(), shell("nft --debug=netlink list ruleset"));
        assert_eq!(ours.0, theirs.0);
        // The expressions in the kernel are the same too; only the jump has a tag in addition.
        let tag = "\\x80\\x0fcni:net/c1/eth0";
        assert_eq!(ours.1.matches(tag).count(), 1, "{}", ours.1);
        assert_eq!(ours.1.replace(tag, ""), theirs.1);
    });
}

#[test]
fn go_removes_what_we_made() {
    on_a_host(|| {
        // Go cannot create rules for an ID over 116 bytes, but can remove those of this module.
        for id in ["c1".to_owned(), "c".repeat(111), "c".repeat(112), "c".repeat(PLAIN_ID_MAX - "-eth0".len())] {
            let Some(go) = GoBridge::new(&id) else { return };
            ensure(&id);
            assert!(ruleset().contains(&id));
            go.run("DEL");
            assert_eq!(ruleset(), SHARED, "{} bytes", id.len());
        }
    });
}

/// Deletes the interfaces that the spoof rules guard.
fn delete_guarded() {
    let host = Netlink::open().unwrap();
    for owner in list(&mut SpoofCheck::open().unwrap()) {
        if let Some(link) = host.find_link(&owner.host_veth.unwrap()).unwrap() {
            host.purge_link(link.index).unwrap();
        }
    }
}

#[test]
fn we_remove_what_go_made_also_twice() {
    on_a_host(|| {
        let Some(go) = GoBridge::new("c1") else { return };
        go.run("ADD");
        let made = ruleset();
        let kept = SpoofCheck::open().unwrap().purge(&attachment("c1")).unwrap();
        assert!(kept.is_some_and(|owner| owner.tag.is_of_network("net").is_none()), "its interface exists");
        assert_eq!(ruleset(), made);
        delete_guarded();
        purge("c1");
        assert_eq!(ruleset(), SHARED);
        purge("c1");
        assert_eq!(ruleset(), SHARED);
        // A second Go ADD puts a second jump beside the first.
        for again in [GoBridge::new("c2").unwrap(), GoBridge::new("c2").unwrap()] {
            again.run("ADD");
        }
        assert_eq!(ruleset().matches("iifname").count(), 2);
        delete_guarded();
        delete_guarded();
        purge("c2");
        assert_eq!(ruleset(), SHARED);
    });
}

#[test]
fn ensuring_again_replaces_and_never_doubles() {
    on_a_host(|| {
        ensure("c1");
        let once = ruleset();
        assert_eq!((once.matches("iifname").count(), once.matches("comment").count()), (1, 4), "{once}");
        ensure("c1");
        assert_eq!(ruleset(), once);
        // Another interface and MAC replace the old ones.
        let mut spoof = SpoofCheck::open().unwrap();
        spoof.ensure(&attachment("c1"), "veth1", Mac([2, 0, 0, 0, 0, 0x0b])).unwrap();
        assert_eq!(ruleset(), once.replace("veth0", "veth1").replace("00:0a", "00:0b"));
        // A second jump, as Go leaves it, is removed.
        nft(
            "insert rule bridge nat PREROUTING iifname veth9 jump cni-br-iface-c1-eth0 comment \"macspoofchk-c1-eth0\"",
        );
        ensure("c1");
        assert_eq!(ruleset(), once);
        ensure("c2");
        purge("c1");
        assert_eq!(ruleset(), once.replace("c1", "c2"));
    });
}

#[test]
fn every_verb_is_one_transaction_or_none() {
    on_a_host(|| {
        let mut spoof = SpoofCheck::open().unwrap();
        let mut transactions = |work: &dyn Fn(&mut SpoofCheck)| {
            let before = spoof.nft.generation().unwrap().0;
            work(&mut spoof);
            spoof.nft.generation().unwrap().0.wrapping_sub(before)
        };
        let ensure = |spoof: &mut SpoofCheck| spoof.ensure(&attachment("c1"), "veth0", MAC).unwrap();
        let purge = |spoof: &mut SpoofCheck| drop(spoof.purge(&attachment("c1")).unwrap());
        assert_eq!(transactions(&purge), 0, "nothing to remove, no table");
        assert_eq!(transactions(&|spoof| spoof.probe().unwrap()), 0);
        assert_eq!(transactions(&ensure), 1, "on a clean host");
        assert_eq!(transactions(&ensure), 1, "again");
        assert_eq!(transactions(&purge), 1);
        assert_eq!(transactions(&purge), 0, "again");
        assert_eq!(transactions(&ensure), 1, "on a host that had some");
        assert_eq!(transactions(&|spoof| drop(list(spoof))), 0);
    });
}

#[test]
fn while_the_rules_are_replaced_the_old_ones_hold() {
    on_a_host(|| {
        ensure("c1");
        let stop = AtomicBool::new(false);
        let gaps = thread::scope(|scope| {
            scope.spawn(|| {
                let mut spoof = SpoofCheck::open().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    spoof.ensure(&attachment("c1"), "veth0", MAC).unwrap();
                }
            });
            let mut nft = Nft::open().unwrap();
            let gaps = (0..2_000).filter(|_| nft.rules(TABLE, PREROUTING).unwrap().len() != 1).count();
            stop.store(true, Ordering::Relaxed);
            gaps
        });
        assert_eq!(gaps, 0);
    });
}

#[test]
fn every_half_done_state_is_completed_and_removed() {
    let pieces = [
        "add rule bridge nat PREROUTING iifname \"veth0\" jump cni-br-iface-c1-eth0 comment \"macspoofchk-c1-eth0\"",
        "add rule bridge nat PREROUTING iifname \"veth0\" drop comment \"macspoofchk-c1-eth0\"",
        "add rule bridge nat PREROUTING iifname \"veth0\" jump cni-br-iface-c1-eth0",
        "add rule bridge nat cni-br-iface-c1-eth0 jump cni-br-iface-c1-eth0-mac",
        "add rule bridge nat cni-br-iface-c1-eth0-mac drop",
    ];
    on_a_host(|| {
        ensure("c1");
        let whole = ruleset();
        let base = "flush ruleset; add table bridge nat; add chain bridge nat PREROUTING { type filter hook prerouting priority -300; }";
        for chains in
            ["", "cni-br-iface-c1-eth0", "cni-br-iface-c1-eth0-mac", "cni-br-iface-c1-eth0 cni-br-iface-c1-eth0-mac"]
        {
            let made =
                chains.split_whitespace().map(|chain| format!("; add chain bridge nat {chain}")).collect::<String>();
            for piece in ["", pieces[0], pieces[1], pieces[2], pieces[3], pieces[4]] {
                let state = format!("{base}{made}\n{piece}");
                // nft refuses a rule without its chain or its jump's target.
                let possible = Command::new("nft").arg(&state).output().unwrap().status.success();
                if !possible {
                    continue;
                }
                purge("c1");
                assert_eq!(ruleset(), SHARED, "{state}");
                nft(&state);
                ensure("c1");
                // Without the ID's chains, `ensure` does not read PREROUTING, and so does not
                // remove the `drop` rule with the comment.
                if !state.contains("drop comment") || !chains.is_empty() {
                    assert_eq!(ruleset(), whole, "{state}");
                }
                purge("c1");
                assert_eq!(ruleset(), SHARED, "{state}");
            }
        }
        nft("flush ruleset");
        purge("c1");
        assert_eq!(ruleset(), "", "removing makes nothing");
    });
}

#[test]
fn a_foreign_jump_to_our_chain_is_named_and_the_rest_removed() {
    on_a_host(|| {
        ensure("c1");
        nft("add chain bridge nat theirs\nadd rule bridge nat theirs jump cni-br-iface-c1-eth0-mac");
        let error = SpoofCheck::open().unwrap().purge(&attachment("c1")).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("failed to delete nft chain bridge nat cni-br-iface-c1-eth0-mac: "), "{text}");
        assert_eq!(error.errno(), Some(libc::EBUSY));
        assert!(!ruleset().contains("iifname") && !ruleset().contains("chain cni-br-iface-c1-eth0 "), "{}", ruleset());
        nft("flush chain bridge nat theirs");
        purge("c1");
        nft("delete chain bridge nat theirs");
        assert_eq!(ruleset(), SHARED);
    });
}

#[test]
fn check_names_each_sabotage() {
    on_a_host(|| {
        let chain = "bridge nat cni-br-iface-c1-eth0";
        let (jump, mac) = ("from veth0 to cni-br-iface-c1-eth0".to_owned(), format!("{chain}-mac is missing or has"));
        let cases = [
            ("flush chain bridge nat PREROUTING", &jump),
            (
                "flush chain bridge nat PREROUTING; add rule bridge nat PREROUTING iifname veth1 jump cni-br-iface-c1-eth0",
                &jump,
            ),
            (&format!("flush chain {chain}"), &format!("{chain} is missing or has")),
            (&format!("insert rule {chain} accept"), &format!("{chain} is missing or has")),
            (&format!("insert rule {chain}-mac accept"), &mac),
            (&format!("flush chain {chain}-mac"), &mac),
            (
                &format!(
                    "flush chain {chain}-mac; add rule {chain}-mac drop; add rule {chain}-mac ether saddr 02:00:00:00:00:0a return"
                ),
                &mac,
            ),
            (
                &format!(
                    "flush chain {chain}-mac; add rule {chain}-mac ether saddr 02:00:00:00:00:0b return; add rule {chain}-mac drop"
                ),
                &"pins MAC 02:00:00:00:00:0b, but eth0 has MAC 02:00:00:00:00:0a".to_owned(),
            ),
            (
                &format!(
                    "flush chain {chain}-mac; add rule {chain}-mac ether saddr != 02:00:00:00:00:0a return; add rule {chain}-mac drop"
                ),
                &mac,
            ),
            (
                &format!(
                    "flush chain {chain}-mac; add rule {chain}-mac ether daddr 02:00:00:00:00:0a return; add rule {chain}-mac drop"
                ),
                &mac,
            ),
        ];
        for (sabotage, named) in cases {
            ensure("c1");
            assert_eq!(differences("c1"), Vec::<String>::new());
            nft(sabotage);
            let found = differences("c1");
            assert!(found.len() == 1 && found[0].contains(named.as_str()), "{sabotage}: {found:?}");
        }
        purge("c1");
        assert_eq!(differences("c1").len(), 3);
        nft("flush ruleset");
        assert_eq!(differences("c1").len(), 4);
    });
}

#[test]
fn long_ids_are_ensured_checked_listed_and_removed() {
    on_a_host(|| {
        let mut spoof = SpoofCheck::open().unwrap();
        for id_len in [115, 116, 117, 128, PLAIN_ID_MAX, PLAIN_ID_MAX + 1, 400] {
            let container = "c".repeat(id_len - "-eth0".len());
            let long_network = AttachmentId::new("n".repeat(200), &container, "eth0");
            spoof.ensure(&long_network, "veth0", MAC).unwrap();
            assert_eq!(differences(&container), Vec::<String>::new());
            let listed = shell("nft -j list ruleset").contains(&Id::new(&container, "eth0").comment());
            assert!(listed, "nft can list what it could not write");
            let owners = list(&mut spoof);
            assert_eq!(owners.len(), 1, "{owners:?}");
            assert_eq!(owners[0].id, Id::new(&container, "eth0"));
            assert_ne!(owners[0].id, Id::new(&format!("{container}c"), "eth0"));
            assert_eq!(owners[0].tag.is_of_network(&"n".repeat(200)), Some(true));
            assert_eq!(owners[0].tag.is_of_network(&"n".repeat(199)), Some(false));
            if id_len % 2 == 0 {
                spoof.purge(&long_network).map(drop)
            } else {
                spoof.gc(&long_network.network, &ValidAttachments::default())
            }
            .unwrap();
            assert_eq!(ruleset(), SHARED);
        }
    });
}

#[test]
fn a_list_distinguishes_own_rules_gos_rules_and_remains() {
    on_a_host(|| {
        let mut spoof = SpoofCheck::open().unwrap();
        assert_eq!(list(&mut spoof), []);
        ensure("ours");
        nft("add chain bridge nat cni-br-iface-go-eth0\n\
             add chain bridge nat cni-br-iface-go-eth0-mac\n\
             add rule bridge nat PREROUTING iifname \"veth7\" jump cni-br-iface-go-eth0 comment \"macspoofchk-go-eth0\"\n\
             add rule bridge nat PREROUTING iifname \"veth8\" jump cni-br-iface-ours-eth0 comment \"macspoofchk-ours-eth0\"\n\
             add chain bridge nat cni-br-iface-half-eth0-mac\n\
             add chain bridge nat foreign\n\
             add rule bridge nat PREROUTING iifname \"veth9\" accept comment \"foreign\"");
        let owners = list(&mut spoof);
        let seen: Vec<_> =
            owners.iter().map(|o| (o.id.0.as_str(), o.host_veth.as_deref(), o.tag.is_of_network("net"))).collect();
        assert_eq!(
            seen,
            [("go-eth0", Some("veth7"), None), ("half-eth0", None, None), ("ours-eth0", Some("veth0"), Some(true)),]
        );
        let garbage = |network: &str, valid: &[(&str, &str)], link: &str| -> Vec<String> {
            let valid = valid.iter().map(|(container, ifname)| Id::new(container, ifname)).collect();
            let gone = |owner: &&SpoofOwner| owner.is_garbage(network, &valid, &[link.to_owned()].into());
            owners.iter().filter(gone).map(|owner| owner.id.0.clone()).collect()
        };
        assert_eq!(garbage("net", &[], "veth7"), ["ours-eth0"]);
        assert_eq!(garbage("net", &[("ours", "eth0")], "veth7"), [""; 0]);
        assert_eq!(garbage("net", &[("ours", "eth1")], ""), ["go-eth0", "ours-eth0"]);
        assert_eq!(garbage("other", &[], ""), ["go-eth0"], "another network's stays, dead or not");
        assert_eq!(garbage("other", &[("go", "eth0")], ""), [""; 0]);
        engine::change_by_handle(&mut spoof.nft, |nft, batch| {
            IdRules::delete_all(&IdRules::list(nft)?, batch);
            Ok(())
        })
        .unwrap();
        assert_eq!(list(&mut spoof), []);
        assert!(ruleset().contains("chain foreign") && ruleset().contains("comment \"foreign\""));
    });
}

#[test]
fn many_at_once_on_a_clean_host_make_each_once() {
    on_a_host(|| {
        let all = |what: &(dyn Fn(usize) + Sync)| {
            thread::scope(|scope| (0..30).for_each(|number| drop(scope.spawn(move || what(number)))));
        };
        all(&|number| ensure(&format!("c{number}")));
        let rules = ruleset();
        for number in 0..30 {
            assert_eq!(differences(&format!("c{number}")), Vec::<String>::new());
            assert_eq!(rules.matches(&format!("jump cni-br-iface-c{number}-eth0 ")).count(), 1);
        }
        all(&|number| purge(&format!("c{number}")));
        assert_eq!(ruleset(), SHARED);

        // All threads write the same attachment: its rules exist once, complete.
        all(&|_| ensure("c"));
        assert_eq!(differences("c"), Vec::<String>::new());
        assert_eq!(ruleset().matches("comment").count(), 4, "{}", ruleset());
        all(&|number| if number % 2 == 0 { ensure("c") } else { purge("c") });
        assert!([0, 4].contains(&ruleset().matches("comment").count()), "{}", ruleset());
        all(&|_| purge("c"));
        assert_eq!(ruleset(), SHARED);
    });
}

/// Not a test: [`start_worker`] runs this function in a process that it can kill.
#[test]
fn worker() {
    let Ok(container) = std::env::var("CNI_TEST_SPOOF_WORKER") else { return };
    ensure(&container);
    std::fs::write("/proc/self/fd/2", "ready").unwrap();
    // One connection for all rounds: closing one waits in the kernel, and a kill during that wait
    // would test nothing.
    let mut spoof = SpoofCheck::open().unwrap();
    loop {
        spoof.purge(&attachment(&container)).unwrap();
        spoof.ensure(&attachment(&container), "veth0", MAC).unwrap();
    }
}

/// Starts a process that writes and removes the container's rules in a loop, in the network
/// namespace of the calling thread. Returns after the rules were written for the first time.
fn start_worker(container: &str) -> Child {
    let mut worker = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--test-threads=1", "spoof::tests::worker"])
        .env("CNI_TEST_SPOOF_WORKER", container)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 5];
    worker.stderr.as_mut().unwrap().read_exact(&mut ready).unwrap();
    worker
}

#[test]
fn a_killed_process_leaves_all_or_nothing() {
    on_a_host(|| {
        let (mut all, mut nothing) = (0, 0);
        for round in 0..500_u64 {
            let mut workers: Vec<Child> = ["a", "b"].into_iter().map(start_worker).collect();
            // Does not wait for an event: the workers are killed at various points of their loop.
            thread::sleep(std::time::Duration::from_micros(round * 1_373 % 50_000));
            for worker in &mut workers {
                worker.kill().unwrap();
                worker.wait().unwrap();
            }
            for container in ["a", "b"] {
                match differences(container).len() {
                    0 => all += 1,
                    // The jump and both chains are missing.
                    3 => nothing += 1,
                    _ => panic!("some rules are left:\n{}", ruleset()),
                }
                purge(container);
            }
            assert_eq!(ruleset(), SHARED);
            if all >= 10 && nothing >= 10 {
                return;
            }
        }
        panic!("the kills did not hit both states often enough: {all} with rules, {nothing} without");
    });
}

#[test]
fn a_foreign_source_address_does_not_pass() {
    on_a_host(|| {
        let ends = [new_netns(), new_netns()];
        shell("ip link add br0 type bridge; ip link set br0 up");
        for (number, end) in ends.iter().enumerate() {
            use std::os::fd::{AsFd as _, AsRawFd as _};
            let netns = format!("/proc/{}/fd/{}", std::process::id(), end.as_fd().as_raw_fd());
            shell(&format!(
                "ip link add veth{number} type veth peer name eth0 address 02:00:00:00:00:0{number} netns {netns}
                 ip link set veth{number} master br0 up
                 nsenter --net={netns} ip address add 10.9.9.{number}/24 dev eth0
                 nsenter --net={netns} ip link set eth0 up"
            ));
        }
        let enter = format!("nsenter --net=/proc/{}/fd/{}", std::process::id(), {
            use std::os::fd::{AsFd as _, AsRawFd as _};
            ends[0].as_fd().as_raw_fd()
        });
        // Pings until the first answer, because the peer has to learn the new MAC, or until the
        // time is over.
        let pings = |seconds: u32| {
            let pinged = shell(&format!("{enter} ping -c1 -w{seconds} 10.9.9.1 >/dev/null && echo yes || echo no"));
            pinged == "yes\n"
        };
        let mut spoof = SpoofCheck::open().unwrap();
        spoof.ensure(&attachment("c0"), "veth0", Mac([2, 0, 0, 0, 0, 0])).unwrap();
        assert!(pings(10), "its own address passes");
        shell(&format!("{enter} ip link set eth0 address 02:00:00:00:00:0f"));
        assert!(!pings(1), "a forged one does not");
        spoof.purge(&attachment("c0")).unwrap();
        assert!(pings(10), "and without the rules everything does");
    });
}

/// Two ADDs of one attachment, into two namespaces, may reach this step at the same time.
#[test]
fn rules_of_a_living_interface_are_not_replaced_or_undone() {
    on_a_host(|| {
        let netlink = Netlink::open().unwrap();
        let peer = Mac([2, 0, 0, 0, 0, 0x0b]);
        let first = netlink.create_veth(&cni_linux::VethSpec::new("veth0", MAC, "peer0", peer)).unwrap();
        ensure("c1");
        let before = ruleset();
        let mut spoof = SpoofCheck::open().unwrap();
        assert!(spoof.ensure(&attachment("c1"), "veth1", MAC).is_err());
        spoof.undo(&attachment("c1"), "veth1").unwrap();
        assert_eq!(ruleset(), before);
        assert!(spoof.find_conflicting_interface(&attachment("c1"), "veth1").unwrap().is_some());
        assert_eq!(spoof.find_conflicting_interface(&attachment("c1"), "veth0").unwrap(), None, "the interface itself");
        netlink.delete_link(first.index).unwrap();
        assert_eq!(spoof.find_conflicting_interface(&attachment("c1"), "veth1").unwrap(), None);
        spoof.ensure(&attachment("c1"), "veth1", MAC).unwrap();
        spoof.undo(&attachment("c1"), "veth1").unwrap();
        assert_eq!(ruleset(), SHARED);
    });
}
