//! The CNI plugin `static`: returns the addresses of the configuration, or those that the runtime
//! requests.

cni_plugin::main!(plugin_static::Static);
