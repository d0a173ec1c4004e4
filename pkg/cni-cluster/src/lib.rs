//! Blocks of addresses that the nodes of a cluster claim from a store that the cluster already has.
//!
//! - [`pool`]: pools and their blocks.
//! - [`store`]: the store of claims, as a trait. [`open`] returns the node's own.
//! - [`conf`]: the node's file, which names the store.
//! - [`ledger`]: the node's own list of its blocks, with the rules of claiming and releasing.
//! - [`cluster`]: what a plugin calls.

pub mod cluster;
pub mod conf;
mod etcd;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod http;
mod kubernetes;
pub mod ledger;
pub mod pool;
pub mod store;
mod tls;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use cni::machine::Machine;

use conf::{Conf, Kind};
use store::Store;

/// Returns the store that the node's file names. Reads the files with the credentials, and sends
/// nothing yet. The deadline is `conf.timeout` from now.
///
/// # Errors
/// Code 5 if a file cannot be read, 7 if it does not have what it should have.
pub fn open<'m>(conf: &Conf, machine: &'m dyn Machine) -> cni::Result<Box<dyn Store + 'm>> {
    let client = http::Client::new(conf, machine)?;
    Ok(match &conf.kind {
        Kind::Kubernetes => Box::new(kubernetes::Kubernetes(client)),
        Kind::Etcd(prefix) => Box::new(etcd::Etcd { client, prefix: prefix.clone() }),
    })
}
