//! etcd v3 as the store of claims, through its JSON gateway.
//!
//! Keys are `<prefix>pools/<pool>` and `<prefix>blocks/<pool>/<first address>`, values are the JSON
//! of a pool or claim. A claim is only written while its pool exists. etcd knows no nodes, so
//! nothing is reclaimed automatically.

use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cni::{Code, Result};
use cni_linux::flock::Limit;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::conf::read_text;
use crate::http::{Client, array, decode, unclear};
use crate::pool::{self, Block};
use crate::store::{Change, Claim, NodeState, Outcome, Pool, Store, Version};

/// A client of the members of one etcd.
pub(crate) struct Etcd<'m> {
    pub(crate) client: Client<'m>,
    /// The beginning of all keys.
    pub(crate) prefix: String,
}

impl Etcd<'_> {
    /// Sends one request. Returns the answer, which has a revision.
    fn call(&mut self, path: &str, body: &Value) -> Result<Value> {
        let response = self.client.send("POST", &format!("/v3/kv/{path}"), "application/json", &body.to_string())?;
        match response.status {
            200 if response.json["header"]["revision"].is_string() => Ok(response.json),
            // Every answer of etcd has a revision.
            200 => Err(response.error(Code::TRY_AGAIN)),
            // With its authentication, the gateway refuses certificates that have a CommonName.
            400 | 401 | 403 => {
                let details = "etcd's own authentication (etcdctl auth enable) is not supported";
                Err(response.error(Code::REFUSED).with_details(details))
            }
            _ => Err(response.error(Code::REFUSED)),
        }
    }

    /// Makes `change` to `key` if all conditions hold, and otherwise reads the key.
    fn transact(&mut self, key: &str, conditions: &[Value], change: Value) -> Result<Outcome> {
        let read = json!([{"request_range": {"key": STANDARD.encode(key)}}]);
        let answer = self.call("txn", &json!({"compare": conditions, "success": [change], "failure": read}))?;
        // The gateway omits `false` and empty lists.
        let kvs = &answer["responses"][0]["response_range"]["kvs"];
        Ok(match answer["succeeded"] == true {
            true => Outcome::Written(Version(answer["header"]["revision"].as_str().unwrap_or_default().to_owned())),
            false if kvs.is_array() => Outcome::Conflict,
            false => Outcome::Absent,
        })
    }

    /// Reads one key, or all keys that begin with `key` if it ends with `/`. Only a list for the
    /// choice of a candidate may be a moment old.
    fn range(&mut self, key: &str, is_serializable: bool) -> Result<Vec<Value>> {
        let mut body = json!({"key": STANDARD.encode(key), "serializable": is_serializable});
        if let Some(parent) = key.strip_suffix('/') {
            // The first key after all that begin with the prefix: `0` follows `/`.
            body["range_end"] = STANDARD.encode(format!("{parent}0")).into();
        }
        self.call("range", &body).map(records)
    }

    fn pool_key(&self, pool: &str) -> String {
        format!("{}pools/{pool}", self.prefix)
    }

    fn block_key(&self, pool: &str, first: IpAddr) -> String {
        format!("{}blocks/{pool}/{}", self.prefix, pool::address_name(first))
    }
}

impl Store for Etcd<'_> {
    fn node(&mut self) -> Result<String> {
        if let Some(node) = &self.client.conf.node {
            return Ok(node.clone());
        }
        read_text("/proc/sys/kernel/hostname".as_ref())
    }

    fn set_limit(&mut self, limit: Limit) {
        self.client.limit = limit;
    }

    fn pools(&mut self) -> Result<Vec<(String, Pool)>> {
        let prefix = self.pool_key("");
        let named = |found: &Value| Ok((text(found, "key").trim_start_matches(&prefix).to_owned(), value(found)?));
        self.range(&prefix, false)?.iter().map(named).collect()
    }

    fn create_pool(&mut self, name: &str, pool: &Pool) -> Result<()> {
        let key = self.pool_key(name);
        self.transact(&key, &[revision(&key, "CREATE", "EQUAL", "0")], put(&key, pool)).map(drop)
    }

    fn get(&mut self, block: &Block) -> Result<Option<(Claim, Version)>> {
        let found = self.range(&self.block_key(&block.pool, block.first), false)?;
        found.first().map(versioned).transpose()
    }

    fn change(&mut self, claim: &Claim, change: &Change) -> Result<Outcome> {
        let key = self.block_key(&claim.pool, claim.first);
        let has = |version: &Version| vec![revision(&key, "MOD", "EQUAL", &version.0)];
        let (conditions, request) = match change {
            Change::Create => {
                let has_pool = revision(&self.pool_key(&claim.pool), "CREATE", "GREATER", "0");
                (vec![revision(&key, "CREATE", "EQUAL", "0"), has_pool], put(&key, claim))
            }
            Change::Swap(version) => (has(version), put(&key, claim)),
            Change::Delete(version) => (has(version), json!({"request_delete_range": {"key": STANDARD.encode(&key)}})),
        };
        match (self.transact(&key, &conditions, request)?, change) {
            (Outcome::Absent, Change::Create) => {
                Err(unclear(format!("etcd did not create {key}: its pool has been deleted")))
            }
            (Outcome::Written(_), Change::Delete(_)) => Ok(Outcome::Absent),
            (outcome, _) => Ok(outcome),
        }
    }

    fn claims_of(&mut self, node: &str) -> Result<Vec<(Claim, Version)>> {
        // etcd finds no values. A record that another program has damaged belongs to no node.
        let all = self.range(&format!("{}blocks/", self.prefix), false)?;
        let claims = all.iter().filter_map(|found| versioned(found).ok());
        Ok(claims.filter(|(claim, _)| claim.node == node).collect())
    }

    fn taken(&mut self, pool: &str) -> Result<Vec<(IpAddr, String)>> {
        let all = self.range(&format!("{}blocks/{pool}/", self.prefix), true)?;
        let claims = all.iter().filter_map(|found| value::<Claim>(found).ok());
        Ok(claims.map(|claim| (claim.first, claim.node)).collect())
    }

    fn node_state(&mut self, _: &str) -> Result<NodeState> {
        Ok(NodeState::Unsupported)
    }

    fn deletion_advice(&self, claim: &Claim) -> String {
        format!("delete the keys of its claims, such as {}", self.block_key(&claim.pool, claim.first))
    }
}

/// Returns the condition that a key's revision of this kind compares so with `number`.
fn revision(key: &str, kind: &str, comparison: &str, number: &str) -> Value {
    let field = if kind == "MOD" { "mod_revision" } else { "create_revision" };
    json!({"key": STANDARD.encode(key), "target": kind, "result": comparison, field: number})
}

/// Returns the request that writes a value.
fn put(key: &str, value: &impl Serialize) -> Value {
    json!({"request_put": {"key": STANDARD.encode(key), "value": STANDARD.encode(json!(value).to_string())}})
}

/// Returns the records of an answer to a range request. The gateway omits an empty list.
pub(crate) fn records(answer: Value) -> Vec<Value> {
    array(answer, "kvs").unwrap_or_default()
}

/// Returns the text that a record has in base64.
fn text(found: &Value, field: &str) -> String {
    let bytes = STANDARD.decode(found[field].as_str().unwrap_or_default()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn value<T: DeserializeOwned>(found: &Value) -> Result<T> {
    let wrong = |error| unclear(format!("etcd's record {}: {error}", text(found, "key")));
    decode(&serde_json::from_str(&text(found, "value")).map_err(wrong)?)
}

pub(crate) fn versioned(found: &Value) -> Result<(Claim, Version)> {
    Ok((value(found)?, Version(found["mod_revision"].as_str().unwrap_or_default().to_owned())))
}
