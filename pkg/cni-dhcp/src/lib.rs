//! The protocols of the plugin dhcp and its daemon, without sockets, clock and threads.
//!
//! - [`gob`], [`rpc`]: the calls between plugin and daemon, which are those of Go's `net/rpc`.
//! - [`message`]: the messages of DHCPv4 and DHCPv6. [`lease`]: the state machine of a client of
//!   either, which decides when to send which message.

pub mod gob;
pub mod lease;
pub mod message;
pub mod rpc;
