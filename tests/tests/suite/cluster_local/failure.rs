//! What follows if the store, the node's files or the node itself fail.

use std::fs;
use std::time::Duration;

use cni_testkit::cluster::Fault;
use cni_testkit::require;
use conformance::cluster::{Cluster, ranges};
use conformance::{address, patched};
use serde_json::{Value, json};

use super::{add, newest, supported};

/// A network of one node with blocks of four addresses, and a short time for the store.
fn network(cluster: &Cluster, node: usize) -> Value {
    patched(cluster.network(node, &ranges(&["10.1.0.0/24"])), json!({"ipam": {"blockSize": 4}}))
}

/// Refuses every request, as a server without a network.
fn cut(cluster: &Cluster) {
    cluster.server.decide(|_| Some(Fault::LoseRequest));
}

#[test]
fn without_the_store_held_blocks_work() {
    require!(supported());
    let cluster = Cluster::new(1);
    let config = network(&cluster, 0);
    let (_a, first, outcome) = add(&cluster, 0, &config);
    let result = outcome.success();
    cut(&cluster);
    // A block of four addresses has at most two more here, if it has the gateway.
    let (_b, second, outcome) = add(&cluster, 0, &config);
    outcome.success();
    first.check(&result).success();
    newest(&first).status().success();
    newest(&first).gc(&[(&first.id, "eth0"), (&second.id, "eth0")]).success();
    let mut more = Vec::new();
    let failure = loop {
        let (container, attachment, outcome) = add(&cluster, 0, &config);
        if outcome.status != Some(0) {
            break outcome.failure();
        }
        more.push((container, attachment));
    };
    assert_eq!(failure.code, Some(11), "{failure:?}");
    assert!(more.len() <= 2, "{}", more.len());
    for (_, attachment) in &more {
        attachment.del().success();
    }
    second.del().success();
    first.del().success();
}

#[test]
fn a_refusal_is_code_103_and_held_blocks_work() {
    require!(supported());
    let cluster = Cluster::new(1);
    let config = network(&cluster, 0);
    let (_a, first, outcome) = add(&cluster, 0, &config);
    outcome.success();
    cluster.server.uninstall();
    let (_b, second, outcome) = add(&cluster, 0, &config);
    outcome.success();
    let other = patched(config, json!({"ipam": {"layer2": "other"}, "name": "net2"}));
    let failure = add(&cluster, 0, &other).2.failure();
    assert_eq!(failure.code, Some(103), "{failure:?}");
    second.del().success();
    first.del().success();
}

#[test]
fn a_lost_answer_loses_no_block() {
    require!(supported());
    let cluster = Cluster::new(1);
    let config = patched(network(&cluster, 0), json!({"ipam": {"blockSize": 1}}));
    let mut count = 0;
    cluster.server.decide(move |request| {
        count += u32::from(!request.starts_with("GET"));
        (!request.starts_with("GET") && count % 3 == 1).then_some(Fault::LoseAnswer)
    });
    let all: Vec<_> = (0..4).map(|_| add(&cluster, 0, &config)).collect();
    all.iter().for_each(|(.., outcome)| drop(outcome.success()));
    assert_eq!(cluster.claims().len(), 4);
    cluster.server.decide(|_| None);
    all.iter().for_each(|(_, attachment, _)| drop(attachment.del().success()));
    assert_eq!(cluster.claims(), []);
}

#[test]
fn a_deleted_sidecar_loses_no_running_container() {
    require!(supported());
    let cluster = Cluster::new(2);
    let (_a, first, outcome) = add(&cluster, 0, &network(&cluster, 0));
    let running = address(&outcome.success());
    fs::remove_dir_all(cluster.nodes[0].data_dir().join(".cni")).unwrap();
    let claimed = cluster.claims();
    let (_b, second, outcome) = add(&cluster, 0, &network(&cluster, 0));
    assert_ne!(address(&outcome.success()), running);
    assert_eq!(cluster.claims(), claimed, "its claim is adopted");
    // Without a ledger the store must answer.
    fs::remove_dir_all(cluster.nodes[0].data_dir().join(".cni")).unwrap();
    cut(&cluster);
    let failure = add(&cluster, 0, &network(&cluster, 0)).2.failure();
    assert_eq!(failure.code, Some(11), "{failure:?}");
    cluster.server.decide(|_| None);
    second.del().success();
    first.del().success();
}

#[test]
fn an_unwritable_ledger_is_code_5_before_any_request() {
    require!(supported());
    let cluster = Cluster::new(1);
    let sidecar = cluster.nodes[0].data_dir().join(".cni/net1");
    fs::create_dir_all(&sidecar).unwrap();
    let sidecar = sidecar.to_str().unwrap();
    cluster.nodes[0].exec(&["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", sidecar]);
    let failure = add(&cluster, 0, &network(&cluster, 0)).2.failure();
    assert!(failure.code == Some(5) && failure.msg.contains(sidecar), "{failure:?}");
    assert_eq!(cluster.server.take_requests(), [""; 0]);
    cluster.nodes[0].exec(&["umount", sidecar]);
    // The same with a full disk.
    cluster.nodes[0].exec(&["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", sidecar]);
    cluster.nodes[0].exec(&["sh", "-c", &format!("cat /dev/zero >{sidecar}/filler 2>/dev/null || true")]);
    let failure = add(&cluster, 0, &network(&cluster, 0)).2.failure();
    assert_eq!(failure.code, Some(5), "{failure:?}");
    assert_eq!(cluster.claims(), []);
    cluster.nodes[0].exec(&["umount", sidecar]);
}

#[test]
fn after_a_reboot_the_first_add_asks_the_store() {
    require!(supported());
    let cluster = Cluster::new(1);
    let node = &cluster.nodes[0];
    let boot_id = node.file("boot_id", "00000000-0000-4000-8000-000000000001\n");
    node.exec(&["mount", "--bind", boot_id.to_str().unwrap(), "/proc/sys/kernel/random/boot_id"]);
    let (_a, first, outcome) = add(&cluster, 0, &network(&cluster, 0));
    outcome.success();
    node.file("boot_id", "00000000-0000-4000-8000-000000000002\n");
    cut(&cluster);
    let failure = add(&cluster, 0, &network(&cluster, 0)).2.failure();
    assert_eq!(failure.code, Some(11), "{failure:?}");
    cluster.server.decide(|_| None);
    let (_b, second, outcome) = add(&cluster, 0, &network(&cluster, 0));
    outcome.success();
    assert_eq!(cluster.claims().len(), 1);
    second.del().success();
    first.del().success();
}

#[test]
fn blocks_of_a_node_that_has_gone_come_back() {
    require!(supported());
    let cluster = Cluster::new(2);
    let small = |node| cluster.network(node, &ranges(&["10.1.0.0/30"]));
    let (_a, first, outcome) = add(&cluster, 0, &small(0));
    outcome.success();
    cluster.server.set_node("node0", None);
    let fails = || {
        let failure = add(&cluster, 1, &small(1)).2.failure();
        assert_eq!(failure.code, Some(11), "{failure:?}");
    };
    fails();
    cluster.server.advance_clock(Duration::from_secs(3500));
    fails();
    cluster.server.advance_clock(Duration::from_secs(200));
    let (_b, second, outcome) = add(&cluster, 1, &small(1));
    assert_eq!(address(&outcome.success()), "10.1.0.2");
    assert_eq!(cluster.claims(), [("10.1.0.2".to_owned(), "node1".to_owned())]);
    second.del().success();
    first.del().success();
}

#[test]
fn a_block_that_another_node_has_is_not_used_and_is_named() {
    require!(supported());
    let cluster = Cluster::new(2);
    let (_a, first, outcome) = add(&cluster, 0, &network(&cluster, 0));
    let lost = address(&outcome.success());
    // The operator deletes the claim although the container runs, and another node claims it.
    let name = cluster.server.specs("ipblocks").into_keys().next().unwrap();
    cluster.server.delete("ipblocks", &name);
    let keys = json!({"runtimeConfig": {"ips": [lost]}});
    let (_b, thief, outcome) = add(&cluster, 1, &patched(network(&cluster, 1), keys));
    outcome.success();
    // As after a quarter of an hour.
    let ledger = cluster.nodes[0].data_dir().join(".cni/net1/blocks");
    let mut content: Value = serde_json::from_slice(&fs::read(&ledger).unwrap()).unwrap();
    content["trustedUntil"] = json!(0);
    fs::write(&ledger, content.to_string()).unwrap();
    let (_c, second, outcome) = add(&cluster, 0, &network(&cluster, 0));
    outcome.success();
    let named = |stderr: &str| stderr.contains(&lost) && stderr.contains("node1");
    assert!(named(&outcome.stderr), "{}", outcome.report());
    for outcome in [newest(&first).status(), newest(&first).gc(&[(&first.id, "eth0"), (&second.id, "eth0")])] {
        outcome.success();
        assert!(named(&outcome.stderr), "{}", outcome.report());
    }
    for attachment in [first, second, thief] {
        attachment.del().success();
    }
}

#[test]
fn a_second_machine_of_one_name_is_refused() {
    require!(supported());
    let cluster = Cluster::new(2);
    let (_a, first, outcome) = add(&cluster, 0, &network(&cluster, 0));
    outcome.success();
    let other = &cluster.nodes[1];
    let id = other.file("machine-id", "0123456789abcdef0123456789abcdef\n");
    other.exec(&["mount", "--bind", id.to_str().unwrap(), "/etc/machine-id"]);
    cluster.join(other, "node0");
    let failure = add(&cluster, 1, &network(&cluster, 1)).2.failure();
    assert!(failure.code == Some(102) && failure.msg.contains("0123456789abcdef0123456789abcdef"), "{failure:?}");
    // The Node object has the new machine's ID: the node was rebuilt.
    cluster.server.set_node("node0", Some("0123456789abcdef0123456789abcdef"));
    let (_b, second, outcome) = add(&cluster, 1, &network(&cluster, 1));
    outcome.success();
    second.del().success();
    first.del().success();
}

#[test]
fn a_wrong_node_file_fails_status_and_not_del() {
    require!(supported());
    let cluster = Cluster::new(1);
    let config = patched(network(&cluster, 0), json!({"cniVersion": "1.1.0", "ipam": {"blockSize": 1}}));
    let (_a, attachment, outcome) = add(&cluster, 0, &config);
    outcome.success();
    let file = cluster.nodes[0].dir().join("cluster-local.json");
    let good = fs::read_to_string(&file).unwrap();
    let missing = good.replace("\"keyFile\":\"", "\"keyFile\":\"/nonexistent");
    for (content, code, named) in
        [("", 7, "cluster-local.json"), ("{}", 7, "cluster-local.json"), (&missing, 5, "/nonexistent")]
    {
        fs::write(&file, content).unwrap();
        attachment.status().fails_naming(50, &[named]);
        let failure = add(&cluster, 0, &config).2.failure();
        assert_eq!(failure.code, Some(code), "{content}: {failure:?}");
    }
    attachment.del().success();
    assert_eq!(cluster.claims().len(), 1);
    fs::write(&file, good).unwrap();
    attachment.status().success();
    attachment.gc(&[]).success();
    assert_eq!(cluster.claims(), [], "the next call that needs the store repeats the release");
}
