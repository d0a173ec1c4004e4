//! Adds and deletes dhcp attachments while the daemon is killed repeatedly: afterwards server,
//! daemon and containers agree. And the plugin is killed, or its system calls fail: after the next
//! DEL neither the daemon nor the server has a lease.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{fs, thread};

use cni_testkit::trace::{self, Act, Hit, Plan};
use cni_testkit::{Attachment, Container, crowd, probe, require, rounds, wait_until};
use conformance::lan::{Lan, configure};
use conformance::measure::{Dice, figure, seed, soak};
use conformance::patched;
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// The number of concurrent attachments, each with a thread of its own.
const ABREAST: usize = 6;

/// The protocol of the leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    V4,
    V6,
}

impl Protocol {
    /// A container's attachment.
    fn attachment<'a>(self, lan: &'a Lan, container: &Container) -> Attachment<'a> {
        let attachment = lan.attachment(container);
        match self {
            Protocol::V4 => attachment,
            Protocol::V6 => {
                let keys = json!({"ipam": {"ipv6": "stateful", "ipv4": false}});
                let config = patched(attachment.config.clone(), keys);
                attachment.config(config)
            }
        }
    }

    /// Divides a number of trials for DHCPv6, where an ADD takes two seconds.
    fn share(self, trials: usize) -> usize {
        if self == Protocol::V4 { trials } else { trials / 4 }
    }
}

/// Returns an address without its prefix.
fn without_prefix(cidr: &str) -> String {
    cidr.split('/').next().unwrap().to_owned()
}

/// Deletes an attachment as a runtime does: a failed DEL is repeated.
fn detach(attachment: &Attachment<'_>, container: &Container) {
    wait_until("DEL succeeds", || attachment.invocation("DEL", None).run().status == Some(0));
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
            without_prefix(network.unwrap_or_else(|| panic!("no lease: {record}")))
        })
        .collect();
    addresses.sort();
    addresses
}

#[test]
fn leases_survive_a_daemon_that_is_killed_again_and_again() {
    require!(probe::dnsmasq().map(drop));
    leases_survive(Protocol::V4, &Lan::new(100, &[]));
}

#[test]
fn ipv6_leases_survive_a_daemon_that_is_killed_again_and_again() {
    require!(probe::kea6().map(drop));
    leases_survive(Protocol::V6, &Lan::kea6());
}

fn leases_survive(protocol: Protocol, lan: &Lan) {
    let cycles = protocol.share(soak().map_or(crowd(100), |times| 500 * usize::try_from(times).unwrap()));
    let seed = seed();
    let daemon = Mutex::new(Some(lan.daemon()));
    let containers: Vec<Container> = (0..ABREAST).map(|_| lan.container(&["eth0"])).collect();
    let (left, living) = (AtomicUsize::new(cycles), AtomicUsize::new(ABREAST));
    let (mut kills, refused) = (0, AtomicUsize::new(0));
    thread::scope(|scope| {
        for (number, container) in containers.iter().enumerate() {
            let (left, living, refused) = (&left, &living, &refused);
            scope.spawn(move || {
                let attachment = protocol.attachment(lan, container);
                let take = || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
                while take().is_ok() {
                    detach(&attachment, container);
                    let added = attachment.invocation("ADD", None).run();
                    match added.json.as_ref().filter(|_| added.status == Some(0)) {
                        Some(result) => configure(container, "eth0", result),
                        None => {
                            refused.fetch_add(1, Ordering::Relaxed);
                            detach(&attachment, container);
                        }
                    }
                }
                // Every third container has no lease in the end.
                if number % 3 == 0 {
                    detach(&attachment, container);
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
            wait_until("ADDs go on", || left.load(Ordering::Relaxed) <= ahead || living.load(Ordering::Relaxed) == 0);
            thread::sleep(Duration::from_millis(dice.below(40)));
            daemon.lock().unwrap().take().unwrap().kill();
            *daemon.lock().unwrap() = Some(lan.daemon());
            kills += 1;
        }
    });
    let refused = refused.into_inner();
    figure(&format!(
        "dhcp, {protocol:?}: {cycles} ADDs and DELs, {kills} daemons killed, {refused} ADDs failed; CNI_SEED={seed}"
    ));
    let mut held: Vec<String> = containers.iter().flat_map(|container| container.addresses("eth0")).collect();
    held.iter_mut().for_each(|address| *address = without_prefix(address));
    held.sort();
    wait_until("the server has leased what containers have", || lan.leased() == held);
    assert_eq!(recorded(lan), held);
    containers.iter().for_each(|container| detach(&protocol.attachment(lan, container), container));
    wait_until("the server has all addresses back", || lan.leased().is_empty());
    assert_eq!(recorded(lan), [""; 0]);
}

/// The plugin's calls in its ADD and its DEL, at the least: the release build makes 21.
const FLOOR: usize = 15;

/// One trial: the plugin is hit at a call, and then DEL succeeds and leaves no lease. Returns the
/// calls that the plugin made, and whether it came to the point.
fn attempt((protocol, lan): (Protocol, &Lan), container: &Container, verb: &str, plan: &Plan) -> (Vec<Hit>, bool) {
    let attachment = protocol.attachment(lan, container);
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
    wait_until("the server has all addresses back", || lan.leased().is_empty());
    container.ip(&["address flush dev eth0 scope global"]);
    (traced.all, traced.hit.is_some())
}

/// Tries a share of the plugin's calls, all of them in a soak run.
fn sweep(protocol: Protocol, verb: &str, acts: &[Act]) {
    require!(trace::supported());
    require!(probe::dnsmasq().map(drop));
    let lan = if protocol == Protocol::V4 { Lan::new(100, &[]) } else { Lan::dual(&[]) };
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let plan = |at, act| Plan { victim: "dhcp".to_owned(), at, act };
    let (mut dice, mut tried, mut all_points) = (Dice::new(seed()), 0, 0);
    for act in acts {
        // Each act has points of its own, because calls that cannot fail are not counted.
        let (all, _) = attempt((protocol, &lan), &container, verb, &plan(u64::MAX, *act));
        assert!(all.len() >= FLOOR, "only {} calls", all.len());
        let points: Vec<u64> = (1..).zip(&all).filter(|(_, hit)| !hit.starting).map(|(at, _)| at).collect();
        all_points += points.len();
        let step = if soak().is_some() { 1 } else { (points.len() as u64 / rounds(protocol.share(12) as u64)).max(1) };
        let first = dice.below(step) as usize;
        for at in points.iter().skip(first).step_by(step as usize) {
            tried += usize::from(attempt((protocol, &lan), &container, verb, &plan(*at, *act)).1);
        }
    }
    figure(&format!(
        "{acts:?} of dhcp, {protocol:?}, in {verb}: tried {tried} of {all_points} points, seed {}",
        seed()
    ));
    assert!(tried >= acts.len(), "only {tried} points were tried");
}

const KILL: [Act; 1] = [Act::Signal(Signal::SIGKILL)];
const FAIL: [Act; 3] = [Act::Fail(Errno::EPERM), Act::Fail(Errno::ENOMEM), Act::Signal(Signal::SIGTERM)];

#[test]
fn a_killed_add_leaves_no_lease_after_its_del() {
    sweep(Protocol::V4, "ADD", &KILL);
}

#[test]
fn a_killed_del_leaves_no_lease_after_the_next() {
    sweep(Protocol::V4, "DEL", &KILL);
}

#[test]
fn errors_during_add_leave_no_lease_after_its_del() {
    sweep(Protocol::V4, "ADD", &FAIL);
}

#[test]
fn errors_during_del_leave_no_lease_after_the_next() {
    sweep(Protocol::V4, "DEL", &FAIL);
}

#[test]
fn a_killed_ipv6_add_leaves_no_lease_after_its_del() {
    sweep(Protocol::V6, "ADD", &KILL);
}

#[test]
fn a_killed_ipv6_del_leaves_no_lease_after_the_next() {
    sweep(Protocol::V6, "DEL", &KILL);
}

#[test]
fn errors_during_an_ipv6_add_leave_no_lease_after_its_del() {
    sweep(Protocol::V6, "ADD", &FAIL);
}

#[test]
fn errors_during_an_ipv6_del_leave_no_lease_after_the_next() {
    sweep(Protocol::V6, "DEL", &FAIL);
}
