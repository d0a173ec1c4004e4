//! Creates and enters namespaces, each time on a new thread, because a namespace is a property of a
//! thread.
//!
//! A namespace exists as long as its file `/proc/thread-self/ns/*` is open. With `self` in place of
//! `thread-self` the path would name the main thread's namespace.

use std::fs::File;
use std::io::ErrorKind;
use std::panic::resume_unwind;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, Once};
use std::thread;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Runs `f` on a new thread and returns its value. A panic in it continues here.
///
/// While hundreds of plugins run, the kernel may refuse to create a thread (EAGAIN): this is
/// repeated for 10 s.
fn on_a_thread<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let deadline = Instant::now() + Duration::from_secs(10);
    let f = Mutex::new(Some(f));
    let run = || {
        let f = f.lock().unwrap().take().expect("one thread runs it");
        f()
    };
    thread::scope(|scope| {
        let started = loop {
            match thread::Builder::new().spawn_scoped(scope, run) {
                Ok(started) => break started,
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(10));
                }
                Err(error) => panic!("failed to start a thread: {error}"),
            }
        };
        started.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Opens the calling thread's namespace of this kind: `net` or `mnt`.
fn open(kind: &str) -> File {
    File::open(format!("/proc/thread-self/ns/{kind}")).expect("a thread can open its own namespace")
}

/// Creates an empty network namespace.
pub(crate) fn network() -> File {
    on_a_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).expect("to make a network namespace: run as root or by scripts/test");
        open("net")
    })
}

/// Runs `body` on a new thread in a new network namespace, with an empty `/run` of its own, where
/// locks and indexes of rules are files. Without the privilege for that, the test is skipped
/// visibly, or fails with `CNI_TEST_REQUIRE=all`.
#[track_caller]
pub fn in_new_netns(body: impl FnOnce() + Send) {
    thread::scope(|scope| {
        // The test's name, for the line that reports a skip.
        let builder = thread::Builder::new().name(thread::current().name().unwrap_or("?").to_owned());
        let test = builder.spawn_scoped(scope, || match unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS) {
            Ok(()) => {
                make_mounts_private();
                mount_tmpfs("/run");
                body();
            }
            Err(errno) => crate::skipped(&format!("cannot make a network namespace: {errno}")),
        });
        test.unwrap().join().unwrap_or_else(|panic| resume_unwind(panic));
    });
}

/// Runs a program in the calling thread's namespaces and returns its stdout. Arguments are
/// separated by one space.
///
/// # Panics
/// If it cannot be run or fails.
pub fn output(command: &str) -> String {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Creates a network namespace and a mount namespace for a node. In the mount namespace the folders
/// that CNI writes to by default are empty and private, and `/sys` shows the new network namespace.
pub(crate) fn node() -> (File, File) {
    static LIMIT: Once = Once::new();
    LIMIT.call_once(allow_many_descriptors);
    on_a_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
            .expect("to make network and mount namespaces: run as root or by scripts/test");
        make_mounts_private();
        for folder in ["/run", "/var/lib", "/etc/cni"] {
            if Path::new(folder).exists() {
                mount_tmpfs(folder);
            }
        }
        // Refused inside some user namespaces; only `/sys/class/net` would be wrong then, and no
        // plugin relies on it.
        let _ = mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>);
        (open("net"), open("mnt"))
    })
}

/// Keeps the mounts of the calling thread's new mount namespace out of the machine's.
fn make_mounts_private() {
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("to make mounts private");
}

/// Mounts an empty file system at a folder.
fn mount_tmpfs(folder: &str) {
    mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("mode=755")).expect("a private tmpfs");
}

/// Raises the limit of open files to the hard limit. Each running plugin and each container needs
/// some descriptors of this process, and the usual soft limit of 1024 is too low for some tests.
fn allow_many_descriptors() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a process has limits");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("a process may raise its soft limit to the hard one");
}

/// Runs `f` on a new thread inside the two namespaces. Programs that it starts run there too.
pub(crate) fn within<T: Send>(net: &File, mnt: &File, f: impl FnOnce() -> T + Send) -> T {
    on_a_thread(|| {
        // A thread that shares its root and working directory with others cannot change its mount
        // namespace.
        unshare(CloneFlags::CLONE_FS).expect("to have a root of one's own");
        setns(net, CloneFlags::CLONE_NEWNET).expect("to enter a network namespace");
        setns(mnt, CloneFlags::CLONE_NEWNS).expect("to enter a mount namespace");
        f()
    })
}
