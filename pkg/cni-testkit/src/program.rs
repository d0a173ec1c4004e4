//! Writes programs that tests run.
//!
//! A program cannot be run while a process has it open for writing (ETXTBSY). Tests are threads of
//! one process, and a child that another test has just forked still has all open files of this
//! process. So a separate process writes the programs.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a script, or replaces the file of that name. It can be run at once.
///
/// # Panics
/// If it cannot be written.
#[track_caller]
pub fn script(path: impl AsRef<Path>, text: &str) {
    install(OsStr::new("/dev/stdin"), path.as_ref(), text.as_bytes());
}

/// Copies a program, or replaces the file of that name. The copy can be run at once.
///
/// # Panics
/// If it cannot be copied.
#[track_caller]
pub fn copy(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    install(from.as_ref().as_os_str(), to.as_ref(), b"");
}

/// Runs the program `install` to copy the file `from`, or its stdin `input`, to `to`.
#[track_caller]
fn install(from: &OsStr, to: &Path, input: &[u8]) {
    let mut child = Command::new("install")
        .args(["-D", "-m", "755", "--"])
        .args([from, to.as_os_str()])
        .stdin(Stdio::piped())
        .spawn()
        .expect("to start install");
    let written = child.stdin.take().expect("a pipe").write_all(input);
    let status = child.wait().expect("the end of install");
    assert!(status.success() && written.is_ok(), "failed to write {}: {status}, {written:?}", to.display());
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_script_runs_at_once_whatever_other_threads_start() {
        let folder = tempfile::tempdir().unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let over_now = crate::Ended(&over);
            for _ in 0..4 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        Command::new("true").status().unwrap();
                    }
                });
            }
            let run = |number: usize| {
                let path = folder.path().join(format!("script{number}"));
                script(&path, "#!/bin/sh\nexit 7\n");
                Command::new(path).status()
            };
            let all: Vec<_> = (0..crate::rounds(100) as usize).map(run).collect();
            drop(over_now);
            for status in all {
                assert_eq!(status.unwrap().code(), Some(7));
            }
        });
    }
}
