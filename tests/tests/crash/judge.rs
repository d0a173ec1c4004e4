//! Judges how a killed or failing plugin ends, what it reports and what it leaves.

use std::time::Duration;

use cni_testkit::patience;
use cni_testkit::trace::{Act, Traced};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::chain::{Chain, dels_after};
use crate::kinds::{Kind, kinds};
use crate::sweep::{Sweep, Verb, Victim, Way};
use crate::world::World;

/// An upper bound on how long a child outlives its plugin. The child is killed with the plugin,
/// which takes a while on a busy machine. A child that waited for a lock would take 30 s.
pub(crate) const ORPHAN: Duration = Duration::from_secs(10);

/// How tuning's DEL reports what it could not restore.
pub(crate) const NOT_RESTORED: &str = "not restored: ";

impl Sweep {
    /// Returns what is wrong with the plugin's end.
    pub(crate) fn judge(self, traced: &Traced, victim: &Victim) -> Vec<String> {
        let Traced { outcome, hit, outlived, .. } = traced;
        let mut complaints = Vec::new();
        let mut complain = |what: &str| complaints.push(format!("{what}\n{}", outcome.report()));
        // On every machine less than the 30 s that plugins wait for a lock.
        if *outlived > patience(ORPHAN).min(Duration::from_secs(25)) {
            complain(&format!("a child lives on for {outlived:?}"));
        }
        if outcome.stderr.contains("panicked at") {
            complain("a panic");
        }
        let says_nothing = outcome.stdout.is_empty();
        match outcome.status {
            Some(0) if (self.verb == Verb::Add) == outcome.json.is_some() => {}
            Some(0) => complain("success with the wrong thing on stdout"),
            Some(_) => {
                let error = outcome.json.as_ref().filter(|json| json.is_object());
                // A plugin that cannot write its error cannot report more.
                let mute =
                    says_nothing && hit.as_ref().is_some_and(|hit| hit.call.starts_with("write") || hit.starting);
                if error.is_none() && !mute {
                    complain("a failure without an error object");
                }
                if let Some(what) = error.and_then(|error| unclear(error, self.act, victim)) {
                    complain(what);
                }
                if hit.is_none() {
                    complain("a failure for no reason");
                }
            }
            None if self.act == Act::Signal(Signal::SIGKILL) && victim.program == victim.plugin => {
                if !says_nothing && outcome.json.is_none() {
                    complain("half a document");
                }
            }
            // The language's runtime library aborts.
            None if hit.as_ref().is_some_and(|hit| hit.starting) && says_nothing => {}
            // A thread that cannot leave a container's namespace must not continue in it; DEL
            // cleans up.
            None if outcome.stderr.contains("failed to leave a network namespace") => {}
            None => complain("ended by a signal"),
        }
        let retries = self.act == Act::Fail(Errno::EINTR) && hit.as_ref().is_some_and(|hit| hit.waits && !hit.starting);
        if retries && outcome.status != Some(0) && victim.program == victim.plugin {
            complain("EINTR was not met by another try");
        }
        complaints
    }
}

/// The codes of `pkg/cni` that a call may fail with.
const CODES: [u64; 15] = [1, 2, 3, 4, 5, 6, 7, 8, 11, 50, 51, 100, 101, 102, 999];

/// Returns what an error lacks: a code of these plugins, a text of more than a word, or the cause.
fn unclear(error: &Value, act: Act, victim: &Victim) -> Option<&'static str> {
    let text = |key: &str| error[key].as_str().unwrap_or_default();
    let all = format!("{} {}", text("msg"), text("details"));
    // By number, because the C library determines the text.
    let said = match act {
        Act::Fail(errno) => all.contains(&format!("(os error {})", errno as i32)),
        Act::Signal(_) => all.contains("signal"),
    };
    // A delegate that its runtime library aborts before main cannot report anything; its caller
    // reports the signal.
    let named = victim.program == "host-local" && all.contains("host-local: ") && all.contains("killed by signal");
    if !error["code"].as_u64().is_some_and(|code| CODES.contains(&code)) {
        Some("an error with a code that these plugins do not use")
    } else if text("msg").trim().len() <= 15 {
        Some("an error without a text")
    } else if !said && !named {
        Some("an error that does not say why")
    } else {
        None
    }
}

/// Whether the plugin ended before its work, or could not continue: the exceptions from
/// [`kept_going`].
fn could_not_go_on(traced: &Traced, victim: &Victim) -> bool {
    let Traced { outcome, hit, .. } = traced;
    // Its runtime library aborted, it could not set up signal handling, or it does not know what to
    // remove: it has not tried anything yet.
    let began = !hit.as_ref().is_some_and(|hit| hit.starting) && !outcome.stdout.contains("error reading from stdin");
    // A thread that cannot leave a container's namespace would do harm there.
    let stranded = outcome.stderr.contains("failed to leave a network namespace");
    victim.program == victim.plugin && outcome.status != Some(0) && (!began || stranded)
}

/// Judges the leftovers of a DEL in which one call failed, before any DEL is repeated. If the DEL
/// reported success, nothing may be left, otherwise at most one kind of the plugin's own resources.
/// After the DELs of the plugins that follow, no more than that. `inside` is what tuning has not
/// restored.
pub(crate) fn kept_going(
    world: &World,
    chain: &Chain<'_>,
    victim: &Victim,
    traced: &Traced,
    inside: Vec<String>,
    (prev, way): (Option<&Value>, Way),
) -> Vec<String> {
    let outcome = &traced.outcome;
    let later: Vec<&str> = dels_after(victim.plugin).collect();
    let is_later = |line: &String| Kind::of(line).plugin().is_some_and(|plugin| later.contains(&plugin));
    let left: Vec<String> = world.left_now().into_iter().chain(inside).filter(|line| !is_later(line)).collect();
    let of = kinds(&left);
    let most = match outcome.status {
        // A value that the kernel does not take back is only logged: the namespace is about to go.
        Some(0) if victim.plugin == "tuning" && outcome.stderr.contains(NOT_RESTORED) => 1,
        Some(0) => 0,
        _ if could_not_go_on(traced, victim) => usize::MAX,
        _ => 1,
    };
    let mut complaints = Vec::new();
    if of.len() > most || of.iter().any(|kind| kind.plugin() != Some(victim.plugin)) {
        complaints.push(format!("a DEL that could go on left {of:?}:\n{}\n{}", left.join("\n"), outcome.report()));
    }
    if way == Way::Del {
        complaints.extend(chain.try_del_after(victim.plugin, prev));
        let left = world.left_now();
        if !kinds(&left).is_subset(&of) {
            complaints.push(format!("with {of:?} left by {}, the other DELs left\n{}", victim.plugin, left.join("\n")));
        }
    }
    complaints
}
