//! The CNI plugin `static`: hands out the addresses of the configuration, or those that the runtime
//! asks for.

cni_plugin::main!(plugin_static::Static);
