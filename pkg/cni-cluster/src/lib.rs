//! Blocks of addresses that the nodes of a cluster claim from a store that the cluster already has.
//!
//! - [`pool`]: pools and their blocks.
//! - [`store`]: the store of claims, as a trait.
//! - [`ledger`]: the node's own list of its blocks, with the rules of claiming and releasing.
//! - [`cluster`]: what a plugin calls.

mod claimer;
pub mod cluster;
pub mod ledger;
pub mod pool;
#[cfg(test)]
mod search;
pub mod store;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
