//! The CNI plugin `tuning`: changes settings of an interface and of its network namespace.

cni_plugin::main!(plugin_tuning::Tuning);
