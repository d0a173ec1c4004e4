//! Stores of claims for tests of cluster-local: a server of a part of the Kubernetes API, and real
//! members of etcd.

mod api;
mod authority;
mod etcd;
mod objects;

pub use api::{ApiServer, Fault};
pub use authority::Authority;
pub use etcd::Etcd;
