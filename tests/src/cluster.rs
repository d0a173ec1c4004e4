//! A cluster for cluster-local: an API server, and nodes that reach it without links.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni_testkit::Node;
use cni_testkit::cluster::ApiServer;
use serde_json::{Value, json};

use crate::{VERSION, patched};

/// The machine ID of all nodes: that of the machine that runs the tests.
fn machine() -> String {
    std::fs::read_to_string("/etc/machine-id").unwrap_or_default().trim().to_owned()
}

/// An API server and the nodes `node0`, `node1` and so on.
pub struct Cluster {
    /// The server, which has a Node object for each node.
    pub server: ApiServer,
    /// The nodes.
    pub nodes: Vec<Node>,
}

impl Cluster {
    /// Returns a cluster of so many nodes.
    pub fn new(count: usize) -> Cluster {
        let cluster = Cluster { server: ApiServer::new(), nodes: (0..count).map(|_| Node::new()).collect() };
        for (number, node) in cluster.nodes.iter().enumerate() {
            let name = format!("node{number}");
            cluster.server.set_node(&name, Some(&machine()));
            cluster.join(node, &name);
        }
        cluster
    }

    /// Lets a node reach the server, and gives it the credentials of this name.
    pub fn join(&self, node: &Node, name: &str) {
        let port = node.enter(|| self.server.listen());
        node.file("cluster-local.json", patched(self.server.node_file(name, port), json!({"timeout": 5})).to_string());
    }

    /// Sets how many seconds a call on any node may wait for the server and for other calls.
    pub fn set_timeout(&self, seconds: u32) {
        for node in &self.nodes {
            let file = std::fs::read(node.dir().join("cluster-local.json")).unwrap();
            let file = patched(serde_json::from_slice(&file).unwrap(), json!({"timeout": seconds}));
            node.file("cluster-local.json", file.to_string());
        }
    }

    /// Returns the network `net1`, for a direct call of cluster-local on a node.
    pub fn network(&self, node: usize, ranges: &Value) -> Value {
        let node = &self.nodes[node];
        let ipam = json!({"type": "cluster-local", "dataDir": node.data_dir(), "ranges": ranges,
                          "clusterConf": node.dir().join("cluster-local.json")});
        json!({"cniVersion": VERSION, "name": "net1", "type": "cluster-local", "ipam": ipam})
    }

    /// Returns the claims: the first address and the node of each block, sorted as texts.
    pub fn claims(&self) -> Vec<(String, String)> {
        let text = |spec: &Value, key: &str| spec[key].as_str().unwrap().to_owned();
        let mut claims: Vec<(String, String)> =
            self.server.specs("ipblocks").values().map(|spec| (text(spec, "first"), text(spec, "node"))).collect();
        claims.sort();
        claims
    }
}

/// Returns ranges of one set for each subnet.
pub fn ranges(subnets: &[&str]) -> Value {
    subnets.iter().map(|subnet| json!([{ "subnet": subnet }])).collect()
}

/// Gives a network of a node these subnets as one block each, without a store: writes the ledger of
/// a node that has verified its claims in this boot. Skips texts that are not subnets.
pub fn hold(node: &Node, network: &str, subnets: &[&str]) {
    let entry = |subnet: &&str| {
        let (first, last) = ends(subnet)?;
        // As in the names of pools.
        let first_text = match first {
            IpAddr::V4(v4) => v4.to_string(),
            IpAddr::V6(v6) => v6.segments().map(|segment| format!("{segment:04x}")).join("-"),
        };
        let pool = format!("{first_text}-{}", subnet.split_once('/')?.1);
        Some(json!({"block": {"pool": pool, "first": first, "last": last}, "state": {"held": "1"}}))
    };
    let entries: Vec<Value> = subnets.iter().filter_map(entry).collect();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let ledger = json!({"format": 1, "node": "node0", "boot": boot.trim(), "trustedUntil": u32::MAX, "pools": {},
                        "entries": entries});
    node.file(&format!("networks/.cni/{network}/blocks"), ledger.to_string());
}

/// Returns the first and the last address of a subnet.
fn ends(subnet: &str) -> Option<(IpAddr, IpAddr)> {
    let (address, length) = subnet.split_once('/')?;
    let length: u32 = length.parse().ok()?;
    Some(match address.parse().ok()? {
        IpAddr::V4(first) => {
            (first.into(), Ipv4Addr::from_bits(first.to_bits() | u32::MAX.checked_shr(length)?).into())
        }
        IpAddr::V6(first) => {
            (first.into(), Ipv6Addr::from_bits(first.to_bits() | u128::MAX.checked_shr(length)?).into())
        }
    })
}
