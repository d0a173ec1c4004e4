//! cluster-local with real members of etcd: nodes are data directories, because only one namespace
//! reaches the members.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use cni_testkit::cluster::Etcd;
use cni_testkit::{Ended, Node, Outcome, patience, probe, require, rounds};
use conformance::cluster::ranges;
use conformance::{VERSION, address, patched};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::supported;

const NODES: usize = 10;

/// Disturbs the members for some seconds.
type Disturb = fn(&mut Etcd<'_>);

const DISTURBANCES: [Disturb; 4] = [
    |etcd| {
        let leader = etcd.leader();
        etcd.kill(leader);
        sleep(Duration::from_secs(2));
        etcd.start_member(leader);
    },
    |etcd| {
        let leader = etcd.leader();
        etcd.signal(leader, Signal::SIGSTOP);
        sleep(Duration::from_secs(6));
        etcd.signal(leader, Signal::SIGCONT);
    },
    |etcd| {
        let leader = etcd.leader();
        etcd.cut(leader);
        sleep(Duration::from_secs(3));
        etcd.join(leader);
    },
    |etcd| {
        (0..3).for_each(|member| etcd.kill(member));
        sleep(Duration::from_secs(1));
        (0..3).for_each(|member| etcd.start_member(member));
    },
];

/// Returns the blocks in the ledgers of all nodes, by their first addresses: the node and the
/// version. All of them must be held.
fn held(networks: &[Value]) -> BTreeMap<String, (String, String)> {
    let mut held = BTreeMap::new();
    for network in networks {
        let ledger = format!("{}/.cni/net1/blocks", network["ipam"]["dataDir"].as_str().unwrap());
        let ledger: Value = serde_json::from_slice(&std::fs::read(ledger).unwrap()).unwrap();
        for entry in ledger["entries"].as_array().unwrap() {
            let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{entry}")).to_owned();
            let owner = (text(&ledger["node"]), text(&entry["state"]["held"]));
            let earlier = held.insert(text(&entry["block"]["first"]), owner);
            assert_eq!(earlier, None, "two nodes have {entry}");
        }
    }
    held
}

/// Returns the claims in etcd in the same form.
fn claimed(etcd: &Etcd<'_>) -> BTreeMap<String, (String, String)> {
    let records = etcd.control(&["get", "--prefix", "/cni/blocks/", "-w", "fields"]);
    let claim = |record: &str| {
        let field = |name: &str| {
            let line = record.lines().find_map(|line| line.strip_prefix(&format!("\"{name}\" : ")));
            line.unwrap_or_else(|| panic!("{record}")).to_owned()
        };
        let value: String = serde_json::from_str(&field("Value")).unwrap();
        let value: Value = serde_json::from_str(&value).unwrap();
        let text = |key: &str| value[key].as_str().unwrap().to_owned();
        (text("first"), (text("node"), field("ModRevision")))
    };
    let records = records.split("\"Key\" : ").skip(1);
    records.map(claim).collect()
}

#[test]
fn no_claim_is_lost_or_made_twice_while_etcd_fails() {
    require!(supported());
    require!(probe::etcd());
    let node = Node::new();
    let container = node.container();
    let mut etcd = Etcd::start(&node, 3);
    let network = |number: usize| {
        // Shorter than an election, so that outcomes are unknown.
        let file = patched(etcd.node_file(&format!("node{number}")), json!({"timeout": 1}));
        let file = node.file(&format!("node{number}.json"), file.to_string());
        let ipam = json!({"type": "cluster-local", "dataDir": node.dir().join(format!("data{number}")),
                          "ranges": ranges(&["10.61.0.0/21"]), "blockSize": 1, "clusterConf": file});
        json!({"cniVersion": VERSION, "name": "net1", "type": "cluster-local", "ipam": ipam})
    };
    let networks: Vec<Value> = (0..NODES).map(network).collect();
    let call = |verb: &str, turn: usize| {
        let call = node.plugin("cluster-local").command(verb).id(&format!("c{turn}")).ifname("eth0");
        call.netns(container.netns()).bad_config(&networks[turn % NODES]).run()
    };
    let count = rounds(1500) as usize;
    let give_up = Instant::now() + patience(Duration::from_secs(180));
    let (ended, done, failed) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let addresses: Mutex<BTreeSet<String>> = Mutex::default();
    // Adds every tenth container, as the runtime of one node does.
    let add_all = |number: usize| {
        for turn in (number..count).step_by(NODES) {
            let result = loop {
                let outcome: Outcome = call("ADD", turn);
                if outcome.status == Some(0) {
                    break outcome.success();
                }
                // During an election.
                assert_eq!(outcome.failure().code, Some(11), "{}", outcome.report());
                assert!(Instant::now() < give_up && !ended.load(Ordering::Relaxed), "{}", outcome.report());
                failed.fetch_add(1, Ordering::Relaxed);
            };
            assert!(addresses.lock().unwrap().insert(address(&result)), "{result} twice");
            done.fetch_add(1, Ordering::Relaxed);
        }
    };
    let begin = Instant::now();
    scope(|scope| {
        let add_all = &add_all;
        let nodes: Vec<_> = (0..NODES).map(|number| scope.spawn(move || add_all(number))).collect();
        let over = Ended(&ended);
        for (number, disturb) in DISTURBANCES.iter().enumerate() {
            while done.load(Ordering::Relaxed) < count * (number + 1) / 5 {
                assert!(Instant::now() < give_up, "{done:?} claims");
                sleep(Duration::from_millis(10));
            }
            disturb(&mut etcd);
        }
        nodes.into_iter().for_each(|node| node.join().unwrap());
        drop(over);
    });
    let (seconds, failed) = (begin.elapsed().as_secs_f32(), failed.into_inner());
    conformance::measure::figure(&format!("{count} claims in a failing etcd: {seconds:.1} s, {failed} ADDs repeated"));
    etcd.wait();
    let held = held(&networks);
    assert_eq!(claimed(&etcd), held);
    assert!(addresses.into_inner().unwrap().iter().all(|address| held.contains_key(address)));
    for turn in 0..NODES.min(count) {
        call("DEL", turn).success();
    }
    assert_eq!(claimed(&etcd).len(), held.len() - NODES.min(count));
}
