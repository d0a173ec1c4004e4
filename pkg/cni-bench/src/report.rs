//! Writes the results: tables in Markdown, and all figures as JSON.
//!
//! The results go into the folder of `--out DIR`. If the page `DIR.md` beside that folder has the
//! two lines [`BEGIN`] and [`END`], the report replaces the part between them.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::cases::{ALONE, AT_ONCE, CHAINS, FULL, Folders, RESERVATIONS, START, Side};
use crate::error::{Doing as _, Result};
use crate::measure::{Results, Row};
use crate::targets::{self, short};
use crate::world::run;

/// The report is written between these two lines of the page.
const BEGIN: &str = "<!-- begin: written by scripts/bench -->";
const END: &str = "<!-- end: written by scripts/bench -->";

const GROUPS: [&str; 6] = [START, ALONE, CHAINS, RESERVATIONS, FULL, AT_ONCE];
const SIDES: [Side; 4] = [Side::Ours, Side::OursNft, Side::Theirs, Side::Kernel];

/// Writes a progress line to standard error.
pub(crate) fn progress(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Writes a line to standard output.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Returns the machine's load averages over 1, 5 and 15 minutes.
pub(crate) fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

/// Returns the description of the machine, the versions and the run, as pairs of name and value.
pub(crate) fn machine(folders: &Folders) -> Vec<(String, String)> {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let value = cpu.lines().find(|line| line.starts_with(name)).and_then(|line| line.split(": ").nth(1));
        value.unwrap_or("unknown").to_owned()
    };
    let cores = cpu.lines().filter(|line| line.starts_with("processor")).count();
    let hypervisor = if field("flags").contains("hypervisor") { ", in a virtual machine" } else { "" };
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = memory.lines().next().and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    // The version of a missing program is the error.
    let output = |argv: &[&str]| match run(argv) {
        Ok(text) => text.trim().to_owned(),
        Err(error) => error.to_string(),
    };
    let package = unpacked_package(&folders.theirs).or_else(|| installed_package(&folders.theirs));
    let package = package.map(|package| format!(" ({package})")).unwrap_or_default();
    let revision = std::env::var("CNI_BENCH_REVISION").unwrap_or_default();
    let ours = if revision.is_empty() { "ours".to_owned() } else { revision };
    vec![
        ("Processor".to_owned(), format!("{cores} of {}{hypervisor}", field("model name"))),
        ("Memory".to_owned(), memory.map_or("unknown".to_owned(), |kib| format!("{:.1} GiB", kib as f64 / 1048576.0))),
        ("Kernel".to_owned(), output(&["uname", "-sr"])),
        ("iptables".to_owned(), output(&["iptables", "--version"])),
        ("Ours".to_owned(), ours),
        ("Theirs".to_owned(), format!("{}{package}", folders.theirs.display())),
        ("Date".to_owned(), output(&["date", "-u", "+%Y-%m-%d %H:%M UTC"])),
        ("Load at the start".to_owned(), load()),
    ]
}

/// Returns the name of the package from which `scripts/lib.sh` unpacked the plugins in `folder`:
/// the first word of the file `package` three folders above; `None` if there is no such file.
fn unpacked_package(folder: &Path) -> Option<String> {
    let text = fs::read_to_string(folder.ancestors().nth(3)?.join("package")).ok()?;
    Some(text.split(' ').next()?.trim().to_owned())
}

/// Returns the name and version of the installed Debian package that has the plugins in `folder`;
/// `None` if there is none.
fn installed_package(folder: &Path) -> Option<String> {
    let owner = run(&["dpkg-query", "-S", &folder.join("bridge").display().to_string()]).ok()?;
    let name_and_version = run(&["dpkg-query", "-W", owner.split(':').next()?]).ok()?;
    Some(name_and_version.trim().replace('\t', " "))
}

/// Returns a table as Markdown, under a heading. `head` are the names of the columns, with ` | `
/// between them.
fn table(title: &str, head: &str, rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let rule = vec!["---"; head.split(" | ").count()].join(" | ");
    let rows: String = rows.into_iter().map(|cells| format!("| {} |\n", cells.join(" | "))).collect();
    format!("### {title}\n\n| {head} |\n| {rule} |\n{rows}\n")
}

/// Prints the tables to standard output, writes all figures as JSON into the folder `out`, and
/// updates the page beside the folder.
pub(crate) fn write(results: &Results, out: &Path) -> Result<()> {
    let report = markdown(results);
    say(&report);
    let json = serde_json::to_string_pretty(&as_json(results)).doing("failed to encode the results as JSON")?;
    let path = out.join("results.json");
    fs::write(&path, json + "\n").doing(format_args!("failed to write {}", path.display()))?;
    update_page(&out.with_extension("md"), &report)
}

/// Replaces the part of the page between [`BEGIN`] and [`END`] with `report`. Does nothing if the
/// page does not exist or lacks one of these lines.
fn update_page(page: &Path, report: &str) -> Result<()> {
    let Ok(old) = fs::read_to_string(page) else { return Ok(()) };
    let (Some(begin), Some(end)) = (old.find(BEGIN), old.find(END)) else { return Ok(()) };
    let (before, after) = (&old[..begin + BEGIN.len()], &old[end..]);
    fs::write(page, format!("{before}\n\n{report}{after}")).doing(format_args!("failed to write {}", page.display()))
}

/// Returns the report as Markdown.
fn markdown(results: &Results) -> String {
    let mut text = String::new();
    for (name, value) in &results.machine {
        text.push_str(&format!("- {name}: {value}\n"));
    }
    text.push('\n');
    text.push_str(&table("Targets", "what | target | reached | kept", targets::lines(results)));
    for group in GROUPS {
        text.push_str(&group_table(results, group));
    }
    text.push_str(&size_table(results));
    for reason in &results.not_measured {
        text.push_str(&format!("- Not measured: {reason}\n"));
    }
    text
}

/// Formats a number, or returns `-` if there is none or it is not finite.
fn number_or_dash(value: Option<f64>) -> String {
    value.filter(|value| value.is_finite()).map_or("-".to_owned(), short)
}

/// Returns the table of a group: one line for each case and verb, a column for each side with the
/// median wall time or, of attachments at once, with the median number per second. Returns an empty
/// text if nothing was measured.
fn group_table(results: &Results, group: &str) -> String {
    let (unit, figure): (&str, fn(&Row) -> f64) = match group {
        AT_ONCE => ("median attachments per second", |row| row.per_second.median()),
        _ => ("median wall time, ms", |row| row.wall.median()),
    };
    let rows: Vec<&Row> = results.rows.iter().filter(|row| row.group == group).collect();
    if rows.is_empty() {
        return String::new();
    }
    let lines = rows.chunk_by(|one, other| (&one.case, one.verb) == (&other.case, other.verb)).map(|of_verb| {
        let median = |side: Side| of_verb.iter().find(|row| row.side == side).map(|row| figure(row));
        let ratio = |side: Side| Some(median(side)? / median(Side::Theirs)?);
        let mut line = vec![of_verb[0].case.clone(), of_verb[0].verb.to_owned()];
        line.extend(SIDES.iter().map(|side| number_or_dash(median(*side))));
        line.extend([number_or_dash(ratio(Side::Ours)), number_or_dash(ratio(Side::OursNft))]);
        line
    });
    let head = "case | verb | ours | ours, nftables | theirs | kernel alone | ours/theirs | nftables/theirs";
    table(&format!("{} ({unit})", capital(group)), head, lines)
}

/// Returns the table of the binaries' sizes, with the sum of the plugins that both folders have.
fn size_table(results: &Results) -> String {
    let line = |name: &str, ours: u64, theirs: Option<u64>| {
        let kilo = |bytes: u64| format!("{:.0}", bytes as f64 / 1e3);
        let ratio = theirs.map(|theirs| ours as f64 / theirs as f64);
        vec![name.to_owned(), kilo(ours), theirs.map_or("-".to_owned(), kilo), number_or_dash(ratio)]
    };
    let mut rows: Vec<Vec<String>> =
        results.sizes.iter().map(|size| line(size.plugin, size.ours, size.theirs)).collect();
    let in_both = || results.sizes.iter().filter_map(|size| Some((size.ours, size.theirs?)));
    let sum_of_theirs = in_both().map(|(_, theirs)| theirs).sum();
    rows.push(line("those that both have", in_both().map(|(ours, _)| ours).sum(), Some(sum_of_theirs)));
    rows.push(line("all", results.sizes.iter().map(|size| size.ours).sum(), None));
    table("Sizes (kB)", "plugin | ours | theirs | ours/theirs", rows)
}

/// Returns the text with its first letter in upper case.
fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

/// Returns all figures as JSON.
fn as_json(results: &Results) -> Value {
    let machine: Map<String, Value> =
        results.machine.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect();
    let rows = results.rows.iter().map(|row| {
        json!({
            "group": row.group, "case": row.case, "side": row.side.label(), "verb": row.verb, "counts": row.counts,
            "wall_ms": row.wall.figures(), "cpu_ms": row.cpu.figures(), "per_second": row.per_second.figures(),
        })
    });
    json!({
        "machine": machine, "operations": rows.collect::<Value>(), "sizes": results.sizes,
        "not_measured": results.not_measured,
    })
}
