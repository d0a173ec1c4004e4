//! The CNI plugin `portmap`: ports of the host lead to ports of a container.

cni_plugin::main!(plugin_portmap::Portmap);
