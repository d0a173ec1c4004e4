//! The plugins of this project, by whose own reading configurations are judged.

use cni::skel::{Plugin, Role};
use cni_plugin::InterfacePlugin;

/// Every plugin. One more line here, and `validate` covers it.
const PLUGINS: &[&dyn Plugin] = &[
    &plugin_bandwidth::Bandwidth,
    &InterfacePlugin(plugin_bridge::Bridge),
    &plugin_dhcp::Dhcp,
    &InterfacePlugin(plugin_dummy::Dummy),
    &plugin_firewall::Firewall,
    &InterfacePlugin(plugin_host_device::HostDevice),
    &plugin_host_local::HostLocal,
    &InterfacePlugin(plugin_ipvlan::Ipvlan),
    &plugin_loopback::Loopback,
    &InterfacePlugin(plugin_macvlan::Macvlan),
    &plugin_portmap::Portmap,
    &InterfacePlugin(plugin_ptp::Ptp),
    &plugin_sbr::Sbr,
    &plugin_static::Static,
    &InterfacePlugin(plugin_tap::TapPlugin),
    &plugin_tuning::Tuning,
    &InterfacePlugin(plugin_vlan::Vlan),
    &plugin_vrf::Vrf,
];

/// Returns the plugin of that `type`, unless it is another project's.
pub(crate) fn find(kind: &str) -> Option<&'static dyn Plugin> {
    PLUGINS.iter().copied().find(|plugin| plugin.name() == kind)
}

/// Returns the role of the plugin of that `type`, unless it is another project's.
pub(crate) fn role(kind: &str) -> Option<Role> {
    find(kind).map(Plugin::role)
}
