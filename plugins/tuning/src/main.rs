//! The CNI plugin `tuning`: settings of an interface and of its network namespace.

cni_plugin::main!(plugin_tuning::Tuning);
