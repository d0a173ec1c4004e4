//! The plugins of this project, by whose own reading configurations are judged.

use cni::skel::{Plugin, Role};
use cni_plugin::InterfacePlugin;

/// Every plugin. One more line here, and `validate` covers it.
const PLUGINS: [&dyn Plugin; 9] = [
    &InterfacePlugin(plugin_bridge::Bridge),
    &InterfacePlugin(plugin_dummy::Dummy),
    &InterfacePlugin(plugin_host_device::HostDevice),
    &plugin_host_local::HostLocal,
    &plugin_loopback::Loopback,
    &plugin_portmap::Portmap,
    &InterfacePlugin(plugin_ptp::Ptp),
    &InterfacePlugin(plugin_tap::TapPlugin),
    &plugin_tuning::Tuning,
];

/// Returns the plugin of that `type`, unless it is another project's.
pub(crate) fn find(kind: &str) -> Option<&'static dyn Plugin> {
    PLUGINS.into_iter().find(|plugin| plugin.name() == kind)
}

/// Returns the role of the plugin of that `type`, unless it is another project's.
pub(crate) fn role(kind: &str) -> Option<Role> {
    find(kind).map(Plugin::role)
}
