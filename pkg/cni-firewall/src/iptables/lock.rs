//! Locks iptables of a network namespace: only one process of these plugins at a time changes it.
//!
//! Reading and then writing iptables is not one transaction, so a process holds this lock during
//! both: an `flock` of a file that only root can open, named after the namespace
//! (`/run/cni/iptables-<device>-<inode>.lock`). The namespace's own file
//! (`/proc/thread-self/ns/net`) is locked only if the file in `/run/cni` cannot be used, because
//! every process in the namespace, of any user, can open the namespace's file and hold its lock
//! forever. [`NetnsLock::remark`] then reports why.
//!
//! The lock excludes only processes of these plugins that see the same folder. Go's plugins do not
//! take it, and iptables-legacy has a lock of its own, which each process holds while it runs.
//!
//! The empty lock file is not removed, because all waiting processes would start over and lose
//! their place in the queue. One file remains for each namespace in which iptables was changed,
//! usually only one, until the next boot empties /run.
//!
//! A thread must not take the lock twice: the second call would wait for the first until its limit.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use cni::machine::{Machine, OnSigterm};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::geteuid;

use cni_linux::error::{Cause, Error, Result};
use cni_linux::flock::{self, Refused};

/// The file of the calling thread's network namespace.
const NETNS: &str = "/proc/thread-self/ns/net";
/// How many times the folder is created at most, if another process keeps removing it.
const FOLDER_ATTEMPTS: usize = 8;
/// The mode bits with which other users can replace a folder's files.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// The mode bits with which other users can open or change a file.
const USABLE_BY_OTHERS: u32 = 0o077;

/// The lock, which is released when this is dropped.
#[derive(Debug)]
pub struct NetnsLock {
    _file: File,
    remark: Option<String>,
}

impl NetnsLock {
    /// Locks iptables of the calling thread's network namespace, and waits `limit` at most. The
    /// lock is on a file in `folder`; both are created if necessary. If that file cannot be used,
    /// the lock is on the namespace's own file, and [`remark`](NetnsLock::remark) returns the
    /// reason.
    ///
    /// # Errors
    /// [`Error::is_deadline`] after `limit`, [`Error::is_terminated`] if `on_sigterm` lets SIGTERM
    /// end the wait. Both name the process that holds the lock, if it is known. If other processes
    /// keep removing the lock file, the deadline error reports that instead. Any other error means
    /// that the namespace's file cannot be opened or that a file cannot be locked.
    pub fn acquire(machine: &dyn Machine, on_sigterm: OnSigterm, folder: &Path, limit: Duration) -> Result<NetnsLock> {
        let deadline = machine.now() + limit;
        let lock = |file: File, display_name: &str| {
            flock::lock(file, machine, on_sigterm, flock::Limit { deadline, length: limit })
                .map_err(|refused| refused_error(display_name, refused))
        };
        let netns = File::open(NETNS).map_err(preparation_error)?;
        let (device, inode) = file_id(&netns.metadata().map_err(preparation_error)?);
        let name = format!("iptables-{device}-{inode}.lock");
        let path = folder.join(&name);
        let display_name = path.display().to_string();
        loop {
            let file = match open(folder, &name) {
                Ok(file) => file,
                Err(cause) => {
                    let remark = namespace_remark(&path, &cause);
                    let file = lock(netns, &format!("the network namespace ({remark})"))?;
                    return Ok(NetnsLock { _file: file, remark: Some(remark) });
                }
            };
            let locked_id = file_id(&file.metadata().map_err(preparation_error)?);
            let file = lock(file, &display_name)?;
            // If the lock file was removed and created again during the wait, the lock is on the
            // removed file, and does not exclude processes that open the path now.
            if path.symlink_metadata().is_ok_and(|found| file_id(&found) == locked_id) {
                return Ok(NetnsLock { _file: file, remark: None });
            }
            if machine.now() >= deadline {
                let what = format!(
                    "failed to lock {display_name} for a change of iptables: other processes keep removing the file"
                );
                return Err(Error::new(what, Cause::Deadline(limit)));
            }
        }
    }

    /// Returns a remark for the operator if the lock is on the namespace's own file; else `None`.
    pub fn remark(&self) -> Option<&str> {
        self.remark.as_deref()
    }
}

/// Returns the remark for a lock on the namespace's own file. `path` is the lock file, which cannot
/// be used because of `cause`.
fn namespace_remark(path: &Path, cause: &Cause) -> String {
    format!(
        "iptables is locked by the file of the network namespace, because {} cannot be used: {cause}. Any process in \
         the namespace can hold that lock",
        path.display()
    )
}

/// Returns the device and the inode of a file.
fn file_id(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Returns the error of a step before the wait for the lock.
fn preparation_error(error: io::Error) -> Error {
    Error::new("failed to prepare the lock of iptables for the network namespace /proc/thread-self/ns/net", error)
}

/// Returns the error of a wait for the lock. After a deadline or SIGTERM it names the process that
/// holds the lock, if that is known.
fn refused_error(display_name: &str, Refused { cause, holder }: Refused) -> Error {
    let mut what = format!("failed to lock {display_name} for a change of iptables");
    if cause.is_deadline() || cause.is_terminated() {
        what += ", held by ";
        what += holder.as_deref().unwrap_or("a process that is not visible from here");
    }
    Error::new(what, cause)
}

/// Opens the file `name` in `folder`, and creates both if necessary. Fails if one of them is a
/// symbolic link, or if another user could open or replace the file.
fn open(folder: &Path, name: &str) -> Result<File, Cause> {
    let mut attempt = 1;
    let file = loop {
        DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
        match open_in_private_folder(folder, name) {
            // Another process removed the folder after `create`: try again.
            Err(error) if error.kind() == io::ErrorKind::NotFound && attempt < FOLDER_ATTEMPTS => attempt += 1,
            result => break result?,
        }
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(Cause::text("it is not a regular file"));
    }
    require_private(&metadata, "it", USABLE_BY_OTHERS)?;
    Ok(file)
}

/// Opens the file `name` in `folder`, and creates the file if necessary. Fails if the file or the
/// folder is a symbolic link, or if another user could replace files of the folder.
fn open_in_private_folder(folder: &Path, name: &str) -> io::Result<File> {
    let folder_flags = (OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits();
    let opened_folder = OpenOptions::new().read(true).custom_flags(folder_flags).open(folder)?;
    require_private(&opened_folder.metadata()?, "its folder", WRITABLE_BY_OTHERS)?;
    // Without O_NONBLOCK, opening a FIFO of this name would wait for a writer.
    let flags = OFlag::O_RDONLY | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    Ok(openat(&opened_folder, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
}

/// Fails unless the file or folder belongs to root or to this process's user, and its mode has none
/// of the bits in `forbidden`. `subject` names the file or folder in the error.
fn require_private(metadata: &Metadata, subject: &str, forbidden: u32) -> io::Result<()> {
    let owner = metadata.uid();
    if owner != 0 && owner != geteuid().as_raw() {
        return Err(io::Error::other(format!("{subject} must belong to root, but belongs to user {owner}")));
    }
    if metadata.mode() & forbidden != 0 {
        let mode = metadata.mode() & 0o7777;
        let message = format!("{subject} has mode {mode:o}, of which the bits {forbidden:03o} must not be set");
        return Err(io::Error::other(message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, machine, new_netns, skip};
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;
    use tempfile::TempDir;

    const SHORT: Duration = Duration::from_millis(30);
    const LONG: Duration = Duration::from_secs(30);

    /// Runs the body in a new namespace, with the path of a lock folder that does not exist yet.
    #[track_caller]
    fn with_folder(body: impl FnOnce(&Path) + Send) {
        in_new_netns(|| body(&tempfile::tempdir().unwrap().path().join("cni")));
    }

    fn acquire(folder: &Path, limit: Duration) -> Result<NetnsLock> {
        NetnsLock::acquire(&machine(), OnSigterm::Kill, folder, limit)
    }

    /// Returns the path of this namespace's lock file.
    fn path(folder: &Path) -> PathBuf {
        let (device, inode) = cni_linux::Netns::current().unwrap().id();
        folder.join(format!("iptables-{device}-{inode}.lock"))
    }

    fn mode(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().mode() & 0o7777
    }

    #[test]
    fn a_held_lock_times_out_naming_its_holder() {
        with_folder(|folder| {
            let held = acquire(folder, LONG).unwrap();
            let refused = || {
                let error = acquire(folder, SHORT).unwrap_err();
                assert!(error.is_deadline(), "{error}");
                let text = error.to_string();
                assert!(text.starts_with(&format!("failed to lock {} for", path(folder).display())), "{text}");
                text
            };
            cni_testkit::locks::assert_names_holder(&format!(", held by process {} (", std::process::id()), refused);
            drop(held);
            // A longer wait than SHORT: a child that another test has just forked has the locked
            // file too, until its exec.
            assert_eq!(acquire(folder, LONG).unwrap().remark(), None);
        });
    }

    #[test]
    fn a_lock_on_the_namespace_itself_blocks_no_acquire() {
        with_folder(|folder| {
            let theirs = File::open(NETNS).unwrap();
            theirs.lock().unwrap();
            acquire(folder, SHORT).unwrap();
        });
    }

    #[test]
    fn the_file_is_root_s_alone_and_empty() {
        with_folder(|folder| {
            let _held = acquire(folder, LONG).unwrap();
            let file = path(folder);
            assert_eq!((mode(&file), file.metadata().unwrap().len()), (0o600, 0));
            assert_eq!(mode(folder) & 0o022, 0);
            assert_eq!(folder.read_dir().unwrap().count(), 1);
        });
    }

    #[test]
    fn another_namespace_has_another_lock() {
        with_folder(|folder| {
            let _held = acquire(folder, LONG).unwrap();
            let other = new_netns().run(|| acquire(folder, SHORT)).unwrap().unwrap();
            assert_eq!(other.remark(), None);
        });
    }

    /// Waits until a process waits for the lock; polls, because no event reports that.
    #[track_caller]
    fn until_a_process_waits(folder: &Path) {
        let inode = format!(":{} ", path(folder).metadata().unwrap().ino());
        let deadline = Instant::now() + LONG;
        while !flock::read_locks().unwrap().lines().any(|line| line.contains("->") && line.contains(&inode)) {
            assert!(Instant::now() < deadline, "no process ever waited");
            thread::yield_now();
        }
    }

    /// Asserts that the lock is on the namespace's own file, with `why` in the remark.
    #[track_caller]
    fn locks_the_namespace(folder: &Path, why: &str) {
        let held = acquire(folder, LONG).unwrap();
        let remark = held.remark().unwrap_or_else(|| panic!("no remark: {why}")).to_owned();
        assert!(remark.contains(&path(folder).display().to_string()) && remark.contains(why), "{remark}");
        let error = acquire(folder, SHORT).unwrap_err();
        assert!(error.is_deadline() && error.to_string().contains("the network namespace"), "{error}");
        assert!(error.to_string().contains(&remark), "{error}");
    }

    #[test]
    fn a_file_that_others_could_open_or_replace_is_not_used() {
        with_folder(|folder| {
            let file = path(folder);
            let spoilt = |spoil: &dyn Fn(), why: &str| {
                let _ = std::fs::remove_dir_all(folder);
                std::fs::create_dir(folder).unwrap();
                spoil();
                locks_the_namespace(folder, why);
            };
            let target = tempfile::NamedTempFile::new().unwrap();
            spoilt(&|| symlink(target.path(), &file).unwrap(), "os error 40");
            spoilt(&|| symlink(folder.join("nowhere"), &file).unwrap(), "os error 40");
            assert!(!folder.join("nowhere").exists());
            spoilt(&|| std::fs::create_dir(&file).unwrap(), "os error 21");
            spoilt(&|| nix::unistd::mkfifo(&file, Mode::S_IRUSR).unwrap(), "it is not a regular file");
            let set = |path: &Path, mode| {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
            };
            for others in [0o604, 0o640] {
                let made = || {
                    std::fs::write(&file, "").unwrap();
                    set(&file, others);
                };
                spoilt(&made, &format!("it has mode {others:o}, of which the bits 077 must not be set"));
            }
            for others in [0o1777, 0o775] {
                spoilt(
                    &|| set(folder, others),
                    &format!("its folder has mode {others:o}, of which the bits 022 must not be set"),
                );
            }
            set(folder, 0o700);
            assert_eq!(acquire(folder, SHORT).unwrap().remark(), None);
        });
    }

    #[test]
    fn a_file_or_folder_of_another_user_is_not_used() {
        with_folder(|folder| {
            drop(acquire(folder, LONG).unwrap());
            if let Err(error) = chown(path(folder), Some(65534), None) {
                return skip(&format!("cannot give files away: {error}"));
            }
            locks_the_namespace(folder, "it must belong to root, but belongs to user 65534");
            chown(path(folder), Some(0), None).unwrap();
            chown(folder, Some(65534), None).unwrap();
            locks_the_namespace(folder, "its folder must belong to root, but belongs to user 65534");
        });
    }

    #[test]
    fn without_a_lock_folder_the_namespace_is_locked_with_a_note() {
        in_new_netns(|| locks_the_namespace(Path::new("/proc/cni"), "os error 2"));
        let base = TempDir::new().unwrap();
        let link = base.path().join("link");
        symlink(base.path(), &link).unwrap();
        in_new_netns(|| locks_the_namespace(&link, "os error 20"));
    }

    #[test]
    fn a_folder_removed_while_waiting_is_locked_again() {
        with_folder(|folder| {
            let held = acquire(folder, LONG).unwrap();
            thread::scope(|scope| {
                let waiter = scope.spawn(|| acquire(folder, LONG).unwrap());
                until_a_process_waits(folder);
                std::fs::remove_dir_all(folder).unwrap();
                let other = acquire(folder, SHORT).unwrap();
                drop(held);
                drop(other);
                let _waited = waiter.join().unwrap();
                assert!(acquire(folder, SHORT).unwrap_err().is_deadline(), "the lock of the file that is there now");
            });
        });
    }

    #[test]
    fn of_many_one_is_inside_at_any_time_and_all_get_in() {
        with_folder(|folder| {
            let (inside, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
            thread::scope(|scope| {
                for _ in 0..20 {
                    scope.spawn(|| {
                        let lock = acquire(folder, LONG).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        assert_eq!(lock.remark(), None);
                        thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        done.fetch_add(1, Ordering::SeqCst);
                    });
                }
            });
            assert_eq!(done.into_inner(), 20);
        });
    }

    #[test]
    fn sigterm_ends_the_wait_but_not_that_of_a_rollback() {
        with_folder(|folder| {
            let _held = acquire(folder, LONG).unwrap();
            thread::scope(|scope| {
                let (thread_sender, thread_receiver) = mpsc::channel();
                let wait = scope.spawn(move || {
                    let machine = machine();
                    thread_sender.send(nix::sys::pthread::pthread_self()).unwrap();
                    let first = NetnsLock::acquire(&machine, OnSigterm::Kill, folder, LONG).unwrap_err();
                    (first, NetnsLock::acquire(&machine, OnSigterm::Finish, folder, SHORT).unwrap_err())
                });
                let waiter = thread_receiver.recv().unwrap();
                until_a_process_waits(folder);
                nix::sys::pthread::pthread_kill(waiter, nix::sys::signal::Signal::SIGTERM).unwrap();
                let signalled = Instant::now();
                let (first, second) = wait.join().unwrap();
                assert!(signalled.elapsed() < LONG / 2, "at once, not at the deadline");
                assert!(first.is_terminated(), "{first}");
                assert!(second.is_deadline(), "{second}");
            });
        });
    }
}
