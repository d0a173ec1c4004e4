//! Kills cni-install at every system call, one command after another, and compares the folder with
//! a model.
//!
//! `cargo test` tries a share of the points, chosen by a seed that is printed (`CNI_SEED` repeats
//! it). With `CNI_SOAK` set, as in `scripts/test --soak`, it tries all of them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

mod model;
mod place;

use std::collections::{BTreeSet, HashSet};
use std::io::Write as _;
use std::time::{Duration, Instant};

use cni_testkit::trace::{self, Act};
use cni_testkit::{Node, require, rounds};
use nix::errno::Errno;
use nix::sys::signal::Signal;

use model::{Command, Model};
use place::{Folder, Place, State};

const KILL: Act = Act::Signal(Signal::SIGKILL);

/// The commands that ran on a folder before the commands that are killed.
const STARTS: [&[Command]; 4] = [
    &[],
    &[Command::InstallFirst],
    &[Command::InstallFirst, Command::InstallSecond],
    &[Command::InstallFirst, Command::InstallSecond, Command::Rollback],
];

fn soak() -> bool {
    std::env::var_os("CNI_SOAK").is_some_and(|value| !value.is_empty())
}

fn seed() -> u64 {
    std::env::var("CNI_SEED").map_or(1, |text| text.parse().expect("CNI_SEED is a number"))
}

/// Returns how long a test may take in a soak run: `CNI_SOAK_MINUTES`, or half an hour.
fn patience() -> Duration {
    let minutes = std::env::var("CNI_SOAK_MINUTES").ok().filter(|text| !text.is_empty());
    Duration::from_secs(60 * minutes.map_or(30, |text| text.parse().expect("CNI_SOAK_MINUTES is a number")))
}

/// Prints without libtest, which hides the output of passing tests; `scripts/test` shows these
/// lines.
fn figure(text: &str) {
    let _ = std::io::stderr().write_all(format!("\nFIGURE {text}\n").as_bytes());
}

/// Random numbers that are the same for the same seed (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(end).unwrap()).unwrap()
    }
}

/// A folder together with the models that it may match: a killed command has happened or not.
#[derive(Clone)]
struct Case {
    state: State,
    models: BTreeSet<Model>,
    story: String,
}

impl Case {
    fn start(place: &Place<'_>, commands: &[Command]) -> Case {
        let folder = place.original();
        let mut case = Case { state: folder.save(), models: BTreeSet::from([Model::new()]), story: String::new() };
        for command in commands {
            case = case.run(place, *command);
        }
        case
    }

    /// Runs the command to its end: the folder must be what one of the models says.
    fn run(&self, place: &Place<'_>, command: Command) -> Case {
        let folder = place.load(&self.state);
        let story = format!("{}\n  {command:?}", self.story);
        let (status, text) = folder.run(command);
        let programs = folder.programs();
        let mut models: BTreeSet<Model> = self.models.iter().map(|model| model.after(command)).collect();
        let expected: BTreeSet<_> = models.iter().map(|model| model.folder.clone()).collect();
        models.retain(|model| model.folder == programs);
        assert!(!models.is_empty(), "{story}\n{text}\nthe folder is {programs:?}, not one of {expected:?}");
        if command == Command::Status {
            let interrupted = text.contains("was interrupted");
            models.retain(|model| interrupted || (status == 0) == model.installed.is_some());
            assert!(!models.is_empty(), "{story}: {text}");
        } else {
            assert_eq!(status, 0, "{story}: {text}");
            let empty = models.iter().all(Model::needs_nothing);
            assert!(!empty || !folder.has_own_files(), "{story}: files of the installer remain\n{:?}", folder.save());
        }
        Case { state: folder.save(), models, story }
    }

    /// Runs the command with the signal or the error at its system call `at`; `None` if it makes
    /// fewer calls.
    fn hurt(&self, place: &Place<'_>, command: Command, (act, at): (Act, u64)) -> Option<(Case, String)> {
        let folder = place.load(&self.state);
        let traced = folder.traced(command, act, at);
        let call = traced.hit?.call;
        let story = format!("{}\n  {command:?}, {act:?} at call {at} ({call})", self.story);
        // Only its standard output failed.
        let was_executed = traced.outcome.stderr.contains("The command was executed");
        let has_failed = traced.outcome.status == Some(1) && !was_executed;
        if has_failed && matches!(command, Command::InstallFirst | Command::InstallSecond) {
            self.assert_install_undone(&folder, &format!("{story}\n{}", traced.outcome.report()));
        }
        let mut models = self.models.clone();
        models.extend(self.models.iter().map(|model| model.after(command)));
        folder.assert_whole_programs(&story);
        Some((Case { state: folder.save(), models, story }, call))
    }

    /// Checks that an installation that failed has changed nothing, and that no command is left to
    /// be undone.
    fn assert_install_undone(&self, folder: &Folder<'_>, story: &str) {
        let expected: BTreeSet<_> = self.models.iter().map(|model| model.folder.clone()).collect();
        assert!(expected.contains(&folder.programs()), "the folder is {:?}, {story}", folder.programs());
        let (_, text) = folder.run(Command::Status);
        assert!(!text.contains("was interrupted"), "{text}, {story}");
    }

    /// Checks that after any next command the folder is whole, and that the original set comes back
    /// unless it was dropped.
    fn check(&self, place: &Place<'_>, next: &[Command]) {
        for command in next {
            let case = self.run(place, *command);
            let drops = self.story.contains("Forget") || *command == Command::Forget;
            if !place.is_new((case.state.clone(), case.models.clone(), drops)) {
                continue;
            }
            let case = case.run(place, Command::Status);
            let back = case.run(place, Command::Original).run(place, Command::Original);
            if !drops {
                let folder = place.load(&back.state);
                assert_eq!(folder.programs(), Model::new().folder, "{}", back.story);
                assert!(!folder.has_own_files(), "{}", back.story);
            }
        }
    }
}

/// Returns the distinct states in which a kill at each call of `command` leaves the folder, found
/// in one run.
fn killed_everywhere(place: &Place<'_>, case: &Case, command: Command) -> (u64, Vec<Case>) {
    let folder = place.load(&case.state);
    let (calls, states) = folder.watched(command);
    let mut models = case.models.clone();
    models.extend(case.models.iter().map(|model| model.after(command)));
    let mut seen = HashSet::new();
    let cases = states.into_iter().filter(|(_, state)| seen.insert(state.clone())).map(|(at, state)| {
        let story = format!("{}\n  {command:?}, killed at call {at}", case.story);
        place.load(&state).assert_whole_programs(&story);
        Case { state, models: models.clone(), story }
    });
    (calls, cases.collect())
}

/// A kill leaves what reading the folder at that call finds: the other tests rely on this.
#[test]
fn a_kill_leaves_what_is_there_at_that_call() {
    require!(trace::supported());
    let node = Node::new();
    let place = Place::new(&node);
    let step = if soak() { 1 } else { 13 };
    let mut killed = 0;
    for command in Command::CHANGING {
        let start = Case::start(&place, STARTS[2]);
        let (calls, cases) = killed_everywhere(&place, &start, command);
        for at in (1..=calls).step_by(step) {
            let Some((hurt, call)) = start.hurt(&place, command, (KILL, at)) else { break };
            assert!(cases.iter().any(|case| case.state == hurt.state), "{command:?} at {at}, {call}");
            killed += 1;
        }
    }
    assert!(killed > 30, "{killed}");
}

#[test]
fn a_rollback_killed_anywhere_then_install_keeps_the_original() {
    require!(trace::supported());
    let node = Node::new();
    let place = Place::new(&node);
    let installed = Case::start(&place, &[Command::InstallFirst]);
    let (_, cases) = killed_everywhere(&place, &installed, Command::Rollback);
    assert!(cases.len() > 10, "{}", cases.len());
    for case in cases {
        let back = case.run(&place, Command::InstallFirst).run(&place, Command::Rollback);
        assert_eq!(place.load(&back.state).programs(), Model::new().folder, "{}", back.story);
    }
}

#[test]
fn an_install_killed_anywhere_then_rollback_keeps_the_original() {
    require!(trace::supported());
    let node = Node::new();
    let place = Place::new(&node);
    for (start, command) in [(STARTS[0], Command::InstallFirst), (STARTS[1], Command::InstallSecond)] {
        let (_, cases) = killed_everywhere(&place, &Case::start(&place, start), command);
        assert!(cases.len() > 10, "{}", cases.len());
        for case in cases {
            case.check(&place, &[Command::Rollback]);
        }
    }
}

/// Each call of an install fails once, also the last write of its state.
#[test]
fn an_install_with_a_failing_call_is_done_or_undone() {
    require!(trace::supported());
    let node = Node::new();
    let place = Place::new(&node);
    let start = Case::start(&place, STARTS[1]);
    let tried =
        (1..).take_while(|at| start.hurt(&place, Command::InstallSecond, (Act::Fail(Errno::EIO), *at)).is_some());
    let tried = tried.count();
    assert!(tried > 100, "{tried}");
}

/// Tries SIGTERM, a full disk, a disk that does not answer and a lack of rights at a share of the
/// calls, or at all calls in a soak run.
#[test]
fn a_signal_or_an_error_at_any_call_loses_nothing() {
    require!(trace::supported());
    let node = Node::new();
    let place = Place::new(&node);
    let (mut tried, mut dice) = (0, Dice(seed()));
    let start = Case::start(&place, STARTS[2]);
    let began = Instant::now();
    let acts = [
        Act::Signal(Signal::SIGTERM),
        Act::Fail(Errno::ENOSPC),
        Act::Fail(Errno::EIO),
        Act::Fail(Errno::EPERM),
        Act::Fail(Errno::EINTR),
    ];
    for command in Command::CHANGING {
        for act in acts {
            let step = if soak() { 1 } else { 130 };
            let mut at = 1 + dice.below(step) as u64;
            while let Some((hurt, _)) = start.hurt(&place, command, (act, at)) {
                let next = [Command::Rollback, Command::Original, Command::InstallFirst];
                hurt.check(&place, if soak() { &next } else { std::slice::from_ref(&next[dice.below(3)]) });
                tried += 1;
                at += step as u64;
            }
        }
    }
    figure(&format!(
        "cni-install hurt at {tried} points in {:.0} s, seed {}: each folder became whole",
        began.elapsed().as_secs_f64(),
        seed()
    ));
    assert!(tried >= 25, "{tried}");
}

/// Tries each ordered pair of commands from each start: the first killed, then the second killed,
/// then any command.
#[test]
fn every_pair_of_killed_commands_leaves_a_usable_folder() {
    require!(trace::supported());
    let began = Instant::now();
    let figures = if soak() { every_pair() } else { some_pairs() };
    figure(&format!("cni-install, pairs of killed commands: {figures} in {:.0} s", began.elapsed().as_secs_f64()));
}

fn some_pairs() -> String {
    let node = Node::new();
    let place = Place::new(&node);
    let mut dice = Dice(seed());
    let starts: Vec<Case> = STARTS.iter().map(|commands| Case::start(&place, commands)).collect();
    let count = rounds(25);
    let pick = |dice: &mut Dice| Command::CHANGING[dice.below(Command::CHANGING.len())];
    for _ in 0..count {
        let mut case = starts[dice.below(starts.len())].clone();
        for _ in 0..2 {
            let (_, mut cases) = killed_everywhere(&place, &case, pick(&mut dice));
            case = cases.swap_remove(dice.below(cases.len()));
        }
        let next = pick(&mut dice);
        case.check(&place, &[next]);
    }
    format!("{count} of them, seed {}", seed())
}

fn every_pair() -> String {
    std::thread::scope(|scope| {
        let workers: Vec<_> = STARTS.iter().map(|start| scope.spawn(move || every_pair_from(start))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect::<Vec<_>>().join("; ")
    })
}

fn every_pair_from(commands: &[Command]) -> String {
    let node = Node::new();
    let place = Place::new(&node);
    let start = Case::start(&place, commands);
    let (began, mut cut) = (Instant::now(), "");
    let (mut calls, mut seen, mut begun) = ([0, 0], HashSet::new(), HashSet::new());
    for first in Command::CHANGING {
        let (made, cases) = killed_everywhere(&place, &start, first);
        calls[0] += made;
        for case in cases {
            if !begun.insert((case.state.clone(), case.models.clone())) {
                continue;
            }
            if began.elapsed() > patience() {
                cut = ", then the time was up";
                break;
            }
            case.check(&place, &Command::CHANGING);
            for second in Command::CHANGING {
                let (made, cases) = killed_everywhere(&place, &case, second);
                calls[1] += made;
                for twice in cases {
                    if seen.insert((twice.state.clone(), twice.models.clone())) {
                        twice.check(&place, &[Command::InstallSecond, Command::Rollback, Command::Original]);
                    }
                }
            }
        }
        figure(&format!("after {commands:?} {first:?} and what follows: done, {} states so far", seen.len()));
    }
    format!(
        "after {commands:?} {} and then {} calls, {} and then {} distinct states{cut}",
        calls[0],
        calls[1],
        begun.len(),
        seen.len()
    )
}
