//! The verbs on nodes whose store answers: which blocks are claimed and given back, and which calls
//! send requests.

use cni_testkit::require;
use conformance::cluster::{Cluster, ranges};
use conformance::{address, addresses, patched};
use serde_json::json;

use super::{add, newest, supported};

/// The addresses of claims, without the nodes.
fn blocks(cluster: &Cluster) -> Vec<String> {
    cluster.claims().into_iter().map(|(first, _)| first).collect()
}

#[test]
fn only_an_add_that_needs_a_block_sends_requests() {
    require!(supported());
    let cluster = Cluster::new(1);
    let config = patched(cluster.network(0, &ranges(&["10.1.0.0/24"])), json!({"ipam": {"blockSize": 16}}));
    let (_a, first, outcome) = add(&cluster, 0, &config);
    let result = outcome.success();
    assert_eq!(cluster.claims().len(), 1);
    let requests = cluster.server.take_requests();
    let created = requests.iter().filter(|request| request.starts_with("POST") && request.ends_with("ipblocks"));
    assert_eq!(created.count(), 1, "{requests:?}");

    let (_b, second, outcome) = add(&cluster, 0, &config);
    outcome.success();
    first.check(&result).success();
    newest(&second).status().success();
    first.del_with(&result).success();
    newest(&second).gc(&[(&second.id, &second.ifname)]).success();
    second.del().success();
    assert_eq!(cluster.server.take_requests(), [""; 0], "the last empty block of a pool stays");
    assert_eq!(cluster.claims().len(), 1);
}

#[test]
fn the_result_is_that_of_host_local() {
    require!(supported());
    let cluster = Cluster::new(1);
    let network = cluster.network(0, &json!([[{"subnet": "10.1.0.0/24", "gateway": "10.1.0.9"}]]));
    let keys = json!({"ipam": {"routes": [{"dst": "0.0.0.0/0"}], "blockSize": 256}});
    let (_c, attachment, outcome) = add(&cluster, 0, &patched(network, keys));
    let ips = json!([{"address": "10.1.0.1/24", "gateway": "10.1.0.9"}]);
    let expected = json!({"cniVersion": "1.0.0", "ips": ips, "routes": [{"dst": "0.0.0.0/0"}]});
    assert_eq!(outcome.success(), expected);
    assert_eq!(cluster.nodes[0].reservations("net1")[0].1, format!("{}\r\neth0", attachment.id));
    attachment.del().success();
}

#[test]
fn a_block_of_one_address_goes_back_at_its_del() {
    require!(supported());
    let cluster = Cluster::new(1);
    let config = patched(cluster.network(0, &ranges(&["10.1.0.0/24"])), json!({"ipam": {"blockSize": 1}}));
    let (_a, first, outcome) = add(&cluster, 0, &config);
    let kept = address(&outcome.success());
    let (_b, second, outcome) = add(&cluster, 0, &config);
    outcome.success();
    assert_eq!(cluster.claims().len(), 2);
    second.del().success();
    assert_eq!(blocks(&cluster), [kept]);
    first.del().success();
    assert_eq!(cluster.claims(), []);
}

#[test]
fn an_emptied_block_goes_back_if_another_is_empty() {
    require!(supported());
    let cluster = Cluster::new(1);
    let config = patched(cluster.network(0, &ranges(&["10.1.0.0/24"])), json!({"ipam": {"blockSize": 2}}));
    let all: Vec<_> = (0..6).map(|_| add(&cluster, 0, &config)).collect();
    all.iter().for_each(|(.., outcome)| drop(outcome.success()));
    let claimed = cluster.claims().len();
    assert!(claimed >= 3, "{claimed}");
    newest(&all[0].1).gc(&[]).success();
    assert_eq!(cluster.claims().len(), 1);
}

#[test]
fn two_nodes_get_different_addresses() {
    require!(supported());
    let cluster = Cluster::new(2);
    let mut all = Vec::new();
    for round in 0..20 {
        let node = round % 2;
        all.push(add(&cluster, node, &cluster.network(node, &ranges(&["10.1.0.0/24", "fd00:1::/64"]))));
    }
    let mut given: Vec<String> = all.iter().flat_map(|(.., outcome)| addresses(&outcome.success())).collect();
    given.sort();
    given.dedup();
    assert_eq!(given.len(), 40, "{given:?}");
    for (_, attachment, _) in all {
        attachment.del().success();
    }
}

#[test]
fn every_address_of_a_small_network_is_used() {
    require!(supported());
    let cluster = Cluster::new(3);
    let network = |node| cluster.network(node, &ranges(&["10.1.0.0/29"]));
    let all: Vec<_> = [0, 1, 2, 0, 1].into_iter().map(|node| add(&cluster, node, &network(node))).collect();
    let mut given: Vec<String> = all.iter().flat_map(|(.., outcome)| addresses(&outcome.success())).collect();
    given.sort();
    assert_eq!(given, ["10.1.0.2/29", "10.1.0.3/29", "10.1.0.4/29", "10.1.0.5/29", "10.1.0.6/29"]);
    let text = "failed to allocate for range 0: no IP addresses available in range set: 10.1.0.1-10.1.0.6";
    let (_c, sixth, outcome) = add(&cluster, 2, &network(2));
    let failure = outcome.fails_with(11, text);
    assert!(failure.msg.contains("node0") && failure.msg.contains("node1"), "{failure:?}");
    // What one node gives back, another one gets.
    all[0].1.del().success();
    assert_eq!(address(&sixth.add().success()), address(&all[0].2.success()));
    sixth.del().success();
    all.iter().for_each(|(_, attachment, _)| drop(attachment.del().success()));
    assert_eq!(cluster.claims(), []);
}

#[test]
fn a_set_with_ranges_of_two_subnets_uses_both_pools() {
    require!(supported());
    let cluster = Cluster::new(2);
    let set = json!([[{"subnet": "10.1.0.0/30"}, {"subnet": "10.2.0.0/29"}]]);
    let all: Vec<_> = (0..6).map(|number| add(&cluster, number % 2, &cluster.network(number % 2, &set))).collect();
    let mut given: Vec<String> = all.iter().flat_map(|(.., outcome)| addresses(&outcome.success())).collect();
    given.sort();
    let expected = ["10.1.0.2/30", "10.2.0.2/29", "10.2.0.3/29", "10.2.0.4/29", "10.2.0.5/29", "10.2.0.6/29"];
    assert_eq!(given, expected);
    let pools: Vec<String> = cluster.server.specs("ippools").into_keys().collect();
    assert_eq!(pools, ["10.1.0.0-30", "10.2.0.0-29"]);
    all.iter().for_each(|(_, attachment, _)| drop(attachment.del().success()));
}

#[test]
fn a_requested_address_claims_its_block_or_names_the_holder() {
    require!(supported());
    let cluster = Cluster::new(2);
    let request = |node: usize, address: &str| {
        let keys = json!({"ipam": {"blockSize": 8}, "runtimeConfig": {"ips": [address]}});
        add(&cluster, node, &patched(cluster.network(node, &ranges(&["10.1.0.0/24"])), keys))
    };
    let (_a, first, outcome) = request(0, "10.1.0.77");
    assert_eq!(addresses(&outcome.success()), ["10.1.0.77/24"]);
    assert_eq!(cluster.claims(), [("10.1.0.72".to_owned(), "node0".to_owned())]);
    let text = "failed to allocate for range 0: requested IP address 10.1.0.78 is not available in range set \
                10.1.0.1-10.1.0.254: ";
    let failure = request(1, "10.1.0.78").2.fails_with(102, text);
    assert!(failure.msg.contains("node0") && failure.msg.contains("net1"), "{failure:?}");

    let reserved = json!({"pool": "10.1.0.0-24", "first": "10.1.0.80", "last": "10.1.0.87", "node": "", "network": "",
                          "machine": "", "nonce": ""});
    cluster.server.write("ipblocks", "10.1.0.0-24.10.1.0.80", &reserved);
    let failure = request(1, "10.1.0.81").2.fails_with(102, "failed to allocate for range 0: requested IP address");
    assert!(failure.msg.contains("reserved"), "{failure:?}");
    let text = "failed to allocate for range 0: requested ip 10.1.0.1 is subnet's gateway";
    request(1, "10.1.0.1").2.fails_with(7, text);
    first.del().success();
}

#[test]
fn the_block_size_is_fixed_when_the_pool_is_first_used() {
    require!(supported());
    let cluster = Cluster::new(2);
    let network = |node, keys| patched(cluster.network(node, &ranges(&["10.1.0.0/24"])), json!({ "ipam": keys }));
    let (_a, first, outcome) = add(&cluster, 0, &network(0, json!({"blockSize": 8})));
    outcome.success();
    for node in [0, 1] {
        let (.., outcome) = add(&cluster, node, &network(node, json!({"blockSize": 16})));
        let failure = outcome.failure();
        assert!(failure.code == Some(7) && failure.msg.contains("16") && failure.msg.contains('8'), "{failure:?}");
    }
    // Without the key, the pool's own size applies. Another layer 2 network has another pool.
    let (_b, second, outcome) = add(&cluster, 1, &network(1, json!({})));
    outcome.success();
    let other = patched(network(1, json!({"blockSize": 16, "layer2": "vlan20"})), json!({"name": "net2"}));
    let (_c, third, outcome) = add(&cluster, 1, &other);
    outcome.success();
    let pools: Vec<String> = cluster.server.specs("ippools").into_keys().collect();
    assert_eq!(pools, ["10.1.0.0-24", "vlan20.10.1.0.0-24"]);
    for attachment in [first, second, third] {
        attachment.del().success();
    }
}

#[test]
fn networks_of_one_subnet_share_the_pool() {
    require!(supported());
    let cluster = Cluster::new(1);
    let network = |name: &str| patched(cluster.network(0, &ranges(&["10.1.0.0/29"])), json!({ "name": name }));
    let all: Vec<_> = ["a", "b", "a", "b", "a"].map(|name| add(&cluster, 0, &network(name))).into();
    let mut given: Vec<String> = all.iter().flat_map(|(.., outcome)| addresses(&outcome.success())).collect();
    given.sort();
    given.dedup();
    assert_eq!(given.len(), 5, "{given:?}");
    all.iter().for_each(|(_, attachment, _)| drop(attachment.del().success()));
}

#[test]
fn with_reuse_a_second_add_needs_no_store() {
    require!(supported());
    let cluster = Cluster::new(1);
    let config = patched(cluster.network(0, &ranges(&["10.1.0.0/24"])), json!({"ipam": {"reuse": true}}));
    let (_c, attachment, outcome) = add(&cluster, 0, &config);
    let result = outcome.success();
    cluster.server.take_requests();
    assert_eq!(attachment.add().success(), result);
    assert_eq!(cluster.server.take_requests(), [""; 0]);
    attachment.del().success();
}

#[test]
fn an_unread_result_leaves_no_reservation() {
    require!(supported());
    let cluster = Cluster::new(1);
    let container = cluster.nodes[0].container();
    let config = cluster.network(0, &ranges(&["10.1.0.0/24"]));
    let attachment = cni_testkit::Attachment::new(&cluster.nodes[0], &container, config);
    assert_eq!(attachment.invocation("ADD", None).with_closed_stdout().run().status, Some(1));
    assert_eq!(cluster.nodes[0].reservations("net1"), []);
    assert_eq!(cluster.claims().len(), 1, "a rollback releases addresses, never blocks");
}

#[test]
fn a_changed_layer2_uses_no_block_of_the_old_pool() {
    require!(supported());
    let cluster = Cluster::new(1);
    let network = |layer2: &str| {
        patched(cluster.network(0, &ranges(&["10.1.0.0/24"])), json!({"ipam": {"layer2": layer2, "blockSize": 8}}))
    };
    let (_a, first, outcome) = add(&cluster, 0, &network("a"));
    outcome.success();
    let (_b, second, outcome) = add(&cluster, 0, &network("b"));
    outcome.success();
    let pools: Vec<String> = cluster.server.specs("ipblocks").values().map(|spec| spec["pool"].to_string()).collect();
    assert_eq!(pools, [r#""a.10.1.0.0-24""#, r#""b.10.1.0.0-24""#]);
    first.del().success();
    second.del().success();
}
