//! Defines the command line. Users run `scripts/bench`, which passes these options.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

/// Measures two folders of CNI plugins and compares them; see scripts/bench --help
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    pub(crate) job: Option<Job>,
    #[command(flatten)]
    pub(crate) bench: Option<Bench>,
}

/// The job, if it is not a measurement.
#[derive(Debug, Subcommand)]
pub(crate) enum Job {
    /// Compares counts, such as those of system calls, with a table
    Guard(Guard),
}

/// The arguments of a measurement.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// The folder of this project's plugins
    #[arg(long, value_name = "DIR", value_parser = existing_folder)]
    pub(crate) ours: PathBuf,
    /// The folder of the plugins to compare with
    #[arg(long, value_name = "DIR", value_parser = existing_folder)]
    pub(crate) theirs: PathBuf,
    /// The folder that the results are written to
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    pub(crate) out: PathBuf,
    /// Run few rounds and small sizes
    #[arg(long)]
    quick: bool,
    /// Only cases whose `group: name` contains one of these texts
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Vec<String>,
}

impl Bench {
    /// Returns how much is measured.
    pub(crate) fn extent(&self) -> Extent {
        if self.quick { Extent::Quick } else { Extent::Full }
    }
}

/// The arguments of the guard.
#[derive(Debug, Args)]
pub(crate) struct Guard {
    /// The folder of this project's plugins
    #[arg(long, value_name = "DIR", value_parser = existing_folder)]
    pub(crate) ours: PathBuf,
    /// The file with the expected counts
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    pub(crate) table: PathBuf,
    /// Write the counts to the table, instead of failing if a count exceeds its bound or the table
    /// has other operations
    #[arg(long)]
    pub(crate) update: bool,
}

/// Returns the absolute path of an existing folder, without symbolic links.
fn existing_folder(path: &str) -> std::io::Result<PathBuf> {
    std::fs::canonicalize(path)
}

/// Returns the absolute path of a file or folder, which need not exist.
fn absolute(path: &str) -> std::io::Result<PathBuf> {
    std::path::absolute(path)
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
