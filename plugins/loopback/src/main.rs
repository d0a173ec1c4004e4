//! The CNI plugin `loopback`: sets the container's `lo` up.

cni_plugin::main!(plugin_loopback::Loopback);
