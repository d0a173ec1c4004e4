//! The CNI plugin `portmap`: ports of the host lead to ports of a container.

use std::process::ExitCode;

#[global_allocator]
static MEMORY: cni_linux::Arena = cni_linux::Arena::new();

fn main() -> ExitCode {
    cni_linux::process::run(&plugin_portmap::Portmap)
}
