//! The start of a plugin's process: the log if one is asked for, the signals, then the skeleton.

use std::io::{self, Write as _};
use std::process::ExitCode;

use cni::skel::{self, Environment, Plugin};
use cni_linux::LinuxMachine;
use cni_linux::stream::{PATIENCE, Stream};

/// Runs a plugin as this process.
pub fn run(plugin: &dyn Plugin) -> ExitCode {
    let traceparent = crate::logging::install(plugin.name());
    let environment = Environment::new(std::env::vars_os().chain(traceparent));
    match LinuxMachine::install() {
        Ok(machine) => {
            let mut stdin = Stream::new(&machine, io::stdin(), PATIENCE);
            let mut stdout = Stream::new(&machine, io::stdout(), PATIENCE);
            skel::run(plugin, &machine, &environment, &mut stdin, &mut stdout)
        }
        Err(error) => {
            // The plugin has done nothing yet. A runtime reports stderr when stdout is empty.
            let _ =
                writeln!(io::stderr(), "{}: failed to block the signals and open a signalfd: {error}", plugin.name());
            ExitCode::FAILURE
        }
    }
}
