//! A trial runs a list up to one call of one program, applies an act there, and lets the runtime
//! continue. A sweep is a trial for each call, until the program ends before the point.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use cni_testkit::trace::{Act, Hit, Plan, Traced};
use cni_testkit::{Container, rounds};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::chain::{Chain, Links, PLUGINS, SYSCTL, left_inside};
use crate::judge::{NOT_RESTORED, kept_going};
use crate::kinds::Inside;
use crate::world::{Backend, World};
use conformance::measure::{Dice, figure, found, seed, soak};

/// The verb in which the act happens.
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
pub(crate) enum Way {
    /// DEL of the list, with the namespace.
    Del,
    /// The namespace is gone and the DEL is lost: GC.
    Gc,
    /// The namespace exists and the DEL is lost: GC.
    GcAlive,
}

/// The program that is hit, the plugin that is called, and the minimum number of the program's
/// calls when this was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Victim {
    pub(crate) plugin: &'static str,
    pub(crate) program: &'static str,
    pub(crate) floor: u64,
}

/// The settings of all trials of a sweep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sweep {
    pub(crate) backend: Backend,
    pub(crate) verb: Verb,
    pub(crate) act: Act,
    /// The points of each victim that an ordinary run tries, on a machine that is not slow.
    pub(crate) share: u64,
    /// How many points an ordinary run tries at least there, of all victims together: four fifths
    /// of what it did when this was written.
    pub(crate) floor: u64,
}

/// How many times a soak run walks over a victim's points, each time over every 16th.
const PASSES: u64 = 16;

/// The 16 offsets in an order in which each lies far from those before it: the bits of the pass
/// reversed.
fn scattered(pass: u64) -> u64 {
    (0..4).map(|bit| (pass >> bit & 1) << (3 - bit)).sum()
}

/// How far a victim's points have been tried.
struct Walk {
    victim: Victim,
    /// The number of its calls without an act.
    calls: u64,
    step: u64,
    points: u64,
    /// The number of completed passes.
    passes: u64,
}

impl Walk {
    fn figure(&self) -> String {
        let Victim { plugin, program, .. } = self.victim;
        format!("{program} in {plugin}: {} of {}", self.points, self.calls)
    }

    /// Returns a complaint if fewer points were tried than the completed passes contain, or, in a
    /// soak run that ran out of time, than its first pass contains.
    fn complaint(&self) -> Option<String> {
        let Walk { victim, calls, step, points, passes } = self;
        // Runs differ by a few calls, because an answer may come late.
        let expected = calls.saturating_sub(*step) * 9 * passes;
        let first = if soak().is_some() { (victim.floor / PASSES).max(1) } else { 1 };
        let few = *calls < victim.floor || points * step * 10 < expected || *points < first;
        few.then(|| format!("{victim:?}: only {points} points of {calls} calls, every {step}th, {passes} times over"))
    }
}

/// The outcome of a trial.
struct Trial {
    hit: Option<Hit>,
    calls: u64,
    /// The calls that the victim made, in order.
    all: Vec<Hit>,
    /// The programs that ran in the victim's plugin.
    programs: BTreeSet<String>,
    complaints: Vec<String>,
}

impl Sweep {
    /// Tries these victims and returns the complaints.
    ///
    /// An ordinary run tries a share of the points, a soak run all of them, both ways: first every
    /// 16th of each victim, then those between, so that what `within` cuts off is the finest.
    pub(crate) fn over(self, victims: &[Victim], within: Duration) -> Vec<String> {
        let seed = seed();
        let (mut complaints, mut dice, began) = (Vec::new(), Dice::new(seed), Instant::now());
        let mut world = World::new(self.backend);
        let mut walks: Vec<Walk> = Vec::new();
        let mut victims = victims.to_vec();
        let (listed, mut next) = (victims.len() as u64, 0);
        while let Some(victim) = victims.get(next).copied() {
            let whole = self.attempt(&world, &victim, u64::MAX, Way::Del, false);
            complaints.extend(whole.complaints);
            victims.extend(self.unlisted(&victim, whole.programs, &victims));
            walks.push(Walk { victim, calls: whole.calls, step: PASSES, points: 0, passes: 0 });
            next += 1;
        }
        if soak().is_none() {
            // An ordinary run tries about as many points as if all programs were listed.
            let share = rounds(self.share) * listed / walks.len() as u64;
            walks.iter_mut().for_each(|walk| walk.step = (walk.calls / share.max(1)).max(1));
        }
        let passes = if soak().is_some() { PASSES } else { 1 };
        let (mut in_time, mut tried) = (true, 0);
        for pass in 0..passes {
            for walk in &mut walks {
                let mut at = 1 + if passes == 1 { dice.below(walk.step) } else { scattered(pass) };
                while in_time && self.try_point(&mut world, walk, at, tried, &mut complaints) {
                    walk.points += 1;
                    tried += 1;
                    at += walk.step;
                    in_time = soak().is_none() || began.elapsed() < within;
                }
                walk.passes += u64::from(in_time);
            }
        }
        world.neighbour_lives();
        world.close();
        let all: u64 = walks.iter().map(|walk| walk.calls).sum();
        let figures: Vec<String> = walks.iter().map(Walk::figure).collect();
        figure(&format!(
            "{} during {}, {:?}: tried {tried} points of {all} in {:.0} s{}, seed {seed} ({})",
            name(self.act),
            self.verb.text(),
            self.backend,
            began.elapsed().as_secs_f64(),
            if in_time { "" } else { ", then the time was up" },
            figures.join(", ")
        ));
        complaints.extend(walks.iter().filter_map(Walk::complaint));
        if soak().is_none() && tried < rounds(self.floor) {
            complaints.push(format!("only {tried} points of {} were tried", rounds(self.floor)));
        }
        if !complaints.is_empty() {
            complaints.insert(0, format!("{self:?}, CNI_SEED={seed}: {} of {tried} points:", complaints.len()));
        }
        complaints
    }

    /// Returns the programs that ran in the victim's plugin and are not in the list, so that each
    /// call of each of them is a point. Only kills hit programs that are not part of these plugins:
    /// what iptables does after an error of the kernel is not tested here.
    fn unlisted(self, victim: &Victim, programs: BTreeSet<String>, listed: &[Victim]) -> Vec<Victim> {
        let is_listed =
            |program: &String| listed.iter().any(|other| other.plugin == victim.plugin && other.program == program);
        let is_hit = |program: &String| {
            let first = program.split('+').next().unwrap_or_default();
            self.act == Act::Signal(Signal::SIGKILL) || first == "host-local" || PLUGINS.contains(&first)
        };
        let unlisted = programs.into_iter().filter(|program| !is_listed(program) && is_hit(program));
        unlisted.map(|program| Victim { plugin: victim.plugin, program: program.leak(), floor: 0 }).collect()
    }

    /// Tries one point, in a soak run both ways. Returns whether the program reached the point.
    /// `number` points were tried before.
    fn try_point(self, world: &mut World, walk: &Walk, at: u64, number: u64, complaints: &mut Vec<String>) -> bool {
        // A share looks at the next ADD after one in four, which go either way.
        let again = soak().is_some() || matches!(number % 8, 0 | 5);
        // A share goes the two ways in turn.
        let ways = match (soak(), walk.points % 2) {
            (Some(_), _) => &[Way::Del, Way::Gc][..],
            (None, 0) => &[Way::Del],
            (None, _) => &[Way::Gc],
        };
        let mut hit = false;
        for way in ways {
            hit = self.try_once(world, &walk.victim, (at, *way), again, complaints);
        }
        hit
    }

    /// Tries one point in one way; returns whether the program reached the point.
    fn try_once(
        self,
        world: &mut World,
        victim: &Victim,
        (at, way): (u64, Way),
        again: bool,
        complaints: &mut Vec<String>,
    ) -> bool {
        let trial = self.attempt(world, victim, at, way, again);
        let hit = trial.hit.is_some();
        if !trial.complaints.is_empty() {
            let (Victim { plugin, program, .. }, hit) = (victim, trial.hit);
            let at = format!("{} of {program} in {plugin} at {at}, {hit:?}, then {way:?}", name(self.act));
            let all = format!("{at}:\n  {}", trial.complaints.join("\n  "));
            found(&all);
            complaints.push(all);
            std::mem::replace(world, World::new(self.backend)).node.abandon();
        }
        hit
    }

    /// Tries every call (of that name, if given) of the plugins of these names and returns the
    /// complaints.
    pub(crate) fn at_each(self, call: Option<&str>, way: Way, plugins: &[&'static str]) -> Vec<String> {
        let (mut complaints, mut world, began, mut tried) = (Vec::new(), World::new(self.backend), Instant::now(), 0);
        for plugin in plugins {
            let victim = Victim { plugin, program: plugin, floor: 0 };
            let whole = self.attempt(&world, &victim, u64::MAX, Way::Del, false);
            complaints.extend(whole.complaints);
            let is_meant = |hit: &Hit| call.is_none_or(|call| hit.call == call) && !hit.starting;
            let points: Vec<u64> = (1..).zip(&whole.all).filter(|(_, hit)| is_meant(hit)).map(|(at, _)| at).collect();
            // All of them; on a slow machine as many as there is time for.
            let count = points.len() as u64;
            let step = (count / rounds(count).max(1)).max(1) as usize;
            for at in points.into_iter().step_by(step) {
                self.try_once(&mut world, &victim, (at, way), tried % 8 == 0, &mut complaints);
                tried += 1;
            }
        }
        world.neighbour_lives();
        world.close();
        figure(&format!(
            "{} at each {} during {}, {:?}: tried {tried} points in {:.0} s",
            name(self.act),
            call.unwrap_or("call"),
            self.verb.text(),
            self.backend,
            began.elapsed().as_secs_f64()
        ));
        if tried < rounds(self.floor) {
            complaints.push(format!("only {tried} points were tried"));
        }
        complaints
    }

    /// Runs a trial and returns its failed assertions as complaints.
    fn attempt(self, world: &World, victim: &Victim, at: u64, way: Way, again: bool) -> Trial {
        let trial = || self.trial(world, victim, at, way, again);
        catch_unwind(AssertUnwindSafe(trial)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic of the test".to_owned());
            Trial {
                hit: Some(Hit::default()),
                calls: 0,
                all: Vec::new(),
                programs: BTreeSet::new(),
                complaints: vec![text],
            }
        })
    }

    fn trial(self, world: &World, victim: &Victim, at: u64, way: Way, again: bool) -> Trial {
        let plan = Plan { victim: victim.program.to_owned(), at, act: self.act };
        let container = world.node.container();
        let chain = Chain::new(world, &container);
        let (traced, prev, mut complaints) = match self.verb {
            Verb::Add => self.adding(world, &chain, &container, victim, &plan),
            Verb::Del => self.deleting(world, &chain, &container, victim, &plan, way),
        };
        if way != Way::Del {
            if way == Way::Gc {
                container.destroy();
                complaints.extend(chain.try_gc_all());
            } else {
                complaints.extend(chain.try_gc_all());
                // A sysctl of the container ends with its namespace.
                complaints.extend(left_inside(&container).into_iter().filter(|left| !left.starts_with(SYSCTL)));
            }
            complaints.extend(world.left());
            if complaints.is_empty() && again {
                let next = world.node.container();
                complaints.extend(lives(world, &Chain::new(world, &next)));
            }
        } else {
            complaints.extend(chain.try_del_all(prev.as_ref()));
            // A sysctl that the kernel does not take back at DEL is only logged, so that the
            // container can end.
            let told = self.verb == Verb::Del && traced.outcome.stderr.contains(NOT_RESTORED);
            complaints.extend(left_inside(&container).into_iter().filter(|left| !(told && left.starts_with(SYSCTL))));
            complaints.extend(world.left());
            // The same container again, as after a failed start.
            if complaints.is_empty() && again {
                complaints.extend(lives(world, &chain));
            }
        }
        Trial { hit: traced.hit, calls: traced.calls, all: traced.all, programs: traced.programs, complaints }
    }

    /// Calls ADD up to the victim's plugin and, if that succeeded, of all others. A failed ADD has
    /// no result.
    fn adding(
        self,
        world: &World,
        chain: &Chain<'_>,
        container: &Container,
        victim: &Victim,
        plan: &Plan,
    ) -> (Traced, Option<Value>, Vec<String>) {
        let mut links = Links::new();
        let mut rest = PLUGINS.iter();
        for plugin in rest.by_ref().take_while(|plugin| **plugin != victim.plugin) {
            links.push(chain.call(plugin, "ADD", links.last()).run().success());
        }
        let (before, inside) = (world.state(), Inside::of(container));
        let traced = chain.call(victim.plugin, "ADD", links.last()).traced(plan);
        let mut complaints = self.judge(&traced, victim);
        if traced.outcome.status != Some(0) {
            if traced.outcome.status.is_some() {
                let mut left = world.left_after(&before);
                left.extend(Inside::of(container).differs_from(&inside));
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
        // A plugin that continued after an error must have completed its work.
        if traced.hit.is_some() {
            complaints.extend(chain.try_check_all(&links));
        }
        (traced, links.pop(), complaints)
    }

    /// Calls ADD of all, then DEL up to the victim's plugin. The runtime keeps the result until all
    /// DELs have succeeded.
    fn deleting(
        self,
        world: &World,
        chain: &Chain<'_>,
        container: &Container,
        victim: &Victim,
        plan: &Plan,
        way: Way,
    ) -> (Traced, Option<Value>, Vec<String>) {
        let mut links = Links::new();
        // The value before tuning, which DEL must restore.
        let mut untuned = None;
        for plugin in PLUGINS {
            if plugin == "tuning" && victim.plugin == "tuning" {
                untuned = Some(Inside::of(container));
            }
            links.push(chain.call(plugin, "ADD", links.last()).run().success());
        }
        let prev = links.pop();
        for plugin in PLUGINS.iter().rev().take_while(|plugin| **plugin != victim.plugin) {
            chain.call(plugin, "DEL", prev.as_ref()).run().success();
        }
        let traced = chain.call(victim.plugin, "DEL", prev.as_ref()).traced(plan);
        let mut complaints = self.judge(&traced, victim);
        if matches!(self.act, Act::Fail(_)) {
            let inside = untuned.map(|untuned| Inside::of(container).differs_from(&untuned)).unwrap_or_default();
            complaints.extend(kept_going(world, chain, victim, &traced, inside, (prev.as_ref(), way)));
        }
        (traced, prev, complaints)
    }
}

/// Returns the failures of the next attachment's ADD and DEL, beside the neighbour.
fn lives(world: &World, chain: &Chain<'_>) -> Vec<String> {
    let links = chain.add_all();
    chain.check_all(&links);
    world.neighbour_lives();
    chain.del_all(links.last());
    world.left()
}

/// Panics if there are complaints.
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
