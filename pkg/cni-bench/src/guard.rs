//! The guard: counts what each operation of the plugins costs, and compares it with a table in the
//! repository. An operation is one verb of a case, for one side.
//!
//! It counts the system calls of the plugins' own processes, and the programs and threads that they
//! start. It does not count the system calls of iptables, which depend on its release.

use std::fs;

use crate::alone;
use crate::cases::{self, ALONE, CHAINS, Case, ChainSpec, Folders, Plugins, SIMPLE, START, Side, WHOLE};
use crate::error::{Doing as _, Error, Result};
use crate::measure;
use crate::options::{Guard, GuardMode};
use crate::report::{progress, say};
use crate::world::World;

/// How often each operation is counted. The lowest counts are used, because a wait may by chance
/// need an additional system call.
const ROUNDS: usize = 4;

/// How often the operations of a case are counted again, at most, if one exceeds the table: on a
/// busy machine all rounds may have additional system calls.
const MAX_RECOUNTS: usize = 5;

const HEAD: &str = "\
# What each operation of the plugins costs: system calls of its own processes, programs started, threads started.
# Compared by `scripts/test`, written by `scripts/bench --counts`. See docs/performance.md, \"The guard\".
";

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    what: String,
    syscalls: usize,
    programs: usize,
    threads: usize,
}

impl Line {
    /// Formats the line for the table.
    fn text(&self) -> String {
        format!("{:<64} {:>5} {:>3} {:>3}\n", self.what, self.syscalls, self.programs, self.threads)
    }

    /// Parses a line of the table: the operation, then three numbers.
    fn parse(line: &str) -> Result<Line> {
        let invalid = || Error::new(format!("{line:?} is not an operation followed by three numbers"));
        let number = |word: &str| word.parse::<usize>().map_err(|_| invalid());
        let words: Vec<&str> = line.split_whitespace().collect();
        let [what @ .., syscalls, programs, threads] = words.as_slice() else { return Err(invalid()) };
        Ok(Line {
            what: what.join(" "),
            syscalls: number(syscalls)?,
            programs: number(programs)?,
            threads: number(threads)?,
        })
    }

    /// Returns the maximum number of system calls that is accepted: 3 % more than in this line,
    /// plus 4 and, if portmap takes part, plus 16.
    ///
    /// The 4: kernels before 6.2 do not answer with a created link, so each of up to two links
    /// costs one more request, which is two system calls. The 16: portmap reads the table of
    /// connections with a varying number of reads; runs that differed by 15 calls were seen.
    fn bound(&self) -> usize {
        let portmap_reads = if self.what.contains("portmap") { 16 } else { 0 };
        self.syscalls + self.syscalls / 33 + 4 + portmap_reads
    }

    /// Describes which counts exceed the bounds of this line of the table; `None` if none does.
    fn excess(&self, counted: &Line) -> Option<String> {
        let mut wrong = Vec::new();
        if counted.syscalls > self.bound() {
            wrong.push(format!("{} system calls, {} in the table", counted.syscalls, self.syscalls));
        }
        if counted.programs > self.programs {
            wrong.push(format!("{} programs, {} in the table", counted.programs, self.programs));
        }
        if counted.threads > self.threads {
            wrong.push(format!("{} threads, {} in the table", counted.threads, self.threads));
        }
        (!wrong.is_empty()).then(|| format!("{}: {}", self.what, wrong.join("; ")))
    }
}

/// Returns the cases whose operations are counted.
fn guarded_cases() -> Vec<Case> {
    let (only_iptables, both) = ([Side::Ours], [Side::Ours, Side::OursNft]);
    let dual_stack = ChainSpec { dual_stack: true, ..SIMPLE };
    let mut cases = vec![Case::new(START, "bridge", Plugins::Version("bridge"), &only_iptables)];
    for plugin in &alone::ALL {
        let ours: Vec<Side> = plugin.sides.iter().copied().filter(|side| both.contains(side)).collect();
        cases.push(Case::new(ALONE, plugin.name, Plugins::Alone(plugin), &ours));
    }
    cases.extend([
        Case::new(CHAINS, SIMPLE.name(), Plugins::Chain(SIMPLE), &only_iptables),
        Case::new(CHAINS, dual_stack.name(), Plugins::Chain(dual_stack), &only_iptables),
        Case::new(CHAINS, WHOLE.name(), Plugins::Chain(WHOLE), &both),
    ]);
    cases
}

/// Counts what each operation costs, and compares the counts with the table or rewrites the table.
/// Returns whether the counts agree with the table; `true` after a rewrite.
pub(crate) fn run(options: &Guard) -> Result<bool> {
    let table = read(options)?;
    let counted = count_all(options, &table)?;
    if options.mode == GuardMode::Update {
        let text: String = counted.iter().map(Line::text).collect();
        fs::write(&options.table, format!("{HEAD}{text}"))
            .doing(format_args!("failed to write {}", options.table.display()))?;
        return Ok(true);
    }
    let is_good = compare(options, &table, &counted);
    say(&format!("the costs of {} operations counted", counted.len()));
    if !is_good {
        progress(
            "If the change is intended, scripts/bench --counts rewrites the table. strace -f -c shows what makes the calls.",
        );
    }
    Ok(is_good)
}

/// Counts what the operations of all cases cost. In a comparison, if an operation costs more than
/// in its line of `table`, counts the operations of the same case and side again, up to
/// [`MAX_RECOUNTS`] times. For a case that this machine cannot run, returns its lines of `table`.
fn count_all(options: &Guard, table: &[Line]) -> Result<Vec<Line>> {
    let world = World::new()?;
    // No guarded case has the side `Theirs`, so its folder does not matter.
    let folders = Folders { ours: options.ours.clone(), theirs: options.ours.clone() };
    let is_compared = options.mode == GuardMode::Compare;
    let exceeds = |line: &Line| table.iter().any(|old| old.what == line.what && old.excess(line).is_some());
    let mut counted = Vec::new();
    for case in guarded_cases() {
        if let Plugins::Alone(plugin) = case.plugins
            && let Some(obstacle) = plugin.obstacle(&world)?
        {
            say(&format!("SKIP {}: {obstacle}", case.name));
            let is_of_case =
                |line: &&Line| line.what.strip_prefix(plugin.name).is_some_and(|rest| rest.starts_with(' '));
            counted.extend(table.iter().filter(is_of_case).cloned());
            continue;
        }
        for side in &case.sides {
            let mut lines = Vec::new();
            // A repetition lowers the counts in `lines`.
            for _ in 0..=MAX_RECOUNTS {
                let doing = format_args!("{} ({})", case.name, side.label());
                count(&world, &folders, &case, *side, &mut lines).doing(doing)?;
                if !is_compared || !lines.iter().any(exceeds) {
                    break;
                }
            }
            counted.extend(lines);
        }
    }
    Ok(counted)
}

/// Compares the counted operations with the table, and prints the differences. Returns whether both
/// have the same operations and all counts are within their bounds.
fn compare(options: &Guard, table: &[Line], counted: &[Line]) -> bool {
    let mut is_good = true;
    for line in counted {
        let Some(old) = table.iter().find(|old| old.what == line.what) else {
            progress(&format!("not in {}: {}", options.table.display(), line.what));
            is_good = false;
            continue;
        };
        if let Some(excess) = old.excess(line) {
            progress(&format!("exceeds the table: {excess}"));
            is_good = false;
        } else if line.bound() < old.syscalls {
            // Fewer system calls by more than the tolerance.
            say(&format!(
                "below the table: {}: {} system calls, {} in the table",
                line.what, line.syscalls, old.syscalls
            ));
        }
    }
    for old in table.iter().filter(|old| !counted.iter().any(|line| line.what == old.what)) {
        progress(&format!("in the table, but not counted: {}", old.what));
        is_good = false;
    }
    is_good
}

/// Reads the table. An empty table is an error in a comparison.
fn read(options: &Guard) -> Result<Vec<Line>> {
    let path = options.table.display();
    let text = fs::read_to_string(&options.table).doing(format_args!("failed to read {path}"))?;
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let lines = lines.map(Line::parse).collect::<Result<Vec<Line>>>().doing(format_args!("invalid table {path}"))?;
    if lines.is_empty() && options.mode == GuardMode::Compare {
        return Err(Error::new(format!(
            "{path} is empty, so there is nothing to compare with; scripts/bench --counts writes it"
        )));
    }
    Ok(lines)
}

/// Counts the operations of a case in several rounds. Adds a line for each operation to `lines`,
/// with the lowest counts of all rounds, or lowers the counts of a line that exists.
fn count(world: &World, folders: &Folders, case: &Case, side: Side, lines: &mut Vec<Line>) -> Result<()> {
    let ready = cases::prepare(world, folders, case, side)?;
    // Round 0 is not counted: it creates what later rounds reuse, such as a bridge.
    for round in 0..=ROUNDS {
        let counted = ready.with_interface(|| measure::count_verbs(world, &ready, case, round))?;
        if round == 0 {
            continue;
        }
        for (verb, counts) in counted {
            if counts.own_syscalls == 0 {
                return Err(Error::new(format!("the tracer counted no system call of {verb}")));
            }
            let what = format!("{} {verb}, {}", case.name, side.label());
            let line =
                Line { what, syscalls: counts.own_syscalls, programs: counts.programs, threads: counts.own_threads };
            match lines.iter_mut().find(|old| old.what == line.what) {
                Some(old) => {
                    old.syscalls = old.syscalls.min(line.syscalls);
                    old.programs = old.programs.min(line.programs);
                    old.threads = old.threads.min(line.threads);
                }
                None => lines.push(line),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(syscalls: usize, programs: usize, threads: usize) -> Line {
        Line { what: "bridge + host-local ADD, ours".to_owned(), syscalls, programs, threads }
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        assert_eq!(Line::parse(line(200, 1, 2).text().trim_end()).unwrap(), line(200, 1, 2));
        assert!(Line::parse("bridge ADD").is_err());
    }

    #[test]
    fn portmap_may_read_more_connections() {
        let line = |syscalls| Line { what: "portmap ADD, ours".to_owned(), ..line(syscalls, 0, 0) };
        assert_eq!(line(190).excess(&line(206)), None);
        assert!(line(190).excess(&line(216)).is_some());
    }

    #[test]
    fn a_few_calls_more_pass_and_a_request_more_does_not() {
        let old = line(100, 1, 2);
        assert_eq!(old.excess(&line(107, 1, 2)), None);
        assert_eq!(old.excess(&line(50, 0, 0)), None);
        assert!(old.excess(&line(108, 1, 2)).unwrap().contains("108 system calls, 100 in the table"));
        assert!(old.excess(&line(100, 2, 2)).unwrap().contains("2 programs"));
        assert!(old.excess(&line(100, 1, 3)).unwrap().contains("3 threads"));
    }
}
