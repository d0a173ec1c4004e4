//! The CNI plugin `dhcp`: gets addresses from a DHCP server. `dhcp daemon` is the daemon that
//! renews the leases.

// `cni_plugin::main!` is not used: its allocator never frees memory, and daemons run for long.
fn main() -> std::process::ExitCode {
    plugin_dhcp::run(std::env::args_os().skip(1))
}
