//! The objects of the test API server, and its answers to requests about them. Texts and shapes are
//! those of kube-apiserver 1.36.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// The API group of the kinds IPPool and IPBlock.
const GROUP: &str = "ipam.cni-plugins-rust.dev";

/// The fields of an IPBlock that no request can change.
const IMMUTABLE: [&str; 5] = ["pool", "first", "last", "node", "network"];

/// The fields that the server adds to a spec without them.
const POOL_DEFAULTS: &[(&str, &str)] = &[("reclaim", "AfterOneHour")];
const BLOCK_DEFAULTS: &[(&str, &str)] = &[("node", ""), ("network", ""), ("machine", ""), ("nonce", "")];

/// The authenticated sender of a request.
#[derive(Debug, Clone)]
pub(super) struct User {
    pub(super) name: String,
    /// The node to which its credentials are bound.
    pub(super) node: Option<String>,
}

/// A request.
#[derive(Debug, Clone, Default)]
pub(super) struct Request {
    pub(super) method: String,
    /// The path without the query.
    pub(super) path: String,
    pub(super) query: BTreeMap<String, String>,
    pub(super) accept: String,
    pub(super) body: String,
}

/// An answer.
#[derive(Debug, Clone)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) body: String,
    /// Whether the body is sent in chunks, as for lists.
    pub(super) is_chunked: bool,
}

impl Reply {
    fn json(status: u16, body: &Value) -> Reply {
        Reply { status, body: body.to_string(), is_chunked: false }
    }

    /// An error, as an object of the kind Status.
    pub(super) fn error(status: u16, reason: &str, message: &str) -> Reply {
        Reply::json(status, &failure(status, reason, message))
    }

    /// An error about one object. `kind` is the resource, or the kind if the object is invalid.
    fn about(status: u16, reason: &str, (kind, name): (&str, &str), message: &str) -> Reply {
        let mut body = failure(status, reason, message);
        body["details"] = json!({"name": name, "group": GROUP, "kind": kind});
        Reply::json(status, &body)
    }
}

/// Returns the object of the kind Status that an error is.
fn failure(status: u16, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": status})
}

/// All objects.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// By resource and name, as in `ipblocks/10.61.0.0-24.10.61.0.64`.
    pub(super) all: BTreeMap<String, Value>,
    /// The machine ID of each node.
    pub(super) nodes: BTreeMap<String, String>,
    /// The server's time in seconds since 1970.
    pub(super) now: u64,
    pub(super) lacks_kinds: bool,
    pub(super) revision: u64,
}

impl Objects {
    /// Stores an object as a new version, without any check.
    pub(super) fn store(&mut self, resource: &str, name: &str, spec: &Value) -> Value {
        let mut spec = spec.clone();
        let defaults = if resource == "ippools" { POOL_DEFAULTS } else { BLOCK_DEFAULTS };
        for (field, default) in defaults {
            if spec[field].is_null() {
                spec[*field] = json!(default);
            }
        }
        let key = format!("{resource}/{name}");
        // A write that changes nothing keeps the version.
        if let Some(existing) = self.all.get(&key).filter(|existing| existing["spec"] == spec) {
            return existing.clone();
        }
        self.revision += 1;
        let object = json!({"apiVersion": format!("{GROUP}/v1"), "kind": kind(resource),
            "metadata": {"name": name, "resourceVersion": self.revision.to_string(), "generation": 1,
                "creationTimestamp": "2026-11-27T17:26:27Z", "uid": format!("uid-{}", self.revision),
                "managedFields": [{"manager": "cluster-local", "operation": "Update", "fieldsType": "FieldsV1"}]},
            "spec": spec});
        self.all.insert(key, object.clone());
        object
    }

    /// Returns the answer to a request.
    pub(super) fn answer(&mut self, user: &User, request: &Request) -> Reply {
        let parts: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
        match (request.method.as_str(), &parts[..]) {
            ("POST", ["apis", "authentication.k8s.io", "v1", "selfsubjectreviews"]) => {
                let extra = user.node.as_ref().map(|node| json!({"authentication.kubernetes.io/node-name": [node]}));
                let extra = extra.filter(|_| !user.name.starts_with("system:node:")).unwrap_or(json!({}));
                let info = json!({"username": user.name, "groups": ["system:authenticated"], "extra": extra});
                let body = json!({"kind": "SelfSubjectReview", "apiVersion": "authentication.k8s.io/v1",
                    "metadata": {}, "status": {"userInfo": info}});
                Reply::json(201, &body)
            }
            ("GET", ["api", "v1", "nodes", name]) => match self.nodes.get(*name) {
                Some(machine) => {
                    let status = json!({"nodeInfo": {"machineID": machine}});
                    Reply::json(200, &json!({"kind": "Node", "metadata": {"name": name}, "status": status}))
                }
                None => Reply::error(404, "NotFound", &format!("nodes \"{name}\" not found")),
            },
            (_, ["apis", GROUP, "v1", ..]) if self.lacks_kinds => page_not_found(),
            ("GET", ["apis", GROUP, "v1", resource @ ("ippools" | "ipblocks")]) => self.list(resource, request),
            ("POST", ["apis", GROUP, "v1", resource @ ("ippools" | "ipblocks")]) => {
                self.create(user, resource, request)
            }
            (_, ["apis", GROUP, "v1", resource @ ("ippools" | "ipblocks"), name]) => {
                match self.all.get(&format!("{resource}/{name}")).cloned() {
                    Some(existing) => self.with_object(user, request, (resource, name), &existing),
                    None => not_found(resource, name),
                }
            }
            _ => page_not_found(),
        }
    }

    fn list(&self, resource: &str, request: &Request) -> Reply {
        let selector = request.query.get("fieldSelector").and_then(|selector| selector.split_once('='));
        let is_selected = |object: &Value| {
            selector.is_none_or(|(field, value)| object["spec"][field.trim_start_matches("spec.")] == *value)
        };
        let of_resource = self.all.iter().filter(|(key, _)| key.split('/').next() == Some(resource));
        let items: Vec<&Value> = of_resource.map(|(_, object)| object).filter(|object| is_selected(object)).collect();
        let metadata = json!({"continue": "", "resourceVersion": self.revision.to_string()});
        let body = if request.accept.contains("as=Table") {
            let columns = ["Name", "Pool", "First", "Last", "Node", "Network", "Absent-Since", "Age"];
            let cells = |object: &Value| {
                let spec = &object["spec"];
                json!([
                    object["metadata"]["name"],
                    spec["pool"],
                    spec["first"],
                    spec["last"],
                    spec["node"],
                    spec["network"],
                    spec["absentSince"],
                    "5s"
                ])
            };
            let rows: Vec<Value> = items.iter().map(|object| json!({"cells": cells(object), "object": null})).collect();
            let column =
                |name: &&str| json!({"name": name, "type": "string", "format": "", "description": "", "priority": 0});
            let columns: Vec<Value> = columns.iter().map(column).collect();
            json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
                "columnDefinitions": columns, "rows": rows})
        } else {
            let kind = format!("{}List", kind(resource));
            json!({"kind": kind, "apiVersion": format!("{GROUP}/v1"), "metadata": metadata, "items": items})
        };
        Reply { status: 200, body: body.to_string(), is_chunked: true }
    }

    fn create(&mut self, user: &User, resource: &str, request: &Request) -> Reply {
        let object: Value = serde_json::from_str(&request.body).unwrap_or_default();
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        if let Some(reply) = invalid(resource, &object) {
            return reply;
        }
        if let Some(reply) = self.forbidden(user, (resource, name), None, Some(&object)) {
            return reply;
        }
        if self.all.contains_key(&format!("{resource}/{name}")) {
            let message = format!("{resource}.{GROUP} \"{name}\" already exists");
            return Reply::about(409, "AlreadyExists", (resource, name), &message);
        }
        Reply::json(201, &self.store(resource, name, &object["spec"]))
    }

    /// Answers a request about an object that exists, by resource and name.
    fn with_object(
        &mut self,
        user: &User,
        request: &Request,
        (resource, name): (&str, &str),
        existing: &Value,
    ) -> Reply {
        let sent: Value = serde_json::from_str(&request.body).unwrap_or_default();
        let version = &existing["metadata"]["resourceVersion"];
        let conflict = |kind: &str, expected: &Value, text: &str| {
            let is_other = !expected.is_null() && expected != version;
            let message = format!("Operation cannot be fulfilled on {kind}.{GROUP} \"{name}\": {text}");
            is_other.then(|| Reply::about(409, "Conflict", (kind, name), &message))
        };
        // The version is compared before the policy decides.
        match request.method.as_str() {
            "GET" => Reply::json(200, existing),
            "PUT" => {
                let text =
                    "the object has been modified; please apply your changes to the latest version and try again";
                let refused = invalid(resource, &sent)
                    .or_else(|| conflict(resource, &sent["metadata"]["resourceVersion"], text))
                    .or_else(|| {
                        let change = IMMUTABLE.iter().any(|field| sent["spec"][field] != existing["spec"][field]);
                        let rule = "a claim belongs to one block, node and network: delete it instead";
                        let message = format!("spec: Invalid value: \"object\": {rule}");
                        change.then(|| invalid_spec(resource, name, &message))
                    })
                    .or_else(|| self.forbidden(user, (resource, name), Some(existing), Some(&sent)));
                refused.unwrap_or_else(|| Reply::json(200, &self.store(resource, name, &sent["spec"])))
            }
            "DELETE" => {
                let expected = &sent["preconditions"]["resourceVersion"];
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let message = format!(
                    "the ResourceVersion in the precondition ({}) does not match the ResourceVersion in record ({}). \
                     The object might have been modified",
                    text(expected),
                    text(version)
                );
                let refused = conflict(kind(resource), expected, &message)
                    .or_else(|| self.forbidden(user, (resource, name), Some(existing), None));
                refused.unwrap_or_else(|| {
                    self.all.remove(&format!("{resource}/{name}"));
                    let uid = &existing["metadata"]["uid"];
                    let details = json!({"name": name, "group": GROUP, "kind": resource, "uid": uid});
                    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
                        "details": details});
                    Reply::json(200, &body)
                })
            }
            _ => Reply::error(405, "MethodNotAllowed", "the server does not allow this method"),
        }
    }

    /// Returns what the admission policy answers to a node: a node changes only its own claims, but
    /// marks and, after an hour, deletes those of absent nodes.
    fn forbidden(
        &self,
        user: &User,
        (resource, name): (&str, &str),
        old: Option<&Value>,
        new: Option<&Value>,
    ) -> Option<Reply> {
        let who = user.node.as_ref().filter(|_| resource == "ipblocks")?;
        let owner = &old.or(new)?["spec"]["node"];
        let is_marked = |object: &Value| object["spec"]["absentSince"].is_string();
        let is_reserved = owner.as_str().is_none_or(str::is_empty);
        let is_allowed = match (old, new) {
            _ if *owner == **who => true,
            (Some(old), Some(new)) => {
                let is_same = |field: &str| old["spec"][field] == new["spec"][field];
                !is_reserved && is_marked(new) && is_same("machine") && is_same("nonce")
            }
            (Some(old), None) => !is_reserved && is_marked(old),
            (None, _) => false,
        };
        let holder = owner.as_str().filter(|_| !is_reserved).unwrap_or("the operator");
        let message = format!(
            "{resource}.{GROUP} \"{name}\" is forbidden: ValidatingAdmissionPolicy 'cluster-local' with binding \
             'cluster-local' denied request: node {who} may only claim and release its own blocks, not those of {holder}"
        );
        (!is_allowed).then(|| Reply::about(422, "Invalid", (resource, name), &message))
    }
}

/// Returns the kind of the objects of a resource.
fn kind(resource: &str) -> &'static str {
    if resource == "ippools" { "IPPool" } else { "IPBlock" }
}

/// Returns the answer to an object with an unknown field or without a required one.
fn invalid(resource: &str, object: &Value) -> Option<Reply> {
    let (known, required): (&[&str], &[&str]) = match resource {
        "ippools" => (&["subnet", "blockSize", "reclaim"], &["subnet", "blockSize"]),
        _ => (
            &["pool", "first", "last", "node", "network", "machine", "nonce", "absentSince"],
            &["pool", "first", "last"],
        ),
    };
    let spec = object["spec"].as_object()?;
    if let Some(unknown) = spec.keys().find(|key| !known.contains(&key.as_str())) {
        let kind = kind(resource);
        let message = format!(
            "{kind} in version \"v1\" cannot be handled as a {kind}: strict decoding error: unknown field \
             \"spec.{unknown}\""
        );
        return Some(Reply::error(400, "BadRequest", &message));
    }
    let missing = required.iter().find(|key| !spec.contains_key(**key))?;
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    Some(invalid_spec(resource, name, &format!("spec.{missing}: Required value")))
}

fn invalid_spec(resource: &str, name: &str, reason: &str) -> Reply {
    let kind = kind(resource);
    Reply::about(422, "Invalid", (kind, name), &format!("{kind}.{GROUP} \"{name}\" is invalid: {reason}"))
}

fn not_found(resource: &str, name: &str) -> Reply {
    Reply::about(404, "NotFound", (resource, name), &format!("{resource}.{GROUP} \"{name}\" not found"))
}

/// The answer about a kind that is not installed: a text.
fn page_not_found() -> Reply {
    Reply { status: 404, body: "404 page not found\n".to_owned(), is_chunked: false }
}
