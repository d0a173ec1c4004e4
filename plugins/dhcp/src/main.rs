//! The CNI plugin `dhcp`: addresses from a DHCP server. `dhcp daemon` is the daemon that keeps the leases.

use std::process::ExitCode;

// Not `cni_plugin::main!`: its allocator never gives memory back, and the daemon lives long.
fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("daemon") => plugin_dhcp::daemon::run(args.collect()),
        _ => cni_plugin::process::run(&plugin_dhcp::Dhcp),
    }
}
