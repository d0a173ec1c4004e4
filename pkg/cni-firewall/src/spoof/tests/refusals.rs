//! Tests the probe, and errors of [`SpoofCheck::ensure`] that must change nothing.

use super::*;
use crate::testing::in_new_netns;

#[test]
fn the_probe_says_yes_both_ways_and_leaves_nothing() {
    on_a_host(|| {
        let mut spoof = SpoofCheck::open().unwrap();
        spoof.probe().unwrap();
        assert_eq!(ruleset(), "");
        ensure("c1");
        let before = ruleset();
        spoof.probe().unwrap();
        assert_eq!(ruleset(), before);
    });
}

const REFUSED: &str =
    "failed to add nft base chain bridge nat PREROUTING: the chain exists with another hook, type or priority";

#[test]
fn a_shared_chain_with_another_hook_is_an_error_and_unchanged() {
    on_a_host(|| {
        for elsewhere in ["hook prerouting priority -200;", "hook output priority -300;", "hook forward priority -300;"]
        {
            nft(&format!("flush ruleset\ntable bridge nat {{ chain PREROUTING {{ type filter {elsewhere} }}; }}"));
            let before = ruleset();
            let mut spoof = SpoofCheck::open().unwrap();
            for error in [spoof.ensure(&attachment("c1"), "veth0", MAC).unwrap_err(), spoof.probe().unwrap_err()] {
                assert_eq!(error.to_string(), REFUSED);
            }
            assert_eq!(ruleset(), before);
            assert_eq!(differences("c1").len(), 4);
            purge("c1");
        }
        nft("flush ruleset\ntable bridge nat { chain PREROUTING { }; }");
        let error = SpoofCheck::open().unwrap().ensure(&attachment("c1"), "veth0", MAC).unwrap_err();
        assert_eq!(error.to_string(), REFUSED);
    });
}

#[test]
fn an_impossible_interface_name_is_refused_before_any_change() {
    on_a_host(|| {
        let error = SpoofCheck::open().unwrap().ensure(&attachment("c1"), "sixteen_bytes_xx", MAC).unwrap_err();
        assert_eq!(error.to_string(), "failed to build a rule for interface sixteen_bytes_xx: the name is too long");
        assert_eq!(ruleset(), "");
    });
}

#[test]
fn a_conflict_without_a_change_of_rules_is_tried_twice() {
    in_new_netns(|| {
        let mut spoof = SpoofCheck::open().unwrap();
        for errno in [libc::EEXIST, libc::ENOENT] {
            let conflict = || Error::new("failed", cni_linux::error::Cause::kernel(errno, None));
            let mut tries = 0;
            let error = engine::retry_conflicts(&mut spoof.nft, |_| {
                tries += 1;
                Err::<(), _>(conflict())
            });
            assert_eq!((error.unwrap_err().errno(), tries), (Some(errno), 2));
        }
        // While other processes change rules, the change is tried again.
        let mut tries = 0;
        let outcome = engine::retry_conflicts(&mut spoof.nft, |_| {
            tries += 1;
            if tries == 10 {
                return Ok(());
            }
            shell(&format!("nft add table bridge t{tries}"));
            Err(Error::new("failed", cni_linux::error::Cause::kernel(libc::EEXIST, None)))
        });
        assert_eq!((outcome.is_ok(), tries), (true, 10));
    });
}
