//! The CNI plugin `host-local`: addresses from ranges of this host, kept in a folder.

use std::process::ExitCode;

#[global_allocator]
static MEMORY: cni_linux::Arena = cni_linux::Arena::new();

fn main() -> ExitCode {
    cni_linux::process::run(&plugin_host_local::HostLocal)
}
