//! One trial: a list is driven up to one call of one program, something happens there, and the runtime goes on.
//! A sweep: a trial for call after call, until the program ends unhurt.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use cni_testkit::trace::{Act, Hit, Plan, Traced};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::chain::{Chain, Links, PLUGINS, left_inside};
use crate::measure::{Dice, figure, found, seed, soak};
use crate::world::{Backend, World};

/// Longer than any child may outlive its plugin: it is to be killed with it. On a machine with a lot to do even that takes
/// a while; one that waits for a lock would take 30 s.
const ORPHAN: Duration = Duration::from_secs(10);

/// During which verb it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Add,
    Del,
}

impl Verb {
    fn text(self) -> &'static str {
        if self == Verb::Add { "ADD" } else { "DEL" }
    }
}

/// What the runtime does afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// DEL of the list, the namespace being there.
    Del,
    /// The namespace is gone, the DEL lost: GC.
    Gc,
}

/// Which program is hit while which plugin is called, and how many calls it made, at least, when this was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Victim {
    pub(crate) plugin: &'static str,
    pub(crate) program: &'static str,
    pub(crate) floor: u64,
}

/// What all trials of a sweep have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sweep {
    pub(crate) backend: Backend,
    pub(crate) verb: Verb,
    pub(crate) act: Act,
    /// How many points of each victim an ordinary run tries.
    pub(crate) share: u64,
}

/// What a trial came to.
struct Trial {
    hit: Option<Hit>,
    calls: u64,
    complaints: Vec<String>,
}

impl Sweep {
    /// Tries these victims, and returns what is to be complained of.
    pub(crate) fn over(self, victims: &[Victim]) -> Vec<String> {
        let seed = seed();
        let (mut complaints, mut figures, mut dice) = (Vec::new(), Vec::new(), Dice::new(seed));
        let (mut tried, began) = (0, Instant::now());
        let mut world = World::new(self.backend);
        for victim in victims {
            let whole = self.attempt(&world, victim, u64::MAX, Way::Del);
            complaints.extend(whole.complaints);
            let step = if soak().is_some() { 1 } else { (whole.calls / self.share).max(1) };
            let ways = if soak().is_some() { &[Way::Del, Way::Gc][..] } else { &[Way::Del][..] };
            let (mut at, mut points) = (1 + dice.below(step), 0);
            loop {
                let mut hit = false;
                for way in ways {
                    // A share goes the two ways in turn.
                    let way = if ways.len() == 1 && points % 2 == 1 { Way::Gc } else { *way };
                    let trial = self.attempt(&world, victim, at, way);
                    hit = trial.hit.is_some();
                    if !trial.complaints.is_empty() {
                        let (Victim { plugin, program, .. }, hit) = (victim, trial.hit);
                        let at = format!("{} of {program} in {plugin} at {at}, {hit:?}, then {way:?}", name(self.act));
                        let all = format!("{at}:\n  {}", trial.complaints.join("\n  "));
                        found(&all);
                        complaints.push(all);
                        world.node.abandon();
                        world = World::new(self.backend);
                    }
                }
                if !hit {
                    break;
                }
                points += 1;
                at += step;
            }
            tried += points;
            figures.push(format!("{} in {}: {points} of {}", victim.program, victim.plugin, whole.calls));
            // Runs differ by a few calls: how often an answer was not there yet.
            if whole.calls < victim.floor || points * step * 10 < whole.calls.saturating_sub(step) * 9 {
                let calls = whole.calls;
                complaints.push(format!("{victim:?}: only {points} points of {calls} calls, every {step}th"));
            }
        }
        world.neighbour_lives();
        world.close();
        figure(&format!(
            "{} during {}, {:?}: {tried} points in {:.0} s, seed {seed} ({})",
            name(self.act),
            self.verb.text(),
            self.backend,
            began.elapsed().as_secs_f64(),
            figures.join(", ")
        ));
        if !complaints.is_empty() {
            complaints.insert(0, format!("{self:?}, CNI_SEED={seed}: {} of {tried} points:", complaints.len()));
        }
        complaints
    }

    /// A trial whose failed assertions are complaints.
    fn attempt(self, world: &World, victim: &Victim, at: u64, way: Way) -> Trial {
        catch_unwind(AssertUnwindSafe(|| self.trial(world, victim, at, way))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic of the test".to_owned());
            Trial { hit: Some(Hit::default()), calls: 0, complaints: vec![text] }
        })
    }

    fn trial(self, world: &World, victim: &Victim, at: u64, way: Way) -> Trial {
        let plan = Plan { victim: victim.program.to_owned(), at, act: self.act };
        let container = world.node.container();
        let chain = Chain::new(world, &container);
        let (traced, prev, mut complaints) = match self.verb {
            Verb::Add => self.adding(world, &chain, victim, &plan),
            Verb::Del => self.deleting(&chain, victim, &plan),
        };
        if way == Way::Gc {
            container.destroy();
            complaints.extend(chain.try_gc_all());
            complaints.extend(world.left());
        } else {
            complaints.extend(chain.try_del_all(prev.as_ref()));
            complaints.extend(left_inside(&container));
            complaints.extend(world.left());
            if complaints.is_empty() && self.verb == Verb::Add && (soak().is_some() || at.is_multiple_of(4)) {
                let links = chain.add_all();
                chain.check_all(&links);
                world.neighbour_lives();
                chain.del_all(links.last());
                complaints.extend(world.left());
            }
        }
        Trial { hit: traced.hit, calls: traced.calls, complaints }
    }

    /// ADD up to the victim's plugin, and, if nothing came of it, to the end. A failed ADD leaves no result.
    fn adding(
        self,
        world: &World,
        chain: &Chain<'_>,
        victim: &Victim,
        plan: &Plan,
    ) -> (Traced, Option<Value>, Vec<String>) {
        let mut links = Links::new();
        let mut rest = PLUGINS.iter();
        for plugin in rest.by_ref().take_while(|plugin| **plugin != victim.plugin) {
            links.push(chain.call(plugin, "ADD", links.last()).run().success());
        }
        let before = world.state();
        let traced = chain.call(victim.plugin, "ADD", links.last()).traced(plan);
        let mut complaints = self.judge(&traced, victim);
        if traced.outcome.status != Some(0) {
            if traced.outcome.status.is_some() {
                let left = world.left_after(&before);
                if !left.is_empty() {
                    complaints.push(format!("a failed ADD left {}\n{}", left.join("\n"), traced.outcome.report()));
                }
            }
            return (traced, None, complaints);
        }
        links.extend(traced.outcome.json.clone());
        for plugin in rest {
            links.push(chain.call(plugin, "ADD", links.last()).run().success());
        }
        (traced, links.pop(), complaints)
    }

    /// ADD of all, DEL up to the victim's plugin. The runtime keeps the result until all have succeeded.
    fn deleting(self, chain: &Chain<'_>, victim: &Victim, plan: &Plan) -> (Traced, Option<Value>, Vec<String>) {
        let prev = chain.add_all().pop();
        for plugin in PLUGINS.iter().rev().take_while(|plugin| **plugin != victim.plugin) {
            chain.call(plugin, "DEL", prev.as_ref()).run().success();
        }
        let traced = chain.call(victim.plugin, "DEL", prev.as_ref()).traced(plan);
        let complaints = self.judge(&traced, victim);
        (traced, prev, complaints)
    }

    /// How the plugin may end.
    fn judge(self, traced: &Traced, victim: &Victim) -> Vec<String> {
        let Traced { outcome, hit, outlived, .. } = traced;
        let mut complaints = Vec::new();
        let mut complain = |what: &str| complaints.push(format!("{what}\n{}", outcome.report()));
        if *outlived > ORPHAN {
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
                let error = outcome.json.as_ref().filter(|json| json["code"].is_u64() && json["msg"].is_string());
                // What cannot write its error has said all that it can.
                let mute =
                    says_nothing && hit.as_ref().is_some_and(|hit| hit.call.starts_with("write") || hit.starting);
                if error.is_none() && !mute {
                    complain("a failure without an error object");
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
            // The runtime library of the language gives up.
            None if hit.as_ref().is_some_and(|hit| hit.starting) && says_nothing => {}
            // A thread that cannot leave a container's namespace must not go on in it; the DEL cleans up.
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

/// Fails the test if there is anything to complain of.
#[track_caller]
pub(crate) fn none(complaints: &[String]) {
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

fn name(act: Act) -> String {
    match act {
        Act::Signal(signal) => signal.to_string(),
        Act::Fail(errno) => format!("{errno:?}"),
    }
}
