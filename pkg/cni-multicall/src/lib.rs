//! Lists all plugins: this crate's program runs them, and cnitool checks configurations with them.

use cni::skel::Plugin;
use cni::{Code, Error};
use cni_plugin::InterfacePlugin;
use plugin_cluster_local::ClusterLocal;

/// All plugins, sorted by name. `cluster-local` cannot open a store here, so that cnitool, which
/// uses this table, does not contain TLS; the program of all plugins has its own value.
pub const PLUGINS: &[&dyn Plugin] = &[
    &plugin_bandwidth::Bandwidth,
    &InterfacePlugin(plugin_bond::Bond),
    &InterfacePlugin(plugin_bridge::Bridge),
    &ClusterLocal { open: |_, _| Err(Error::new(Code::INTERNAL, "this program cannot open a store")) },
    &plugin_dhcp::Dhcp,
    &InterfacePlugin(plugin_dummy::Dummy),
    &plugin_firewall::Firewall,
    &plugin_flannel::Flannel,
    &InterfacePlugin(plugin_host_device::HostDevice),
    &plugin_host_local::HostLocal,
    &InterfacePlugin(plugin_ipvlan::Ipvlan),
    &plugin_loopback::Loopback,
    &InterfacePlugin(plugin_macvlan::Macvlan),
    &plugin_portmap::Portmap,
    &InterfacePlugin(plugin_ptp::Ptp),
    &plugin_route_override::RouteOverride,
    &plugin_sbr::Sbr,
    &plugin_slaac::Slaac,
    &plugin_static::Static,
    &InterfacePlugin(plugin_tap::TapPlugin),
    &plugin_tuning::Tuning,
    &InterfacePlugin(plugin_vlan::Vlan),
    &plugin_vrf::Vrf,
];

/// Returns the plugin with this name; `None` if there is none.
pub fn find(name: &str) -> Option<&'static dyn Plugin> {
    PLUGINS.iter().copied().find(|plugin| plugin.name() == name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

    use super::*;

    #[test]
    fn the_table_has_every_folder_of_plugins_in_order() {
        let folders = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../plugins")).unwrap();
        let mut expected: Vec<String> =
            folders.map(|folder| folder.unwrap().file_name().into_string().unwrap()).collect();
        expected.sort_unstable();
        let listed: Vec<&str> = PLUGINS.iter().map(|plugin| plugin.name()).collect();
        assert_eq!(listed, expected);
    }
}
