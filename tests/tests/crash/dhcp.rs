//! Adds and deletes dhcp attachments while the daemon is killed repeatedly: afterwards server,
//! daemon and containers agree. And the plugin is killed, or its system calls fail: after the next
//! DEL neither the daemon nor the server has a lease.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{fs, thread};

use cni_testkit::trace::{self, Act, Hit, Plan};
use cni_testkit::{Container, crowd, probe, require, rounds};
use conformance::lan::{Lan, configure, until};
use conformance::measure::{Dice, figure, seed, soak};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::Value;

/// The number of concurrent attachments, each with a thread of its own.
const ABREAST: usize = 6;

/// Deletes an attachment as a runtime does: a failed DEL is repeated.
fn detach(lan: &Lan, container: &Container) {
    until("DEL succeeds", || lan.attachment(container).invocation("DEL", None).run().status == Some(0));
    container.ip(&["address flush dev eth0 scope global"]);
}

/// Returns the addresses in the daemon's records.
fn recorded(lan: &Lan) -> Vec<String> {
    let entries = fs::read_dir(lan.node.dir().join("dhcp")).unwrap().map(|entry| entry.unwrap().path());
    let records = entries.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let mut addresses: Vec<String> = records
        .map(|path| {
            let record: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
            let network = record["held"]["Bound"]["terms"]["network"].as_str();
            network.unwrap_or_else(|| panic!("no lease: {record}")).trim_end_matches("/24").to_owned()
        })
        .collect();
    addresses.sort();
    addresses
}

#[test]
fn leases_survive_a_daemon_that_is_killed_again_and_again() {
    require!(probe::dnsmasq().map(drop));
    let cycles = soak().map_or(crowd(100), |times| 500 * usize::try_from(times).unwrap());
    let seed = seed();
    let lan = Lan::new(100, &[]);
    let daemon = Mutex::new(Some(lan.daemon()));
    let containers: Vec<Container> = (0..ABREAST).map(|_| lan.container(&["eth0"])).collect();
    let (left, living) = (AtomicUsize::new(cycles), AtomicUsize::new(ABREAST));
    let (mut kills, refused) = (0, AtomicUsize::new(0));
    thread::scope(|scope| {
        for (number, container) in containers.iter().enumerate() {
            let (lan, left, living, refused) = (&lan, &left, &living, &refused);
            scope.spawn(move || {
                let take = || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
                while take().is_ok() {
                    detach(lan, container);
                    let added = lan.attachment(container).invocation("ADD", None).run();
                    match added.json.as_ref().filter(|_| added.status == Some(0)) {
                        Some(result) => configure(container, "eth0", result),
                        None => {
                            refused.fetch_add(1, Ordering::Relaxed);
                            detach(lan, container);
                        }
                    }
                }
                // Every third container has no lease in the end.
                if number % 3 == 0 {
                    detach(lan, container);
                }
                living.fetch_sub(1, Ordering::Relaxed);
            });
        }
        let mut dice = Dice::new(seed);
        // Not after the last ADD: then nothing paces the kills, and on a busy machine no DEL ever
        // ends between two of them.
        while left.load(Ordering::Relaxed) > 0 {
            // At some moment during some ADD. A kill fails all calls that run, and most of them
            // should succeed.
            let ahead = left.load(Ordering::Relaxed).saturating_sub(2 + usize::try_from(dice.below(16)).unwrap());
            until("ADDs go on", || left.load(Ordering::Relaxed) <= ahead || living.load(Ordering::Relaxed) == 0);
            thread::sleep(Duration::from_millis(dice.below(40)));
            daemon.lock().unwrap().take().unwrap().kill();
            *daemon.lock().unwrap() = Some(lan.daemon());
            kills += 1;
        }
    });
    let refused = refused.into_inner();
    figure(&format!("dhcp: {cycles} ADDs and DELs, {kills} daemons killed, {refused} ADDs failed; CNI_SEED={seed}"));
    let mut held: Vec<String> = containers.iter().flat_map(|container| container.addresses("eth0")).collect();
    held.iter_mut().for_each(|address| *address = address.trim_end_matches("/24").to_owned());
    held.sort();
    until("the server has leased what containers have", || lan.leased() == held);
    assert_eq!(recorded(&lan), held);
    containers.iter().for_each(|container| detach(&lan, container));
    until("the server has all addresses back", || lan.leased().is_empty());
    assert_eq!(recorded(&lan), [""; 0]);
}

/// The plugin's calls in its ADD and its DEL, at the least: the release build makes 21.
const FLOOR: usize = 15;

/// One trial: the plugin is hit at a call, and then DEL succeeds and leaves no lease. Returns the
/// calls that the plugin made, and whether it came to the point.
fn attempt(lan: &Lan, container: &Container, verb: &str, plan: &Plan) -> (Vec<Hit>, bool) {
    let attachment = lan.attachment(container);
    if verb == "DEL" {
        configure(container, "eth0", &attachment.add().success());
    }
    let traced = attachment.invocation(verb, None).traced(plan);
    let story = || format!("{:?} at {} of {verb}, {:?}\n{}", plan.act, plan.at, traced.hit, traced.outcome.report());
    let status = traced.outcome.status;
    if let (Act::Fail(_), "ADD", Some(1..)) = (plan.act, verb, status) {
        // What it could not undo, DEL does.
        let undone = !traced.outcome.stderr.contains("release the lease");
        assert!(!undone || recorded(lan).is_empty(), "a failed ADD left a lease: {}", story());
    } else if let ("ADD", Some(0), Some(result)) = (verb, status, &traced.outcome.json) {
        configure(container, "eth0", result);
        attachment.check(result).success();
    } else if ("DEL", Some(0)) == (verb, status) {
        assert!(recorded(lan).is_empty(), "a DEL that succeeded left a lease: {}", story());
    }
    attachment.del().success();
    assert!(recorded(lan).is_empty(), "DEL left a lease: {}", story());
    until("the server has all addresses back", || lan.leased().is_empty());
    container.ip(&["address flush dev eth0 scope global"]);
    (traced.all, traced.hit.is_some())
}

/// Tries a share of the plugin's calls, all of them in a soak run.
fn sweep(verb: &str, acts: &[Act]) {
    require!(trace::supported());
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(100, &[]);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let plan = |at, act| Plan { victim: "dhcp".to_owned(), at, act };
    let (mut dice, mut tried, mut all_points) = (Dice::new(seed()), 0, 0);
    for act in acts {
        // Each act has points of its own, because calls that cannot fail are not counted.
        let (all, _) = attempt(&lan, &container, verb, &plan(u64::MAX, *act));
        assert!(all.len() >= FLOOR, "only {} calls", all.len());
        let points: Vec<u64> = (1..).zip(&all).filter(|(_, hit)| !hit.starting).map(|(at, _)| at).collect();
        all_points += points.len();
        let step = if soak().is_some() { 1 } else { (points.len() as u64 / rounds(12)).max(1) };
        let first = dice.below(step) as usize;
        for at in points.iter().skip(first).step_by(step as usize) {
            tried += usize::from(attempt(&lan, &container, verb, &plan(*at, *act)).1);
        }
    }
    figure(&format!("{acts:?} of dhcp in {verb}: tried {tried} of {all_points} points, seed {}", seed()));
    assert!(tried >= acts.len(), "only {tried} points were tried");
}

#[test]
fn a_killed_add_leaves_no_lease_after_its_del() {
    sweep("ADD", &[Act::Signal(Signal::SIGKILL)]);
}

#[test]
fn a_killed_del_leaves_no_lease_after_the_next() {
    sweep("DEL", &[Act::Signal(Signal::SIGKILL)]);
}

#[test]
fn errors_during_add_leave_no_lease_after_its_del() {
    sweep("ADD", &[Act::Fail(Errno::EPERM), Act::Fail(Errno::ENOMEM), Act::Signal(Signal::SIGTERM)]);
}

#[test]
fn errors_during_del_leave_no_lease_after_the_next() {
    sweep("DEL", &[Act::Fail(Errno::EPERM), Act::Fail(Errno::ENOMEM), Act::Signal(Signal::SIGTERM)]);
}
