//! The CNI plugin `vrf`: a container's interface gets routing tables of its own.

cni_plugin::main!(plugin_vrf::Vrf);
