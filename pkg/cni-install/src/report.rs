//! Defines the outcomes of the commands, and the texts about them that are printed.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::kept::Kept;

/// What a command did first because an earlier command had been interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryReport {
    /// Nothing: no command had been interrupted.
    Nothing,
    /// An installation was undone.
    InstallUndone,
    /// A rollback was finished.
    RollbackFinished,
    /// A forget was finished.
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
    /// Nothing: the folder already has these programs.
    AlreadyThere,
    /// The programs are in place.
    Replaced,
}

/// The outcome of a rollback.
#[derive(Debug, PartialEq, Eq)]
pub enum RollbackReport {
    /// Nothing: the requested set is not kept.
    NothingKept {
        /// Whether the original set is kept.
        original: bool,
    },
    /// It was done, with these names.
    Done {
        /// Programs that were put back.
        restored: Vec<String>,
        /// Programs that were removed, because they did not exist before.
        removed: Vec<String>,
        /// Programs that were left as they are, because another installer has replaced or removed
        /// them since.
        left: Vec<String>,
        /// Programs that were left as they are, because the kept file is gone.
        lost: Vec<String>,
        /// Kept files that are still kept, because the folder does not have them.
        kept: Vec<String>,
    },
}

impl RollbackReport {
    /// Returns a line about each group of names that is not empty. `since` is the line's beginning
    /// for the programs that were put back.
    pub(crate) fn lines(&self, since: &str) -> String {
        let RollbackReport::Done { restored, removed, left, lost, kept } = self else { return String::new() };
        let mut text = String::new();
        for (outcome, names) in [
            (since, restored),
            ("removed, because they did not exist before", removed),
            ("not restored, because another installer has replaced or removed them after the install", left),
            ("left alone, because the kept file is gone", lost),
            ("still kept, because the folder does not hold them (`cni-install forget` drops them)", kept),
        ] {
            if !names.is_empty() {
                let _ = write!(text, "\n  {outcome}: {}", names.join(", "));
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
    /// The kept sets that were removed.
    Dropped(KeptSets),
}

/// The outcome of comparing the folder with what was installed.
#[derive(Debug, PartialEq, Eq)]
pub enum Comparison {
    /// cni-install has installed nothing here.
    NothingInstalled,
    /// The command of this name was interrupted.
    Interrupted(&'static str),
    /// All programs are as installed; their names.
    Same(Vec<String>),
    /// Some are not; a text for each of those.
    Different(Vec<String>),
}

/// The sets that a rollback can put back.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct KeptSets {
    /// The files from before the first install.
    pub original: Option<KeptSet>,
    /// The files from before the last install. After a single install this is the original set.
    pub previous: Option<KeptSet>,
}

/// A set that a rollback can put back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptSet {
    /// The time of the install that replaced the files.
    pub since: SystemTime,
    /// The names of the kept programs.
    pub programs: Vec<String>,
    /// The names of installed programs that did not exist before.
    pub absent: Vec<String>,
}

impl KeptSets {
    /// Combines the sets that are on the disk. There `original` does not contain the previous set
    /// yet: the next install adds it.
    pub(crate) fn new(original: Option<&Kept>, previous: Option<&Kept>) -> KeptSets {
        let sets: Vec<&Kept> = original.into_iter().chain(previous).collect();
        KeptSets {
            original: KeptSet::merge(&sets),
            previous: previous.and_then(|previous| KeptSet::merge(&[previous])),
        }
    }
}

impl KeptSet {
    /// Merges several sets, or returns `None` if there are none. For each name the first set that
    /// has it counts.
    fn merge(sets: &[&Kept]) -> Option<KeptSet> {
        let (mut seen, mut programs, mut absent) = (BTreeSet::new(), Vec::new(), Vec::new());
        for kept in sets {
            for name in kept.names() {
                if seen.insert(name) {
                    let names = if kept.was_absent(name) { &mut absent } else { &mut programs };
                    names.push(name.to_owned());
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
        if self.absent.is_empty() { Ok(()) } else { write!(f, "; did not exist: {}", self.absent.join(", ")) }
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
