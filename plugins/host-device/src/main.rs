//! The CNI plugin `host-device`: a container gets an interface of the host until DEL.

cni_plugin::main!(cni_plugin::InterfacePlugin(plugin_host_device::HostDevice));
