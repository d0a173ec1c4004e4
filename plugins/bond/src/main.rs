//! The CNI plugin `bond`: a container gets an interface that sends and receives over several
//! others.

cni_plugin::main!(cni_plugin::InterfacePlugin(plugin_bond::Bond));
