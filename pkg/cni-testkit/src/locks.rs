//! Waits for other processes to lock files, or to wait for locks.

use std::fs::{self, File};
use std::path::Path;

use crate::wait_until;

/// Waits until the file is locked.
///
/// # Panics
/// If it is not locked within 30 s.
#[track_caller]
pub fn wait_until_locked(path: &Path) {
    wait_until(&format!("{} is locked", path.display()), || {
        let file = File::open(path).expect("a file to lock");
        let is_free = file.try_lock().is_ok();
        if is_free {
            // Closing the file is not enough: a child that another test has just forked has it open
            // too.
            file.unlock().expect("to unlock");
        }
        !is_free
    });
}

/// Waits until the process waits for a lock, as `/proc/locks` shows it: `12: -> FLOCK ADVISORY
/// WRITE 4711 …`.
///
/// # Panics
/// If it does not wait within 30 s.
#[track_caller]
pub fn wait_until_waiting(pid: u32) {
    let waiter = format!(" {pid} ");
    wait_until(&format!("process {pid} waits for a lock"), || {
        let locks = fs::read_to_string("/proc/locks").expect("the kernel's list");
        locks.lines().any(|line| line.contains("->") && line.contains(&waiter))
    });
}

/// Asserts that the error text that `failing_call` returns names the holder of the lock.
/// `/proc/locks` may lack a line while other locks change, so `failing_call` is called up to 20
/// times.
///
/// # Panics
/// If no error names the holder.
#[track_caller]
pub fn assert_names_holder(holder: &str, mut failing_call: impl FnMut() -> String) {
    let texts: Vec<String> = (0..20).map(|_| failing_call()).take_while(|text| !text.contains(holder)).collect();
    assert!(texts.len() < 20, "no error names `{holder}`: {texts:?}");
}
