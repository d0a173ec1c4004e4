//! The CNI plugin `firewall`: packets from and to containers pass the node's filter.

cni_plugin::main!(plugin_firewall::Firewall);
