//! The CNI plugin `dummy`: a container gets an interface that discards every frame, with an
//! address.

cni_plugin::main!(cni_plugin::InterfacePlugin(plugin_dummy::Dummy));
