//! Random schedules of several nodes whose requests are lost, late or answered late.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;

use crate::testing::{Fault, TestNode, memory};

/// One event of a schedule.
#[derive(Debug, Clone)]
enum Event {
    /// A node adds a container with an address of a family.
    Add {
        node: usize,
        set: usize,
    },
    /// A node deletes one of its containers.
    Del {
        node: usize,
        choice: usize,
    },
    Gc {
        node: usize,
    },
    /// A node's sidecar is deleted.
    Wipe {
        node: usize,
    },
    /// A node boots, and an operator has deleted its claims.
    Boot {
        node: usize,
    },
    /// Minutes pass.
    Wait {
        minutes: u64,
    },
    /// A late request takes effect.
    Deliver {
        choice: usize,
    },
    /// The faults of the next requests.
    Faults(Vec<Fault>),
}

fn event(nodes: usize) -> impl Strategy<Value = Event> {
    let node = 0..nodes;
    let fault = prop::sample::select(vec![Fault::None, Fault::Lost, Fault::Unanswered, Fault::Late, Fault::Late]);
    prop_oneof![
        6 => (node.clone(), 0..2_usize).prop_map(|(node, set)| Event::Add { node, set }),
        6 => (node.clone(), any::<usize>()).prop_map(|(node, choice)| Event::Del { node, choice }),
        1 => node.clone().prop_map(|node| Event::Gc { node }),
        1 => node.clone().prop_map(|node| Event::Wipe { node }),
        1 => node.prop_map(|node| Event::Boot { node }),
        1 => (1..40_u64).prop_map(|minutes| Event::Wait { minutes }),
        3 => any::<usize>().prop_map(|choice| Event::Deliver { choice }),
        3 => prop::collection::vec(fault, 1..12).prop_map(Event::Faults),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_schedule_gives_an_address_to_two_nodes(
        (count, events) in (3..=5_usize).prop_flat_map(|count| (Just(count), prop::collection::vec(event(count), 1..120)))
    ) {
        let memory = memory();
        let subnets = ["10.61.0.0/28", "fd00:61::/124"];
        let new = |n: usize| TestNode { block_size: Some(2), ..TestNode::new(&memory, &format!("node{n}"), &subnets) };
        let mut nodes: Vec<TestNode> = (0..count).map(new).collect();
        let mut owners: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for event in events {
            match event {
                Event::Add { node, set } => {
                    if let Ok(address) = nodes[node].add_in(set, None) {
                        prop_assert_eq!(owners.insert(address, node), None, "{}", address);
                    }
                }
                Event::Del { node, choice } => {
                    let own: Vec<IpAddr> = nodes[node].reserved.borrow().iter().copied().collect();
                    if !own.is_empty() {
                        let address = own[choice % own.len()];
                        owners.remove(&address);
                        nodes[node].del(address);
                    }
                }
                Event::Gc { node } => nodes[node].gc(),
                Event::Wipe { node } => drop(std::fs::remove_dir_all(nodes[node].sidecar())),
                Event::Boot { node } => {
                    nodes[node].boot();
                    owners.retain(|_, owner| *owner != node);
                    let name = nodes[node].name.clone();
                    memory.borrow_mut().claims.retain(|_, (claim, _)| claim.node != name);
                }
                Event::Wait { minutes } => nodes.iter_mut().for_each(|node| node.host.uptime += 60 * minutes),
                Event::Deliver { choice } => drop(memory.borrow_mut().deliver(choice)),
                Event::Faults(faults) => memory.borrow_mut().faults = faults.into(),
            }
            // Each reserved address is in a claim of its node.
            for (address, owner) in &owners {
                let has_claim = memory.borrow().claims.values().any(|(claim, _)| {
                    claim.node == nodes[*owner].name && claim.first <= *address && *address <= claim.last
                });
                prop_assert!(has_claim, "{} of node{}", address, owner);
            }
        }
        // When all requests are answered again and no container is left, all blocks become free
        // but one of each pool and node.
        memory.borrow_mut().faults.clear();
        while memory.borrow_mut().deliver(0) {}
        for node in &mut nodes {
            node.reserved.borrow_mut().clear();
            node.host.uptime += 3600;
            for set in 0..2 {
                let address = node.add_in(set, None);
                if let Ok(address) = address {
                    node.del(address);
                }
            }
            node.gc();
        }
        for node in &nodes {
            prop_assert!(memory.borrow().count(&node.name) <= 2);
        }
    }
}
