//! Generates completions and man pages from the parser.

use std::fs;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;
use cni::{Code, Error};

use crate::call::{Exit, Streams};
use crate::report::write_raw;

/// The arguments of `completions`.
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    shell: Shell,
}

/// The arguments of `man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// The folder, which is created if it does not exist
    #[arg(value_hint = clap::ValueHint::DirPath)]
    dir: PathBuf,
}

/// Prints the completions for a shell.
///
/// # Errors
/// Code 5 if stdout cannot be written.
pub(crate) fn completions(args: &Completions, mut parser: Command, streams: &mut Streams<'_>) -> Result<Exit, Error> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut parser, "cnitool", &mut script);
    write_raw(streams, &String::from_utf8_lossy(&script)).map(|()| Exit::Done)
}

/// Writes `cnitool.1` and a page for each verb.
///
/// # Errors
/// Code 5 if the folder or a page cannot be written.
pub(crate) fn man(args: &ManArgs, parser: Command) -> Result<Exit, Error> {
    fs::create_dir_all(&args.dir)
        .and_then(|()| clap_mangen::generate_to(with_descriptions(parser), &args.dir))
        .map_err(|error| Error::caused(Code::IO, format_args!("failed to write into {}", args.dir.display()), error))
        .map(|()| Exit::Done)
}

/// Sets the description of each verb's man page: the short text and the text that `--help` prints
/// below it.
fn with_descriptions(command: Command) -> Command {
    let texts = [command.get_about(), command.get_before_help()].into_iter().flatten();
    let description = texts.map(ToString::to_string).collect::<Vec<_>>().join("\n\n");
    command.long_about(description).mut_subcommands(with_descriptions)
}
