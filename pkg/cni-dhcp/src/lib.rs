//! A DHCPv4 client, as values: no sockets, no clock, no threads.
//!
//! - [`gob`], [`rpc`]: what plugin and daemon say to each other, which is Go's `net/rpc`.

pub mod gob;
pub mod rpc;
