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

mod advertisement;
mod answer;
mod args;
mod cache;
mod config;
mod conflist;
mod conntrack;
mod dhcp;
mod gob;
mod input;
mod iptables;
mod ledger;
mod links;
mod machine;
mod nft;
mod node_file;
mod pods;
mod proc;
mod resolv;
mod result;
mod store;
mod subnet;
mod sums;
mod tuning;

/// A target: it panics if its property does not hold for these bytes.
type Target = fn(&[u8]);

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

/// Runs the target `name` with one input.
///
/// # Panics
/// If no target has this name, or if its property does not hold.
pub fn run(name: &str, data: &[u8]) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).expect("a target has this name");
    target(data);
}
