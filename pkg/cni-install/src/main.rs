//! The program `cni-install`. The library does everything; this file connects it to the process.

use std::io::{stderr, stdout};
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = std::env::args_os().skip(1);
    ExitCode::from(cni_install::run(args, &mut stdout().lock(), &mut stderr().lock()))
}
