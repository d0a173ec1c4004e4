//! Blocks of addresses that the nodes of a cluster claim from a store which the cluster already has.
//!
//! - [`pool`]: pools and their blocks.
//! - [`store`]: the store of claims, as a trait.

pub mod pool;
pub mod store;
