//! Test only: for each thing that comes from outside, a function that takes any bytes and fails by
//! panicking if what must hold does not.
//!
//! libFuzzer calls them (the crate `fuzz/`, outside the workspace, which needs a nightly compiler),
//! and so does `tests/corpus.rs` for each file of `fuzz/corpus/`, with the rest of `scripts/test`.
//! What the plugins' crates keep private they open in their modules `fuzzing`, behind a feature
//! that nothing but this crate turns on.
//!
//! Nothing here touches the kernel's network state or any file but in temporary folders of its own.
//! No target only looks for panics: each checks a property, which is described at its head.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a target fails by panicking, where libFuzzer and the corpus test can see it"
)]

pub mod args;
pub mod cache;
pub mod config;
pub mod conflist;
pub mod conntrack;
pub mod dhcp;
pub mod gob;
pub mod index;
mod input;
pub mod iptables;
mod machine;
pub mod nft;
pub mod proc;
pub mod resolv;
pub mod result;
pub mod store;
pub mod sums;
pub mod tuning;

/// A target.
pub type Target = fn(&[u8]);

/// All of them, each with the name of its folder below `fuzz/corpus`.
pub const TARGETS: [(&str, Target); 16] = [
    ("args", args::run),
    ("cache", cache::run),
    ("config", config::run),
    ("conflist", conflist::run),
    ("conntrack", conntrack::run),
    ("dhcp", dhcp::run),
    ("gob", gob::run),
    ("index", index::run),
    ("iptables", iptables::run),
    ("nft", nft::run),
    ("proc", proc::run),
    ("resolv", resolv::run),
    ("result", result::run),
    ("store", store::run),
    ("sums", sums::run),
    ("tuning", tuning::run),
];
