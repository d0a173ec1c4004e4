//! `portmap`: maps ports of the host to a container, with every backend, and leaves nothing.
//!
//! A network of two plugins, called one after the other as a runtime does: `bridge`, then `portmap`
//! with its result.

mod crowded;
mod identity;
mod life;
mod no_route;
mod packets;
mod refusals;
mod rivals;
mod sctp;
mod shapes;
mod stale;
mod undo;
pub(crate) mod world;
