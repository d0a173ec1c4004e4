//! The store's lock: Go's `flock` on the file `lock`, with a deadline, and open to SIGTERM.
//!
//! It knows nothing of what it protects. A free lock is taken at once. For a held one a second thread calls the
//! blocking `flock` and so keeps its turn in the kernel's queue, while this thread waits in `ppoll` for that thread,
//! the deadline, or SIGTERM. The signal is blocked meanwhile and seen through a descriptor of our own, which is only
//! polled and never read: the signal stays pending for whatever way the machine has of noticing it. SIGINT and SIGHUP
//! count as SIGTERM where the machine has blocked them; blocked here, they would come to those too who ignore them.
//!
//! What a newcomer gets wrong: owning the lock of a file proves nothing if somebody has removed the folder
//! meanwhile, so the path is compared with the descriptor afterwards. And the thread that lost its wait cannot be
//! stopped; it gives the lock back as soon as it gets it, since nobody takes the file from it.

use std::fs::{DirBuilder, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use cni::machine::Machine;
use cni::steps::Step;
use cni::{Code, Error, Result};
use nix::errno::Errno;
use nix::libc::{O_CREAT, O_NONBLOCK};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;

/// How long a verb waits for the lock unless the configuration says otherwise.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(30);

/// What ends a wait.
const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// What to do if there is no folder yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// ADD makes it.
    Create,
    /// Every other verb has nothing to do then.
    Leave,
}

/// Whether SIGTERM ends a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sigterm {
    /// It does.
    Ends,
    /// It does not: a rollback must not be cut short by what caused it.
    Waits,
}

/// The locked file and the folder it lies in. Dropping unlocks.
#[derive(Debug)]
pub(crate) struct Guard {
    /// The lock, as long as this is open.
    pub(crate) lock: File,
    /// The folder, opened after the lock was taken.
    pub(crate) folder: File,
}

/// Locks the folder `path`. `None` if it does not exist and may not be made.
///
/// # Errors
/// Code 11 if the lock is not to be had in time or SIGTERM arrives, naming who holds it; code 5 if the folder or the
/// file cannot be opened.
pub(crate) fn acquire(
    path: &Path,
    missing: Missing,
    sigterm: Sigterm,
    limit: Duration,
    machine: &dyn Machine,
) -> Result<Option<Guard>> {
    let deadline = machine.now() + limit;
    let lock_path = path.join("lock");
    loop {
        if missing == Missing::Create {
            let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
            made.map_err(|error| Error::caused(Code::IO, format_args!("failed to create {}", path.display()), error))?;
        }
        let file = match open(&lock_path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound && lock_path.is_symlink() => {
                let doing = format_args!("failed to open {}: it is a link that leads nowhere", lock_path.display());
                return Err(Error::caused(Code::IO, doing, error));
            }
            Err(error) if missing == Missing::Leave && cannot_exist(&error) => return Ok(None),
            // Removed between the two calls: make it again.
            Err(error) if error.kind() == io::ErrorKind::NotFound && machine.now() < deadline => continue,
            Err(error) => {
                return Err(Error::caused(Code::IO, format_args!("failed to open {}", lock_path.display()), error));
            }
        };
        let step = Step::begin();
        let file = wait(file, &lock_path, sigterm, limit, deadline, machine);
        step.end(format_args!("lock {}", lock_path.display()), &file);
        let file = file?;
        let same = |metadata: Metadata| {
            file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (metadata.dev(), metadata.ino()))
        };
        if std::fs::metadata(&lock_path).is_ok_and(same) {
            let folder = File::open(path)
                .map_err(|error| Error::caused(Code::IO, format_args!("failed to open {}", path.display()), error))?;
            return Ok(Some(Guard { lock: file, folder }));
        }
        if machine.now() >= deadline {
            return Err(refusal(&lock_path, limit, "it is removed again and again"));
        }
    }
}

/// No folder, a name that no folder can have, or a plain file where a folder would be.
fn cannot_exist(error: &io::Error) -> bool {
    use nix::libc::{ENAMETOOLONG, ENOENT, ENOTDIR};
    match error.raw_os_error() {
        Some(errno) => matches!(errno, ENOENT | ENAMETOOLONG | ENOTDIR),
        // A NUL in it: the kernel was not even asked.
        None => error.kind() == io::ErrorKind::InvalidInput,
    }
}

/// As Go opens it. Not blocking, in case somebody put a FIFO there.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).mode(0o750).custom_flags(O_CREAT | O_NONBLOCK).open(path)
}

fn refusal(path: &Path, limit: Duration, why: &str) -> Error {
    Error::new(Code::TRY_AGAIN, format!("failed to lock {} within {} s: {why}", path.display(), limit.as_secs_f32()))
}

fn wait(
    file: File,
    path: &Path,
    sigterm: Sigterm,
    limit: Duration,
    deadline: Instant,
    machine: &dyn Machine,
) -> Result<File> {
    let broken = |error: io::Error| Error::caused(Code::IO, format_args!("failed to lock {}", path.display()), error);
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => break,
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(TryLockError::Error(error)) => return Err(broken(error)),
        }
    }
    let identity = file.metadata().map_err(broken)?;
    let signals = Blocked::new().map_err(broken)?;
    let (woken, waker) = io::pipe().map_err(broken)?;
    let (sender, receiver) = mpsc::channel();
    let body = move || {
        let result = loop {
            match file.lock() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map(|()| file),
            }
        };
        // If nobody waits any more, the file comes back in the error and is closed, which unlocks it.
        drop(sender.send(result));
        drop(waker);
    };
    thread::Builder::new().name("flock".into()).spawn(body).map_err(broken)?;
    let mut pending = false;
    loop {
        if sigterm == Sigterm::Ends && (pending || machine.terminated()) {
            let why = format!("interrupted by a signal; {}", holder(&identity));
            return Err(Error::new(Code::TRY_AGAIN, format!("failed to lock {}: {why}", path.display())));
        }
        let left = deadline.saturating_duration_since(machine.now());
        if left.is_zero() {
            return Err(refusal(path, limit, &holder(&identity)));
        }
        let mut events =
            [PollFd::new(woken.as_fd(), PollFlags::POLLIN), PollFd::new(signals.pending.as_fd(), PollFlags::POLLIN)];
        let watched = if sigterm == Sigterm::Ends { &mut events[..] } else { &mut events[..1] };
        match ppoll(watched, Some(TimeSpec::from_duration(left)), None) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(broken(error.into())),
        }
        let happened = |event: &PollFd<'_>| event.revents().is_some_and(|events| !events.is_empty());
        if happened(&events[0]) {
            // The other thread closes its end after it has sent.
            return match receiver.try_recv() {
                Ok(result) => result.map_err(broken),
                Err(_) => Err(broken(io::Error::other("the waiting thread died"))),
            };
        }
        pending = happened(&events[1]);
    }
}

/// SIGTERM is blocked in this thread, and in those it starts, until this is dropped.
struct Blocked {
    outside: SigSet,
    /// Readable while SIGTERM, SIGINT or SIGHUP is pending.
    pending: SignalFd,
}

impl Blocked {
    fn new() -> io::Result<Blocked> {
        let (term, ending) = (SigSet::from(Signal::SIGTERM), ENDING.into_iter().collect());
        let pending = SignalFd::with_flags(&ending, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        Ok(Blocked { outside: term.thread_swap_mask(SigmaskHow::SIG_BLOCK)?, pending })
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // Cannot fail: the mask came from the kernel.
        let _ = self.outside.thread_set_mask();
    }
}

/// Who holds the lock of this file, in words.
fn holder(identity: &Metadata) -> String {
    let device = (nix::sys::stat::major(identity.dev()), nix::sys::stat::minor(identity.dev()));
    // Locks come and go between two reads of the file, and lines are lost by that: large reads, and a second look.
    let look = || holder_in(&proc_locks().unwrap_or_default(), device, identity.ino());
    match look().or_else(look) {
        Some(pid) => match std::fs::read_to_string(PathBuf::from(format!("/proc/{pid}/comm"))) {
            Ok(name) => format!("it is held by process {pid} ({})", name.trim()),
            Err(_) => format!("it is held by process {pid}"),
        },
        None => "who holds it is not visible from here".to_owned(),
    }
}

fn proc_locks() -> io::Result<String> {
    let mut file = File::open("/proc/locks")?;
    let (mut text, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            length => text.extend_from_slice(&buffer[..length]),
        }
    }
}

/// Finds the holder in the text of `/proc/locks`. Lines with an arrow are waiters. Some file systems show another
/// device there than in `stat`, so an equal inode alone counts if nothing matches better.
pub(crate) fn holder_in(locks: &str, (major, minor): (u64, u64), inode: u64) -> Option<u32> {
    let mut by_inode = None;
    for line in locks.lines() {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file, ..] = fields[..] else { continue };
        let Some((device, number)) = file.rsplit_once(':') else { continue };
        let Ok(pid) = pid.parse::<u32>() else { continue };
        if number != inode.to_string() || pid == 0 {
            continue;
        }
        let same = device
            .split_once(':')
            .is_some_and(|(a, b)| u64::from_str_radix(a, 16) == Ok(major) && u64::from_str_radix(b, 16) == Ok(minor));
        if same {
            return Some(pid);
        }
        by_inode = by_inode.or(Some(pid));
    }
    by_inode
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::TestMachine;
    use std::sync::atomic::Ordering;

    #[test]
    fn the_holder_is_found_among_waiters_and_other_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 10 fd:00:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 11 fd:01:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 12 fd:0a:77 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 13 fd:0a:77 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 14 fd:0a:78 0 EOF\n";
        assert_eq!(holder_in(locks, (0xfd, 10), 77), Some(12));
        assert_eq!(holder_in(locks, (0, 33), 77), Some(11), "only the inode agrees");
        assert_eq!(holder_in(locks, (0xfd, 10), 79), None);
        assert_eq!(holder_in("nonsense\n1: FLOCK\n", (0, 0), 0), None);
    }

    #[test]
    fn a_held_lock_ends_in_code_11_that_names_the_holder() {
        let folder = tempfile::tempdir().unwrap();
        let machine = TestMachine::default();
        let _held = acquire(folder.path(), Missing::Create, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap().unwrap();
        let refused = || {
            let limit = Duration::from_millis(30);
            let error = acquire(folder.path(), Missing::Create, Sigterm::Ends, limit, &machine).unwrap_err();
            assert_eq!(error.code(), Code::TRY_AGAIN);
            error.to_string()
        };
        cni_testkit::locks::assert_named(&format!("it is held by process {} (", std::process::id()), refused);
    }

    #[test]
    fn a_lock_given_back_in_time_is_taken_and_a_lost_waiter_does_not_keep_it() {
        let folder = tempfile::tempdir().unwrap();
        let machine = TestMachine::default();
        let held = acquire(folder.path(), Missing::Create, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap();
        acquire(folder.path(), Missing::Leave, Sigterm::Ends, Duration::from_millis(5), &machine).unwrap_err();
        let path = folder.path().to_owned();
        let (ready, wait) = mpsc::channel();
        let other = thread::spawn(move || {
            ready.send(()).unwrap();
            acquire(&path, Missing::Leave, Sigterm::Ends, DEFAULT_LIMIT, &TestMachine::default()).unwrap().is_some()
        });
        wait.recv().unwrap();
        drop(held);
        assert!(other.join().unwrap());
        assert!(acquire(folder.path(), Missing::Leave, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap().is_some());
    }

    #[test]
    fn sigterm_ends_the_wait() {
        let folder = tempfile::tempdir().unwrap();
        let machine = TestMachine::default();
        let _held = acquire(folder.path(), Missing::Create, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap();
        machine.terminated.store(true, Ordering::SeqCst);
        let error = acquire(folder.path(), Missing::Create, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap_err();
        assert_eq!(error.code(), Code::TRY_AGAIN);
        assert!(error.msg().contains("interrupted by a signal"), "{error}");
        let limit = Duration::from_millis(20);
        let error = acquire(folder.path(), Missing::Create, Sigterm::Waits, limit, &machine).unwrap_err();
        assert!(error.msg().contains("within 0.02 s"), "a rollback waits all the same: {error}");
    }

    #[test]
    fn a_blocked_signal_ends_the_wait_and_stays_pending() {
        let folder = tempfile::tempdir().unwrap();
        let machine = TestMachine::default();
        let _held = acquire(folder.path(), Missing::Create, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap();
        for signal in ENDING {
            let blocked = SigSet::from(signal);
            blocked.thread_block().unwrap();
            nix::sys::signal::raise(signal).unwrap();
            let limit = Duration::from_secs(5);
            let error = acquire(folder.path(), Missing::Create, Sigterm::Ends, limit, &machine).unwrap_err();
            assert!(error.msg().contains("interrupted by a signal"), "{signal}: {error}");
            assert_eq!(blocked.wait().unwrap(), signal, "the machine can still read it");
            blocked.thread_unblock().unwrap();
        }
    }

    #[test]
    fn a_missing_folder_is_made_only_when_asked() {
        let base = tempfile::tempdir().unwrap();
        let (path, machine) = (base.path().join("a/b"), TestMachine::default());
        assert!(acquire(&path, Missing::Leave, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap().is_none());
        assert!(!base.path().join("a").exists());
        assert!(acquire(&path, Missing::Create, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap().is_some());
        let mode = std::fs::metadata(path.join("lock")).unwrap().mode();
        assert_eq!(mode & 0o777 & !0o750, 0, "Go creates it with 0750");
        let long = base.path().join("x".repeat(300));
        assert!(acquire(&long, Missing::Leave, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap().is_none());
    }

    #[test]
    fn below_a_plain_file_there_is_no_folder_and_none_can_be_made() {
        let base = tempfile::tempdir().unwrap();
        let (file, machine) = (base.path().join("file"), TestMachine::default());
        std::fs::write(&file, "").unwrap();
        for path in [file.join("net"), file] {
            assert!(acquire(&path, Missing::Leave, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap().is_none());
            let error = acquire(&path, Missing::Create, Sigterm::Ends, DEFAULT_LIMIT, &machine).unwrap_err();
            assert_eq!(error.code(), Code::IO);
        }
    }

    #[test]
    fn a_folder_replaced_while_waiting_is_locked_anew() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("net");
        let held = acquire(&path, Missing::Create, Sigterm::Ends, DEFAULT_LIMIT, &TestMachine::default()).unwrap();
        let waiter = {
            let path = path.clone();
            thread::spawn(move || {
                acquire(&path, Missing::Create, Sigterm::Ends, DEFAULT_LIMIT, &TestMachine::default()).unwrap().unwrap()
            })
        };
        // No event tells that it has come to the kernel's queue.
        let inode = format!(":{} ", held.as_ref().unwrap().lock.metadata().unwrap().ino());
        let deadline = Instant::now() + Duration::from_secs(20);
        while !proc_locks().unwrap().lines().any(|line| line.contains("->") && line.contains(&inode)) {
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
