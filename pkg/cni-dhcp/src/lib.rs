//! A DHCPv4 client, as values: no sockets, no clock, no threads.
//!
//! - [`gob`], [`rpc`]: what plugin and daemon say to each other, which is Go's `net/rpc`.
//! - [`message`]: what clients and servers say to each other. [`lease`]: when they say it.

pub mod gob;
pub mod lease;
pub mod message;
pub mod rpc;
