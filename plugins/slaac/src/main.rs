//! The CNI plugin `slaac`: returns the addresses that the container's interface makes of the
//! advertisements of IPv6 routers.

cni_plugin::main!(plugin_slaac::Slaac);
