//! Measuring: what one directory of CNI plugins costs beside another, and beside the kernel alone.
//!
//! `scripts/bench` and the guard in `scripts/test` run it. It knows nothing of our crates: plugins
//! are programs in a folder. Everything plays in namespaces that it makes for itself and that end
//! with it.
//!
//! The newcomer's mistake: measuring one side after the other. The machine changes its mind within
//! minutes, so each round runs every side once, and what is compared was measured within the same
//! second.

mod burst;
mod call;
mod cases;
mod chain;
mod error;
mod floor;
mod guard;
mod measure;
mod options;
mod plot;
mod report;
mod stats;
mod targets;
mod trace;
mod world;

use std::io::Write as _;
use std::process::ExitCode;

use error::Result;
use options::Job;

fn main() -> ExitCode {
    // Before anything else: this is the process that becomes a traced plugin.
    if let Some(error) = trace::become_tracee() {
        let _ = writeln!(std::io::stderr(), "cni-bench: {error}");
        return ExitCode::FAILURE;
    }
    match options::parse().and_then(run) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "cni-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether everything could be measured and, for the guard, was within its bounds.
fn run(job: Job) -> Result<bool> {
    match job {
        Job::Help => {
            let _ = std::io::stdout().write_all(options::HELP.as_bytes());
            Ok(true)
        }
        Job::Bench(options) => measure::all(&options),
        Job::Guard(options) => guard::run(&options),
    }
}
