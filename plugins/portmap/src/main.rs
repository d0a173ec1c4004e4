//! The CNI plugin `portmap`: ports of the host lead to ports of a container.

use std::process::ExitCode;

fn main() -> ExitCode {
    cni_linux::process::run(&plugin_portmap::Portmap)
}
