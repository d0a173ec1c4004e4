//! Nobody waits for the dead: a lock that is held on behalf of a process that is gone, while others stand in line.
//!
//! The time that a call takes says nothing of it: with 64 at a time on two processors all wait for their turn. The kernel's
//! own list says who holds a lock and who waits. One is held on after its holder's death if a child has inherited the
//! descriptor, and then for as long as that child lives.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cni_testkit::patience;

use crate::judge::ORPHAN;
use crate::world::World;

/// Looks until `done`; what there is to be complained of.
pub(crate) fn watch(world: &World, done: &AtomicBool) -> Vec<String> {
    let ours: BTreeSet<u64> = world.lock_files().iter().filter_map(|path| inode(world, path)).collect();
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

fn inode(world: &World, path: &Path) -> Option<u64> {
    world.node.enter(|| fs::metadata(path).ok().map(|file| file.ino()))
}

/// Inode and holder of these locks that somebody waits for and whose holder is dead.
fn dead_holders(locks: &str, ours: &BTreeSet<u64>) -> BTreeSet<(u64, u32)> {
    // `1: FLOCK  ADVISORY  WRITE 123 fe:00:456 0 EOF`, and below it, of who waits for it, `1: -> FLOCK …`.
    let words: Vec<Vec<&str>> = locks.lines().map(|line| line.split_whitespace().collect()).collect();
    let awaited: BTreeSet<&str> = words.iter().filter(|line| line.get(1) == Some(&"->")).map(|line| line[0]).collect();
    let held = words.iter().filter(|line| line.get(1) == Some(&"FLOCK") && awaited.contains(line[0]));
    let holders = held.filter_map(|line| {
        let inode: u64 = line.get(5)?.rsplit(':').next()?.parse().ok()?;
        Some((inode, line.get(4)?.parse().ok()?))
    });
    holders.filter(|(inode, holder)| ours.contains(inode) && !lives(*holder)).collect()
}

fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    state.is_some_and(|state| !matches!(state, "Z" | "X"))
}

/// A program takes a lock and dies; who lives on has the descriptor too, and another one waits.
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
    let ours = BTreeSet::from([fs::metadata(&path).unwrap().ino()]);
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
    // Only in the machine's own PID namespace does the kernel show the locks of the dead.
    if seen.is_empty() && fs::read_link("/proc/self/ns/pid").unwrap() != Path::new("pid:[4026531836]") {
        cni_testkit::skip!("the locks of dead processes are not shown in this PID namespace");
    }
    assert_eq!(seen.len(), 1, "{seen:?}");
}
