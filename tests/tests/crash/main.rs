//! Checks that nothing is left after plugins were killed, starved and raced, and a DEL or GC
//! followed.
//!
//! A chain of bridge (with host-local and `ipMasq`), tuning, portmap and bandwidth is called as a
//! runtime calls it, once for every system call of each of its programs. Other tests add and delete
//! many attachments concurrently. One test per verb and backend.
//!
//! `scripts/test` runs a share of the points, chosen by a seed that is printed (`CNI_SEED` repeats
//! it). `CNI_SOAK=N` runs all of them, as far as `CNI_SOAK_MINUTES` let each test, and N storms
//! instead of one: `scripts/test --soak`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

mod chain;
mod cluster_local;
mod devices;
mod dhcp;
mod errors;
mod interfaces;
mod judge;
mod kill;
mod kinds;
mod locks;
mod orphans;
mod storm;
mod sweep;
mod unmarked;
mod world;
