//! Killed while waiting for a lock: no child of a dead plugin may go on and reserve, or write, after the DEL.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use cni_testkit::{Started, bin_dir, require};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::chain::{Chain, Links, left_inside};
use crate::measure::{Dice, figure, seed, soak};
use crate::sweep;
use crate::world::{Backend, World};

/// Which locks the test holds while the plugin is killed.
const HELD: [&[&str]; 3] = [&["store"], &["firewall"], &["store", "firewall"]];

/// Opens the lock file that is meant, if the backend has one.
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

/// SIGKILL for the plugin alone, as from an impatient runtime or the kernel out of memory.
pub(crate) fn slay(started: &Started) {
    let pid = Pid::from_raw(i32::try_from(started.pid()).unwrap());
    kill(pid, Signal::SIGKILL).expect("to kill our own child");
}

fn nap(dice: &mut Dice, longest: u64) {
    sleep(Duration::from_micros(dice.below(longest * 1000)));
}

/// One round: hold, kill, DEL at once, let go, look.
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
    // At once: while whoever waited for the lock would still be waiting.
    let prev = (verb == "DEL").then(|| links.last()).flatten();
    let mut del = chain.call("bridge", "DEL", prev).start();
    del.release();
    nap(dice, 30);
    drop(locks);
    let mut complaints = Vec::new();
    let outcome = del.finish();
    if outcome.status != Some(0) {
        complaints.push(outcome.report());
    }
    if plugin == "bridge" {
        // A late one would come now, and the next DEL would hide it.
        sleep(Duration::from_millis(20));
        let reserved = world.node.reservations("net1").into_iter().filter(|(_, of)| of.starts_with(chain.id()));
        complaints.extend(reserved.map(|(address, _)| format!("{address} was reserved after the DEL")));
    }
    // bridge's part of the DEL was the one to race; now the list's.
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

/// host-local stopped before its first step, the plugin killed, DEL, and host-local told to go on.
#[test]
fn a_delegate_that_has_not_begun_dies_with_its_plugin() {
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let container = world.node.container();
    let chain = Chain::new(&world, &container);
    let told = world.node.dir().join("pid");
    let real = bin_dir().join("host-local");
    let script = format!(
        "#!/bin/sh\n[ $CNI_COMMAND = ADD ] || exec {0}\necho $$ > {1}.new\nmv {1}.new {1}\nkill -STOP $$\nexec {0}\n",
        real.display(),
        told.display()
    );
    let path = world.node.file("slow/host-local", script);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut victim = chain.call("bridge", "ADD", None).cni_path(path.parent().unwrap()).start();
    victim.release();
    let deadline = Instant::now() + Duration::from_secs(20);
    let stopped = loop {
        assert!(Instant::now() < deadline, "host-local was never started");
        let pid = fs::read_to_string(&told).ok().and_then(|text| text.trim().parse::<i32>().ok());
        let state = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default().contains(" T ");
        if let Some(pid) = pid.filter(state) {
            break Pid::from_raw(pid);
        }
        sleep(Duration::from_millis(2));
    };
    slay(&victim);
    let _ = victim.finish();
    chain.call("bridge", "DEL", None).run().success();
    // host-local takes its reservation back when nobody hears its answer, but that is not to be relied on.
    let state = fs::read_to_string(format!("/proc/{stopped}/stat")).unwrap_or_default();
    let lives = !state.is_empty() && !state.contains(" Z ");
    let _ = kill(stopped, Signal::SIGCONT);
    sleep(Duration::from_millis(100));
    let left = world.left();
    if left.is_empty() {
        world.close();
    } else {
        world.node.abandon();
    }
    assert!(!lives && left.is_empty(), "the orphan lived on after the DEL: {state}: {left:?}");
}

#[test]
fn with_nftables() {
    rounds(Backend::Nftables);
}

#[test]
fn with_iptables() {
    rounds(Backend::IptablesNft);
}
