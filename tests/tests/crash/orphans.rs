//! Plugins are killed while they wait for a lock. No child of a killed plugin may reserve or write
//! anything after the DEL.

use std::fs::{self, File};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cni_testkit::{Started, bin_dir, patience, require};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::chain::{Chain, Links, left_inside};
use crate::judge::ORPHAN;
use crate::kinds::Kind;
use crate::sweep;
use crate::world::{Backend, World};
use conformance::measure::{Dice, figure, seed, soak};

/// Which locks the test holds while the plugin is killed.
const HELD: [&[&str]; 3] = [&["store"], &["firewall"], &["store", "firewall"]];

/// Opens this lock file, if the backend has one.
fn lock_file(world: &World, which: &str) -> Option<File> {
    if which == "store" {
        return Some(File::open(world.data_dir().join("net1/lock")).expect("the store has a lock"));
    }
    world.node.enter(|| {
        let files = fs::read_dir("/run/cni").into_iter().flatten().flatten();
        let mut locks = files.filter(|file| file.file_name().to_string_lossy().starts_with("iptables-"));
        locks.next().map(|file| File::open(file.path()).expect("to open the lock"))
    })
}

/// Sends SIGKILL to the plugin only, as a runtime after a timeout or the OOM killer does.
pub(crate) fn slay(started: &Started) {
    let pid = Pid::from_raw(i32::try_from(started.pid()).unwrap());
    kill(pid, Signal::SIGKILL).expect("to kill our own child");
}

fn nap(dice: &mut Dice, longest: u64) {
    sleep(Duration::from_micros(dice.below(longest * 1000)));
}

/// Waits until no process runs on the node any more. A process that outlives its killed plugin may
/// change the node until then.
fn all_gone(world: &World) -> Vec<String> {
    let deadline = Instant::now() + patience(ORPHAN);
    loop {
        let alive = world.node.processes();
        if alive.is_empty() {
            return Vec::new();
        }
        if Instant::now() > deadline {
            let names = alive.iter().map(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default());
            return names.map(|name| format!("{} lives on after its plugin", name.trim())).collect();
        }
        sleep(Duration::from_millis(1));
    }
}

/// Runs one round: hold the lock, kill, DEL at once, release the lock, check.
fn round(world: &World, dice: &mut Dice) -> Vec<String> {
    let container = world.node.container();
    let chain = Chain::new(world, &container);
    let (plugin, verb) = [("bridge", "ADD"), ("portmap", "ADD"), ("bridge", "DEL")][dice.below(3) as usize];
    let which = HELD[dice.below(3) as usize];
    let mut links = Links::new();
    if verb == "DEL" {
        links = chain.add_all();
    } else if plugin == "portmap" {
        for before in ["bridge", "tuning"] {
            links.push(chain.call(before, "ADD", links.last()).run().success());
        }
    }
    let locks: Vec<File> = which.iter().filter_map(|which| lock_file(world, which)).collect();
    locks.iter().for_each(|file| file.lock().expect("to lock"));
    let mut victim = chain.call(plugin, verb, links.last()).start();
    victim.release();
    nap(dice, 60);
    slay(&victim);
    let _ = victim.finish();
    let mut complaints = Vec::new();
    if dice.below(2) == 0 {
        // A child that waits for a lock would still wait.
        complaints.extend(all_gone(world));
    }
    // Otherwise at once, while it would still wait.
    let prev = (verb == "DEL").then(|| links.last()).flatten();
    let mut del = chain.call(plugin, "DEL", prev).start();
    del.release();
    nap(dice, 30);
    drop(locks);
    let outcome = del.finish();
    if outcome.status != Some(0) {
        complaints.push(outcome.report());
    }
    // A late child has the lock now. The next DEL would hide its changes.
    complaints.extend(all_gone(world));
    let left = world.left_now().into_iter().filter(|line| Kind::of(line).plugin() == Some(plugin));
    complaints.extend(left.map(|left| format!("after the DEL of {plugin}: {left}")));
    // The first DEL was only for the race; now the DELs of the list.
    complaints.extend(chain.try_del_all(prev));
    complaints.extend(left_inside(&container));
    complaints.extend(world.left());
    if !complaints.is_empty() {
        complaints.insert(0, format!("{verb} of {plugin} was killed while the test held {which:?}"));
    }
    complaints
}

#[track_caller]
fn rounds(backend: Backend) {
    require!(backend.probe());
    let (seed, count) = (seed(), soak().map_or_else(|| cni_testkit::rounds(25), |times| 400 * times));
    let mut dice = Dice::new(seed);
    let world = World::new(backend);
    let mut complaints = Vec::new();
    for number in 0..count {
        let found = round(&world, &mut dice);
        if !found.is_empty() {
            complaints.extend(found);
            complaints.insert(0, format!("CNI_SEED={seed}, round {number}:"));
            break;
        }
    }
    if complaints.is_empty() {
        world.neighbour_lives();
        world.close();
    } else {
        world.node.abandon();
    }
    figure(&format!("killed while the locks were held, {backend:?}: {count} rounds, seed {seed}"));
    sweep::none(&complaints);
}

/// host-local is held before its first step, the plugin is killed, DEL follows, and host-local is
/// released. It is held by a pipe: a stopped process would die of the SIGHUP that the kernel sends
/// to stopped orphans.
#[test]
fn a_delegate_that_has_not_begun_dies_with_its_plugin() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let container = world.node.container();
    let chain = Chain::new(&world, &container);
    let (told, gate) = (world.node.dir().join("pid"), world.node.dir().join("gate"));
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let script = format!(
        "#!/bin/sh\n[ $CNI_COMMAND = ADD ] || exec {0}\necho $$ > {1}.new\nmv {1}.new {1}\nread -r go < {2}\nexec {0}\n",
        bin_dir().join("host-local").display(),
        told.display(),
        gate.display()
    );
    let path = world.node.script("slow/host-local", &script);
    let mut victim = chain.call("bridge", "ADD", None).cni_path(path.parent().unwrap()).start();
    victim.release();
    let deadline = Instant::now() + patience(Duration::from_secs(20));
    while !told.exists() {
        assert!(Instant::now() < deadline, "host-local was never started");
        sleep(Duration::from_millis(2));
    }
    slay(&victim);
    let _ = victim.finish();
    chain.call("bridge", "DEL", None).run().success();
    // host-local releases its reservation if its answer cannot be written, but the test must not
    // depend on it. The killed process takes a while to end. A survivor waits at the gate, which
    // opens only afterwards.
    let orphans = all_gone(&world);
    let mut options = File::options();
    let open = std::os::unix::fs::OpenOptionsExt::custom_flags(options.write(true), nix::libc::O_NONBLOCK).open(&gate);
    drop(open);
    let left = [orphans, all_gone(&world), world.left_now()].concat();
    if left.is_empty() {
        world.close();
    } else {
        world.node.abandon();
    }
    assert!(left.is_empty(), "the orphan lived on after the DEL: {left:?}");
}

#[test]
fn with_nftables() {
    rounds(Backend::Nftables);
}

#[test]
fn with_iptables() {
    rounds(Backend::IptablesNft);
}
