//! The CNI plugin `macvlan`: a container gets an interface with a hardware address of its own on an
//! interface of the host.

cni_plugin::main!(cni_plugin::InterfacePlugin(plugin_macvlan::Macvlan));
