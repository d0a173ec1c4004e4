//! The CNI plugin `bridge`: a container's network namespace gets a port on a Linux bridge.

cni_plugin::main!(cni_plugin::InterfacePlugin(plugin_bridge::Bridge));
