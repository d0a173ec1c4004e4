//! cnitool: the operator's side of CNI.
//!
//! - `network`: the verbs of a network, run by hand: add, check, del, gc, status, version. A thin
//!   layer over [`libcni`].
//! - `inspect`: attachments as they are, beside their results, and leftovers.
//! - `validate`: all that is wrong with a network's file, and `networks`, which is that for every
//!   file.
//! - `doctor`: what on the node keeps networks from working, and what fixes it.
//! - `explain`: a verb of a network with the steps of each plugin.
//! - `ipam`: the reservations of host-local, and the leases of dhcp.
//! - `rules`: the packet filter rules of attachments, written again after something else has
//!   removed them.
//! - `plugins`: the plugins of this project, in one table.
//! - `node`: what is configured, remembered and marked on this node, and whether an attachment is
//!   still in use.
//! - `cli`: what all verbs share: the tree of verbs, the options that are everybody's, the
//!   variables.
//! - `target`: a network namespace's path and the container ID that goes with it.
//! - `report`: results and errors, for people or as JSON. `help`: every word of `--help`.
//!
//! - `generate`: completions and man pages.
//!
//! A new verb is a module with its arguments and a `run`, and a line in `cli::Verb`.
//!
//! stdout carries results only; everything else goes to stderr. The whole tool works on values
//! ([`Call`], [`Streams`]), so its tests start no process.

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
