//! Tests reading and changing nf_tables on the real kernel, in new network namespaces.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::expr::{daddr, dnat, dport, fib_daddr_local, iifname, l4proto, masked, nfproto, not, saddr};
use super::*;
use crate::engine::{change, nft_usable};
use crate::testing::{nft, on_a_host, ruleset, shell};

const T: Table<'static> = Table { family: Family::Inet, name: "t" };

fn with_base(name: &str, kind: Kind, hook: Hook, priority: i32) -> Batch {
    let mut batch = Batch::new();
    batch.ensure_table(T, None);
    batch.ensure_base_chain(T, name, BaseChain { kind, hook, priority });
    batch
}

fn verdict(verdict: Verdict) -> Rule {
    Rule::new([Expr::Verdict(verdict)])
}

#[test]
fn every_expression_looks_to_nft_as_its_own() {
    on_a_host(|| {
        let mut batch = with_base("post", Kind::Nat, Hook::Postrouting, 100);
        batch.ensure_base_chain(T, "pre", BaseChain { kind: Kind::Nat, hook: Hook::Prerouting, priority: -100 });
        batch.ensure_chain(T, "c", Some("a chain"));
        let then = |mut exprs: Vec<Expr>, last: Expr| {
            exprs.push(last);
            exprs
        };
        let v4 = || nfproto("0.0.0.0".parse().unwrap());
        let v6 = || nfproto("::".parse().unwrap());
        let goto = |to: &str| Expr::Verdict(Verdict::Goto(to.into()));
        for exprs in [
            then(iifname("eth0").unwrap(), Expr::Verdict(Verdict::Accept)),
            then([v4(), saddr("10.0.0.1".parse().unwrap())].concat(), Expr::Verdict(Verdict::Return)),
            then([v6(), not(masked(daddr("ff00::".parse().unwrap()), 8))].concat(), Expr::Verdict(Verdict::Drop)),
            [v4(), masked(saddr("10.1.0.0".parse().unwrap()), 16)].concat(),
            [v6(), masked(saddr("fd00:1::".parse().unwrap()), 33)].concat(),
            [fib_daddr_local(), l4proto(6), dport(80)].concat(),
        ] {
            batch.append_rule(T, "c", &Rule::new(exprs));
        }
        batch.append_rule(T, "post", &Rule::new([goto("c")]).with_comment("first"));
        batch.append_rule(T, "post", &Rule::new([v4(), masked(daddr("224.0.0.1".parse().unwrap()), 4)].concat()));
        batch.append_rule(T, "post", &Rule::new([Expr::Masquerade]));
        let target = dnat("10.0.0.2".parse().unwrap(), Some(8080));
        batch.append_rule(T, "pre", &Rule::new([l4proto(17), dport(53), target].concat()));
        Nft::open().unwrap().commit(batch).unwrap();
        let expected = "table inet t {
	chain post {
		type nat hook postrouting priority srcnat; policy accept;
		goto c comment \"first\"
		ip daddr 224.0.0.0/4
		masquerade
	}

	chain pre {
		type nat hook prerouting priority dstnat; policy accept;
		udp dport 53 dnat ip to 10.0.0.2:8080
	}

	chain c {
		comment \"a chain\"
		iifname \"eth0\" accept
		ip saddr 10.0.0.1 return
		ip6 daddr != ff00::/8 drop
		ip saddr 10.1.0.0/16
		ip6 saddr fd00:1::/33
		fib daddr type local tcp dport 80
	}
}
";
        assert_eq!(ruleset(), expected);
        // The expressions that nft writes for the listed text are the same.
        let (text, written) = (ruleset(), bytecode());
        nft(&format!("flush ruleset\n{text}"));
        assert_eq!(bytecode(), written);
    });
}

/// Returns the expressions of all rules in the kernel, without the rules' handles.
fn bytecode() -> Vec<String> {
    let all = shell("nft --debug=netlink list ruleset");
    all.lines().filter(|line| line.starts_with("  ")).map(str::to_owned).collect()
}

#[test]
fn thousands_of_rules_come_and_go_in_one_transaction_each() {
    on_a_host(|| {
        let mut client = Nft::open().unwrap();
        let mut batch = with_base("c", Kind::Filter, Hook::Output, 0);
        (0..5000).for_each(|_| batch.append_rule(T, "c", &verdict(Verdict::Accept)));
        client.commit(batch).unwrap();
        let rules = client.rules(T, "c").unwrap();
        assert_eq!(rules.len(), 5000);
        let mut batch = Batch::new();
        rules.iter().for_each(|rule| batch.delete_rule(T, "c", rule.handle));
        Nft::open().unwrap().commit(batch).unwrap();
        assert_eq!(client.rules(T, "c").unwrap(), []);
    });
}

#[test]
fn what_the_kernel_dumps_is_what_was_written() {
    on_a_host(|| {
        let t = Table { family: Family::Ip, name: "t" };
        let mut client = Nft::open().unwrap();
        let rules = [
            Rule::new([iifname("eth0").unwrap(), masked(daddr("10.0.0.0".parse().unwrap()), 9)].concat()),
            Rule::new([fib_daddr_local(), vec![Expr::Verdict(Verdict::Jump("other".into()))]].concat()),
            Rule::new([l4proto(6), dport(80), dnat("10.0.0.2".parse().unwrap(), Some(80))].concat()),
            Rule::new([Expr::Verdict(Verdict::Accept)]).with_comment("äöü \"quoted\"").with_tag(0x80, b"tag"),
        ];
        let mut batch = Batch::new();
        batch.ensure_table(t, Some("table"));
        batch.ensure_base_chain(t, "c", BaseChain { kind: Kind::Nat, hook: Hook::Prerouting, priority: -100 });
        batch.ensure_chain(t, "other", Some("chain"));
        for rule in &rules {
            batch.append_rule(t, "c", rule);
        }
        client.commit(batch).unwrap();
        let listed = client.rules(t, "c").unwrap();
        assert_eq!(listed.iter().map(|listed| listed.rule.clone()).collect::<Vec<_>>(), rules);
        assert!(listed.is_sorted_by_key(|listed| listed.handle));
        assert_eq!(client.rules(t, "other").unwrap(), []);
        assert_eq!(client.rules(t, "absent").unwrap(), []);
        assert_eq!(client.rules(T, "c").unwrap(), []);
        let chains = client.chains(t).unwrap();
        assert_eq!(chains.iter().map(|chain| chain.name.as_str()).collect::<Vec<_>>(), ["c", "other"]);
        let base = BaseChain { kind: Kind::Nat, hook: Hook::Prerouting, priority: -100 };
        assert_eq!(chains.iter().map(|chain| chain.base).collect::<Vec<_>>(), [Some(base), None]);
        assert_eq!(client.find_chain(t, "other").unwrap().as_ref(), Some(&chains[1]));
        assert_eq!(client.find_chain(t, "absent").unwrap(), None);
        assert!(ruleset().contains("comment \"chain\""));
        // The rule and the chain with these handles are removed, and no others.
        let mut batch = Batch::new();
        batch.delete_rule(t, "c", listed[1].handle);
        batch.delete_chain(t, "other", chains[1].handle);
        client.commit(batch).unwrap();
        assert_eq!(client.rules(t, "c").unwrap().len(), 3);
        assert_eq!(client.chains(t).unwrap().len(), 1);
        let mut batch = Batch::new();
        batch.flush_chain(t, "c");
        client.commit(batch).unwrap();
        assert_eq!(client.rules(t, "c").unwrap(), []);
        let mut batch = Batch::new();
        batch.delete_table(t);
        client.commit(batch).unwrap();
        assert_eq!(ruleset(), "");
    });
}

#[test]
fn a_refused_change_is_named_and_takes_the_whole_batch_back() {
    on_a_host(|| {
        let mut client = Nft::open().unwrap();
        let mut batch = with_base("base", Kind::Filter, Hook::Prerouting, 0);
        batch.append_rule(T, "base", &verdict(Verdict::Jump("nowhere".into())).with_comment("mine"));
        batch.append_rule(T, "missing", &verdict(Verdict::Drop));
        let error = client.commit(batch).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("failed to add rule \"mine\" to nft chain inet t base: No such file"), "{text}");
        assert!(error.is_not_found() && !raced(&error) && !error.is_unsupported());
        assert_eq!(ruleset(), "");

        client.commit(with_base("base", Kind::Filter, Hook::Prerouting, 0)).unwrap();
        let mut batch = Batch::new();
        batch.create_chain(T, "base");
        let error = client.commit(batch).unwrap_err();
        assert!(error.is_exists() && error.to_string().starts_with("failed to add nft chain inet t base: File exists"));
        let error = client.commit(with_base("base", Kind::Filter, Hook::Output, 0)).unwrap_err();
        let text = "failed to add nft base chain inet t base: the chain exists with another hook, type or priority";
        assert_eq!(error.to_string(), text);
        let mut batch = Batch::new();
        batch.append_rule(T, "base", &verdict(Verdict::Drop).with_comment("x".repeat(254)));
        let text = client.commit(batch).unwrap_err().to_string();
        assert!(text.ends_with("comment and tags are longer than the 256 bytes that the kernel stores"), "{text}");
        // The connection still works after these refusals.
        assert_eq!(client.chains(T).unwrap().len(), 1);
        client.commit(Batch::new()).unwrap();
    });
}

#[test]
fn only_a_plan_from_outdated_rules_is_tried_again() {
    on_a_host(|| {
        let mut client = Nft::open().unwrap();
        let mut tries = 0;
        let error = change(&mut client, |_, batch| {
            tries += 1;
            if tries < 3 {
                nft("flush ruleset\nadd table inet t");
            }
            batch.append_rule(T, "missing", &verdict(Verdict::Drop));
            Ok(())
        });
        assert!(error.unwrap_err().is_not_found());
        assert_eq!(tries, 3);
    });
}

#[test]
fn what_an_administrator_set_on_a_shared_table_stays() {
    on_a_host(|| {
        let theirs = "table inet t { flags dormant; comment \"theirs\"\n chain base { comment \"too\"\n type filter hook prerouting priority 0; policy drop; }; }";
        nft(theirs);
        let before = ruleset();
        assert!(before.contains("dormant") && before.contains("policy drop") && before.contains("theirs"));
        let mut batch = with_base("base", Kind::Filter, Hook::Prerouting, 0);
        batch.ensure_table(T, Some("ours"));
        batch.ensure_chain(T, "base", Some("o"));
        Nft::open().unwrap().commit(batch).unwrap();
        assert_eq!(ruleset(), before);
    });
}

#[test]
fn after_einval_nothing_is_read_and_changes_are_unsupported() {
    on_a_host(|| {
        nft("table ip t { set s { type ipv4_addr; }; chain c { accept; }; }");
        let table = Table { family: Family::Ip, name: "t" };
        let mut connection = Nft::open().unwrap();
        assert_eq!(connection.rules(table, "c").unwrap().len(), 1);
        assert!(connection.unsupported_error().is_none());
        // A kernel without nf_tables answers EINVAL to every request, this one to an address of the
        // wrong length.
        assert!(!connection.has_element(table, "s", "fd00::1".parse().unwrap()).unwrap());
        assert_eq!(connection.rules(table, "c").unwrap(), []);
        assert_eq!(connection.find_chain(table, "c").unwrap(), None);
        let generation = connection.wait_for_generation().unwrap();
        let planned = || {
            let mut batch = Batch::new();
            batch.only_at(generation);
            batch
        };
        connection.commit(planned()).unwrap();
        let mut batch = planned();
        batch.flush_chain(table, "c");
        let error = connection.commit(batch).unwrap_err();
        assert!(error.is_unsupported(), "{error:?}");
        let text = "failed to read nft set ip t s: Operation not supported (os error 95): the kernel has no nf_tables \
                    (EINVAL: Invalid argument)";
        assert_eq!(error.to_string(), text);
    });
}

#[test]
fn an_unsupported_chain_type_is_not_taken_for_a_lost_race() {
    on_a_host(|| {
        // No kernel has NAT for bridges, so each answers as one without the bridge family does.
        let bridge = Table { family: Family::Bridge, name: "t" };
        let mut batch = Batch::new();
        batch.ensure_table(bridge, None);
        batch.ensure_base_chain(bridge, "c", BaseChain { kind: Kind::Nat, hook: Hook::Prerouting, priority: 0 });
        let error = Nft::open().unwrap().commit(batch).unwrap_err();
        assert!(error.is_unsupported() && !raced(&error), "{error:?}");
        let text = error.to_string();
        assert!(text.starts_with("failed to add nft base chain bridge t c: Operation not supported"), "{text}");
        assert_eq!(ruleset(), "");
    });
}

#[test]
fn the_probe_says_yes_and_leaves_nothing() {
    on_a_host(|| {
        assert!(nft_usable().unwrap());
        assert_eq!(ruleset(), "");
        // The kernel refuses a rehearsal for the same reason as a commit.
        let mut batch = with_base("base", Kind::Filter, Hook::Prerouting, 0);
        batch.append_rule(T, "missing", &verdict(Verdict::Drop));
        assert!(Nft::open().unwrap().rehearse(batch).unwrap_err().is_not_found());
    });
}

#[test]
fn many_at_once_making_the_same_table_all_succeed() {
    on_a_host(|| {
        // Threads instead of processes: the kernel only distinguishes the sockets. A new thread is
        // in the namespace of the thread that creates it.
        thread::scope(|scope| {
            for number in 0..30 {
                scope.spawn(move || {
                    let mut batch = with_base("base", Kind::Filter, Hook::Prerouting, 0);
                    batch.append_rule(T, "base", &verdict(Verdict::Accept).with_comment(number.to_string()));
                    Nft::open().unwrap().commit(batch).unwrap();
                });
            }
        });
        assert_eq!(Nft::open().unwrap().rules(T, "base").unwrap().len(), 30);
    });
}

#[test]
fn a_long_list_is_read_as_it_was_at_one_instant() {
    on_a_host(|| {
        let fill = |comment: &str| {
            let mut batch = with_base("base", Kind::Filter, Hook::Prerouting, 0);
            batch.flush_chain(T, "base");
            for _ in 0..400 {
                batch.append_rule(T, "base", &verdict(Verdict::Return).with_comment(comment));
            }
            batch
        };
        Nft::open().unwrap().commit(fill("even")).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut writer = Nft::open().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    writer.commit(fill("odd")).unwrap();
                    writer.commit(fill("even")).unwrap();
                }
            });
            let _ended = cni_testkit::Ended(&stop);
            let mut reader = Nft::open().unwrap();
            let mut seen = BTreeSet::new();
            let (mut reads, deadline) = (0, Instant::now() + cni_testkit::patience(Duration::from_secs(20)));
            // After sixty reads, the writer has perhaps not begun yet.
            while reads < 60 || (seen.len() < 2 && Instant::now() < deadline) {
                reads += 1;
                let mut comments: Vec<_> =
                    reader.rules(T, "base").unwrap().into_iter().map(|listed| listed.rule.comment.unwrap()).collect();
                let len = comments.len();
                comments.dedup();
                seen.insert((len, comments.concat()));
            }
            assert_eq!(seen, BTreeSet::from([(400, "even".to_owned()), (400, "odd".to_owned())]));
        });
    });
}

#[test]
fn what_a_rule_mentions_is_found_in_its_bytes() {
    on_a_host(|| {
        nft(
            "table ip t { chain x { }; chain longer { }; chain c { tcp dport 4660 counter jump longer comment \"ab\"; tcp dport 13398 jump x; }; }",
        );
        let mut nft = Nft::open().unwrap();
        let table = Table { family: Family::Ip, name: "t" };
        let mut count = |wanted: &dyn Fn(&[u8]) -> bool| nft.rules_where(table, "c", wanted).unwrap().len();
        assert_eq!(count(&|rule| has_any_pair(rule, &[[0x12, 0x34]])), 1, "4660");
        assert_eq!(count(&|rule| has_any_pair(rule, &[[0x34, 0x56], [0x12, 0x34]])), 2);
        assert_eq!(count(&|rule| has_any_pair(rule, &[[0x56, 0x34]])), 0);
        assert_eq!(count(&|rule| mentions(rule, "longer")), 1);
        assert_eq!(count(&|rule| mentions(rule, "longest")), 0);
        assert_eq!(count(&|rule| mentions(rule, "")), 2);
        assert_eq!(count(&|rule| mentions(rule, "ab\0")), 1, "the comment");
    });
}
