//! The CNI plugin `ptp`: a container gets a veth pair to the host, which routes each of its
//! addresses.

cni_plugin::main!(cni_plugin::InterfacePlugin(plugin_ptp::Ptp));
