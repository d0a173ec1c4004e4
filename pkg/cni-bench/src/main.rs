//! Measures what one directory of CNI plugins costs compared with another, and with the kernel
//! alone.
//!
//! `scripts/bench` and the guard in `scripts/test` run it. It runs the plugins as programs.
//! Everything runs in namespaces that it creates and that end with it.
//!
//! The speed of a machine changes within minutes, so each round runs every side (each of the
//! compared folders, and the kernel alone) once, and compared values are from the same seconds.

mod alone;
mod call;
mod cases;
mod chain;
mod error;
mod floor;
mod full;
mod guard;
mod measure;
mod options;
mod report;
mod stats;
mod targets;
mod trace;
mod world;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

use options::Job;

/// Runs the job that the arguments ask for. Exits with 1 after an error, if a case could not be
/// measured or, in the guard, if the counts do not match the table.
fn main() -> ExitCode {
    let outcome = match Job::parse() {
        Job::Measure(options) => measure::all(&options),
        Job::Guard(options) => guard::run(&options),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "cni-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
