//! Locks on files, as the kernel's list of them shows them.

use std::fs::{self, File};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::patience;

/// Waits until the file is locked.
///
/// # Panics
/// If it never is.
#[track_caller]
pub fn wait_until_locked(path: &Path) {
    wait_until(&format!("no process locked {}", path.display()), || {
        let file = File::open(path).expect("a file to lock");
        let free = file.try_lock().is_ok();
        if free {
            // Closing does not do: a child that another test has just forked has the file too.
            file.unlock().expect("to unlock");
        }
        !free
    });
}

/// Waits until the process stands in the kernel's queue for a lock: `12: -> FLOCK ADVISORY WRITE
/// 4711 …`.
///
/// # Panics
/// If it never does.
#[track_caller]
pub fn wait_until_waiting(pid: u32) {
    let waiter = format!(" {pid} ");
    wait_until("it never waited", || {
        let locks = fs::read_to_string("/proc/locks").expect("the kernel's list");
        locks.lines().any(|line| line.contains("->") && line.contains(&waiter))
    });
}

/// Asserts that the error of `refused` names the holder of the lock. The kernel's list can miss a
/// line while other tests' locks come and go, so `refused` is called up to twenty times.
///
/// # Panics
/// If no error names the holder.
#[track_caller]
pub fn assert_named(holder: &str, mut refused: impl FnMut() -> String) {
    let texts: Vec<String> = (0..20).map(|_| refused()).take_while(|text| !text.contains(holder)).collect();
    assert!(texts.len() < 20, "it should say `{holder}`: {texts:?}");
}

#[track_caller]
fn wait_until(otherwise: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + patience(Duration::from_secs(20));
    while !done() {
        assert!(Instant::now() < deadline, "{otherwise}");
        sleep(Duration::from_millis(5));
    }
}
