//! The operator's tool: runs a CNI network by hand. All of it is in the library; here the process becomes values.

use std::io::{self, Write as _};
use std::process::ExitCode;

use cni::rollback::Notes;
use cni::skel::MachineRef;
use cni_linux::LinuxMachine;
use cnitool::{Call, Exit, Streams};

fn main() -> ExitCode {
    let notes = Notes::new(|line| {
        let _ = writeln!(io::stderr(), "{line}"); // a closed stderr is nobody's problem
    });
    let machine = match LinuxMachine::install() {
        Ok(machine) => machine,
        Err(error) => {
            notes.note(format_args!("cnitool: failed to take over the signals: {error}"));
            return Exit::Failed.into();
        }
    };
    let call = Call {
        args: std::env::args_os().skip(1).collect(),
        environment: std::env::vars_os().collect(),
        folder: std::env::current_dir().unwrap_or_default(),
        machine: MachineRef(&machine),
    };
    cnitool::run(&call, &mut Streams { stdout: &mut io::stdout(), notes }).into()
}
