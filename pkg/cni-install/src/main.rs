//! Puts a set of plugins into a folder that runtimes are using, and takes it back. All of it is in
//! the library; here the process becomes values.

use std::io::{stderr, stdout};
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = std::env::args_os().skip(1);
    ExitCode::from(cni_install::run(args, &mut stdout().lock(), &mut stderr().lock()))
}
