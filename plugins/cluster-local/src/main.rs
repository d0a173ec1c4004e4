//! The CNI plugin `cluster-local`: addresses that are unique across the nodes of a cluster.

cni_plugin::main!(plugin_cluster_local::ClusterLocal { open: cni_cluster::open });
