//! Each system call of firewall fails or is where the plugin is killed. The next DEL removes the
//! leftovers and does not affect a neighbour. Each run tries a share of the calls; `CNI_TEST_SLOW`
//! and `--soak` change it (`cni_testkit::rounds`).

use cni_testkit::trace::{self, Act, Plan};
use cni_testkit::{bin_dir, require, rounds};
use conformance::patched;
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::json;

use super::egress::{denying, has_network, is_checked};
use super::world::{Backend, Pod, World, config, each, naming, rules};

const SWEPT: [Backend; 2] = [Backend::Nftables, Backend::IptablesNft];

/// Runs `verb` once for each of a share of its calls, with `act` at that call, and asserts that the
/// next DEL leaves nothing.
#[track_caller]
fn swept(world: &World, verb: &str, act: Act) {
    let keys = patched(json!({"ingressPolicy": "same-bridge", "acceptMappedPorts": true}), denying());
    let config = config(world, keys);
    let (pod, neighbour) = (world.dual(), world.dual());
    // The rules of egress are in nf_tables with every backend.
    let naming = |pod: &Pod<'_>| naming(world, pod) + usize::from(is_checked(world, pod));
    neighbour.add(&config).success();
    let kept = naming(&neighbour);
    let live = |at: u64| {
        let plan = Plan { victim: "firewall".to_owned(), at, act };
        if verb == "DEL" {
            pod.add(&config).success();
        }
        let traced = pod.invocation(&bin_dir(), verb, &config, Some(&pod.result)).traced(&plan);
        let (left, failed) = (naming(&pod), traced.outcome.status != Some(0));
        let told = || format!("call {at}, {:?}, {:?}\n{}", traced.hit, world.backend, traced.outcome.report());
        // An ADD that failed without being killed has undone everything.
        let must_be_clean = if verb == "ADD" { failed && matches!(act, Act::Fail(_)) } else { !failed };
        assert!(!must_be_clean || left == 0, "{} {:#?}", told(), rules(world));
        pod.invocation(&bin_dir(), "DEL", &config, None).run().success();
        assert_eq!((naming(&pod), naming(&neighbour)), (0, kept), "{} {:#?}", told(), rules(world));
        traced.calls
    };
    live(u64::MAX);
    let calls = live(u64::MAX);
    assert!(calls > 20, "{calls}");
    let some = rounds(calls).clamp(1, 25);
    for at in (1..=calls).step_by(usize::try_from(calls.div_ceil(some)).unwrap()) {
        live(at);
    }
    neighbour.check(&config).success();
    pod.add(&config).success();
    pod.check(&config).success();
    pod.leave();
    neighbour.leave();
    assert!(!has_network(world), "{:?} {:#?}", world.backend, rules(world));
}

#[test]
fn a_killed_add_leaves_nothing_that_del_does_not_remove() {
    require!(trace::supported());
    each(&SWEPT, |world| swept(world, "ADD", Act::Signal(Signal::SIGKILL)));
}

#[test]
fn a_killed_del_leaves_nothing_to_the_next() {
    require!(trace::supported());
    each(&SWEPT, |world| swept(world, "DEL", Act::Signal(Signal::SIGKILL)));
}

#[test]
fn an_add_whose_calls_fail_undoes_itself() {
    require!(trace::supported());
    each(&SWEPT, |world| swept(world, "ADD", Act::Fail(Errno::EIO)));
}

#[test]
fn a_del_with_failing_calls_reports_it_and_the_next_cleans() {
    require!(trace::supported());
    each(&SWEPT, |world| swept(world, "DEL", Act::Fail(Errno::EIO)));
}
