//! The CNI plugin `tuning`: settings of an interface and of its network namespace.

use std::process::ExitCode;

fn main() -> ExitCode {
    cni_linux::process::run(&plugin_tuning::Tuning)
}
