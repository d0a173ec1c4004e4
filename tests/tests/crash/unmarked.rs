//! A veth between its creation and its alias, with an existing container namespace: GC removes it
//! if its ADD was killed, and keeps it if its ADD continues.

use std::sync::mpsc::channel;
use std::thread;

use cni_testkit::require;
use cni_testkit::trace::{self, Act, Plan};
use conformance::measure::soak;
use nix::sys::signal::Signal;

use crate::chain::Chain;
use crate::sweep::{self, Sweep, Verb, Way};
use crate::world::{Backend, World};

#[test]
fn gc_removes_what_a_killed_add_left_in_a_living_container() {
    require!(trace::supported());
    require!(Backend::Nftables.probe());
    let act = Act::Signal(Signal::SIGKILL);
    let sweep = Sweep { backend: Backend::Nftables, verb: Verb::Add, act, share: 0, floor: 27 };
    // A kill between two kernel requests has the same effect as one at the next request, so only
    // soak runs try every call.
    let call = if soak().is_some() { None } else { Some("sendto") };
    sweep::none(&sweep.at_each(call, Way::GcAlive, &["bridge", "bandwidth"]));
}

#[test]
fn gc_beside_an_add_takes_nothing_from_it() {
    require!(trace::supported());
    require!(Backend::Nftables.probe());
    let world = World::new(Backend::Nftables);
    let plan = |program: &str| Plan { victim: program.into(), at: u64::MAX, act: Act::Signal(Signal::SIGKILL) };
    let (mut waited, mut requests, mut at) = (0, 1, 0);
    while at < requests {
        at += 1;
        let container = world.node.container();
        world.live.lock().unwrap().insert(container.id.clone());
        let chain = Chain::new(&world, &container);
        let mut seen = 0;
        thread::scope(|scope| {
            let mut collector = None;
            // GC begins before this request. ADD continues when GC waits for its second look or has
            // ended.
            let add = chain.call("bridge", "ADD", None).watched(&plan("bridge"), |hit| {
                seen += u64::from(hit.call == "sendto");
                if seen < at || collector.is_some() {
                    return;
                }
                let ((tell, waits), gc, plan) = (channel(), chain.call("bridge", "GC", None), plan("bridge"));
                collector = Some(scope.spawn(move || {
                    // GC waits for its second look between listing the links and starting IPAM.
                    let (mut listed, mut delegates) = (false, false);
                    let gc = gc.watched(&plan, |hit| {
                        listed |= hit.call == "sendto";
                        delegates |= ["clone", "fork"].iter().any(|call| hit.call.contains(call));
                        let _ = (listed && !delegates && hit.call.contains("poll")).then(|| tell.send(true));
                    });
                    let _ = tell.send(false);
                    gc
                }));
                waited += u64::from(waits.recv().unwrap());
            });
            let added = add.outcome.success();
            // Runs differ by one request, so the last one does not always occur.
            if let Some(collector) = collector {
                collector.join().unwrap().outcome.success();
            }
            chain.call("bridge", "CHECK", Some(&added)).run().success();
            chain.call("bridge", "DEL", Some(&added)).run().success();
        });
        requests = seen;
        world.live.lock().unwrap().remove(&container.id);
        assert_eq!(world.left(), Vec::<String>::new());
    }
    // Kernels before 6.2 do not return the link they created: ADD looks it up before it sets the
    // alias.
    assert!(requests > 10 && [1, 2].contains(&waited), "{requests} requests, GC waited {waited} times");
    world.close();
}
