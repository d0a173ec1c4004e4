//! The CNI plugin `vrf`: adds a container's interface to a VRF, with its own routing table.

cni_plugin::main!(plugin_vrf::Vrf);
