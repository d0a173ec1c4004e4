//! The CNI plugin `tuning`: settings of an interface and of its network namespace.

use std::process::ExitCode;

#[global_allocator]
static MEMORY: cni_linux::Arena = cni_linux::Arena::new();

fn main() -> ExitCode {
    cni_linux::process::run(&plugin_tuning::Tuning)
}
