//! The same list attached by Go's plugins and by these, on two fresh nodes: what is different?
//!
//! Cases are drawn at random, by a seed that is printed; `CNI_SEED` repeats a run, `CNI_DRAW` one case of it, and `CNI_CASE` runs
//! one that is given as JSON. `CNI_SOAK=N` runs N thousand cases.
//! Compared are outcomes, results, links, addresses, routes, rules, sysctls, firewall rules and files. A difference is
//! explained (`explained.rs` names the paragraph of docs/differences.md) or it is a failure, and its case is cut down
//! to what it takes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

mod compare;
mod draw;
mod explained;
mod facts;
mod run;
mod shrink;
mod side;
