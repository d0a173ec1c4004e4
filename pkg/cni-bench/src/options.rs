//! Parses the command line. `scripts/bench` is the command that users run; it passes these options.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Doing as _, Error, Result};

/// The text of `--help`.
pub(crate) const HELP: &str = "\
Usage: cni-bench --ours DIR --theirs DIR --out DIR [--quick] [--only TEXT]...
       cni-bench guard --ours DIR --table FILE [--update]

See scripts/bench --help.
";

/// What the program does.
#[derive(Debug)]
pub(crate) enum Job {
    Help,
    Bench(Bench),
    Guard(Guard),
}

/// Measures two sets of plugins and compares them.
#[derive(Debug)]
pub(crate) struct Bench {
    /// The folder of this project's plugins.
    pub(crate) ours: PathBuf,
    /// The folder of the plugins to compare with.
    pub(crate) theirs: PathBuf,
    /// The folder that the results are written to.
    pub(crate) out: PathBuf,
    pub(crate) extent: Extent,
    /// Only cases whose `group: name` contains one of these texts; all if empty.
    pub(crate) only: Vec<String>,
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Full,
    Quick,
}

impl Extent {
    /// Returns the limits of one case. With these, a full run takes less than 15 minutes and a
    /// quick one about a minute.
    pub(crate) fn rounds(self) -> Rounds {
        match self {
            Extent::Full => Rounds { min: 12, max: 300, time: Duration::from_millis(8500) },
            Extent::Quick => Rounds { min: 3, max: 20, time: Duration::from_millis(300) },
        }
    }

    /// Returns the number of attached containers of a full node.
    pub(crate) fn full_node(self) -> usize {
        match self {
            Extent::Full => 600,
            Extent::Quick => 100,
        }
    }

    /// Selects the sizes to measure, such as numbers of rules: all in a full run, the first two in
    /// a quick one.
    pub(crate) fn sizes(self, all: &[usize]) -> Vec<usize> {
        match self {
            Extent::Full => all.to_vec(),
            Extent::Quick => all.iter().copied().take(2).collect(),
        }
    }
}

/// How long one case is measured: for at least `min` rounds, and then until `time` has passed or
/// `max` rounds are done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    pub(crate) min: usize,
    pub(crate) max: usize,
    pub(crate) time: Duration,
}

/// Compares counts, such as those of system calls, with a table of expected counts.
#[derive(Debug)]
pub(crate) struct Guard {
    /// The folder of this project's plugins.
    pub(crate) ours: PathBuf,
    /// The file with the expected counts.
    pub(crate) table: PathBuf,
    pub(crate) mode: GuardMode,
}

/// What is done with the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuardMode {
    /// Fail if a count exceeds its bound, or if the table has different operations.
    Compare,
    /// Write the counts to the table.
    Update,
}

/// Parses the arguments of this process.
///
/// # Errors
/// An argument is unknown or missing, or a folder does not exist.
pub(crate) fn parse() -> Result<Job> {
    let mut words = std::env::args_os().skip(1);
    let (mut ours, mut theirs, mut out, mut table) = (None, None, None, None);
    let (mut extent, mut mode, mut is_guard, mut only) = (Extent::Full, GuardMode::Compare, false, Vec::new());
    while let Some(word) = words.next() {
        let word = word.to_string_lossy().into_owned();
        let mut value = || words.next().ok_or_else(|| Error::new(format!("command line: {word} needs a value")));
        match word.as_str() {
            "--ours" => ours = Some(PathBuf::from(value()?)),
            "--theirs" => theirs = Some(PathBuf::from(value()?)),
            "--out" => out = Some(PathBuf::from(value()?)),
            "--table" => table = Some(PathBuf::from(value()?)),
            "--only" => only.push(value()?.to_string_lossy().into_owned()),
            "--quick" => extent = Extent::Quick,
            "--update" => mode = GuardMode::Update,
            "--help" | "-h" => return Ok(Job::Help),
            "guard" => is_guard = true,
            other => return Err(Error::new(format!("command line: unknown argument {other:?}; --help lists all"))),
        }
    }
    let required = |value: Option<PathBuf>, name: &str| {
        value.ok_or_else(|| Error::new(format!("command line: {name} is missing")))
    };
    let absolute =
        |path: PathBuf, name: &str| std::path::absolute(&path).doing(format_args!("invalid {name} {}", path.display()));
    let ours = existing_folder(required(ours, "--ours DIR")?)?;
    if is_guard {
        let table = absolute(required(table, "--table FILE")?, "--table")?;
        return Ok(Job::Guard(Guard { ours, table, mode }));
    }
    let theirs = existing_folder(required(theirs, "--theirs DIR")?)?;
    let out = absolute(required(out, "--out DIR")?, "--out")?;
    Ok(Job::Bench(Bench { ours, theirs, out, extent, only }))
}

/// Returns the absolute path of an existing folder, without symbolic links.
fn existing_folder(path: PathBuf) -> Result<PathBuf> {
    std::fs::canonicalize(&path).doing(format_args!("failed to find {}", path.display()))
}
