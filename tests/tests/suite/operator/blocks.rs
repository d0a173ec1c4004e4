//! The blocks of cluster-local, seen without a store.

use cni_testkit::{Attachment, probe, require};
use conformance::cluster::hold;
use serde_json::{Value, json};

use super::Operator;

/// A node whose network `net1` uses cluster-local, and has a block for the whole subnet.
fn operator() -> Operator {
    let operator = Operator::new();
    let file = operator.node.dir().join("cluster-local.json");
    let store = json!({"server": "https://127.0.0.1:6443", "caFile": file, "tokenFile": file});
    operator.node.file("cluster-local.json", json!({ "kubernetes": store }).to_string());
    operator.configure(json!({"ipam": {"type": "cluster-local", "clusterConf": file}}), &[]);
    hold(&operator.node, "net1", &["10.1.0.0/24"]);
    operator
}

fn supported() -> probe::Probed {
    probe::plugin("cnitool").and_then(|()| probe::plugin("cluster-local"))
}

/// A second network, with these keys in `ipam`.
fn configure_other(operator: &Operator, ranges: &Value, layer2: &str) {
    let ipam = json!({"type": "cluster-local", "ranges": ranges, "layer2": layer2,
                      "clusterConf": operator.node.dir().join("cluster-local.json")});
    let plugins = json!([{"type": "bridge", "bridge": "br1", "ipam": ipam}]);
    operator
        .node
        .file("net.d/20-net2.conflist", json!({"cniVersion": "1.1.0", "name": "net2", "plugins": plugins}).to_string());
}

#[test]
fn ipam_show_and_list_have_the_blocks_and_their_use() {
    require!(supported());
    let operator = operator();
    let container = operator.attach();
    let shown = operator.json(&["ipam", "show", "net1"]);
    let block = json!({"first": "10.1.0.0", "last": "10.1.0.255", "pool": "10.1.0.0-24", "state": "held", "used": 1});
    assert_eq!(shown["blocks"], json!([block]));
    let text = operator.done(&["ipam", "show", "net1"]);
    assert!(text.contains("10.1.0.255") && text.contains("held"), "{text}");
    assert_eq!(operator.json(&["ipam", "list"])["ranges"][0]["used"], 1);
    operator.detach(&container);
}

#[test]
fn doctor_names_addresses_in_a_block_of_another_node() {
    require!(supported());
    let operator = operator();
    let container = operator.attach();
    operator.done(&["doctor"]);
    let path = operator.node.dir().join("networks/.cni/net1/blocks");
    let mut ledger: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    ledger["entries"][0]["state"] = json!({"lost": {"node": "worker-9", "network": "net1"}});
    std::fs::write(&path, ledger.to_string()).unwrap();
    operator.failed(&["doctor"], &["10.1.0.2", "worker-9"]);
    operator.detach(&container);
}

#[test]
fn validate_reports_pools_that_overlap_but_no_shared_pool() {
    require!(supported());
    let operator = operator();
    configure_other(&operator, &json!([[{"subnet": "10.1.0.0/24"}]]), "");
    assert!(!operator.done(&["networks"]).contains("warning"), "one pool");
    configure_other(&operator, &json!([[{"subnet": "10.1.0.0/16", "rangeStart": "10.1.9.1"}]]), "");
    let text = operator.done(&["networks"]);
    assert!(text.contains("pool 10.1.0.0-24 overlaps with pool 10.1.0.0-16 of network \"net2\""), "{text}");
    configure_other(&operator, &json!([[{"subnet": "10.1.0.0/24"}]]), "vlan20");
    let text = operator.done(&["networks"]);
    assert!(text.contains("overlaps with pool vlan20.10.1.0.0-24 of network \"net2\""), "{text}");
}

#[test]
fn validate_reports_a_missing_node_file() {
    require!(supported());
    let operator = operator();
    std::fs::remove_file(operator.node.dir().join("cluster-local.json")).unwrap();
    operator.failed(&["networks"], &["cluster-local.json"]);
}

#[test]
fn the_schema_has_the_keys_of_cluster_local() {
    require!(supported());
    let operator = Operator::new();
    let schema: Value = serde_json::from_str(&operator.done(&["schema", "cluster-local"])).unwrap();
    let keys = &schema["properties"];
    assert_eq!((&keys["blockSize"]["type"], &keys["layer2"]["type"]), (&json!("integer"), &json!("string")));
    assert!(keys["ranges"].is_object() && keys["dataDir"].is_object(), "{schema:#}");
}

#[test]
fn an_attachment_of_the_network_is_checked_by_inspect() {
    require!(supported());
    let operator = operator();
    let container = operator.attach();
    let config = json!({"cniVersion": "1.0.0", "name": "net1", "type": "cluster-local",
                        "ipam": {"type": "cluster-local", "dataDir": operator.node.data_dir()}});
    // Another program releases the address of a running container.
    let stray = Attachment::new(&operator.node, &container, config);
    stray.del().success();
    operator.failed(&["inspect", "net1"], &["not reserved for this attachment"]);
    operator.detach(&container);
}
