//! The CNI plugin `vlan`: a container gets one VLAN of an interface of the host.

cni_plugin::main!(cni_plugin::InterfacePlugin(plugin_vlan::Vlan));
