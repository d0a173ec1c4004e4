//! The CNI plugin `flannel`: connects a container to the node's subnet of a flannel network.

cni_plugin::main!(plugin_flannel::Flannel);
