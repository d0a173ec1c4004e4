//! The CNI plugin `bridge`: a container's network namespace gets a port on a Linux bridge.

use std::process::ExitCode;

#[global_allocator]
static MEMORY: cni_linux::Arena = cni_linux::Arena::new();

fn main() -> ExitCode {
    cni_linux::process::run(&plugin_bridge::Bridge)
}
