//! Tests the reading of a container's chain, and situations that a call of the plugin cannot bring
//! about. The backend as a whole is tested through the plugin, with packets, in both variants.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cni_testkit::program;

use super::super::{Mapping, PortMap, Protocol, SetMark, Snat};
use super::shape::{RuleGroup, groups, has_conditions};
use super::*;
use crate::Backend;
use crate::iptables::{Folders, NetnsLock, Table, split};
use crate::nft::{self, Batch, Nft};
use crate::testing::shell;
use crate::testing::{in_new_netns, machine, skip};
use cni::AttachmentId;
use cni::machine::{Machine, OnSigterm};
use cni::rollback::Notes;

fn rules(lines: &[&str]) -> Vec<Rule> {
    lines.iter().map(|line| Rule { words: split(line), handle: None, whole: true }).collect()
}

fn mapping(port: u16, to: &str) -> [String; 2] {
    [
        format!("-s 10.0.0.0/24 -p tcp -m tcp --dport {port} -j CNI-HOSTPORT-SETMARK"),
        format!("-p tcp -m tcp --dport {port} -j DNAT --to-destination {to}"),
    ]
}

fn summary<'r>(groups: &[RuleGroup<'r>]) -> Vec<(Option<&'r str>, Option<u16>)> {
    groups.iter().map(|group| (group.alias(), group.claim.map(|claim| claim.host_port))).collect()
}

#[test]
fn a_chain_is_read_as_the_rules_of_its_attachments() {
    let (a, b, c, again) = (
        mapping(8080, "10.0.0.2:80"),
        mapping(8081, "10.0.0.3:80"),
        mapping(8082, "10.0.0.4:80"),
        mapping(8083, "10.0.0.3:81"),
    );
    let chain = rules(&[
        &c[0],
        &c[1],
        "-i veth1 -m comment --comment \"cni:net/c/eth0\"",
        &a[0],
        &a[1],
        "-m comment --comment cni:net/c/eth1",
        &b[0],
        &b[1],
        &again[0],
        &again[1],
        // Appended by Go for another interface.
        &c[0],
        &c[1],
    ]);
    let found = groups(&chain);
    let (eth0, eth1) = (Some("cni:net/c/eth0"), Some("cni:net/c/eth1"));
    let expected = [
        (None, Some(8082)),
        (eth0, None),
        (eth0, Some(8080)),
        (eth1, None),
        (eth1, Some(8081)),
        (eth1, Some(8083)),
        (None, Some(8082)),
    ];
    assert_eq!(summary(&found), expected);
    assert!(found[1].is_marker() && !found[2].is_marker());
    assert!(found[2].had_link() && !found[4].had_link() && !found[0].had_link());
    assert!(found.iter().flat_map(|group| group.rules).eq(&chain), "no rule is lost");
}

#[test]
fn rules_without_a_mark_form_one_group_per_mapping() {
    let (a, b, again) = (mapping(8080, "10.0.0.2:80"), mapping(8081, "10.0.0.3:80"), mapping(8082, "10.0.0.2:81"));
    let chain = rules(&[&a[0], &a[1], &b[0], &b[1], "-p tcp -j DNAT", &again[0], &again[1], "-j LOG"]);
    let found = groups(&chain);
    let expected = [(None, Some(8080)), (None, Some(8081)), (None, None), (None, Some(8082)), (None, None)];
    assert_eq!(summary(&found), expected);
    assert_eq!(found.iter().map(RuleGroup::shows_owner).collect::<Vec<_>>(), [true, true, false, true, false]);
    assert!(found.iter().flat_map(|group| group.rules).eq(&chain), "no rule is lost");
}

#[test]
fn unknown_rules_of_a_chain_stay_with_the_marker_before_them() {
    let chain = rules(&["-j RETURN", "-m comment --comment cni:net/c/eth0", "-p tcp -j DNAT", "-j LOG"]);
    let found = groups(&chain);
    let eth0 = Some("cni:net/c/eth0");
    assert_eq!(summary(&found), [(None, None), (eth0, None), (eth0, None), (eth0, None)]);
    assert!(found.iter().flat_map(|group| group.rules).eq(&chain));
    assert_eq!(groups(&[]).len(), 1);
}

#[test]
fn a_jump_to_a_chain_covers_the_ports_it_names() {
    let of = |line: &str| rules(&[line]).remove(0);
    let can_match = |jump: &Rule, port| {
        let container = "10.0.0.2:80".parse().unwrap();
        can_match_any(jump, &[ClaimedPort { protocol: Protocol::Tcp, host_ip: None, host_port: port, container }])
    };
    let jump =
        of("-p tcp -m comment --comment \"dnat name: \\\"n\\\" id: \\\"c\\\"\" -m multiport --dports 80,81 -j D");
    assert!(!has_conditions(&jump) && can_match(&jump, 80) && can_match(&jump, 81) && !can_match(&jump, 82));
    assert!(has_conditions(&of("-s 10.0.0.1/32 -p tcp -m comment --comment c -m multiport --dports 80 -j D")));
    assert!(!can_match(&of("-p udp -m multiport --dports 80 -j D"), 80));
    assert!(can_match(&of("-p tcp -j D"), 80), "every port");
}

/// Runs the body in a new namespace. Without iptables-nft, skips the test.
#[track_caller]
fn with_nft(body: impl FnOnce() + Send) {
    in_new_netns(|| match std::process::Command::new("iptables-nft-restore").arg("--version").output() {
        Ok(_) => body(),
        Err(error) => skip(&format!("cannot run iptables-nft-restore: {error}")),
    });
}

/// Runs the body in a new namespace. Without iptables-legacy, skips the test.
#[track_caller]
fn with_legacy(body: impl FnOnce() + Send) {
    in_new_netns(|| match std::process::Command::new("iptables-legacy").arg("--version").output() {
        Ok(_) => body(),
        Err(error) => skip(&format!("cannot run iptables-legacy: {error}")),
    });
}

fn forwarding() -> Forwarding {
    Forwarding {
        attachment: AttachmentId::new("net", "c", "eth0"),
        containers: vec!["10.9.0.2/16".parse().unwrap()],
        mappings: vec![Mapping { protocol: Protocol::Tcp, host_ip: None, host_port: 8080, container_port: 80 }],
        snat: Snat::Hairpin,
        set_mark: SetMark::Bit(13),
        conditions_v4: Vec::new(),
        conditions_v6: Vec::new(),
        policy: Policy::RefuseIfAlive,
        links: Vec::new(),
    }
}

#[test]
fn after_sigterm_a_failed_add_still_waits_for_the_lock_to_undo() {
    with_legacy(|| {
        let (machine, locks, wanted) = (machine(), tempfile::tempdir().unwrap(), forwarding());
        let folders = Folders::new(std::env::var_os("PATH")).with_lock_folder(locks.path());
        let mut portmap = PortMap::new(&machine, Notes::silent());
        portmap.store.folders = folders;
        let mut changed = None;
        portmap.ensure(&wanted, Some(Backend::Iptables), &mut changed).unwrap();
        let has_chain = || shell("iptables-save -t nat").contains(&shape::chain_name(&wanted.attachment));
        assert!(changed == Some(Backend::Iptables) && has_chain());
        let lock = NetnsLock::acquire(&machine, OnSigterm::Kill, locks.path(), Duration::from_secs(30)).unwrap();
        nix::sys::pthread::pthread_kill(nix::sys::pthread::pthread_self(), nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(machine.terminated());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                drop(lock);
            });
            portmap.undo(&wanted, Backend::Iptables).unwrap();
        });
        assert!(!has_chain());
    });
}

/// Searches both variants for rules of other containers, and returns the remarks.
#[track_caller]
fn remarks_of_search(machine: &dyn Machine, folders: Option<Folders>, wanted: &Forwarding) -> Vec<String> {
    let lines = Rc::new(RefCell::new(Vec::new()));
    let sink = Rc::clone(&lines);
    let notes = Notes::new(move |line| sink.borrow_mut().push(line.to_owned()));
    let mut store = Store::new(machine, notes.clone(), Table::Nat, "");
    store.folders = folders.unwrap_or(store.folders);
    search_other_tables(&store, &mut ConflictSearch::new(wanted, notes), None).unwrap();
    lines.take()
}

#[test]
fn add_only_notes_that_a_legacy_program_it_reads_with_failed() {
    with_legacy(|| {
        shell("iptables-legacy -t nat -N CNI-X");
        let (machine, folder) = (machine(), tempfile::tempdir().unwrap());
        for job in ["save", "restore"] {
            let script = "#!/bin/sh\necho 'error while loading shared libraries: libip4tc.so.2' >&2\nexit 127\n";
            program::script(folder.path().join(format!("iptables-legacy-{job}")), script);
        }
        let folders = Folders::only([folder.path().to_owned()]);
        let remarks = remarks_of_search(&machine, Some(folders), &forwarding());
        let [remark] = &remarks[..] else { panic!("{remarks:?}") };
        for words in
            ["iptables-legacy has a table nat", "libip4tc.so.2", "it was not searched for other containers' host ports"]
        {
            assert!(remark.contains(words), "it should say `{words}`: {remark}");
        }
    });
}

#[test]
fn other_writers_do_not_hold_up_the_search_for_stale_rules() {
    with_nft(|| {
        let mut text = String::from("*nat\n:CNI-HOSTPORT-DNAT - [0:0]\n");
        for number in 0..300 {
            let (chain, id) = (format!("CNI-DN-{number:021}"), format!("gone{number}"));
            let way = format!(
                "-m comment --comment \"dnat name: \\\"other\\\" id: \\\"{id}\\\"\" -m multiport --dports {number}"
            );
            text += &format!(":{chain} - [0:0]\n-A CNI-HOSTPORT-DNAT -p tcp {way} -j {chain}\n");
            let to = if number == 150 { "10.9.0.2:80" } else { "10.9.0.3:80" };
            text += &format!("-A {chain} -p tcp -m tcp --dport {number} -j DNAT --to-destination {to}\n");
        }
        shell(&format!("iptables-nft-restore <<'EOF'\n{text}COMMIT\nEOF"));
        let (machine, wanted) = (machine(), Forwarding { mappings: Vec::new(), ..forwarding() });
        let search = || remarks_of_search(&machine, None, &wanted);
        // The rule names another network, so it is found again by each search.
        let alone = cni_testkit::cost(|| assert!(search()[0].contains("the rule was not removed")));
        let (beside_writer, changes) = beside_busy_writer(|| {
            cni_testkit::cost(|| {
                for _ in 0..5 {
                    let found = search();
                    let is_expected = |words| found[0].contains(words);
                    assert!(is_expected("was not removed") || is_expected("changed the rules"), "{found:?}");
                }
            })
        });
        // A list is read 512 times if that is not limited.
        assert!(beside_writer < 5 * 32 * alone, "{beside_writer:?} beside {changes} changes, {alone:?} without");
    });
}

/// Calls `body` while another thread changes unrelated rules of nf_tables all the time. Returns the
/// result and the number of changes.
fn beside_busy_writer<T>(body: impl FnOnce() -> T) -> (T, usize) {
    let unrelated = nft::Table { family: nft::Family::Inet, name: "unrelated" };
    let (stop, changes) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut writer = Nft::open().unwrap();
            while !stop.load(Ordering::Relaxed) {
                let mut batch = Batch::new();
                batch.ensure_table(unrelated, None);
                batch.delete_table(unrelated);
                writer.commit(batch).unwrap();
                changes.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _ended = cni_testkit::Ended(&stop);
        let result = body();
        (result, changes.load(Ordering::Relaxed))
    })
}

#[test]
fn the_search_by_address_reads_the_jumps_only_a_few_times() {
    with_nft(|| {
        let rule = "-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports & -j CNI-DN-other";
        let chains = "*nat\\n:CNI-HOSTPORT-DNAT - [0:0]\\n:CNI-DN-other - [0:0]\\n";
        shell(&format!("(printf '{chains}'; seq 3000 | sed 's/.*/{rule}/'; echo COMMIT) | iptables-nft-restore"));
        let machine = machine();
        let store = Store::new(&machine, Notes::silent(), Table::Nat, "");
        let mut iptables = store.open(OnSigterm::Kill).unwrap();
        let (found, changes) = beside_busy_writer(|| {
            thread::sleep(Duration::from_millis(20));
            // A reading in which the writer gets no processor succeeds.
            (0..100).find_map(|_| {
                let mut nat = iptables.read(Family::V4, Variant::Nft).unwrap();
                jumps_to(&mut nat, "CNI-DN-other", Retries::Few).err()
            })
        });
        let error = found.expect("no reading was disturbed").to_string();
        assert!(error.ends_with("changed the rules during each of 4 readings"), "{error}, {changes} changes");
    });
}

/// Returns the chains with the rules of this many attachments.
fn mapped(count: usize) -> String {
    let mut saved = String::new();
    for i in 0..count {
        let attachment = AttachmentId::new("net", format!("c{i}"), "eth0");
        let comment = crate::iptables::quote(&shape::comment(&attachment)).unwrap();
        let (chain, alias, port) = (shape::chain_name(&attachment), attachment.alias(), 8000 + i);
        saved += &format!(
            ":{chain} - [0:0]\n\
             -A {DNAT} -p tcp -m comment --comment {comment} -m multiport --dports {port} -j {chain}\n\
             -A {chain} -m comment --comment {alias}\n\
             -A {chain} -p tcp -m tcp --dport {port} -j DNAT --to-destination 10.1.0.2:80\n"
        );
    }
    saved
}

#[test]
fn an_interface_without_mappings_keeps_its_marker() {
    let comment = r#""dnat name: \"net\" id: \"gone\"""#;
    let jump = format!("-A {DNAT} -p tcp -m comment --comment {comment} -m multiport --dports 8080 -j CNI-DN-1");
    let [mark, map] = mapping(8080, "10.9.0.2:80");
    let saved = format!(
        ":{DNAT} - [0:0]\n:CNI-DN-1 - [0:0]\n{}\n\
         -A CNI-DN-1 -m comment --comment cni:net/gone/eth0\n-A CNI-DN-1 {mark}\n-A CNI-DN-1 {map}\n\
         -A CNI-DN-1 -m comment --comment cni:net/gone/eth1\n",
        jump
    );
    let mut nat = Chains::of_text(Table::Nat, Family::V4, &saved);
    let wanted = forwarding();
    let (mut search, mut edit) = (ConflictSearch::new(&wanted, Notes::silent()), Edit::new());
    let request = wanted.families().next().unwrap();
    let jumps = candidate_jumps(&mut nat, &request).unwrap();
    plan_displacement(&mut nat, &request, &jumps, &mut search, &mut edit).unwrap();
    let expected = format!(
        "*nat\n-D CNI-DN-1 -m comment --comment cni:net/gone/eth0\n-D CNI-DN-1 {mark}\n-D CNI-DN-1 {map}\n{}\nCOMMIT\n",
        jump.replacen("-A", "-D", 1)
    );
    assert_eq!(edit.restore_text(Table::Nat).unwrap(), expected);
}

#[test]
fn gc_takes_time_in_proportion_to_the_chains() {
    let plan = |count: usize, saved: &str, garbage: bool| {
        let mut nat = Chains::of_text(Table::Nat, Family::V4, saved);
        let mut claims = BTreeSet::new();
        removal::plan_garbage(&mut nat, |_, _| garbage, &mut claims).unwrap();
        assert_eq!(claims.len(), if garbage { count } else { 0 });
    };
    let (few, many) = (mapped(200), mapped(800));
    for garbage in [true, false] {
        cni_testkit::assert_cost_below(8, || plan(200, &few, garbage), || plan(800, &many, garbage));
    }
}
