//! The node's file of cluster-local. Every refusal has code 7. A file that is accepted has between
//! 1 and 16 endpoints, each with a host and a port, and is refused with an unknown key.

use cni::Code;
use cni_cluster::conf::Conf;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let conf = match Conf::parse(data) {
        Ok(conf) => conf,
        Err(error) => return assert_eq!(error.code(), Code::INVALID_CONFIG, "{error}"),
    };
    assert!((1..=20).contains(&conf.timeout.as_secs()) && (1..=16).contains(&conf.endpoints.len()), "{conf:?}");
    assert_ne!(conf.node.as_deref(), Some(""));
    for endpoint in &conf.endpoints {
        let (host, port) = endpoint.rsplit_once(':').unwrap();
        assert!(!host.is_empty() && !host.contains(['/', '\n']) && port.parse::<u16>().is_ok(), "{endpoint}");
    }
    let text = String::from_utf8_lossy(data);
    let with_unknown = text.replacen('{', "{\"x\": 1,", 1);
    assert!(Conf::parse(with_unknown.as_bytes()).is_err(), "an unknown key is accepted");
}
