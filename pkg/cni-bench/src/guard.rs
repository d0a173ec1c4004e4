//! The guard: counts what each operation of the plugins costs, and compares it with a table in the
//! repository. An operation is one verb of a case, for one side.
//!
//! It counts the system calls of the plugins' own processes, the programs and threads that they
//! start, and, on a node with many containers, their netlink requests and the received bytes. It
//! does not count the system calls of iptables, which depend on its release.

use std::fs;

use crate::alone;
use crate::cases::{self, ALONE, CHAINS, Case, ChainSpec, Folders, Plugins, SIMPLE, START, Side, WHOLE};
use crate::error::{Doing as _, Result};
use crate::full::FullNode;
use crate::measure;
use crate::options::Guard;
use crate::report::{progress, say};
use crate::trace::Counts;
use crate::world;

/// How often each operation is counted. The lowest counts are used, because a wait may by chance
/// need an additional system call.
const ROUNDS: usize = 4;

/// How often the operations of a case are counted again, at most, if one exceeds the table: on a
/// busy machine all rounds may have additional system calls.
const MAX_RECOUNTS: usize = 5;

/// The end of the name of a case on a full node.
const ON_FULL_NODE: &str = ", full node";

/// The node of the cases on a full node: as many containers as can be attached in a few seconds.
const FULL_NODE: FullNode = FullNode { by_theirs: false, containers: 100, ports: 5 };

/// What an operation on a full node may receive over netlink at most, if it does not grow with the
/// number of containers.
const RECEIVED_MAX: usize = 64 << 10;

const HEAD: &str = "\
# What each operation of the plugins costs: system calls of its own processes, programs started, threads started.
# On a node with 100 containers, also: netlink requests, and bytes received over netlink. `empty` means as many requests
# as on the empty node, `64KiB` at most 64 KiB.
# Compared by `scripts/test`, written by `scripts/bench --counts`. See docs/performance.md, \"The guard\".
";

/// A column of the table.
struct Column {
    /// What it counts.
    unit: &'static str,
    width: usize,
    /// The word for a count that does not grow with the number of containers.
    flat: &'static str,
}

/// The columns after the operation. Only lines of a full node have the last two.
const COLUMNS: [Column; 5] = [
    Column { unit: "system calls", width: 5, flat: "" },
    Column { unit: "programs", width: 3, flat: "" },
    Column { unit: "threads", width: 3, flat: "" },
    Column { unit: "netlink requests", width: 6, flat: "empty" },
    Column { unit: "bytes received over netlink", width: 8, flat: "64KiB" },
];

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    what: String,
    /// The counts of the first of the [`COLUMNS`]. `None` is a count that does not grow with the
    /// number of containers.
    counts: Vec<Option<usize>>,
}

impl Line {
    /// Formats the line for the table.
    fn text(&self) -> String {
        let mut text = format!("{:<64}", self.what);
        for (Column { width, flat, .. }, count) in COLUMNS.iter().zip(&self.counts) {
            let word = count.map_or((*flat).to_owned(), |number| number.to_string());
            text.push_str(&format!(" {word:>width$}"));
        }
        text + "\n"
    }

    /// Parses a line of the table.
    fn parse(line: &str) -> Result<Line> {
        let invalid = || format!("{line:?} is not an operation followed by its counts");
        let words: Vec<&str> = line.split_whitespace().collect();
        let columns = if line.contains(ON_FULL_NODE) { COLUMNS.len() } else { COLUMNS.len() - 2 };
        let (what, counts) = words.split_at(words.len().checked_sub(columns).ok_or_else(invalid)?);
        let parse = |(word, column): (&&str, &Column)| match *word == column.flat {
            true => Ok(None),
            false => word.parse().map(Some).map_err(|_| invalid()),
        };
        let counts = counts.iter().zip(&COLUMNS).map(parse).collect::<Result<_>>()?;
        Ok(Line { what: what.join(" "), counts })
    }

    /// Returns the number of system calls.
    fn syscalls(&self) -> usize {
        self.counts.first().copied().flatten().unwrap_or_default()
    }

    /// Returns how much more than in this line is accepted, in the order of the columns: 3 % more
    /// system calls, plus 4 and, if portmap takes part, plus 16; 2 requests; 4 KiB.
    ///
    /// The 4: kernels before 6.2 do not answer with a created link, so each of up to two links
    /// costs one more request, which is two system calls. The 16: portmap reads the table of
    /// connections with a varying number of reads; runs that differed by 15 calls were seen. The
    /// 4 KiB: the sizes of some lists, such as that of the links, depend on the kernel.
    fn tolerances(&self) -> [usize; COLUMNS.len()] {
        let portmap_reads = if self.what.contains("portmap") { 16 } else { 0 };
        [self.syscalls() / 33 + 4 + portmap_reads, 0, 0, 2, 4 << 10]
    }

    /// Describes which counts exceed the bounds of this line of the table; `None` if none does.
    fn excess(&self, counted: &Line) -> Option<String> {
        let mut wrong = Vec::new();
        for (index, (Column { unit, .. }, tolerance)) in COLUMNS.iter().zip(self.tolerances()).enumerate() {
            match (self.counts.get(index), counted.counts.get(index)) {
                (Some(None), Some(Some(number))) => {
                    wrong.push(format!("{number} {unit}: grows with the number of containers"));
                }
                (Some(Some(allowed)), Some(Some(number))) if *number > allowed + tolerance => {
                    wrong.push(format!("{number} {unit}, {allowed} in the table"));
                }
                _ => {}
            }
        }
        (!wrong.is_empty()).then(|| format!("{}: {}", self.what, wrong.join("; ")))
    }
}

/// Returns the cases whose operations are counted.
fn guarded_cases() -> Vec<Case> {
    let (only_iptables, both) = ([Side::Ours], [Side::Ours, Side::OursNft]);
    let dual_stack = ChainSpec { dual_stack: true, ..SIMPLE };
    let mut cases = vec![Case::new(START, "bridge", Plugins::Version("bridge"), &only_iptables)];
    for plugin in alone::ALL {
        let ours: Vec<Side> = plugin.sides.iter().copied().filter(|side| both.contains(side)).collect();
        cases.push(Case::new(ALONE, plugin.name, Plugins::Alone(plugin), &ours));
    }
    cases.extend([
        Case::new(CHAINS, SIMPLE.name(), Plugins::Chain(SIMPLE), &only_iptables),
        Case::new(CHAINS, dual_stack.name(), Plugins::Chain(dual_stack), &only_iptables),
        Case::new(CHAINS, WHOLE.name(), Plugins::Chain(WHOLE), &both),
    ]);
    // After the cases on the empty node, which these are compared with.
    for plugin in alone::ALL.iter().filter(|plugin| ["portmap", "firewall", "bandwidth"].contains(&plugin.name)) {
        let sides: Vec<Side> = plugin.sides.iter().copied().filter(|side| both.contains(side)).collect();
        cases.push(FULL_NODE.case(format!("{}{ON_FULL_NODE}", plugin.name), Plugins::Alone(plugin), &sides));
    }
    cases.push(FULL_NODE.case(format!("{}{ON_FULL_NODE}", WHOLE.name()), Plugins::Chain(WHOLE), &both));
    cases
}

/// Counts what each operation costs, and compares the counts with the table or rewrites the table.
/// Returns whether the counts agree with the table; `true` after a rewrite.
pub(crate) fn run(options: &Guard) -> Result<bool> {
    let table = read(options)?;
    let counted = count_all(options, &table)?;
    if options.update {
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
    world::isolate()?;
    // No guarded case has the side `Theirs`, so its folder does not matter.
    let folders = Folders { ours: options.ours.clone(), theirs: options.ours.clone() };
    let exceeds = |line: &Line| table.iter().any(|old| old.what == line.what && old.excess(line).is_some());
    // The lines of cases that this machine cannot run, and the operations with their counts.
    let (mut skipped, mut counted) = (Vec::new(), Vec::new());
    for case in guarded_cases() {
        if let Plugins::Alone(plugin) = case.plugins
            && let Some(obstacle) = plugin.obstacle()?
        {
            say(&format!("SKIP {}: {obstacle}", case.name));
            let is_of_case =
                |line: &&Line| line.what.strip_prefix(plugin.name).is_some_and(|rest| rest.starts_with(' '));
            skipped.extend(table.iter().filter(is_of_case).cloned());
            continue;
        }
        for side in &case.sides {
            let mut counts = Vec::new();
            // A repetition lowers the counts.
            for _ in 0..=MAX_RECOUNTS {
                let doing = format_args!("{} ({})", case.name, side.label());
                count(&folders, &case, *side, &mut counts).doing(doing)?;
                let is_too_much =
                    |(what, counts): &(String, Counts)| exceeds(&line(what, counts, on_empty_node(&counted, what)));
                if options.update || !counts.iter().any(is_too_much) {
                    break;
                }
            }
            counted.extend(counts);
        }
    }
    let lines = counted.iter().map(|(what, counts)| line(what, counts, on_empty_node(&counted, what)));
    Ok(skipped.into_iter().chain(lines).collect())
}

/// Returns the counts of the same operation on the empty node; `None` if `what` is not an operation
/// on a full node.
fn on_empty_node<'c>(counted: &'c [(String, Counts)], what: &str) -> Option<&'c Counts> {
    let (case, verb) = what.split_once(ON_FULL_NODE)?;
    let on_empty = format!("{case}{verb}");
    counted.iter().find(|(other, _)| *other == on_empty).map(|(_, counts)| counts)
}

/// Returns the line of an operation, with the counts of netlink if it is one on a full node.
fn line(what: &str, counts: &Counts, on_empty_node: Option<&Counts>) -> Line {
    let mut columns = vec![Some(counts.syscalls), Some(counts.programs), Some(counts.threads)];
    if let Some(on_empty) = on_empty_node {
        columns.push(Some(counts.requests).filter(|requests| *requests > on_empty.requests));
        columns.push(Some(counts.received).filter(|received| *received > RECEIVED_MAX));
    }
    Line { what: what.to_owned(), counts: columns }
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
        } else if line.syscalls() + line.tolerances()[0] < old.syscalls() {
            let (what, counted, old) = (&line.what, line.syscalls(), old.syscalls());
            say(&format!("below the table: {what}: {counted} system calls, {old} in the table"));
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
    if lines.is_empty() && !options.update {
        return Err(format!("{path} is empty, so there is nothing to compare with; scripts/bench --counts writes it"));
    }
    Ok(lines)
}

/// Counts the operations of a case in several rounds. Adds the operations, with the lowest counts
/// of all rounds, to `all`, or lowers the counts of those that are in it.
fn count(folders: &Folders, case: &Case, side: Side, all: &mut Vec<(String, Counts)>) -> Result<()> {
    let ready = cases::prepare(folders, case, side)?;
    // Round 0 is not counted: it creates what later rounds reuse, such as a bridge.
    for round in 0..=ROUNDS {
        let counted = ready.with_interface(|| measure::count_verbs(&ready, case, round))?;
        if round == 0 {
            continue;
        }
        for (verb, counts) in counted {
            if counts.syscalls == 0 {
                return Err(format!("the tracer counted no system call of {verb}"));
            }
            let what = format!("{} {verb}, {}", case.name, side.label());
            match all.iter_mut().find(|(other, _)| *other == what) {
                Some((_, lowest)) => lowest.lower_to(&counts),
                None => all.push((what, counts)),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(syscalls: usize, programs: usize, threads: usize) -> Line {
        let counts = [syscalls, programs, threads].map(Some).to_vec();
        Line { what: "bridge + host-local ADD, ours".to_owned(), counts }
    }

    #[test]
    fn a_full_node_must_stay_as_cheap_as_the_empty_one() {
        let counts = |requests, received| Counts { syscalls: 9, requests, received, ..Counts::default() };
        let what = "portmap, full node ADD, ours";
        let counted = [("portmap ADD, ours".to_owned(), counts(7, 900))];
        let full_line = |full: Counts| super::line(what, &full, on_empty_node(&counted, what));
        let flat = full_line(counts(7, 64 << 10));
        assert!(flat.text().contains("empty") && flat.text().contains("64KiB"));
        let grown = full_line(counts(8, (64 << 10) + 1));
        for line in [&flat, &grown] {
            assert_eq!(&Line::parse(line.text().trim_end()).unwrap(), line);
            assert_eq!(line.excess(line), None);
        }
        assert!(flat.excess(&grown).unwrap().contains("8 netlink requests: grows"));
        assert_eq!(grown.excess(&flat), None);
        let more = full_line(counts(11, 70 << 10));
        assert!(grown.excess(&more).unwrap().contains("11 netlink requests, 8 in the table"));
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
    fn a_few_more_calls_pass_and_one_more_request_fails() {
        let old = line(100, 1, 2);
        assert_eq!(old.excess(&line(107, 1, 2)), None);
        assert_eq!(old.excess(&line(50, 0, 0)), None);
        assert!(old.excess(&line(108, 1, 2)).unwrap().contains("108 system calls, 100 in the table"));
        assert!(old.excess(&line(100, 2, 2)).unwrap().contains("2 programs"));
        assert!(old.excess(&line(100, 1, 3)).unwrap().contains("3 threads"));
    }
}
