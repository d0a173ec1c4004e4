//! For pkg/cni-fuzz: reads answers of the stores.

use std::io::BufRead;

use crate::store::Claim;
use crate::{etcd, http, kubernetes};

/// Reads an answer. Returns its status, the server's time and the body, or `None` if it is refused.
pub fn read_answer(mut input: impl BufRead) -> Option<(u16, Option<u64>, Vec<u8>)> {
    let response = http::read_response(&mut input).ok()?;
    drop(response.error(cni::Code::REFUSED));
    Some((response.status, response.date, response.body))
}

/// Decodes the body of an answer in all ways. Returns the claims in it.
pub fn claims(body: &[u8]) -> Vec<Claim> {
    let Ok(json) = serde_json::from_slice::<serde_json::Value>(body) else { return Vec::new() };
    drop(kubernetes::taken(&json));
    let items = http::array(json.clone(), "items").unwrap_or_default();
    let in_kubernetes = items.iter().map(kubernetes::versioned).collect::<Vec<_>>();
    let in_etcd = etcd::records(json).iter().map(etcd::versioned).collect::<Vec<_>>();
    in_kubernetes.into_iter().chain(in_etcd).flatten().map(|(claim, _)| claim).collect()
}
