//! cluster-local with an API server of its own: nodes are namespaces, and reach it by loopback.

mod etcd;
mod failure;
mod life;
mod nodes;

use cni_testkit::{Attachment, Container, Outcome, probe};
use conformance::cluster::Cluster;
use conformance::patched;
use serde_json::{Value, json};

/// Whether these tests can run: Go has no such plugin, and openssl makes the certificates.
fn supported() -> probe::Probed {
    probe::plugin("cluster-local").and_then(|()| probe::tool("openssl"))
}

/// Runs ADD for a new container on a node.
fn add<'c>(cluster: &'c Cluster, node: usize, config: &Value) -> (Container, Attachment<'c>, Outcome) {
    let container = cluster.nodes[node].container();
    let attachment = Attachment::new(&cluster.nodes[node], &container, config.clone());
    let outcome = attachment.add();
    (container, attachment, outcome)
}

/// The attachment in the newest version, which has GC and STATUS.
fn newest<'c>(attachment: &Attachment<'c>) -> Attachment<'c> {
    attachment.clone().config(patched(attachment.config.clone(), json!({"cniVersion": "1.1.0"})))
}
