//! cnitool: runs, inspects and repairs CNI networks by hand.
//!
//! - `network`: the verbs add, check, del, gc, status and version of a network, with [`libcni`].
//! - `inspect`: compares attachments with their results, and finds leftovers.
//! - `validate`: reports all problems of a network's file; `networks` does that for every file.
//! - `doctor`: finds problems of the node, with the commands that fix them.
//! - `explain`: runs a verb of a network and prints the steps of each plugin.
//! - `ipam`: the reservations of host-local, and the leases of dhcp.
//! - `rules`: writes packet filter rules again that another program has removed.
//! - `plugins`: the plugins of this project.
//! - `node`: the configured networks, the result cache, the aliases of links, and whether an
//!   attachment is in use.
//! - `cli`: the verbs, the options of all verbs, environment variables.
//! - `target`: a network namespace and its container ID.
//! - `report`: prints results and errors. `help`: the longer texts of `--help`.
//! - `generate`: completions and man pages.
//!
//! A new verb is a module with its arguments and a function `run`, and a line in `cli::Verb`.
//!
//! stdout carries only results; everything else goes to stderr. The tool gets its arguments,
//! environment and streams as values ([`Call`], [`Streams`]), so its tests start no process.

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

/// A call of the tool, as values.
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

/// Where output goes, as values.
pub struct Streams<'a> {
    /// Results.
    pub stdout: &'a mut dyn Write,
    /// Everything else, by lines.
    pub notes: Notes,
    /// Whether stdout is for eyes.
    pub stdout_style: ColorMode,
    /// Whether stderr is.
    pub stderr_style: ColorMode,
}

/// Whether a stream gets colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColorMode {
    /// Nothing but text: a file, a pipe, NO_COLOR.
    Plain,
    /// A terminal.
    Coloured,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// 0: done.
    Done,
    /// 1: it failed, and why was reported; or it looked for something wrong, and found it.
    Failed,
    /// 2: it was called in a way that makes no sense.
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

/// Runs the tool.
pub fn run(call: &Call<'_>, streams: &mut Streams<'_>) -> Exit {
    match cli::run(call, streams) {
        Ok(exit) => exit,
        Err(failure) => report::failure(&failure, streams),
    }
}
