//! Locks the store with an `flock` of the file `lock`, as the Go plugin does, with a deadline.
//!
//! While a process waits for the lock, the folder may be removed, and then the lock protects
//! nothing. So the locked file is afterwards compared with the file at the path.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use cni::machine::{Machine, OnSigterm};
use cni::steps::Step;
use cni::{Code, Error, Result};
use cni_linux::flock::{self, Limit, Refused};
use nix::libc::{ELOOP, O_CREAT, O_NOFOLLOW, O_NONBLOCK};

/// How long a verb waits for the lock by default.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(30);

/// The treatment of a folder that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MissingFolder {
    /// ADD creates it.
    Create,
    /// The other verbs do not create it: without a folder, they have nothing to lock.
    Leave,
}

/// A locked store. Dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct Guard {
    /// The lock file. Closing it releases the lock.
    pub(crate) lock: File,
    /// The folder, opened after the lock was taken.
    pub(crate) folder: File,
}

/// Locks the folder `path`. Returns `None` if it does not exist and `missing` is
/// [`MissingFolder::Leave`].
///
/// # Errors
/// - Code 11 if another process holds the lock until `limit` has passed or a signal arrives. The
///   message names that process.
/// - Code 11 if other processes keep removing the lock file until `limit` has passed.
/// - Code 5 if the folder or the lock file cannot be created, opened or locked.
pub(crate) fn acquire(
    path: &Path,
    missing: MissingFolder,
    on_sigterm: OnSigterm,
    limit: Duration,
    machine: &dyn Machine,
) -> Result<Option<Guard>> {
    let deadline = machine.now() + limit;
    let lock_path = path.join("lock");
    loop {
        if missing == MissingFolder::Create {
            create_folder(path)?;
        }
        let file = match open(&lock_path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound && lock_path.is_symlink() => {
                let doing = format!("failed to open {}: it is a dangling symbolic link", lock_path.display());
                return Err(Error::caused(Code::IO, doing, error));
            }
            Err(error) if missing == MissingFolder::Leave && means_missing_folder(&error) => return Ok(None),
            // Another process removed the folder after this one had created it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && machine.now() < deadline => continue,
            Err(error) => {
                return Err(Error::caused(Code::IO, format_args!("failed to open {}", lock_path.display()), error));
            }
        };
        let step = Step::begin();
        let locked = lock_file(file, &lock_path, machine, on_sigterm, Limit { deadline, length: limit });
        step.end(format_args!("lock {}", lock_path.display()), &locked);
        let lock = locked?;
        if is_at_path(&lock, &lock_path) {
            let folder = File::open(path)
                .map_err(|error| Error::caused(Code::IO, format_args!("failed to open {}", path.display()), error))?;
            return Ok(Some(Guard { lock, folder }));
        }
        // The lock file was removed or replaced during the wait.
        if machine.now() >= deadline {
            return Err(not_locked(&lock_path, limit, "another process keeps removing it"));
        }
    }
}

/// Creates a folder and its parents. An existing folder is not an error.
fn create_folder(path: &Path) -> Result<()> {
    let created = DirBuilder::new().recursive(true).mode(0o755).create(path);
    created.map_err(|error| Error::caused(Code::IO, format_args!("failed to create {}", path.display()), error))
}

/// Whether this file is still the file at `path`.
pub fn is_at_path(file: &File, path: &Path) -> bool {
    let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(opened), Ok(at_path)) => identity(opened) == identity(at_path),
        _ => false,
    }
}

/// Whether this error of opening a file in a folder means that the folder does not exist: it is
/// missing, has an impossible name, or is a file.
fn means_missing_folder(error: &io::Error) -> bool {
    use nix::libc::{ENAMETOOLONG, ENOENT, ENOTDIR};
    match error.raw_os_error() {
        Some(errno) => matches!(errno, ENOENT | ENAMETOOLONG | ENOTDIR),
        // std's error for a path with a NUL byte.
        None => error.kind() == io::ErrorKind::InvalidInput,
    }
}

/// Opens the lock file for reading, as Go does, or creates it. Follows a symbolic link, but fails
/// with `NotFound` instead of creating the file that the link names.
fn open(path: &Path) -> io::Result<File> {
    // O_CREAT is a custom flag, because std creates only files that are opened for writing.
    // O_NONBLOCK, because opening a FIFO would block.
    let flags = O_CREAT | O_NOFOLLOW | O_NONBLOCK;
    match OpenOptions::new().read(true).mode(0o750).custom_flags(flags).open(path) {
        Err(error) if error.raw_os_error() == Some(ELOOP) => {
            let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
            // With O_CREAT, the kernel refuses a folder.
            if file.metadata()?.is_dir() { Err(io::ErrorKind::IsADirectory.into()) } else { Ok(file) }
        }
        opened => opened,
    }
}

/// Returns the error, code 11, of a lock that was not taken within `limit`.
fn not_locked(path: &Path, limit: Duration, why: &str) -> Error {
    Error::new(Code::TRY_AGAIN, format!("failed to lock {} within {} s: {why}", path.display(), limit.as_secs_f32()))
}

/// Waits for the lock of an open file and returns the file. `path` is for the error.
///
/// # Errors
/// - Code 11 if another process holds the lock until the limit or until a signal arrives.
/// - Code 5 if the file cannot be locked.
fn lock_file(file: File, path: &Path, machine: &dyn Machine, on_sigterm: OnSigterm, limit: Limit) -> Result<File> {
    flock::lock(file, machine, on_sigterm, limit).map_err(|Refused { cause, holder }| {
        let holder = match holder {
            Some(holder) => format!("it is held by {holder}"),
            None => "its holder cannot be determined".to_owned(),
        };
        match cause {
            cause if cause.is_deadline() => not_locked(path, limit.length, &holder),
            cause if cause.is_terminated() => {
                let why = format!("interrupted by a signal; {holder}");
                Error::new(Code::TRY_AGAIN, format!("failed to lock {}: {why}", path.display()))
            }
            cause => Error::caused(Code::IO, format_args!("failed to lock {}", path.display()), cause),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::TestMachine;
    use nix::sys::signal::{SigSet, Signal};
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    #[test]
    fn a_held_lock_ends_in_code_11_that_names_the_holder() {
        let folder = tempfile::tempdir().unwrap();
        let machine = TestMachine::default();
        let _held =
            acquire(folder.path(), MissingFolder::Create, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap().unwrap();
        let refused = || {
            let limit = Duration::from_millis(30);
            let error = acquire(folder.path(), MissingFolder::Create, OnSigterm::Kill, limit, &machine).unwrap_err();
            assert_eq!(error.code(), Code::TRY_AGAIN);
            error.to_string()
        };
        cni_testkit::locks::assert_names_holder(&format!("it is held by process {} (", std::process::id()), refused);
    }

    #[test]
    fn a_link_is_followed_but_creates_no_file_elsewhere() {
        let base = tempfile::tempdir().unwrap();
        let (folder, target) = (base.path().join("net1"), base.path().join("of another program"));
        std::fs::create_dir(&folder).unwrap();
        std::os::unix::fs::symlink(&target, folder.join("lock")).unwrap();
        let machine = TestMachine::default();
        let acquire = |missing| acquire(&folder, missing, OnSigterm::Kill, DEFAULT_LIMIT, &machine);
        for missing in [MissingFolder::Create, MissingFolder::Leave] {
            let error = acquire(missing).unwrap_err();
            assert!(error.code() == Code::IO && error.to_string().contains("is a dangling symbolic link"), "{error}");
            assert!(!target.exists());
        }
        std::fs::write(&target, "content").unwrap();
        assert!(acquire(MissingFolder::Create).unwrap().is_some());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "content");
    }

    #[test]
    fn a_lock_released_in_time_is_taken_and_a_late_waiter_drops_it() {
        let folder = tempfile::tempdir().unwrap();
        let machine = TestMachine::default();
        let held = acquire(folder.path(), MissingFolder::Create, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap();
        acquire(folder.path(), MissingFolder::Leave, OnSigterm::Kill, Duration::from_millis(5), &machine).unwrap_err();
        let path = folder.path().to_owned();
        let (ready, wait) = mpsc::channel();
        let other = thread::spawn(move || {
            ready.send(()).unwrap();
            acquire(&path, MissingFolder::Leave, OnSigterm::Kill, DEFAULT_LIMIT, &TestMachine::default())
                .unwrap()
                .is_some()
        });
        wait.recv().unwrap();
        drop(held);
        assert!(other.join().unwrap());
        assert!(
            acquire(folder.path(), MissingFolder::Leave, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap().is_some()
        );
    }

    #[test]
    fn sigterm_ends_the_wait() {
        let folder = tempfile::tempdir().unwrap();
        let machine = TestMachine::default();
        let _held = acquire(folder.path(), MissingFolder::Create, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap();
        machine.terminated.store(true, Ordering::SeqCst);
        let error =
            acquire(folder.path(), MissingFolder::Create, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap_err();
        assert_eq!(error.code(), Code::TRY_AGAIN);
        assert!(error.msg().contains("interrupted by a signal"), "{error}");
        let limit = Duration::from_millis(20);
        let error = acquire(folder.path(), MissingFolder::Create, OnSigterm::Finish, limit, &machine).unwrap_err();
        assert!(error.msg().contains("within 0.02 s"), "a rollback waits too: {error}");
    }

    #[test]
    fn a_blocked_signal_ends_the_wait_and_stays_pending() {
        let folder = tempfile::tempdir().unwrap();
        let machine = TestMachine::default();
        let _held = acquire(folder.path(), MissingFolder::Create, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
            let blocked = SigSet::from(signal);
            blocked.thread_block().unwrap();
            nix::sys::signal::raise(signal).unwrap();
            let limit = Duration::from_secs(5);
            let error = acquire(folder.path(), MissingFolder::Create, OnSigterm::Kill, limit, &machine).unwrap_err();
            assert!(error.msg().contains("interrupted by a signal"), "{signal}: {error}");
            assert_eq!(blocked.wait().unwrap(), signal, "the machine can still read it");
            blocked.thread_unblock().unwrap();
        }
    }

    #[test]
    fn a_missing_folder_is_created_only_on_request() {
        let base = tempfile::tempdir().unwrap();
        let (path, machine) = (base.path().join("a/b"), TestMachine::default());
        assert!(acquire(&path, MissingFolder::Leave, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap().is_none());
        assert!(!base.path().join("a").exists());
        assert!(acquire(&path, MissingFolder::Create, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap().is_some());
        let mode = std::fs::metadata(path.join("lock")).unwrap().mode();
        assert_eq!(mode & 0o777 & !0o750, 0, "Go creates it with 0750");
        let long = base.path().join("x".repeat(300));
        assert!(acquire(&long, MissingFolder::Leave, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap().is_none());
    }

    #[test]
    fn a_folder_below_a_plain_file_cannot_be_created() {
        let base = tempfile::tempdir().unwrap();
        let (file, machine) = (base.path().join("file"), TestMachine::default());
        std::fs::write(&file, "").unwrap();
        for path in [file.join("net"), file] {
            assert!(acquire(&path, MissingFolder::Leave, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap().is_none());
            let error = acquire(&path, MissingFolder::Create, OnSigterm::Kill, DEFAULT_LIMIT, &machine).unwrap_err();
            assert_eq!(error.code(), Code::IO);
        }
    }

    #[test]
    fn a_folder_replaced_while_waiting_is_locked_again() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("net");
        let held =
            acquire(&path, MissingFolder::Create, OnSigterm::Kill, DEFAULT_LIMIT, &TestMachine::default()).unwrap();
        let waiter = {
            let path = path.clone();
            thread::spawn(move || {
                acquire(&path, MissingFolder::Create, OnSigterm::Kill, DEFAULT_LIMIT, &TestMachine::default())
                    .unwrap()
                    .unwrap()
            })
        };
        // No event reports that it is in the kernel's queue.
        let inode = format!(":{} ", held.as_ref().unwrap().lock.metadata().unwrap().ino());
        let deadline = Instant::now() + Duration::from_secs(20);
        while !flock::read_locks().unwrap().lines().any(|line| line.contains("->") && line.contains(&inode)) {
            assert!(Instant::now() < deadline, "it never waited");
            thread::yield_now();
        }
        std::fs::rename(&path, base.path().join("away")).unwrap();
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("lock"), "").unwrap();
        drop(held);
        let guard = waiter.join().unwrap();
        let now = std::fs::metadata(path.join("lock")).unwrap();
        assert_eq!(guard.lock.metadata().unwrap().ino(), now.ino(), "the lock of the folder that is there now");
    }
}
