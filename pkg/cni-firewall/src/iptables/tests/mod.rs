//! Tests reading and changing both variants of iptables, each in a new namespace.

use std::process::Command;

use super::*;
use crate::testing::shell;
use crate::testing::{in_new_netns, machine, skip};

/// Tests that every installed release of iptables reads what is written over netlink.
mod releases;

const VARIANTS: [Variant; 2] = [Variant::Nft, Variant::Legacy];

/// Runs the body once per variant and family, each in a namespace of its own.
#[track_caller]
pub(crate) fn with_each(body: impl Fn(Variant, Family) + Sync) {
    for variant in VARIANTS {
        for family in FAMILIES {
            in_new_netns(|| match Command::new(program(variant, family, "restore")).arg("--version").output() {
                Ok(_) => body(variant, family),
                Err(error) => skip(&format!("cannot run iptables-{variant}: {error}")),
            });
        }
    }
}

/// The host's programs, with a folder for the lock that is removed after the test.
struct Rig {
    machine: cni_linux::LinuxMachine,
    locks: tempfile::TempDir,
}

impl Rig {
    fn new() -> Rig {
        Rig { machine: machine(), locks: tempfile::tempdir().unwrap() }
    }

    fn folders(&self) -> Folders {
        Folders::new(std::env::var_os("PATH")).with_lock_folder(self.locks.path())
    }

    fn iptables(&self) -> Iptables<'_> {
        Iptables::open_with(Table::Nat, &self.machine, Notes::silent(), OnSigterm::Kill, self.folders()).unwrap()
    }
}

fn program(variant: Variant, family: Family, job: &str) -> String {
    format!("ip{}tables-{variant}-{job}", if family == Family::V4 { "" } else { "6" })
}

/// Returns the rules, and the chains named `CNI...`, that the variant's own program prints.
fn saved(variant: Variant, family: Family) -> Vec<String> {
    let text = shell(&format!("{} -t nat 2>/dev/null", program(variant, family, "save")));
    text.lines().filter(|line| line.starts_with("-A") || line.starts_with(":CNI")).map(str::to_owned).collect()
}

fn restore(variant: Variant, family: Family, lines: &str) {
    shell(&format!("{} --noflush <<'EOF'\n*nat\n{lines}\nCOMMIT\nEOF", program(variant, family, "restore")));
}

/// Returns every form of rule that plugins write, in the words of `-S`.
fn forms(family: Family) -> Vec<&'static str> {
    let mut forms = vec![
        r#"-m comment --comment "name: \"my\\net\" id: \"ctr1\"" -j ACCEPT"#,
        r#"-m comment --comment cni:net/ctr/eth0"#,
        "-m mark --mark 0x2000/0x2000 -j MASQUERADE",
        "-m comment --comment \"CNI portfwd masquerade mark\" -j MARK --set-xmark 0x2000/0x2000",
        "-m addrtype --dst-type LOCAL -j CNI-B",
        r#"-p tcp -m comment --comment "dnat name: \"n\" id: \"c\"" -m multiport --dports 80,443,8080 -j CNI-B"#,
        "-p udp -m multiport --dports 53 -j CNI-B",
        "-p sctp -m sctp --dport 80 -j CNI-B",
        "-p tcp -m tcp --dport 80 -j CNI-B",
        "-i eth+ ! -o eth0 -g CNI-B",
    ];
    forms.extend(match family {
        Family::V4 => [
            "-s 10.88.0.2/32 -j CNI-B",
            "-d 10.88.0.0/20 -j ACCEPT",
            "! -d 224.0.0.0/4 -j MASQUERADE",
            "-s 10.88.0.0/16 -d 192.168.1.1/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.88.0.2:8080",
            "-s 127.0.0.1/32 -p udp -m udp --dport 53 -j DNAT --to-destination 10.88.0.2",
        ],
        Family::V6 => [
            "-s fd00::2/128 -j CNI-B",
            "-d fd00:1234::/50 -j ACCEPT",
            "! -d ff00::/8 -j MASQUERADE",
            "-s fd00::/64 -d fd01::1/128 -p tcp -m tcp --dport 80 -j DNAT --to-destination [fd00::2]:8080",
            "-s fd00::1/128 -p udp -m udp --dport 53 -j DNAT --to-destination fd00::2",
        ],
    });
    forms
}

#[test]
fn both_variants_are_read_as_their_own_program_prints_them() {
    with_each(|variant, family| {
        let forms = forms(family);
        let lines: Vec<String> = forms.iter().map(|form| format!("-A CNI-A {form}")).collect();
        restore(variant, family, &format!(":CNI-A - [0:0]\n:CNI-B - [0:0]\n{}", lines.join("\n")));
        let printed: Vec<Vec<String>> =
            saved(variant, family).iter().filter_map(|line| line.strip_prefix("-A CNI-A ")).map(split).collect();
        assert_eq!(printed, forms.iter().map(|form| split(form)).collect::<Vec<_>>(), "the test's own forms");
        let rig = Rig::new();
        let mut iptables = rig.iptables();
        let mut nat = iptables.read(family, variant).unwrap();
        let rules = nat.rules("CNI-A").unwrap();
        assert_eq!(rules.iter().map(|rule| rule.words.clone()).collect::<Vec<_>>(), printed);
        assert!(rules.iter().all(Rule::is_whole));
        assert_eq!(nat.read_chains_where(|name| name.starts_with("CNI-")).unwrap(), ["CNI-A", "CNI-B"]);
        assert!(
            nat.has_chain("CNI-B").unwrap()
                && !nat.has_chain("CNI-C").unwrap()
                && nat.chain("CNI-C").unwrap().is_none()
        );
    });
}

#[test]
fn an_unknown_rule_still_has_its_comment_and_target() {
    with_each(|variant, family| {
        restore(
            variant,
            family,
            ":CNI-A - [0:0]\n-A CNI-A -m statistic --mode nth --every 3 --packet 0 -m comment --comment c -j RETURN",
        );
        let rig = Rig::new();
        let mut iptables = rig.iptables();
        let rule = iptables.read(family, variant).unwrap().rules("CNI-A").unwrap()[0].clone();
        assert_eq!(
            (rule.comment(), rule.target(), rule.is_whole()),
            (Some("c"), Some("RETURN"), variant == Variant::Legacy)
        );
    });
}

#[test]
fn an_edit_adds_and_removes_what_it_says_and_nothing_else() {
    with_each(|variant, family| {
        restore(
            variant,
            family,
            ":CNI-OLD - [0:0]\n-A CNI-OLD -m comment --comment \"a b\" -j RETURN\n\
            -A POSTROUTING -j CNI-OLD\n-A POSTROUTING -m comment --comment stays -j ACCEPT\n-A POSTROUTING -j CNI-OLD",
        );
        let rig = Rig::new();
        let mut iptables = rig.iptables();
        let change = |nat: &mut Chains<'_>| {
            let mut edit = Edit::new();
            if !nat.has_chain("CNI-NEW")? {
                edit.create_chain("CNI-NEW");
                edit.append("CNI-NEW", ["-m", "comment", "--comment", "it's \"quoted\" \\ $(id)", "-j", "ACCEPT"]);
                edit.insert("POSTROUTING", ["-j", "CNI-NEW"]);
            }
            for rule in nat.rules("POSTROUTING")?.iter().filter(|rule| rule.target() == Some("CNI-OLD")) {
                edit.delete("POSTROUTING", rule);
            }
            if let Some(chain) = nat.chain("CNI-OLD")? {
                edit.delete_chain("CNI-OLD", chain);
            }
            Ok(edit)
        };
        assert_eq!(iptables.variants_to_search(family, &["CNI-OLD"]).unwrap(), [variant]);
        iptables.change(family, variant, change).unwrap();
        let expected = [
            ":CNI-NEW - [0:0]",
            "-A POSTROUTING -j CNI-NEW",
            "-A POSTROUTING -m comment --comment stays -j ACCEPT",
            r#"-A CNI-NEW -m comment --comment "it\'s \"quoted\" \\ $(id)" -j ACCEPT"#,
        ];
        assert_eq!(saved(variant, family), expected);
        iptables.change(family, variant, change).unwrap();
        assert_eq!(saved(variant, family), expected, "there was nothing left to do");
    });
}

#[test]
fn another_table_is_changed_as_nat_is() {
    with_each(|variant, family| {
        let rig = Rig::new();
        let open =
            |table| Iptables::open_with(table, &rig.machine, Notes::silent(), OnSigterm::Kill, rig.folders()).unwrap();
        let mut iptables = open(Table::Filter);
        let filter = || {
            let text = shell(&format!("{} -t filter 2>/dev/null", program(variant, family, "save")));
            text.lines().filter(|line| line.starts_with("-A")).map(str::to_owned).collect::<Vec<_>>()
        };
        let words = ["-m", "comment", "--comment", "x", "-j", "ACCEPT"];
        iptables
            .change(family, variant, |table| {
                let mut edit = Edit::new();
                if !table.has_chain("CNI-FORWARD")? {
                    edit.create_chain("CNI-FORWARD");
                    edit.append("CNI-FORWARD", words);
                    edit.insert("FORWARD", ["-j", "CNI-FORWARD"]);
                }
                Ok(edit)
            })
            .unwrap();
        assert_eq!(filter(), ["-A FORWARD -j CNI-FORWARD", "-A CNI-FORWARD -m comment --comment x -j ACCEPT"]);
        assert_eq!(iptables.variants_to_search(family, &["CNI-FORWARD"]).unwrap(), [variant]);
        assert_eq!(open(Table::Nat).variants_to_search(family, &["CNI-FORWARD"]).unwrap(), []);
        iptables
            .change(family, variant, |table| {
                let mut edit = Edit::new();
                for rule in table.find_rules("FORWARD", &[Part::Target("CNI-FORWARD")], IfMissing::ReadAll, |_| true)? {
                    edit.delete("FORWARD", &rule);
                }
                if let Some(chain) = table.chain("CNI-FORWARD")? {
                    edit.delete_chain("CNI-FORWARD", chain);
                }
                Ok(edit)
            })
            .unwrap();
        assert_eq!(filter(), [""; 0]);
    });
}

#[test]
fn reading_makes_no_table() {
    in_new_netns(|| {
        let rig = Rig::new();
        let mut iptables = rig.iptables();
        for family in FAMILIES {
            assert_eq!(iptables.variants_to_search(family, &["CNI-A", "POSTROUTING"]).unwrap(), []);
            for variant in VARIANTS {
                assert!(iptables.read(family, variant).unwrap().rules("POSTROUTING").unwrap().is_empty());
                iptables.change(family, variant, |_| Ok(Edit::new())).unwrap();
            }
        }
        assert_eq!(shell("nft list ruleset; cat /proc/thread-self/net/ip*_tables_names 2>/dev/null || true"), "");
    });
}

#[test]
fn removing_over_netlink_needs_no_program() {
    in_new_netns(|| {
        restore(Variant::Nft, Family::V4, ":CNI-A - [0:0]\n-A CNI-A -j RETURN\n-A POSTROUTING -j CNI-A");
        let rig = Rig::new();
        let folders = Folders::only([]).with_lock_folder(rig.locks.path());
        let mut iptables =
            Iptables::open_with(Table::Nat, &rig.machine, Notes::silent(), OnSigterm::Finish, folders).unwrap();
        assert_eq!(iptables.chosen_variant(Family::V4).unwrap(), None);
        assert!(iptables.can_remove(Family::V4, Variant::Nft).unwrap());
        assert!(!iptables.can_remove(Family::V4, Variant::Legacy).unwrap());
        let remove = |nat: &mut Chains<'_>| {
            let mut edit = Edit::new();
            edit.delete("POSTROUTING", &nat.rules("POSTROUTING")?[0]);
            edit.delete_chain("CNI-A", nat.chain("CNI-A")?.unwrap());
            Ok(edit)
        };
        iptables.change(Family::V4, Variant::Nft, remove).unwrap();
        assert_eq!(saved(Variant::Nft, Family::V4), Vec::<String>::new());
        let error = iptables
            .change(Family::V4, Variant::Nft, |_| {
                let mut edit = Edit::new();
                edit.append("POSTROUTING", ["-m", "owner", "--uid-owner", "0", "-j", "RETURN"]);
                Ok(edit)
            })
            .unwrap_err();
        assert!(error.to_string().contains("iptables-nft"), "in words that are not ours: {error}");
    });
}

#[test]
fn a_chain_created_concurrently_is_seen_on_the_retry() {
    with_each(|variant, family| {
        let rig = Rig::new();
        let mut iptables = rig.iptables();
        let mut plan_calls = 0;
        let plan = |nat: &mut Chains<'_>| {
            plan_calls += 1;
            let mut edit = Edit::new();
            if !nat.has_chain("CNI-SHARED")? {
                edit.create_chain("CNI-SHARED");
                edit.append("CNI-SHARED", ["-j", "RETURN"]);
            }
            // A program that does not take the lock, between reading and change.
            if plan_calls == 1 {
                restore(variant, family, ":CNI-SHARED - [0:0]\n-A CNI-SHARED -m comment --comment theirs -j RETURN");
            }
            Ok(edit)
        };
        iptables.change(family, variant, plan).unwrap();
        assert_eq!(plan_calls, 2);
        assert_eq!(
            saved(variant, family),
            [":CNI-SHARED - [0:0]", "-A CNI-SHARED -m comment --comment theirs -j RETURN"],
            "their chain was not emptied"
        );
    });
}

#[test]
fn a_rule_removed_concurrently_is_not_a_failure() {
    with_each(|variant, family| {
        restore(variant, family, ":CNI-A - [0:0]\n-A POSTROUTING -j CNI-A");
        let rig = Rig::new();
        let mut iptables = rig.iptables();
        let mut plan_calls = 0;
        let plan = |nat: &mut Chains<'_>| {
            plan_calls += 1;
            let mut edit = Edit::new();
            for rule in nat.rules("POSTROUTING")? {
                edit.delete("POSTROUTING", rule);
            }
            if plan_calls == 1 {
                restore(variant, family, "-D POSTROUTING -j CNI-A");
            }
            Ok(edit)
        };
        iptables.change(family, variant, plan).unwrap();
        assert_eq!((plan_calls, saved(variant, family)), (2, vec![":CNI-A - [0:0]".to_owned()]));
    });
}

#[test]
fn permanent_errors_quote_the_program_and_are_not_retried() {
    with_each(|variant, family| {
        let rig = Rig::new();
        let mut iptables = rig.iptables();
        let mut plan_calls = 0;
        let plan = |_: &mut Chains<'_>| {
            plan_calls += 1;
            let mut edit = Edit::new();
            edit.append("CNI-NONE", ["-j", "RETURN"]);
            Ok(edit)
        };
        let error = iptables.change(family, variant, plan).unwrap_err().to_string();
        // With iptables-nft, the first attempt is over netlink.
        let wanted = if variant == Variant::Nft { 3 } else { 2 };
        assert_eq!(plan_calls, wanted, "planned again, but the program ran only once");
        assert!(error.contains("-restore --noflush -w 10: exit status"), "{error}");
    });
}

#[test]
fn a_lock_every_user_can_hold_is_used_with_one_note() {
    in_new_netns(|| {
        let (machine, noted) = (machine(), std::rc::Rc::new(std::cell::RefCell::new(Vec::new())));
        let sink = std::rc::Rc::clone(&noted);
        let notes = Notes::new(move |line| sink.borrow_mut().push(line.to_owned()));
        let folders = Folders::only([]).with_lock_folder("/proc/cni");
        let mut iptables = Iptables::open_with(Table::Nat, &machine, notes, OnSigterm::Kill, folders).unwrap();
        for family in FAMILIES {
            iptables.change(family, Variant::Nft, |_| Ok(Edit::new())).unwrap();
        }
        assert_eq!(noted.borrow().len(), 1, "{noted:?}");
        assert!(noted.borrow()[0].contains("because /proc/cni/iptables-"), "{noted:?}");
    });
}

#[test]
fn concurrent_first_changes_are_each_made_once() {
    with_each(|variant, family| {
        let (netns, rig) = (cni_linux::Netns::current().unwrap(), Rig::new());
        let folders = rig.folders();
        let plan_calls = std::sync::atomic::AtomicUsize::new(0);
        let crowd = cni_testkit::crowd(50);
        std::thread::scope(|scope| {
            for number in 0..crowd {
                let (netns, plan_calls, folders) = (&netns, &plan_calls, folders.clone());
                scope.spawn(move || {
                    // Threads inherit the namespace.
                    assert!(cni_linux::Netns::current().unwrap().is_same(netns));
                    let machine = machine();
                    let chain = format!("CNI-{number}");
                    let plan = |nat: &mut Chains<'_>| {
                        plan_calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        let mut edit = Edit::new();
                        if !nat.has_chain("CNI-SHARED")? {
                            edit.create_chain("CNI-SHARED");
                            edit.append("POSTROUTING", ["-j", "CNI-SHARED"]);
                        }
                        edit.replace_chain(&chain);
                        edit.append("CNI-SHARED", ["-j", &chain]);
                        Ok(edit)
                    };
                    let mut iptables =
                        Iptables::open_with(Table::Nat, &machine, Notes::silent(), OnSigterm::Kill, folders).unwrap();
                    iptables.change(family, variant, plan).unwrap();
                });
            }
        });
        assert_eq!(plan_calls.into_inner(), crowd, "no other writer came in between");
        let saved = saved(variant, family);
        assert_eq!(saved.iter().filter(|line| line.starts_with(":CNI")).count(), crowd + 1);
        assert_eq!(saved.iter().filter(|line| line.starts_with("-A POSTROUTING")).count(), 1);
        assert_eq!(saved.iter().filter(|line| line.starts_with("-A CNI-SHARED")).count(), crowd);
    });
}
