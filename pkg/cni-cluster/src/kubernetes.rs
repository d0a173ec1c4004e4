//! The Kubernetes API as the store of claims: an object IPBlock for each claim, an IPPool for each
//! pool. docs/kubernetes/cluster-local.yaml declares both.
//!
//! Reads are from etcd, through the API server, except [`Store::taken`], which its cache answers.

use std::net::IpAddr;

use cni::{Code, Error, Result};
use cni_linux::flock::Limit;
use serde::Serialize;
use serde_json::{Value, json};

use crate::http::{Client, array, decode, unclear};
use crate::pool::{self, Block};
use crate::store::{Change, Claim, NodeState, Outcome, Pool, Store, Version};

/// The API group of the two kinds. It cannot change after a release without a migration.
const GROUP: &str = "ipam.cni-plugins-rust.dev";

/// The query of requests that write: unknown fields are errors.
const WRITE: &str = "fieldValidation=Strict&fieldManager=cluster-local";

const JSON: &str = "application/json";

/// 5,000 claims take 0.5 MB as a table, and 3.2 MB as objects.
const TABLE: &str = "application/json;as=Table;g=meta.k8s.io;v=v1";

/// A client of one API server.
pub(crate) struct Kubernetes<'m>(pub(crate) Client<'m>);

impl Kubernetes<'_> {
    /// Sends one request to `path`, which is relative to the API group's unless it begins with `/`.
    /// Returns the status and the object: 200 or 201, or without an object 404 if the named object
    /// does not exist, or 409 if it is not as a change expects.
    fn call(&mut self, method: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/apis/{GROUP}/v1/{path}") };
        let accept = if path.ends_with("includeObject=None") { TABLE } else { JSON };
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let response = self.0.send(method, &path, accept, &body)?;
        match (response.status, method) {
            (200 | 201, _) => Ok((200, response.json)),
            // Without the kind, the server answers with a text.
            (404, _) if response.json["reason"] != "NotFound" => {
                let msg = format!("{}: HTTP 404: the API group {GROUP} is not installed", response.request);
                Err(Error::new(Code::REFUSED, msg))
            }
            // These do not fit the request, so they prove nothing.
            (404, "POST") | (409, "GET") => Err(response.error(Code::TRY_AGAIN)),
            (404 | 409, _) => Ok((response.status, Value::Null)),
            _ => Err(response.error(Code::REFUSED)),
        }
    }

    /// Reads the objects of a list.
    fn list(&mut self, path: &str) -> Result<Vec<Value>> {
        let (_, list) = self.call("GET", path, &Value::Null)?;
        array(list, "items").ok_or_else(|| unclear(format!("the answer to GET {path} is not a list")))
    }
}

impl Store for Kubernetes<'_> {
    fn node(&mut self) -> Result<String> {
        if self.0.conf.node.is_none() {
            let body = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
            let path = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
            let (_, review) = self.call("POST", path, &body)?;
            let user = &review["status"]["userInfo"];
            let of_kubelet = user["username"].as_str().and_then(|name| name.strip_prefix("system:node:"));
            let of_token = user["extra"]["authentication.kubernetes.io/node-name"][0].as_str();
            let unnamed =
                || format!("the credentials of user {} belong to no node: set the key node", user["username"]);
            let node = of_kubelet.or(of_token).ok_or_else(|| Error::config(unnamed()))?;
            self.0.conf.node = Some(node.to_owned());
        }
        Ok(self.0.conf.node.clone().unwrap_or_default())
    }

    fn set_limit(&mut self, limit: Limit) {
        self.0.limit = limit;
    }

    fn pools(&mut self) -> Result<Vec<(String, Pool)>> {
        let name = |object: &Value| object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        self.list("ippools")?.iter().map(|object| Ok((name(object), decode(&object["spec"])?))).collect()
    }

    fn create_pool(&mut self, name: &str, pool: &Pool) -> Result<()> {
        let object = object("IPPool", json!({"name": name}), pool);
        self.call("POST", &format!("ippools?{WRITE}"), &object).map(drop)
    }

    fn get(&mut self, block: &Block) -> Result<Option<(Claim, Version)>> {
        match self.call("GET", &format!("ipblocks/{}", name(&block.pool, block.first)), &Value::Null)? {
            (404, _) => Ok(None),
            (_, object) => versioned(&object).map(Some),
        }
    }

    fn change(&mut self, claim: &Claim, change: &Change) -> Result<Outcome> {
        let name = name(&claim.pool, claim.first);
        let (method, path, body) = match change {
            Change::Create => ("POST", format!("ipblocks?{WRITE}"), object("IPBlock", json!({"name": name}), claim)),
            Change::Swap(version) => {
                let metadata = json!({"name": name, "resourceVersion": version});
                ("PUT", format!("ipblocks/{name}?{WRITE}"), object("IPBlock", metadata, claim))
            }
            Change::Delete(version) => {
                let preconditions = json!({"resourceVersion": version});
                let body = json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions});
                ("DELETE", format!("ipblocks/{name}"), body)
            }
        };
        match (self.call(method, &path, &body)?, change) {
            ((409, _), _) => Ok(Outcome::Conflict),
            ((404, _), _) | (_, Change::Delete(_)) => Ok(Outcome::Absent),
            ((_, object), _) => version(&object).map(Outcome::Written),
        }
    }

    fn claims_of(&mut self, node: &str) -> Result<Vec<(Claim, Version)>> {
        let path = format!("ipblocks?fieldSelector=spec.node%3D{}", encoded(node));
        self.list(&path)?.iter().map(versioned).collect()
    }

    fn taken(&mut self, pool: &str) -> Result<Vec<(IpAddr, String)>> {
        let selector = format!("fieldSelector=spec.pool%3D{pool}&resourceVersion=0&includeObject=None");
        let (_, table) = self.call("GET", &format!("ipblocks?{selector}"), &Value::Null)?;
        let wrong = || unclear("the table of IPBlocks has no columns First and Node".to_owned());
        taken(&table).ok_or_else(wrong)
    }

    fn node_state(&mut self, name: &str) -> Result<NodeState> {
        match self.call("GET", &format!("/api/v1/nodes/{}", encoded(name)), &Value::Null)? {
            (200, node) => {
                let machine = node["status"]["nodeInfo"]["machineID"].as_str().unwrap_or_default();
                Ok(NodeState::Present(machine.to_owned()))
            }
            _ => {
                let no_time = || unclear(format!("node {name}: the server's answer has no time"));
                self.0.date.map(NodeState::Absent).ok_or_else(no_time)
            }
        }
    }

    fn deletion_advice(&self, claim: &Claim) -> String {
        format!("kubectl delete ipblocks --field-selector spec.node={}", claim.node)
    }
}

/// Returns the JSON of an object.
fn object(kind: &str, metadata: Value, spec: &impl Serialize) -> Value {
    json!({"apiVersion": format!("{GROUP}/v1"), "kind": kind, "metadata": metadata, "spec": spec})
}

/// Returns the version of an object.
fn version(object: &Value) -> Result<Version> {
    let version = object["metadata"]["resourceVersion"].as_str();
    version.map(|version| Version(version.to_owned())).ok_or_else(|| unclear(format!("not an object: {object}")))
}

pub(crate) fn versioned(object: &Value) -> Result<(Claim, Version)> {
    Ok((decode(&object["spec"])?, version(object)?))
}

/// Returns the first addresses and nodes in a table of claims; `None` if the table has no such
/// columns.
pub(crate) fn taken(table: &Value) -> Option<Vec<(IpAddr, String)>> {
    let columns = table["columnDefinitions"].as_array()?;
    let column = |name: &str| columns.iter().position(|column| column["name"] == name);
    let (first, node) = (column("First")?, column("Node")?);
    let text = |row: &Value, column: usize| row["cells"][column].as_str().map(str::to_owned);
    let claim = |row: &Value| Some((text(row, first)?.parse().ok()?, text(row, node).unwrap_or_default()));
    Some(table["rows"].as_array().into_iter().flatten().filter_map(claim).collect())
}

/// Returns the name of the object of a claim.
fn name(pool: &str, first: IpAddr) -> String {
    format!("{pool}.{}", pool::address_name(first))
}

/// Encodes a value for a path or a query. Another node's name comes from its claim.
fn encoded(value: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let encode = |byte: u8| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    value.bytes().map(encode).collect()
}
