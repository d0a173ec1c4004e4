//! Many attachments are added and deleted concurrently, killed during calls, deprived of their
//! DELs, and collected by GC.
//!
//! A GC runs alone, as the specification requires, with the attachments valid at that moment. All
//! calls have a deadline, so a deadlock is a failure. So are a call of these plugins that fails
//! without having been killed, for instance for want of a lock, and a lock with a dead holder
//! ([`locks`]).

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use cni_testkit::{Container, Ended, Outcome, Started, bin_dir, crowd, go_bin_dir, probe, require};
use conformance::addresses;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::chain::{Chain, Links, PLUGINS};
use crate::locks;
use crate::orphans::slay;
use crate::sweep;
use crate::world::{Backend, World};
use conformance::measure::{Dice, figure, seed, soak};

/// How many attachments, and how many at a time.
#[derive(Clone, Copy, Debug)]
struct Size {
    crowd: usize,
    abreast: usize,
}

/// Which implementation's plugins add and delete an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    Ours,
    /// Sometimes Go's. Go's plugins are never killed: their leftovers are not our subject.
    Mixed,
}

struct Storm<'w> {
    world: &'w World,
    whose: Whose,
    size: Size,
    next: AtomicUsize,
    /// All calls hold it for reading, GC for writing.
    quiet: RwLock<()>,
    /// The holder of each address.
    held: Mutex<BTreeMap<String, String>>,
    /// The live attachments with their results.
    living: Mutex<BTreeMap<String, (Chain<'w>, Links)>>,
    complaints: Mutex<Vec<String>>,
    killed: AtomicUsize,
    /// Calls with a killed child: the delegate, or iptables.
    bereft: AtomicUsize,
    /// ADDs and DELs by Go's plugins.
    go_calls: AtomicUsize,
    /// ADDs and DELs by Go's plugins that failed.
    go_failed: AtomicUsize,
    collected: AtomicUsize,
    /// The longest call, in milliseconds.
    longest: AtomicUsize,
    /// The current duration of an ADD in microseconds, which determines when to kill.
    usual: AtomicUsize,
}

impl<'w> Storm<'w> {
    fn complain(&self, what: impl Into<String>) {
        self.complaints.lock().unwrap().push(what.into());
    }

    /// Runs one attachment after the other, until all have run.
    fn work(&self, worker: usize) {
        let mut dice = Dice::new(seed().wrapping_add((worker as u64) << 32));
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.size.crowd || self.complaints.lock().unwrap().len() > 5 {
                return;
            }
            self.attachment(&mut dice, number >= self.size.crowd / 2);
            if number % (self.size.crowd / 8).max(1) == 5 {
                self.collect();
            }
        }
    }

    /// Makes one call, which may be killed.
    fn call(&self, chain: &Chain<'_>, plugin: &str, verb: &str, prev: Option<&Value>, fate: Option<u64>) -> Outcome {
        let began = Instant::now();
        let mut started = chain.call(plugin, verb, prev).timeout(Duration::from_secs(100)).start();
        started.release();
        if let Some(fate) = fate {
            if is_a_childs(fate) {
                self.bereft.fetch_add(usize::from(slay_child(&started, fate)), Ordering::Relaxed);
            } else {
                let usual = self.usual.load(Ordering::Relaxed) as u64;
                thread::sleep(Duration::from_micros(fate % usual.max(1)));
                slay(&started);
            }
        }
        let outcome = started.finish();
        let took = began.elapsed();
        self.longest.fetch_max(took.as_millis() as usize, Ordering::Relaxed);
        if fate.is_none() && verb == "ADD" {
            self.usual.store(took.as_micros() as usize, Ordering::Relaxed);
        }
        if outcome.status.is_none() {
            self.killed.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    /// Calls ADD of the list; `None` if it was killed, or if a plugin of Go failed.
    fn add(&self, chain: &Chain<'_>, go: bool, late: bool, dice: &mut Dice) -> Option<Links> {
        let doomed = (!go && dice.below(5) == 0).then(|| dice.below(u64::MAX));
        // A call that is chosen to be killed may end earlier. Late in the test every call is chosen
        // until one was killed.
        let none = |number: &AtomicUsize| !go && late && number.load(Ordering::Relaxed) == 0;
        let doomed = match doomed {
            None if none(&self.bereft) => Some(dice.below(u64::MAX) & !1),
            None if none(&self.killed) => Some(dice.below(u64::MAX) | 1),
            doomed => doomed,
        };
        // The plugins with a child: bridge, and portmap where iptables is a program.
        let parents = if self.world.backend.program().is_some() { &["bridge", "portmap"][..] } else { &["bridge"] };
        let doomed = doomed.map(|fate| {
            let of = if is_a_childs(fate) { parents } else { &PLUGINS[..] };
            (of[dice.below(of.len() as u64) as usize], fate)
        });
        let mut links = Links::new();
        for plugin in PLUGINS {
            self.go_calls.fetch_add(usize::from(go), Ordering::Relaxed);
            let fate = doomed.and_then(|(of, fate)| (of == plugin).then_some(fate));
            let outcome = self.call(chain, plugin, "ADD", links.last(), fate);
            match (outcome.status, outcome.json.clone()) {
                (Some(0), Some(result)) => links.push(result),
                (None, _) if fate.is_some_and(|fate| !is_a_childs(fate)) => return None,
                // It must report an error. DEL or GC must find what it has not undone.
                (Some(_), Some(error)) if fate.is_some_and(is_a_childs) && error["msg"].is_string() => return None,
                _ if go => {
                    self.go_failed.fetch_add(1, Ordering::Relaxed);
                    return None;
                }
                _ => {
                    self.complain(format!("ADD failed\n{}", outcome.report()));
                    return None;
                }
            }
        }
        Some(links)
    }

    fn attachment(&self, dice: &mut Dice, late: bool) {
        let container = self.world.node.container();
        let go = self.whose == Whose::Mixed && dice.below(3) == 0;
        let ours = Chain::new(self.world, &container).without_exclusions();
        let chain = if go { ours.by(go_bin_dir()) } else { ours };
        let added = {
            let _quiet = self.quiet.read().unwrap();
            let added = self.add(&chain, go, late, dice);
            if let Some(links) = &added {
                // These plugins check the attachments of both implementations.
                self.came(&container, chain.clone().by(bin_dir()), links);
            }
            added
        };
        if added.is_some() {
            thread::sleep(Duration::from_millis(dice.below(60)));
        }
        // One attachment in eight never gets its DEL. Those of Go always do: their resources have
        // no mark that GC could find.
        if !go && dice.below(8) == 0 {
            let _quiet = self.quiet.read().unwrap();
            self.went(&container);
            container.destroy();
            return;
        }
        let _quiet = self.quiet.read().unwrap();
        self.went(&container);
        let prev = added.as_ref().and_then(|links| links.last());
        if !go && dice.below(5) == 0 {
            let plugin = PLUGINS[dice.below(PLUGINS.len() as u64) as usize];
            self.call(&chain, plugin, "DEL", prev, Some(dice.below(u64::MAX)));
        }
        // By either implementation: the runtime may have changed its plugins meanwhile.
        let by_go = go && dice.below(2) == 0;
        for plugin in PLUGINS.iter().rev() {
            let chain = Chain::new(self.world, &container).without_exclusions();
            if by_go {
                self.go_calls.fetch_add(1, Ordering::Relaxed);
                let failed = self.call(&chain.by(go_bin_dir()), plugin, "DEL", prev, None).status != Some(0);
                self.go_failed.fetch_add(usize::from(failed), Ordering::Relaxed);
            }
            let chain = Chain::new(self.world, &container).without_exclusions();
            let outcome = self.call(&chain, plugin, "DEL", prev, None);
            if outcome.status != Some(0) {
                self.complain(format!("DEL failed\n{}", outcome.report()));
            }
        }
    }

    /// Records a live attachment. No other one may have its addresses.
    fn came(&self, container: &Container, chain: Chain<'w>, links: &Links) {
        self.living.lock().unwrap().insert(container.id.clone(), (chain, links.clone()));
        self.world.live.lock().unwrap().insert(container.id.clone());
        let mut held = self.held.lock().unwrap();
        for address in links.last().into_iter().flat_map(addresses) {
            if let Some(other) = held.insert(address.clone(), container.id.clone()) {
                self.complain(format!("{address} of {other} was given to {}", container.id));
            }
        }
    }

    /// Records that an attachment is about to be deleted. From now on its addresses may be reused.
    fn went(&self, container: &Container) {
        self.living.lock().unwrap().remove(&container.id);
        self.world.live.lock().unwrap().remove(&container.id);
        self.held.lock().unwrap().retain(|_, holder| *holder != container.id);
    }

    /// Runs GC while no other call runs, and checks that live attachments keep everything.
    fn collect(&self) {
        let _quiet = self.quiet.write().unwrap();
        let anybody = self.world.node.container();
        for complaint in Chain::new(self.world, &anybody).without_exclusions().try_gc_all() {
            self.complain(format!("GC failed\n{complaint}"));
        }
        self.collected.fetch_add(1, Ordering::Relaxed);
        let held = self.held.lock().unwrap().clone();
        let reserved: BTreeMap<String, String> = self.world.node.reservations("net1").into_iter().collect();
        for (address, holder) in &held {
            let address = address.split('/').next().unwrap_or_default();
            if !reserved.get(address).is_some_and(|content| content.starts_with(holder.as_str())) {
                self.complain(format!(
                    "{address} of {holder}, which lives, is reserved for {:?}",
                    reserved.get(address)
                ));
            }
        }
        for (chain, links) in self.living.lock().unwrap().values() {
            for plugin in PLUGINS {
                let outcome = self.call(chain, plugin, "CHECK", links.last(), None);
                if outcome.status != Some(0) {
                    self.complain(format!("CHECK of what lives failed\n{}", outcome.report()));
                }
            }
        }
    }
}

#[track_caller]
fn storm(backend: Backend, whose: Whose, share: Size, whole: Size) {
    require!(backend.probe());
    let share = Size { crowd: crowd(share.crowd), abreast: crowd(share.abreast) };
    let size = if soak().is_some() { whole } else { share };
    for round in 0..soak().unwrap_or(1) {
        let world = World::new(backend);
        let began = Instant::now();
        let storm = Storm {
            world: &world,
            whose,
            size,
            next: AtomicUsize::new(0),
            quiet: RwLock::new(()),
            held: Mutex::default(),
            living: Mutex::default(),
            complaints: Mutex::default(),
            killed: AtomicUsize::new(0),
            bereft: AtomicUsize::new(0),
            go_calls: AtomicUsize::new(0),
            go_failed: AtomicUsize::new(0),
            collected: AtomicUsize::new(0),
            longest: AtomicUsize::new(0),
            usual: AtomicUsize::new(20_000),
        };
        let over = AtomicBool::new(false);
        let waited = thread::scope(|scope| {
            let watch = scope.spawn(|| locks::watch(&world, &over));
            // Also after a panic, because the watch is joined.
            let end = Ended(&over);
            thread::scope(|scope| {
                for worker in 0..size.abreast {
                    let storm = &storm;
                    scope.spawn(move || storm.work(worker + round as usize * 1000));
                }
            });
            drop(end);
            watch.join().unwrap()
        });
        storm.collect();
        let count = |number: &AtomicUsize| number.load(Ordering::Relaxed);
        figure(&format!(
            "storm, {backend:?}, {whose:?}: {} attachments, {} at a time, in {:.0} s, seed {}; {} killed, {} lost a \
             child, {} GCs, {} of {} calls of Go's failed, longest call {} ms",
            size.crowd,
            size.abreast,
            began.elapsed().as_secs_f64(),
            seed(),
            count(&storm.killed),
            count(&storm.bereft),
            count(&storm.collected),
            count(&storm.go_failed),
            count(&storm.go_calls),
            count(&storm.longest),
        ));
        let (failed, calls) = (count(&storm.go_failed), count(&storm.go_calls));
        let mut complaints = storm.complaints.into_inner().unwrap();
        complaints.extend(waited);
        // None failed when this was written. Go's plugins take no lock and do not retry.
        if failed > 2 && failed * 10 > calls {
            complaints.push(format!("{failed} of {calls} calls of Go's failed beside ours"));
        }
        if size.crowd >= 100 && (count(&storm.bereft) == 0 || count(&storm.killed) == 0) {
            complaints.push("no plugin was killed, or no child of a plugin".to_owned());
        }
        complaints.extend(world.left());
        if complaints.is_empty() {
            world.neighbour_lives();
            world.close();
        } else {
            world.node.abandon();
            complaints.insert(0, format!("CNI_SEED={}:", seed()));
        }
        sweep::none(&complaints);
    }
}

/// Whether a child of this call is to be killed.
fn is_a_childs(fate: u64) -> bool {
    fate.is_multiple_of(2)
}

/// Sends SIGKILL to the plugin's first child, at some moment of its life. Many plugins have no
/// child.
fn slay_child(started: &Started, fate: u64) -> bool {
    let process = format!("/proc/{}", started.pid());
    let child = || {
        let tasks = fs::read_dir(format!("{process}/task")).into_iter().flatten().flatten();
        let mut children = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        children.find_map(|text| text.split(' ').next()?.parse::<i32>().ok())
    };
    let ended = || !fs::read_to_string(format!("{process}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    let first = loop {
        match child() {
            None if ended() => return false,
            None => thread::sleep(Duration::from_micros(300)),
            Some(first) => break first,
        }
    };
    thread::sleep(Duration::from_micros(fate / 2 % 3000));
    // Its parent has not reaped it, so the number is still its own.
    child() == Some(first) && kill(Pid::from_raw(first), Signal::SIGKILL).is_ok()
}

const WHOLE: Size = Size { crowd: 500, abreast: 64 };

#[test]
fn with_nftables() {
    storm(Backend::Nftables, Whose::Ours, Size { crowd: 120, abreast: 32 }, WHOLE);
}

#[test]
fn with_iptables() {
    storm(Backend::IptablesNft, Whose::Ours, Size { crowd: 120, abreast: 32 }, WHOLE);
}

#[test]
fn with_the_go_plugins_beside_ours() {
    require!(probe::go_plugins());
    storm(Backend::IptablesNft, Whose::Mixed, Size { crowd: 60, abreast: 16 }, WHOLE);
}
