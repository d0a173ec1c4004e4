//! The CNI plugin `loopback`: sets the container's `lo` up.

use std::process::ExitCode;

fn main() -> ExitCode {
    cni_linux::process::run(&plugin_loopback::Loopback)
}
