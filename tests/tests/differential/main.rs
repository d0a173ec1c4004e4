//! Attaches the same lists by Go's plugins and by these, on two fresh nodes, and compares the
//! nodes.
//!
//! Cases are drawn at random, by a seed that is printed; `CNI_SEED` repeats a run, `CNI_DRAW` one
//! case of it, and `CNI_CASE` runs one that is given as JSON. `CNI_SOAK=N` runs N thousand cases.
//! The tests compare outcomes, results, links, addresses, routes, rules, sysctls, firewall rules
//! and files. A difference is explained (`explained.rs` names the paragraph of docs/differences.md)
//! or is a failure, whose case is cut down to what the difference needs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

mod compare;
mod draw;
mod explained;
mod facts;
mod run;
mod shrink;
mod side;
