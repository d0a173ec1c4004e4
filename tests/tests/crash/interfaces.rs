//! ptp, the plugins that create a link in the container, flannel, whose delegate here is ptp, and
//! slaac, as the IPAM plugin of macvlan, are killed, or fail, at each call of ADD and DEL.
//!
//! A failed ADD leaves nothing. After a killed ADD, and after a killed or failed DEL, the next DEL
//! leaves nothing; it gets no result.

use std::fs;
use std::path::PathBuf;

use cni_testkit::probe::{self, Probed};
use cni_testkit::trace::{self, Act, Hit, Plan, Traced};
use cni_testkit::{Attachment, Container, Node, require, rounds};
use conformance::measure::{Dice, figure, seed, soak};
use conformance::{VERSION, ipam, patched, router, uplink};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// The points that an ordinary run tries for each plugin, verb and act, on a machine that is not
/// slow.
const SHARE: u64 = 8;

/// The points of slaac, whose ADD takes two seconds.
const SHARE_OF_SLAAC: u64 = 4;

/// Returns the minimum number of calls that a plugin makes. flannel's own are few in DEL, and slaac
/// has nothing to do there.
fn floor(plugin: &str, verb: &str) -> usize {
    match (plugin, verb) {
        ("slaac", "DEL") => 5,
        ("slaac", _) | ("flannel", "DEL") => 20,
        // Its calls depend on how many of its reads the delegate's answer takes.
        ("flannel", _) => 40,
        _ => 50,
    }
}

fn config(node: &Node, plugin: &str) -> Value {
    let base = json!({"cniVersion": VERSION, "name": "net1", "type": plugin, "master": "eth0",
                      "ipam": ipam(node, &["10.1.0.0/24", "fd00:1::/64"])});
    match plugin {
        // The node reports remaining rules when it is dropped.
        "ptp" => patched(base, json!({"ipMasq": true, "ipMasqBackend": "nftables"})),
        "vlan" => patched(base, json!({"vlanId": 5})),
        "flannel" => {
            let env =
                "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
            let file = node.file("subnet.env", env);
            patched(base, json!({"subnetFile": file, "dataDir": stored(node), "delegate": {"type": "ptp"}}))
        }
        "slaac" => {
            let base = patched(base, json!({"type": "macvlan", "ipam": null}));
            patched(base, json!({"ipam": {"type": "slaac", "timeout": 50}}))
        }
        _ => base,
    }
}

/// The folder of flannel's stored configurations.
fn stored(node: &Node) -> PathBuf {
    node.dir().join("flannel")
}

/// Returns the leftovers of a trial, as lines.
fn left(node: &Node, container: &Container) -> Vec<String> {
    let names = |links: Value| -> Vec<String> {
        let links = links.as_array().cloned().unwrap_or_default();
        let names = links.iter().filter_map(|link| link["ifname"].as_str());
        names.filter(|name| *name != "lo").map(str::to_owned).collect()
    };
    let list = ["ip", "-j", "link", "show"];
    let inside = names(container.json(&list)).into_iter().map(|name| format!("inside: {name}"));
    let outside = names(node.json(&list)).into_iter().filter(|name| name != "eth0");
    let reserved = node.reservations("net1").into_iter().map(|(address, _)| format!("reserved: {address}"));
    let stored = fs::read_dir(stored(node)).into_iter().flatten().flatten();
    let stored = stored.map(|file| format!("stored: {}", file.path().display()));
    inside.chain(outside.map(|name| format!("on the host: {name}"))).chain(reserved).chain(stored).collect()
}

/// Runs one trial.
fn attempt(node: &Node, plugin: &str, verb: &str, plan: &Plan) -> Traced {
    let container = node.container();
    let attachment = Attachment::new(node, &container, config(node, plugin));
    let result = (verb == "DEL").then(|| attachment.add().success());
    let traced = attachment.invocation(verb, result.as_ref()).traced(plan);
    let story = || format!("{:?} of {plugin} at {} of {verb}, {:?}", plan.act, plan.at, traced.hit);
    if verb == "ADD" && traced.outcome.status.is_some_and(|status| status != 0) {
        let left = left(node, &container);
        assert!(left.is_empty(), "{}: a failed ADD left {left:?}\n{}", story(), traced.outcome.report());
    } else if let ("ADD", Some(0), Some(result)) = (verb, traced.outcome.status, &traced.outcome.json) {
        attachment.check(result).success();
    }
    attachment.del().success();
    let left = left(node, &container);
    assert!(left.is_empty(), "{}: DEL left {left:?}\n{}", story(), traced.outcome.report());
    traced
}

/// Tries a share of the plugin's calls that `is_meant`; in a soak run all of them, and those of all
/// programs that it starts.
fn sweep(plugin: &str, probed: Probed, acts: &[Act], is_meant: impl Fn(&Hit) -> bool) {
    require!(trace::supported());
    require!(probed);
    let node = Node::new();
    let outside = uplink(&node, "eth0");
    let is_slaac = plugin == "slaac";
    let _radvd = is_slaac.then(|| router::radvd(&node, &outside, "prefix 2001:db8:1::/64 { };"));
    let share = if is_slaac { SHARE_OF_SLAAC } else { SHARE };
    let (mut dice, mut tried) = (Dice::new(seed()), 0);
    let mut all_points = 0;
    for verb in ["ADD", "DEL"] {
        // Each act has points of its own, because calls that cannot fail are not counted.
        for act in acts {
            let plan = |victim: &str, at| Plan { victim: victim.to_owned(), at, act: *act };
            let mut victims = vec![plugin.to_owned()];
            if soak().is_some() {
                let programs = attempt(&node, plugin, verb, &plan(plugin, u64::MAX)).programs;
                victims.extend(programs.into_iter().filter(|program| program != plugin));
            }
            for victim in victims {
                let all = attempt(&node, plugin, verb, &plan(&victim, u64::MAX)).all;
                assert!(
                    victim != plugin || all.len() >= floor(plugin, verb),
                    "{plugin} made only {} calls in {verb}",
                    all.len()
                );
                let points: Vec<u64> = (1..).zip(&all).filter(|(_, hit)| is_meant(hit)).map(|(at, _)| at).collect();
                all_points += points.len();
                let step = if soak().is_some() { 1 } else { (points.len() as u64 / rounds(share)).max(1) };
                let first = dice.below(step) as usize;
                for at in points.iter().skip(first).step_by(step as usize) {
                    tried += u64::from(attempt(&node, plugin, verb, &plan(&victim, *at)).hit.is_some());
                }
            }
        }
    }
    figure(&format!("{acts:?} of {plugin}: tried {tried} points of {all_points}, seed {}", seed()));
    assert!(tried >= acts.len() as u64, "only {tried} points were tried");
}

/// Expands to one test per plugin.
macro_rules! for_each_plugin {
    ($($plugin:ident: $probed:expr;)*) => {
        $(mod $plugin {
            use super::*;

            /// A kill between two kernel requests has the same effect as one at the next request,
            /// so only soak runs try every call.
            #[test]
            fn is_killed() {
                let request = |hit: &Hit| soak().is_some() || hit.call == "sendto";
                sweep(stringify!($plugin), $probed, &[Act::Signal(Signal::SIGKILL)], request);
            }

            #[test]
            fn meets_an_error() {
                let acts = [Act::Fail(Errno::EPERM), Act::Signal(Signal::SIGTERM)];
                sweep(stringify!($plugin), $probed, &acts, |_| true);
            }

            /// The kernel has handled the request, but its answer is lost.
            #[test]
            fn loses_an_answer() {
                let lost = |hit: &Hit| hit.call == "recvfrom" && !hit.starting;
                sweep(stringify!($plugin), $probed, &[Act::Fail(Errno::ENOBUFS)], lost);
            }
        })*
    };
}

for_each_plugin! {
    dummy: probe::dummy();
    ipvlan: probe::ipvlan();
    macvlan: Ok(());
    ptp: probe::nft();
    slaac: probe::radvd().map(drop);
    vlan: probe::vlan_links();
}

/// flannel itself sends the kernel no requests.
mod flannel {
    use super::*;

    #[test]
    fn is_killed() {
        sweep("flannel", Ok(()), &[Act::Signal(Signal::SIGKILL)], |hit| soak().is_some() || !hit.starting);
    }

    #[test]
    fn meets_an_error() {
        sweep("flannel", Ok(()), &[Act::Fail(Errno::EPERM), Act::Signal(Signal::SIGTERM)], |_| true);
    }
}
