//! host-local called directly: which address, what is on disk, what comes back.

mod allocation;
mod exhaustion;
mod life;
mod ranges;
mod reboot;
mod requested;
mod store;
mod surroundings;
