//! Defines the command line. Users run `scripts/bench`, which passes these options.

use std::path::PathBuf;

use clap::{Args, Parser};

/// Measures what CNI plugins cost; see scripts/bench --help
#[derive(Debug, Parser)]
pub(crate) enum Job {
    /// Measures two folders of plugins and compares them
    Measure(Measure),
    /// Compares counts, such as those of system calls, with a table
    Guard(Guard),
}

/// The arguments of a measurement.
#[derive(Debug, Args)]
pub(crate) struct Measure {
    /// The folder of this project's plugins
    #[arg(long, value_name = "DIR", value_parser = existing_folder)]
    pub(crate) ours: PathBuf,
    /// The folder of the plugins to compare with
    #[arg(long, value_name = "DIR", value_parser = existing_folder)]
    pub(crate) theirs: PathBuf,
    /// The folder that the results are written to
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    pub(crate) out: PathBuf,
    /// Only cases whose `group: name` contains one of these texts
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Vec<String>,
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
