//! The CNI plugin `dhcp`: addresses from a DHCP server. `dhcp daemon` is the daemon that keeps the
//! leases.

// Not `cni_plugin::main!`: its allocator never gives memory back, and the daemon lives long.
fn main() -> std::process::ExitCode {
    plugin_dhcp::run(std::env::args_os().skip(1))
}
