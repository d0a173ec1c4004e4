//! The CNI plugin `bandwidth`: limits on what a container receives and sends.

cni_plugin::main!(plugin_bandwidth::Bandwidth);
