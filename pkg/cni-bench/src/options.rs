//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Doing as _, Error, Result};

pub(crate) const HELP: &str = "\
Usage: cni-bench --ours DIR --theirs DIR --out DIR [--quick] [--only TEXT]...
       cni-bench guard --ours DIR --table FILE [--update]

See scripts/bench --help.
";

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Job {
    Help,
    Bench(Bench),
    Guard(Guard),
}

/// A comparison.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) ours: PathBuf,
    pub(crate) theirs: PathBuf,
    pub(crate) out: PathBuf,
    pub(crate) extent: Extent,
    /// Cases whose `group: name` contains one of these; all if empty.
    pub(crate) only: Vec<String>,
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Full,
    Quick,
}

impl Extent {
    /// The time that one case may take, and the least and the greatest number of rounds.
    pub(crate) fn rounds(self) -> (Duration, usize, usize) {
        match self {
            Extent::Full => (Duration::from_millis(8500), 12, 300),
            Extent::Quick => (Duration::from_millis(300), 3, 20),
        }
    }

    /// How many, of these, is enough.
    pub(crate) fn sizes(self, all: &[usize]) -> Vec<usize> {
        match self {
            Extent::Full => all.to_vec(),
            Extent::Quick => all.iter().copied().take(2).collect(),
        }
    }
}

/// A look at the counts alone.
#[derive(Debug)]
pub(crate) struct Guard {
    pub(crate) ours: PathBuf,
    pub(crate) table: PathBuf,
    pub(crate) mode: GuardMode,
}

/// What becomes of the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuardMode {
    Compare,
    Update,
}

/// `scripts/bench` is the interface; this takes what that hands on, and nothing shorter.
pub(crate) fn parse() -> Result<Job> {
    let mut words = std::env::args_os().skip(1);
    let (mut ours, mut theirs, mut out, mut table) = (None, None, None, None);
    let (mut extent, mut mode, mut guard, mut only) = (Extent::Full, GuardMode::Compare, false, Vec::new());
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
            "guard" => guard = true,
            other => return Err(Error::new(format!("command line: {other}: see --help"))),
        }
    }
    let given = |value: Option<PathBuf>, name: &str| value.ok_or_else(|| Error::new(format!("{name} is missing")));
    let absolute =
        |path: PathBuf, name: &str| std::path::absolute(&path).doing(format_args!("{name} {}", path.display()));
    let ours = folder(given(ours, "--ours DIR")?)?;
    if guard {
        let table = absolute(given(table, "--table FILE")?, "--table")?;
        return Ok(Job::Guard(Guard { ours, table, mode }));
    }
    let theirs = folder(given(theirs, "--theirs DIR")?)?;
    let out = absolute(given(out, "--out DIR")?, "--out")?;
    Ok(Job::Bench(Bench { ours, theirs, out, extent, only }))
}

/// A folder that exists, by the path that the kernel knows it by.
fn folder(path: PathBuf) -> Result<PathBuf> {
    std::fs::canonicalize(&path).doing(format_args!("failed to find {}", path.display()))
}
