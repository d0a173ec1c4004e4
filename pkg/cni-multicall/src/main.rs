//! A program that contains all plugins. It runs the one whose name it is called by.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use cni::skel::Plugin;

/// The exit status if the program is called by a name that no plugin has.
const UNKNOWN_NAME: u8 = 2;

// Not `cni_plugin::main!`: its allocator never frees memory, and the DHCP daemon runs for a long
// time.
fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let path = args.next().unwrap_or_default();
    let name = Path::new(&path).file_name().unwrap_or_default().to_string_lossy();
    match cni_multicall::find(&name) {
        // The program of dhcp is also its daemon: `dhcp daemon`, with options.
        Some(_) if name == "dhcp" => plugin_dhcp::run(args),
        Some(_) if name == "cluster-local" => {
            cni_plugin::process::run(&plugin_cluster_local::ClusterLocal { open: cni_cluster::open })
        }
        Some(plugin) => cni_plugin::process::run(plugin),
        None => {
            let names: Vec<&str> = cni_multicall::PLUGINS.iter().map(|plugin: &&dyn Plugin| plugin.name()).collect();
            let _ = writeln!(
                std::io::stderr(),
                "{name}: no plugin has this name. Run the program by a hard link with one of these names: {}",
                names.join(", ")
            );
            ExitCode::from(UNKNOWN_NAME)
        }
    }
}
