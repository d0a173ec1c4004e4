//! The CNI plugin `bridge`: a container's network namespace gets a port on a Linux bridge.

use std::process::ExitCode;

fn main() -> ExitCode {
    cni_linux::process::run(&plugin_bridge::Bridge)
}
