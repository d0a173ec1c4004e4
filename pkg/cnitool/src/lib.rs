//! cnitool: runs, inspects and repairs CNI networks by hand.
//!
//! - `network`: the verbs add, check, del, gc, status and version of a network, with [`libcni`].
//! - `inspect`: compares attachments with their results, and finds leftovers.
//! - `validate`: reports all problems of a network's file, or of every network's file (`networks`).
//! - `doctor`: finds problems of the node, with the commands that fix them.
//! - `explain`: runs a verb of a network and prints the steps of each plugin.
//! - `ipam`: the reservations of host-local, and the leases of dhcp.
//! - `rules`: writes packet filter rules again that another program has removed.
//! - `plugins`: the plugins of this project.
//! - `node`: the configured networks, the result cache, the aliases of links, and whether an
//!   attachment is in use.
//! - `cli`: the verbs, the options of all verbs, environment variables.
//! - `target`: whether a network namespace exists, and the container ID for its path.
//! - `report`: prints results and errors. `help`: the longer texts of `--help`.
//! - `generate`: completions and man pages.
//!
//! A new verb is a module with its arguments and a function `run`, and a line in `cli::Verb`.
//!
//! stdout gets only results, the help and, with `--json`, errors; everything else goes to stderr.
//! The library gets its arguments, environment and streams as values ([`Call`], [`Streams`]), so
//! its tests start no process.

mod cli;
mod doctor;
mod explain;
mod generate;
mod help;
mod inspect;
mod ipam;
mod network;
mod node;
mod plugins;
mod report;
mod rules;
mod target;
#[cfg(test)]
mod testing;
mod validate;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use cni::machine::Machine;
use cni::rollback::Notes;

/// The input of one run of the tool.
#[derive(Debug)]
pub struct Call<'m> {
    /// The arguments, without the program's name.
    pub args: Vec<OsString>,
    /// The whole environment.
    pub environment: Vec<(OsString, OsString)>,
    /// The working directory, for relative paths.
    pub folder: PathBuf,
    /// Runs the plugins.
    pub machine: &'m dyn Machine,
}

/// The output streams of one run of the tool.
pub struct Streams<'a> {
    /// The stream for results.
    pub stdout: &'a mut dyn Write,
    /// The receiver of all other lines. In the program, it writes them to stderr.
    pub notes: Notes,
    /// Whether stdout gets colours.
    pub stdout_style: ColorMode,
    /// Whether stderr gets colours.
    pub stderr_style: ColorMode,
}

/// The colours of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColorMode {
    /// It gets only text, for example because it is a file or NO_COLOR is set.
    Plain,
    /// It gets colours, because it is a terminal.
    Coloured,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// 0: the verb succeeded and found nothing wrong.
    Done,
    /// 1: the verb failed and reported why, or it found something wrong.
    Failed,
    /// 2: the arguments are invalid.
    Usage,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(match exit {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::Usage => 2,
        })
    }
}

/// Runs the tool and prints everything, including errors.
pub fn run(call: &Call<'_>, streams: &mut Streams<'_>) -> Exit {
    match cli::run(call, streams) {
        Ok(exit) => exit,
        Err(failure) => report::print_failure(&failure, streams),
    }
}
