//! The outcomes of the commands, and the texts that describe them.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::kept::Kept;

/// What a command did before its own work, because an earlier command had been interrupted.
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
pub enum InstallReport {
    /// Nothing was changed: the folder already has these programs.
    AlreadyThere,
    /// The programs are in place.
    Replaced,
}

/// The outcome of a rollback.
#[derive(Debug, PartialEq, Eq)]
pub enum RollbackReport {
    /// Nothing was changed: the requested set is not kept.
    NothingKept {
        /// Whether the original set is kept.
        is_original_kept: bool,
    },
    /// A set was put back.
    Done(RestoreReport),
}

/// The outcome of putting a kept set back: the names of the programs, grouped by what happened.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RestoreReport {
    /// Programs that were put back.
    pub restored: Vec<String>,
    /// Programs that were removed, because they did not exist before.
    pub removed: Vec<String>,
    /// Programs that were left unchanged, because another installer has replaced or removed them
    /// since.
    pub left: Vec<String>,
    /// Programs that were left unchanged, because the kept file is gone.
    pub lost: Vec<String>,
    /// Kept files that stay kept, because the plugin folder does not have them after the rollback.
    pub still_kept: Vec<String>,
}

impl RestoreReport {
    /// Returns a line for each non-empty group of names. `restored_label` begins the line about the
    /// programs that were put back.
    pub(crate) fn lines(&self, restored_label: &str) -> String {
        let mut text = String::new();
        for (label, names) in [
            (restored_label, &self.restored),
            ("removed, because they did not exist before", &self.removed),
            ("not restored, because another installer has replaced or removed them after the install", &self.left),
            ("left alone, because the kept file is gone", &self.lost),
            (
                "still kept as copies, because the plugin folder does not contain them (`cni-install forget` deletes the copies)",
                &self.still_kept,
            ),
        ] {
            if !names.is_empty() {
                let _ = write!(text, "\n  {label}: {}", names.join(", "));
            }
        }
        text
    }
}

/// The outcome of a forget.
#[derive(Debug, PartialEq, Eq)]
pub enum ForgetReport {
    /// Nothing was changed: no earlier set was kept.
    NothingKept,
    /// The kept sets that were removed.
    Dropped(KeptSets),
}

/// The outcome of comparing the folder with what was installed.
#[derive(Debug, PartialEq, Eq)]
pub enum Comparison {
    /// cni-install has installed nothing here.
    NothingInstalled,
    /// This command was interrupted: `an installation` or `a rollback`.
    Interrupted(&'static str),
    /// The installed programs, each with its name and how the file differs from it.
    Installed(Vec<(String, Option<&'static str>)>),
}

impl Comparison {
    /// Whether all programs are as installed.
    pub fn is_same(&self) -> bool {
        matches!(self, Comparison::Installed(programs) if programs.iter().all(|(_, difference)| difference.is_none()))
    }

    /// Returns the comparison and the kept sets for `--json`.
    pub(crate) fn json(&self, folder: &Path, kept: &KeptSets) -> Value {
        let (state, programs) = match self {
            Comparison::NothingInstalled => ("nothingInstalled", &[][..]),
            Comparison::Interrupted(_) => ("interrupted", &[][..]),
            Comparison::Installed(programs) => (if self.is_same() { "same" } else { "different" }, &programs[..]),
        };
        let programs = programs.iter().map(|(name, difference)| json!({"name": name, "difference": difference}));
        let set = |set: &Option<KeptSet>| {
            set.as_ref().map(|KeptSet { replaced_at, programs, absent }| {
                json!({"replacedAt": date(*replaced_at), "programs": programs, "absent": absent})
            })
        };
        json!({
            "folder": folder.display().to_string(), "state": state, "programs": programs.collect::<Vec<_>>(),
            "original": set(&kept.original), "previous": set(&kept.previous),
        })
    }
}

/// Returns a time in the form of RFC 3339.
fn date(time: SystemTime) -> String {
    cni::time::rfc3339(time.duration_since(UNIX_EPOCH).unwrap_or_default())
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
    pub replaced_at: SystemTime,
    /// The names of the kept files.
    pub programs: Vec<String>,
    /// The names of installed programs that did not exist before.
    pub absent: Vec<String>,
}

impl KeptSets {
    /// Returns the sets as a rollback would use them. On the disk, the previous set is not part of
    /// the original one until the next install or `rollback --original` adds it.
    pub(crate) fn new(original: Option<&Kept>, previous: Option<&Kept>) -> KeptSets {
        let sets: Vec<&Kept> = original.into_iter().chain(previous).collect();
        KeptSets {
            original: KeptSet::merge(&sets),
            previous: previous.and_then(|previous| KeptSet::merge(&[previous])),
        }
    }
}

impl KeptSet {
    /// Merges several sets, or returns `None` if there are none. If several sets have a name, the
    /// first of these sets is used for it.
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
        Some(KeptSet { replaced_at: sets.first()?.replaced_at, programs, absent })
    }
}

impl fmt::Display for KeptSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = if self.programs.is_empty() { "no program".to_owned() } else { self.programs.join(", ") };
        write!(f, "from before {}: {names}", date(self.replaced_at))?;
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
