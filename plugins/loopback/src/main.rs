//! The CNI plugin `loopback`: sets the container's `lo` up.

use std::process::ExitCode;

#[global_allocator]
static MEMORY: cni_linux::Arena = cni_linux::Arena::new();

fn main() -> ExitCode {
    cni_linux::process::run(&plugin_loopback::Loopback)
}
