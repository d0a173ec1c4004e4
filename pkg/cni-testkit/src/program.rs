//! Programs that tests write and run.
//!
//! A file that was open for writing a moment ago may be "busy"
//! (ETXTBSY), though it was closed. Tests are threads of one process, and a child that another one
//! forks has all its files, until it runs its own program. So a process of its own writes them,
//! which forks nothing.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a script that can be run at once, in the place of what has that name.
///
/// # Panics
/// If it cannot be written.
#[track_caller]
pub fn script(path: impl AsRef<Path>, text: &str) {
    install(OsStr::new("/dev/stdin"), path.as_ref(), text.as_bytes());
}

/// Copies a program, which can be run at once, into the place of what has that name.
///
/// # Panics
/// If it cannot be copied.
#[track_caller]
pub fn copy(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    install(from.as_ref().as_os_str(), to.as_ref(), b"");
}

#[track_caller]
fn install(from: &OsStr, to: &Path, input: &[u8]) {
    let mut child = Command::new("install")
        .args(["-D", "-m", "755", "--"])
        .args([from, to.as_os_str()])
        .stdin(Stdio::piped())
        .spawn()
        .expect("to start install");
    let fed = child.stdin.take().expect("a pipe").write_all(input);
    let status = child.wait().expect("the end of install");
    assert!(status.success() && fed.is_ok(), "failed to write {}: {status}, {fed:?}", to.display());
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
