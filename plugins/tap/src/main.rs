//! The CNI plugin `tap`: a container gets an Ethernet interface whose other end is a program, such
//! as a virtual machine.

cni_plugin::main!(cni_plugin::InterfacePlugin(plugin_tap::TapPlugin));
