//! Measures every case for every side, round by round.

use std::panic::resume_unwind;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::call::{Call, Cost, children_cpu, milliseconds_since};
use crate::cases::{self, Case, Folders, Plugins, Ready, SIMPLE, Side};
use crate::chain::Attachment;
use crate::error::{Doing as _, Result};
use crate::options::Measure;
use crate::report;
use crate::stats::Samples;
use crate::trace::{self, Counts};
use crate::world;

/// The verbs in the order of the report. RTM_DELLINK, a request within [`Side::Kernel`]'s DEL, is
/// reported like a verb.
const VERBS: [&str; 7] = ["VERSION", "ADD", "CHECK", "DEL", "RTM_DELLINK", "STATUS", "GC"];

/// After this time of the whole run, each further case gets only a few rounds, so that the run ends
/// in time on a slow machine too.
const LATE: Duration = Duration::from_secs(600);

/// The largest number of rounds of a case.
const MAX_ROUNDS: usize = 300;

/// How long a case is measured: for at least `min` rounds, and then until `time` has passed or
/// [`MAX_ROUNDS`] are done.
#[derive(Clone, Copy, Debug)]
struct Rounds {
    min: usize,
    time: Duration,
}

/// The measurements of one verb of one side in one case.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) group: &'static str,
    pub(crate) case: String,
    pub(crate) side: Side,
    pub(crate) verb: &'static str,
    /// The wall time of each call, in milliseconds; of attachments at once, the time from the
    /// common start to the end of each.
    pub(crate) wall: Samples,
    /// The user and system time of each call, in milliseconds; of attachments at once, that per
    /// attachment, once for each round.
    pub(crate) cpu: Samples,
    /// Attachments per second, once for each round of attachments at once.
    pub(crate) per_second: Samples,
    /// System calls and the like, if they were counted.
    pub(crate) counts: Option<Counts>,
}

/// The sizes of one plugin's binaries, in bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Size {
    pub(crate) plugin: &'static str,
    pub(crate) ours: u64,
    /// `None` if the compared folder lacks the plugin.
    pub(crate) theirs: Option<u64>,
}

/// The results of a run.
#[derive(Debug, Default)]
pub(crate) struct Results {
    pub(crate) rows: Vec<Row>,
    pub(crate) sizes: Vec<Size>,
    /// Cases that could not be measured or that this machine cannot run, each with the reason.
    pub(crate) not_measured: Vec<String>,
    /// The machine, the versions and the run, as pairs of name and value.
    pub(crate) machine: Vec<(String, String)>,
}

impl Results {
    /// Returns the measurements of a verb; `None` if it was not measured.
    pub(crate) fn row(&self, group: &str, case: &str, side: Side, verb: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.group == group && row.case == case && row.side == side && row.verb == verb)
    }
}

/// Returns the row of a side and verb of `case` in `rows`, to add measurements. Creates the row if
/// it is missing.
fn row_mut<'r>(rows: &'r mut Vec<Row>, case: &Case, side: Side, verb: &'static str) -> &'r mut Row {
    let position = rows.iter().position(|row| (row.side, row.verb) == (side, verb)).unwrap_or(rows.len());
    if position == rows.len() {
        let (wall, cpu, per_second) = (Samples::default(), Samples::default(), Samples::default());
        rows.push(Row { group: case.group, case: case.name.clone(), side, verb, wall, cpu, per_second, counts: None });
    }
    &mut rows[position]
}

/// Returns the sizes of all plugins. Fails if our folder lacks a plugin, or if the compared folder
/// lacks a plugin of [`cases::FIVE`].
fn sizes(folders: &Folders) -> Result<Vec<Size>> {
    let mut sizes = Vec::new();
    for plugin in cases::FIVE.into_iter().chain(cases::OTHERS.split(' ')) {
        let size_in = |dir: &Path| {
            let path = dir.join(plugin);
            path.metadata().map(|file| file.len()).doing(format_args!("failed to find {}", path.display()))
        };
        let theirs = match size_in(&folders.theirs) {
            Err(error) if cases::FIVE.contains(&plugin) => return Err(error),
            size => size.ok(),
        };
        sizes.push(Size { plugin, ours: size_in(&folders.ours)?, theirs });
    }
    Ok(sizes)
}

/// Measures all selected cases and writes the report. Returns `false` if a case failed. Cases that
/// this machine cannot run are skipped, which is not a failure.
pub(crate) fn all(options: &Measure) -> Result<bool> {
    let folders = Folders { ours: options.ours.clone(), theirs: options.theirs.clone() };
    std::fs::create_dir_all(&options.out).doing(format_args!("failed to make {}", options.out.display()))?;
    let mut results = Results { machine: report::machine(&folders), sizes: sizes(&folders)?, ..Results::default() };
    world::isolate()?;
    let begin = Instant::now();
    let mut is_complete = true;
    for case in cases::all() {
        let name = format!("{}: {}", case.group, case.name);
        let is_selected = options.only.is_empty() || options.only.iter().any(|part| name.contains(part.as_str()));
        if !is_selected {
            continue;
        }
        report::progress(&format!("{:4.0} s  {name}", begin.elapsed().as_secs_f64()));
        if let Plugins::Alone(plugin) = case.plugins
            && let Some(obstacle) = plugin.obstacle()?
        {
            report::progress(&format!("        {obstacle}"));
            results.not_measured.push(format!("{}, since {obstacle}", case.name));
            continue;
        }
        let rounds = match case.group {
            _ if begin.elapsed() > LATE => Rounds { min: 1, time: Duration::from_secs(1) },
            cases::CHAINS | cases::ALONE => Rounds { min: 12, time: Duration::from_millis(8500) },
            // Fewer are enough, because these calls vary little.
            _ => Rounds { min: 4, time: Duration::from_millis(8500) },
        };
        match measure_case(&folders, &case, rounds) {
            Ok(rows) => results.rows.extend(rows),
            Err(error) => {
                is_complete = false;
                report::progress(&format!("        {error}"));
                results.not_measured.push(format!("{name}: {error}"));
            }
        }
    }
    results.machine.push(("The run took".to_owned(), format!("{:.0} s", begin.elapsed().as_secs_f64())));
    results.machine.push(("Load at the end".to_owned(), report::load()));
    report::write(&results, &options.out)?;
    Ok(is_complete)
}

/// Returns the verbs to measure for a case: VERSION alone for a start-up case, otherwise ADD, CHECK
/// and DEL and, in some cases and only for our plugins, STATUS and GC.
pub(crate) fn verbs(case: &Case, side: Side) -> Vec<&'static str> {
    let has_status_and_gc =
        case.group == cases::ALONE || (case.group == cases::CHAINS && matches!(case.plugins, Plugins::Chain(SIMPLE)));
    match (case.plugins, side) {
        (Plugins::Version(_), _) => vec!["VERSION"],
        // STATUS and GC need CNI 1.1.0, which older releases of the Go plugins do not support.
        (_, Side::Ours | Side::OursNft) if has_status_and_gc => vec!["ADD", "CHECK", "DEL", "STATUS", "GC"],
        _ => vec!["ADD", "CHECK", "DEL"],
    }
}

/// Measures one case for all its sides, and returns its rows, sorted by verb, then by side. Unless
/// the case makes attachments at once, also counts the system calls of the plugins in one more
/// round.
fn measure_case(folders: &Folders, case: &Case, rounds: Rounds) -> Result<Vec<Row>> {
    let mut sides = Vec::new();
    for side in case.sides.iter().filter(|side| **side != Side::Theirs || case.plugins.is_in(&folders.theirs)) {
        let ready = cases::prepare(folders, case, *side).doing(format_args!("failed to prepare {}", side.label()))?;
        sides.push(ready);
    }
    // The warm-up, round 0, creates what later rounds reuse, such as bridges, base chains and an
    // index. It makes a single attachment even in a case with attachments at once: some of Go's
    // ADDs fail if several create the shared chains at once.
    for ready in &sides {
        ready.node.enter()?;
        ready.with_interface(|| measure_verbs(ready, case, 0)).doing(round_label(ready, 0))?;
    }
    let mut rows = Vec::new();
    let begin = Instant::now();
    for round in 1.. {
        let measured_rounds = round - 1;
        if measured_rounds >= MAX_ROUNDS || (measured_rounds >= rounds.min && begin.elapsed() >= rounds.time) {
            break;
        }
        for ready in order_of_round(&sides, round) {
            ready.node.enter()?;
            let label = round_label(ready, round);
            if case.at_once.is_some() {
                measure_crowd(ready, case, round, &mut rows).doing(label)?;
                continue;
            }
            for (verb, cost) in ready.with_interface(|| measure_verbs(ready, case, round)).doing(label)? {
                let row = row_mut(&mut rows, case, ready.side, verb);
                row.wall.push(cost.wall);
                row.cpu.push(cost.cpu);
            }
        }
    }
    if case.at_once.is_none() {
        for ready in sides.iter().filter(|ready| ready.side != Side::Kernel) {
            ready.node.enter()?;
            // No measured round has this number, so the container ID is new.
            for (verb, counts) in ready.with_interface(|| count_verbs(ready, case, usize::MAX))? {
                row_mut(&mut rows, case, ready.side, verb).counts = Some(counts);
            }
        }
    }
    rows.sort_by_key(|row| (VERBS.iter().position(|verb| *verb == row.verb), row.side));
    Ok(rows)
}

/// Names a round of a side in an error.
fn round_label(ready: &Ready, round: usize) -> String {
    format!("{}, round {round}", ready.side.label())
}

/// Returns the sides in their order in this round. What a side deletes slows the next side down, so
/// no side may always follow the same one: the first side changes with each round, and the order is
/// reversed in every second cycle of rounds.
fn order_of_round(sides: &[Ready], round: usize) -> Vec<&Ready> {
    let mut order: Vec<&Ready> = sides.iter().collect();
    order.rotate_left(round % sides.len());
    if (round / sides.len()) % 2 == 1 {
        order.reverse();
    }
    order
}

/// Runs all verbs of a case once, for a new attachment, and returns the cost of each. For
/// [`Side::Kernel`], these are ADD, DEL, and the RTM_DELLINK of that DEL.
fn measure_verbs(ready: &Ready, case: &Case, round: usize) -> Result<Vec<(&'static str, Cost)>> {
    let attachment = ready.attachment(round, 0);
    match &ready.kernel_attacher {
        Some(attacher) => attacher.measure(&attachment.netns, round),
        None => run_verbs(ready, case, &attachment, Call::run),
    }
}

/// Runs all verbs of a case once, for a new attachment, under a tracer, and returns the counts of
/// each.
pub(crate) fn count_verbs(ready: &Ready, case: &Case, round: usize) -> Result<Vec<(&'static str, Counts)>> {
    run_verbs(ready, case, &ready.attachment(round, 0), trace::run)
}

/// Runs all verbs of a case once for `attachment`, and returns the total of each verb over its
/// plugins. `run_call` runs one call, adds its cost or counts to the total, and returns its output.
/// A failed CHECK of [`Side::Theirs`] is left out.
fn run_verbs<T: Default>(
    ready: &Ready,
    case: &Case,
    attachment: &Attachment,
    run_call: fn(&Call, &mut T) -> Result<Value>,
) -> Result<Vec<(&'static str, T)>> {
    let mut totals = Vec::new();
    let mut result: Option<Value> = None;
    for verb in verbs(case, ready.side) {
        let mut total = T::default();
        match ready.chain.run(verb, attachment, result.as_ref(), |call| run_call(call, &mut total)) {
            Ok(output) if verb == "ADD" => result = Some(output),
            Ok(_) => {}
            // In some Go releases, CHECK fails for an attachment of the same release, for example
            // in portmap 1.1.1 without IPv6.
            Err(_) if verb == "CHECK" && ready.side == Side::Theirs => continue,
            Err(error) => return Err(error),
        }
        totals.push((verb, total));
    }
    Ok(totals)
}

/// Runs ADD and then DEL for all containers of `ready` at once, as a runtime does after a reboot of
/// its node, and adds the measurements to `rows`. Each attachment has its own thread, which runs
/// the plugins one after the other. If a plugin fails, the other attachments still run to their
/// end.
fn measure_crowd(ready: &Ready, case: &Case, round: usize, rows: &mut Vec<Row>) -> Result<()> {
    let count = ready.containers.len();
    let chain = &ready.chain;
    let attachments: Vec<Attachment> = (0..count).map(|number| ready.attachment(round, number)).collect();
    // The results of ADD, which are the prevResult of DEL.
    let mut results: Vec<Option<Value>> = vec![None; count];
    for verb in ["ADD", "DEL"] {
        let before = children_cpu()?;
        let begin = Instant::now();
        // Returns the time from the common start to the end of the attachment's last plugin, with
        // the threads' starts and the files of the first calls.
        let run = |attachment: &Attachment, result: &mut Option<Value>| -> Result<f64> {
            *result = Some(chain.run(verb, attachment, result.as_ref(), |call| call.run(&mut Cost::default()))?);
            Ok(milliseconds_since(begin))
        };
        let latencies = thread::scope(|scope| {
            let all = attachments.iter().zip(&mut results);
            let threads: Vec<_> =
                all.map(|(attachment, result)| scope.spawn(move || run(attachment, result))).collect();
            let ended = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            ended.collect::<Result<Vec<f64>>>()
        });
        let latencies = latencies.doing(format_args!("{count} at once"))?;
        let wall = milliseconds_since(begin);
        let row = row_mut(rows, case, ready.side, verb);
        row.per_second.push(count as f64 / wall * 1e3);
        row.cpu.push((children_cpu()? - before) / count as f64);
        latencies.into_iter().for_each(|latency| row.wall.push(latency));
    }
    Ok(())
}
