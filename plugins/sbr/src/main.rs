//! The CNI plugin `sbr`: packets from an interface's addresses leave by that interface.

cni_plugin::main!(plugin_sbr::Sbr);
