//! Passes the arguments, the environment and the streams to the library, which does everything.

use std::io::{self, IsTerminal, Write as _};
use std::process::ExitCode;

use cni::rollback::Notes;
use cni_linux::{Arena, LinuxMachine};
use cnitool::{Call, ColorMode, Exit, Streams};

/// The block is large enough for `metrics` on a node with 600 containers, which takes a third less
/// time with it. A verb that runs for long, such as a repeated gc, uses musl's allocator when the
/// block is full.
#[global_allocator]
static MEMORY: Arena<{ 48 << 20 }> = Arena::new();

fn main() -> ExitCode {
    let notes = Notes::new(|line| {
        let _ = writeln!(io::stderr(), "{line}"); // a closed stderr is ignored
    });
    let traceparent = cni_plugin::logging::install("cnitool");
    let machine = match LinuxMachine::install() {
        Ok(machine) => machine,
        Err(error) => {
            notes.note(format_args!("cnitool: failed to block the signals and open a signalfd: {error}"));
            return Exit::Failed.into();
        }
    };
    let call = Call {
        args: std::env::args_os().skip(1).collect(),
        environment: std::env::vars_os().chain(traceparent).collect(),
        // If the working directory was deleted, relative paths are relative to `/`.
        folder: std::env::current_dir().unwrap_or_default(),
        machine: &machine,
    };
    let (stdout_style, stderr_style) = (style(&io::stdout()), style(&io::stderr()));
    cnitool::run(&call, &mut Streams { stdout: &mut io::stdout(), notes, stdout_style, stderr_style }).into()
}

/// Returns [`ColorMode::Coloured`] for a terminal that supports colours, or if CLICOLOR_FORCE is
/// set and not 0, unless NO_COLOR is set (<https://no-color.org>, <https://bixense.com/clicolors>).
fn style(stream: &impl IsTerminal) -> ColorMode {
    let value = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let dumb = value("TERM").is_none_or(|term| term == "dumb");
    let supported = value("CLICOLOR_FORCE").is_some_and(|value| value != "0") || (stream.is_terminal() && !dumb);
    if supported && value("NO_COLOR").is_none() { ColorMode::Coloured } else { ColorMode::Plain }
}
