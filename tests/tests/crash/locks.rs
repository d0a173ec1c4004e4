//! Finds locks that are still held for a dead process while other processes wait for them.
//!
//! The duration of a call proves nothing: with 64 calls at a time on two processors all of them
//! wait. The kernel's list of locks shows holders and waiters. A lock outlives its holder if a
//! child has inherited the descriptor, and then for as long as that child lives.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cni_testkit::patience;
use nix::sys::stat::{major, minor};
use nix::sys::statfs::{BTRFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, statfs};

use crate::judge::ORPHAN;
use crate::world::World;

/// Watches until `done` and returns the complaints.
pub(crate) fn watch(world: &World, done: &AtomicBool) -> Vec<String> {
    let files = world.lock_files();
    let ours = world.node.enter(|| files.iter().filter_map(|path| Lock::of(path)).collect());
    let (mut since, mut complaints) = (HashMap::new(), Vec::new());
    while !done.load(Ordering::Relaxed) && complaints.is_empty() {
        let now = Instant::now();
        let dead = dead_holders(&fs::read_to_string("/proc/locks").unwrap_or_default(), &ours);
        since.retain(|holder, _| dead.contains(holder));
        for holder in dead {
            let first = *since.entry(holder).or_insert(now);
            if now - first > patience(ORPHAN) {
                complaints.push(format!("a lock is waited for whose holder, {}, is dead", holder.1));
            }
        }
        sleep(Duration::from_millis(100));
    }
    complaints
}

/// A locked file, identified as in `/proc/locks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Lock {
    /// Of other nodes' files many have the same inode, each on a tmpfs of its own. `None` where the
    /// file system shows another device there than in `stat`.
    device: Option<(u64, u64)>,
    inode: u64,
}

impl Lock {
    fn of(path: &Path) -> Option<Lock> {
        let (file, system) = (fs::metadata(path).ok()?, statfs(path).ok()?.filesystem_type());
        let differs = [BTRFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC].contains(&system);
        Some(Lock { device: (!differs).then(|| (major(file.dev()), minor(file.dev()))), inode: file.ino() })
    }

    /// Whether `fe:00:456` is this file.
    fn is(&self, file: &str) -> bool {
        let [major, minor, inode] = file.split(':').collect::<Vec<_>>()[..] else { return false };
        let hex = |digits| u64::from_str_radix(digits, 16);
        let same = self.device.is_none_or(|device| (hex(major), hex(minor)) == (Ok(device.0), Ok(device.1)));
        same && inode.parse() == Ok(self.inode)
    }
}

/// Returns the locks with a waiting process and a dead holder, and the holder.
fn dead_holders(locks: &str, ours: &BTreeSet<Lock>) -> BTreeSet<(Lock, u32)> {
    // `1: FLOCK  ADVISORY  WRITE 123 fe:00:456 0 EOF`, and below it a line `1: -> FLOCK …` for each
    // waiting process.
    let words: Vec<Vec<&str>> = locks.lines().map(|line| line.split_whitespace().collect()).collect();
    let awaited: BTreeSet<&str> = words.iter().filter(|line| line.get(1) == Some(&"->")).map(|line| line[0]).collect();
    let held = words.iter().filter(|line| line.get(1) == Some(&"FLOCK") && awaited.contains(line[0]));
    let holders = held.filter_map(|line| {
        let lock = ours.iter().find(|lock| line.get(5).is_some_and(|file| lock.is(file)))?;
        Some((*lock, line.get(4)?.parse().ok()?))
    });
    holders.filter(|(_, holder)| !lives(*holder)).collect()
}

fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    state.is_some_and(|state| !matches!(state, "Z" | "X"))
}

#[test]
fn a_lock_on_the_same_inode_of_another_device_is_ignored() {
    // No process can have this number.
    let locks = "1: FLOCK  ADVISORY  WRITE 4294967295 fe:0a:77 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 1 fe:0a:77 0 EOF\n";
    let found = |device, inode| dead_holders(locks, &BTreeSet::from([Lock { device, inode }])).len();
    assert_eq!([found(Some((0xfe, 10)), 77), found(None, 77)], [1, 1]);
    assert_eq!([found(Some((0xfe, 11)), 77), found(Some((0xfe, 10)), 78), found(None, 78)], [0, 0, 0]);
}

/// A process locks a file and dies; its child still has the descriptor, and another process waits.
#[test]
fn a_dead_holder_is_seen() {
    use std::process::{Command, Stdio};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lock");
    fs::write(&path, "").unwrap();
    let hold = "exec 9<\"$1\"; flock 9; sleep 60 9<&9 & echo $!";
    let mut command = Command::new("bash");
    command.args(["-c", hold, "bash"]).arg(&path).stdin(Stdio::null()).stderr(Stdio::null());
    let mut holder = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    let mut out = std::io::BufReader::new(holder.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut told).unwrap();
    holder.wait().unwrap();
    let mut waiting = Command::new("flock").arg(&path).arg("true").spawn().unwrap();
    let ours = BTreeSet::from([Lock::of(&path).unwrap()]);
    let deadline = Instant::now() + patience(Duration::from_secs(5));
    let seen = loop {
        let seen = dead_holders(&fs::read_to_string("/proc/locks").unwrap(), &ours);
        if !seen.is_empty() || Instant::now() > deadline {
            break seen;
        }
        sleep(Duration::from_millis(5));
    };
    let sleeper = nix::unistd::Pid::from_raw(told.trim().parse().unwrap());
    nix::sys::signal::kill(sleeper, nix::sys::signal::Signal::SIGKILL).unwrap();
    waiting.wait().unwrap();
    // The kernel shows locks of dead processes only in the machine's own PID namespace.
    if seen.is_empty() && fs::read_link("/proc/self/ns/pid").unwrap() != Path::new("pid:[4026531836]") {
        cni_testkit::skip!("the locks of dead processes are not shown in this PID namespace");
    }
    assert_eq!(seen.len(), 1, "{seen:?}");
}
