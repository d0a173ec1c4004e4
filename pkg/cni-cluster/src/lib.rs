//! Blocks of addresses that the nodes of a cluster claim from a store which the cluster already has.
//!
//! - [`store`]: the store of claims, as a trait.

pub mod store;
