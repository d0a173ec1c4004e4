#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use cni::config::NetConf;
use cni::skel::Plugin as _;
use serde_json::{Value, json};

use super::*;

const OFFLINE: ClusterLocal = ClusterLocal { open: |_, _| Err(Error::config("no store")) };

/// A network with these keys in `ipam`, besides the type and a subnet.
fn conf(keys: &Value) -> NetConf {
    let mut ipam = json!({"type": "cluster-local", "subnet": "10.0.0.0/24"});
    ipam.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let conf = json!({"cniVersion": "1.1.0", "name": "net", "type": "macvlan", "ipam": ipam});
    NetConf::parse(conf.to_string()).unwrap()
}

#[test]
fn without_keys_the_pool_is_the_subnets_own() {
    let keys = Keys::read(&conf(&json!({}))).unwrap();
    assert_eq!((keys.block_size, keys.layer2.as_str()), (None, ""));
    assert_eq!(keys.node_file(), Path::new("/etc/cni/cluster-local.json"));
    let keys = Keys::read(&conf(&json!({"BlockSize": 16, "layer2": "vlan-20", "clusterConf": "/c"}))).unwrap();
    assert_eq!((keys.block_size, keys.layer2.as_str(), keys.node_file()), (Some(16), "vlan-20", Path::new("/c")));
}

#[test]
fn an_invalid_key_is_code_7_and_is_named() {
    for (keys, name) in [
        (json!({"blockSize": 3}), "blockSize"),
        (json!({"blockSize": 0}), "blockSize"),
        (json!({"blockSize": -1}), "blockSize"),
        (json!({"blockSize": 131_072}), "blockSize"),
        (json!({"blockSize": 4_294_967_297_u64}), "blockSize"),
        (json!({"blockSize": 1.5}), "blockSize"),
        (json!({"blockSize": "16"}), "blockSize"),
        (json!({"layer2": "Vlan"}), "layer2"),
        (json!({"layer2": "a."}), "layer2"),
        (json!({"layer2": 20}), "layer2"),
        (json!({"clusterConf": 1}), "clusterConf"),
    ] {
        let error = OFFLINE.examine(&conf(&keys)).unwrap_err();
        assert_eq!(error.code(), Code::INVALID_CONFIG, "{keys}: {error}");
        assert!(error.to_string().contains(name), "{keys}: {error}");
    }
    OFFLINE.examine(&conf(&json!({"blockSize": 65_536, "layer2": "a"}))).unwrap();
}

#[test]
fn keys_of_neither_plugin_are_unknown() {
    let conf = conf(&json!({"blockSize": 1, "Layer2": "", "clusterConf": "", "reuse": true, "blocksize2": 1}));
    let unknown: Vec<String> = OFFLINE.unknown_keys(conf.json()).into_iter().map(|key| key.path).collect();
    assert_eq!(unknown, ["ipam.blocksize2"]);
}
