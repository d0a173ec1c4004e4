//! Installs a set of plugins into a folder while runtimes execute programs from it.
//!
//! - [`set`]: reads and verifies a folder with programs and their `SHA256SUMS`.
//! - [`folder`]: the commands on the folder that runtimes use. Its documentation describes the
//!   files and states.
//! - [`report`]: the outcomes of the commands, and their texts.
//!
//! This is a separate, static program, because a container image that contains only it and the
//! plugins installs them onto a node. `scripts/install` runs the same program.
//!
//! Each rename replaces *one* program. A pod that starts at the same time may run the new `bridge`
//! and the old `host-local`, which works: every release, and Go's plugins, work together. There is
//! never an incomplete, missing or unusable program.

mod disk;
pub mod folder;
mod kept;
pub mod report;
pub mod set;
mod staging;
mod state;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use nix::sys::signal::{SigSet, Signal};

pub use folder::Folder;
pub use report::{Comparison, ForgetReport, InstallReport, KeptSets, RecoveryReport, RestoreReport, RollbackReport};
pub use set::Set;

/// Where runtimes look for plugins by default.
const DEST: &str = "/opt/cni/bin";

/// An error. The text has the action, its object, and the cause.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

impl Error {
    pub(crate) fn new(text: impl Into<String>) -> Error {
        Error(text.into())
    }

    /// Returns a function that makes the error `failed to <action> <path>: <cause>`.
    pub(crate) fn io<'a>(action: &'a str, path: &'a Path) -> impl FnOnce(io::Error) -> Error + 'a {
        move |cause| Error(format!("failed to {action} {}: {cause}", path.display()))
    }
}

#[derive(Parser)]
#[command(
    name = "cni-install",
    version = cni::release::release(),
    about = "Installs a set of CNI plugins into a folder that runtimes are using, and rolls it back",
    after_help = "Each command that changes the folder first undoes an installation, or finishes a rollback, that was interrupted.\n\
                  An older cni-install, without `rollback --original`, refuses a folder that this one has installed into.",
    disable_help_subcommand = true
)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replace the plugins, and keep the earlier ones
    ///
    /// Verifies DIR against its SHA256SUMS, copies its programs into a temporary folder, runs each
    /// once, and only then renames them into place, one by one: a runtime that starts a plugin
    /// meanwhile gets either the old or the new program, complete. If that fails, everything is
    /// undone, and if the undo fails too, the error says so. Other files are left alone.
    ///
    /// Two sets are kept for rollback: the previous one, which was there before this install, and
    /// the original one, which was there before the first. Later installs replace the previous set
    /// and never the original one.
    Install {
        /// The folder of the new programs and their SHA256SUMS
        #[arg(long, value_name = "DIR")]
        from: PathBuf,
        #[command(flatten)]
        dest: Dest,
        #[command(flatten)]
        stay: StayOption,
    },
    /// Put back what was there before the last install, or before the first
    ///
    /// Programs that were not there before are removed. A program that another installer has
    /// replaced since is left unchanged, and its kept file stays kept.
    ///
    /// A second rollback changes nothing, because the first one leaves no previous set. The
    /// original set is still kept, unless it is the one that was put back. `rollback --original`
    /// puts the original set back, also after a rollback, and drops the previous set.
    Rollback {
        /// Put back what was there before the first install
        #[arg(long)]
        original: bool,
        #[command(flatten)]
        dest: Dest,
        #[command(flatten)]
        stay: StayOption,
    },
    /// Drop the kept sets: the installed programs stay, and no rollback is possible
    ///
    /// The next install takes the programs that are in the folder then as the original set.
    Forget {
        #[command(flatten)]
        dest: Dest,
    },
    /// Show whether the folder has the installed programs (exit status 1 if not), and what is kept
    Status {
        #[command(flatten)]
        dest: Dest,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
}

/// Returns the parser, for the man pages and completions.
pub fn command() -> clap::Command {
    CommandLine::command()
}

/// The option `--dest`.
#[derive(Args)]
struct Dest {
    /// The folder that runtimes use
    #[arg(id = "dest", long, value_name = "DIR", default_value = DEST)]
    path: PathBuf,
}

/// The option `--stay`.
#[derive(Args)]
struct StayOption {
    /// Wait for SIGTERM or SIGINT afterwards: for a container that must keep running
    #[arg(long)]
    stay: bool,
}

impl Command {
    /// Returns the folder that runtimes use.
    fn dest(&self) -> &Path {
        let (Command::Install { dest, .. }
        | Command::Rollback { dest, .. }
        | Command::Forget { dest }
        | Command::Status { dest, .. }) = self;
        &dest.path
    }

    /// Whether the program waits for a signal after the command (`--stay`).
    fn stays(&self) -> bool {
        match self {
            Command::Install { stay, .. } | Command::Rollback { stay, .. } => stay.stay,
            Command::Forget { .. } | Command::Status { .. } => false,
        }
    }
}

/// Runs the installer with the arguments `args`. Returns its exit status: 0 for success, 1 if it
/// failed or `status` found a difference, 2 for invalid arguments.
pub fn run(args: impl Iterator<Item = OsString>, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    let command = match CommandLine::try_parse_from(std::iter::once(OsString::from("cni-install")).chain(args)) {
        Ok(line) => line.command,
        // The parser returns the texts of `--help` and `--version` as errors.
        Err(help) if !help.use_stderr() => return report(out, err, &help.to_string(), 0),
        Err(error) => return write_line(err, &format!("cni-install: {error}"), 2),
    };
    let mut blocked_signals = None;
    if command.stays() {
        // Blocked before the command, because process 1 of a container would otherwise lose a
        // signal that arrives while the command runs.
        match block_signals() {
            Ok(signals) => blocked_signals = Some(signals),
            Err(cause) => {
                return write_line(err, &format!("cni-install: failed to block SIGTERM and SIGINT: {cause}"), 1);
            }
        }
    }
    let (text, status) = match execute(&command) {
        Ok(outcome) => outcome,
        Err(error) => return write_line(err, &format!("cni-install: {error}"), 1),
    };
    let status = report(out, err, &text, status);
    if status != 0 {
        return status;
    }
    match blocked_signals.map(|signals| signals.wait()) {
        None => status,
        Some(Ok(signal)) => report(out, err, &format!("{signal}: leaving {} as it is", command.dest().display()), 0),
        Some(Err(cause)) => write_line(err, &format!("cni-install: failed to wait for a signal: {cause}"), 1),
    }
}

/// Writes the outcome of a command, which has been executed, and a newline to standard output.
/// Returns the exit status. If the outcome cannot be written, writes it to standard error with the
/// reason, and returns at least 1.
fn report(out: &mut dyn Write, err: &mut dyn Write, text: &str, status: u8) -> u8 {
    match try_write_line(out, text) {
        Ok(()) => status,
        Err(cause) => {
            let text = format!(
                "cni-install: failed to write to standard output: {cause}. The command was executed; its outcome:\n{text}"
            );
            write_line(err, &text, status.max(1))
        }
    }
}

/// Writes the text and a newline. Returns the exit status: `status`, but at least 1 if the text
/// cannot be written.
fn write_line(stream: &mut dyn Write, text: &str, status: u8) -> u8 {
    match try_write_line(stream, text) {
        Ok(()) => status,
        Err(_) => status.max(1),
    }
}

/// Writes the text and a newline.
fn try_write_line(stream: &mut dyn Write, text: &str) -> io::Result<()> {
    writeln!(stream, "{}", text.trim_end()).and_then(|()| stream.flush())
}

/// Executes a command. Returns the text to print and the exit status.
fn execute(command: &Command) -> Result<(String, u8), Error> {
    let (path, dest) = (command.dest(), command.dest().display());
    Ok(match command {
        Command::Install { from, .. } => {
            let set = Set::read(from)?;
            let names = set.names().collect::<Vec<_>>().join(", ");
            let (recovered, installed) = Folder::ensure(path)?.install(&set)?;
            let text = match installed {
                InstallReport::AlreadyThere => format!("{dest} holds {names} already; nothing was changed"),
                InstallReport::Replaced => {
                    format!("{names} are now in {dest}; what was there before is kept for rollback")
                }
            };
            (format!("{recovered}{text}"), 0)
        }
        Command::Rollback { original: false, .. } => rollback_text(command, &Folder::open(path)?.rollback()?),
        Command::Rollback { original: true, .. } => {
            let (recovered, report) = Folder::open(path)?.rollback_to_original()?;
            let (text, status) = rollback_text(command, &report);
            (format!("{recovered}{text}"), status)
        }
        Command::Forget { .. } => match Folder::open(path)?.forget()? {
            (recovered, ForgetReport::NothingKept) => {
                (format!("{recovered}nothing to forget in {dest}: no earlier set is kept"), 0)
            }
            (recovered, ForgetReport::Dropped(kept)) => {
                (format!("{recovered}{dest}: nothing is kept any more. It was:\n{kept}"), 0)
            }
        },
        Command::Status { json, .. } => {
            let folder = Folder::open_to_read(path)?;
            let (comparison, kept) = (folder.compare()?, folder.kept_sets()?);
            let text = match json {
                true => format!("{:#}", comparison.json(path, &kept)),
                false => format!("{}\n{kept}", comparison_text(command, &comparison)),
            };
            (text, u8::from(!comparison.is_same()))
        }
    })
}

/// Returns the text about the comparison of the folder with the installed programs: a table of
/// them.
fn comparison_text(command: &Command, comparison: &Comparison) -> String {
    let dest = command.dest().display();
    let programs = match comparison {
        Comparison::NothingInstalled => return format!("nothing is installed in {dest} by cni-install"),
        Comparison::Interrupted(interrupted) => {
            return format!(
                "{interrupted} in {dest} was interrupted; the next install, rollback or forget completes or undoes it first"
            );
        }
        Comparison::Installed(programs) => programs,
    };
    let verdict = if comparison.is_same() { "holds what was installed" } else { "differs from what was installed" };
    let width = programs.iter().map(|(name, _)| name.len()).chain(["PROGRAM".len()]).max().unwrap_or_default();
    let row = |(name, state): (&str, &str)| format!("\n{name:<width$}  {state}");
    let rows = programs.iter().map(|(name, difference)| (name.as_str(), difference.unwrap_or("as installed")));
    let rows: String = [("PROGRAM", "STATE")].into_iter().chain(rows).map(row).collect();
    format!("{dest} {verdict}:{rows}")
}

/// Returns the text about a rollback, and the exit status: 1 if a kept file was lost.
fn rollback_text(command: &Command, report: &RollbackReport) -> (String, u8) {
    let dest = command.dest().display();
    match report {
        RollbackReport::NothingKept { is_original_kept: false } => {
            (format!("nothing to roll back in {dest}: no earlier set is kept"), 0)
        }
        RollbackReport::NothingKept { is_original_kept: true } => (
            format!(
                "nothing to roll back in {dest}: no previous set is kept. The original one is: rollback --original puts it back"
            ),
            0,
        ),
        RollbackReport::Done(restored) => {
            let restored_label = match command {
                Command::Rollback { original: true, .. } => "as before the first install",
                _ => "as before the last install",
            };
            (format!("{dest}:{}", restored.lines(restored_label)), u8::from(!restored.lost.is_empty()))
        }
    }
}

/// Blocks SIGTERM and SIGINT, so that they stay pending until the program waits for them. The
/// kernel discards signals to process 1 of a container that are neither handled nor blocked.
fn block_signals() -> nix::Result<SigSet> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    Ok(signals)
}
