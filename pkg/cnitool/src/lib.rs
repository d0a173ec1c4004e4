//! cnitool: runs, inspects and repairs CNI networks by hand.
//!
//! - `network`: the verbs add, check, del, gc, status and version of a network, with [`libcni`].
//! - `inspect`: compares attachments with their results, and finds leftovers.
//! - `validate`: reports all problems of network files, or of the files in the networks' folder.
//! - `schema`: the JSON Schema of a network, or of one plugin's keys.
//! - `doctor`: finds problems of the node, with the commands that fix them.
//! - `metrics`: figures of the node in Prometheus' text format.
//! - `explain`: runs a verb of a network and prints the steps of each plugin.
//! - `ipam`: the reservations of host-local, and the leases of dhcp.
//! - `rules`: writes packet filter rules again that another program has removed.
//! - `node`: the configured networks, the attachments and whether they are in use, reservations,
//!   and leftovers.
//! - `cli`: parses the arguments and runs the verb.
//! - `call`: what all verbs use: arguments, streams, exit codes, failures, the options of all
//!   verbs, environment variables.
//! - `target`: whether a network namespace exists, and the container ID for its path.
//! - `report`: prints results and errors.
//! - `generate`: completions and man pages.
//!
//! A new verb is a module with its arguments and a function `run`, and a line in `cli::Verb`.
//!
//! stdout gets only results, the help and, with `--json`, errors; everything else goes to stderr.
//! The library gets its arguments, environment and streams as values ([`Call`], [`Streams`]), so
//! its tests start no process.

mod call;
mod cli;
mod doctor;
mod explain;
mod generate;
mod inspect;
mod ipam;
mod metrics;
mod network;
mod node;
mod report;
mod rules;
mod schema;
mod target;
#[cfg(test)]
mod testing;
mod validate;

pub use call::{Call, ColorMode, Exit, Streams};

/// Runs the tool and prints everything, including errors.
pub fn run(call: &Call<'_>, streams: &mut Streams<'_>) -> Exit {
    match cli::run(call, streams) {
        Ok(exit) => exit,
        Err(failure) => report::print_failure(&failure, streams),
    }
}
