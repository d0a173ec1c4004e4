//! Reports what the commands did, as values and as the text that is printed.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::kept::Kept;

/// The recovery that was done first, because an earlier command had been cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryReport {
    /// Nothing: no command had been cut off.
    Nothing,
    /// An installation was undone.
    InstallUndone,
    /// A rollback was finished.
    RollbackFinished,
    /// The kept sets were dropped.
    ForgetFinished,
}

impl fmt::Display for RecoveryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RecoveryReport::Nothing => "",
            RecoveryReport::InstallUndone => "An installation that was interrupted was undone first.\n",
            RecoveryReport::RollbackFinished => "A rollback that was interrupted was finished first.\n",
            RecoveryReport::ForgetFinished => "A forget that was interrupted was finished first.\n",
        })
    }
}

/// The outcome of an install.
#[derive(Debug, PartialEq, Eq)]
pub enum Installed {
    /// Nothing: the folder holds these very programs.
    AlreadyThere,
    /// The programs are in place.
    Replaced,
}

/// The outcome of a rollback.
#[derive(Debug, PartialEq, Eq)]
pub enum RollbackReport {
    /// Nothing: the set that was asked for is not kept.
    NothingKept {
        /// Whether the original set is kept.
        original: bool,
    },
    /// By name.
    Done {
        /// Put back.
        restored: Vec<String>,
        /// Removed, because an install brought them.
        removed: Vec<String>,
        /// Left, because another installer has replaced or removed them since.
        left: Vec<String>,
        /// Left, because the kept file has gone.
        lost: Vec<String>,
        /// Still kept, because the folder does not hold them.
        kept: Vec<String>,
    },
}

impl RollbackReport {
    /// Writes a line about each group of names; `since` names the install.
    pub(crate) fn lines(&self, since: &str) -> String {
        let RollbackReport::Done { restored, removed, left, lost, kept } = self else { return String::new() };
        let mut text = String::new();
        for (what, names) in [
            (since, restored),
            ("removed, because they did not exist before", removed),
            ("left alone, because another installer has replaced or removed them since", left),
            ("left alone, because the kept file is gone", lost),
            ("still kept, because the folder does not hold them (`cni-install forget` drops them)", kept),
        ] {
            if !names.is_empty() {
                let _ = write!(text, "\n  {what}: {}", names.join(", "));
            }
        }
        text
    }
}

/// The outcome of a forget.
#[derive(Debug, PartialEq, Eq)]
pub enum ForgetReport {
    /// Nothing: no earlier set was kept.
    NothingKept,
    /// These are not kept any more.
    Dropped(KeptSets),
}

/// The folder beside what was installed.
#[derive(Debug, PartialEq, Eq)]
pub enum Comparison {
    /// This program installed nothing here.
    NothingInstalled,
    /// This command was killed half-way.
    CutOff(&'static str),
    /// These are there, unchanged.
    Same(Vec<String>),
    /// A line for each that is not.
    Different(Vec<String>),
}

/// The sets that can be put back.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct KeptSets {
    /// The files from before the first install.
    pub original: Option<KeptSet>,
    /// The files from before the last install. After a single install this is the original set.
    pub previous: Option<KeptSet>,
}

/// A set that can be put back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptSet {
    /// The time when an install replaced it.
    pub since: SystemTime,
    /// The programs that are kept.
    pub programs: Vec<String>,
    /// The names that were not there.
    pub absent: Vec<String>,
}

impl KeptSets {
    /// Combines both sets. `original` is as on the disk: it lacks what the last install has
    /// replaced.
    pub(crate) fn new(original: Option<&Kept>, previous: Option<&Kept>) -> KeptSets {
        let sets: Vec<&Kept> = original.into_iter().chain(previous).collect();
        KeptSets { original: KeptSet::of(&sets), previous: previous.and_then(|previous| KeptSet::of(&[previous])) }
    }
}

impl KeptSet {
    /// Merges several sets: for each name the first set that has it counts.
    fn of(sets: &[&Kept]) -> Option<KeptSet> {
        let (mut seen, mut programs, mut absent) = (BTreeSet::new(), Vec::new(), Vec::new());
        for kept in sets {
            for name in kept.names() {
                if seen.insert(name) {
                    if kept.was_absent(name) { &mut absent } else { &mut programs }.push(name.to_owned());
                }
            }
        }
        Some(KeptSet { since: sets.first()?.since, programs, absent })
    }
}

impl fmt::Display for KeptSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.since.duration_since(UNIX_EPOCH).unwrap_or_default();
        let names = if self.programs.is_empty() { "no program".to_owned() } else { self.programs.join(", ") };
        write!(f, "from before {}: {names}", cni::time::rfc3339(since))?;
        if self.absent.is_empty() { Ok(()) } else { write!(f, "; not there: {}", self.absent.join(", ")) }
    }
}

impl fmt::Display for KeptSets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.original, &self.previous) {
            (None, None) => f.write_str("no earlier set is kept"),
            (Some(original), Some(previous)) if original == previous => {
                write!(f, "kept, the original set, which is the previous one too, {original}")
            }
            (original, previous) => {
                let sets = [("original", original), ("previous", previous)];
                let lines: Vec<String> = sets
                    .iter()
                    .filter_map(|(which, set)| Some(format!("kept, the {which} set, {}", set.as_ref()?)))
                    .collect();
                f.write_str(&lines.join("\n"))
            }
        }
    }
}
