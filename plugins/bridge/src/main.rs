//! The CNI plugin `bridge`: a container's network namespace gets a port on a Linux bridge.

cni_plugin::main!(plugin_bridge::Bridge);
