//! The CNI plugin `ipvlan`: a container gets an interface that shares the hardware address of an
//! interface of the host.

cni_plugin::main!(cni_plugin::InterfacePlugin(plugin_ipvlan::Ipvlan));
