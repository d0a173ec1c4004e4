//! Fuzzing targets: for each kind of input from outside, a function that takes any bytes and panics
//! if a property does not hold. The head of each module describes its properties.
//!
//! libFuzzer calls the targets from the crate `fuzz/`, which is outside the workspace and needs a
//! nightly compiler. `tests/corpus.rs`, which `scripts/test` runs, calls them with each input of
//! `fuzz/corpus/`. Modules named `fuzzing` in the other crates make private functions available,
//! behind a feature that only this crate enables.
//!
//! Targets change neither the kernel's network state nor files outside their own temporary folders.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a target fails by panicking, where libFuzzer and the corpus test can see it"
)]

pub mod advertisement;
pub mod answer;
pub mod args;
pub mod cache;
pub mod config;
pub mod conflist;
pub mod conntrack;
pub mod dhcp;
pub mod gob;
mod input;
pub mod iptables;
pub mod ledger;
pub mod links;
mod machine;
pub mod nft;
pub mod node_file;
pub mod pods;
pub mod proc;
pub mod resolv;
pub mod result;
pub mod store;
pub mod subnet;
pub mod sums;
pub mod tuning;

/// A target: it panics if its property does not hold for these bytes.
pub type Target = fn(&[u8]);

/// All targets, each with the name of its archive in `fuzz/corpus`.
pub const TARGETS: [(&str, Target); 22] = [
    ("advertisement", advertisement::run),
    ("answer", answer::run),
    ("args", args::run),
    ("cache", cache::run),
    ("config", config::run),
    ("conflist", conflist::run),
    ("conntrack", conntrack::run),
    ("dhcp", dhcp::run),
    ("gob", gob::run),
    ("iptables", iptables::run),
    ("ledger", ledger::run),
    ("links", links::run),
    ("nft", nft::run),
    ("node_file", node_file::run),
    ("pods", pods::run),
    ("proc", proc::run),
    ("resolv", resolv::run),
    ("result", result::run),
    ("store", store::run),
    ("subnet", subnet::run),
    ("sums", sums::run),
    ("tuning", tuning::run),
];
