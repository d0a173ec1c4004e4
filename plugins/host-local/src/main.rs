//! The CNI plugin `host-local`: addresses from ranges of this host, kept in a folder.

cni_plugin::main!(plugin_host_local::HostLocal);
