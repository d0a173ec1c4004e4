//! One of the two nodes: sets up the case and runs its steps with one set of plugins.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use cni_testkit::{Container, Invocation, Node, Outcome, bin_dir, go_bin_dir};
use conformance::VERSIONS;
use serde_json::{Value, json};

/// The plugins that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Go,
    Ours,
}

impl Who {
    fn folder(self) -> PathBuf {
        if self == Who::Go { go_bin_dir() } else { bin_dir() }
    }

    fn other(self) -> Who {
        if self == Who::Go { Who::Ours } else { Who::Go }
    }
}

/// The outcome of a step.
#[derive(Clone, Debug)]
pub(crate) struct Did {
    /// Nothing, or the plugin that refused and its error.
    pub(crate) refused: Option<(String, String)>,
    /// The result of an ADD.
    pub(crate) result: Option<Value>,
}

/// A (list, container, interface) of the case, by numbers.
pub(crate) type Key = (usize, usize, String);

/// A node, its containers, and what is attached.
pub(crate) struct Side<'c> {
    pub(crate) who: Who,
    pub(crate) node: Node,
    pub(crate) containers: Vec<Container>,
    case: &'c Value,
    /// The case in lower case: names in it are not random.
    pub(crate) literal: String,
    /// The attachments in the order of their first ADD, with the result of the last ADD that
    /// worked.
    pub(crate) attached: Vec<(Key, Option<Value>)>,
    /// The random names and MACs found so far, and their replacements.
    pub(crate) names: BTreeMap<String, String>,
}

impl<'c> Side<'c> {
    /// Makes a fresh node as the case describes it.
    pub(crate) fn new(who: Who, case: &'c Value) -> Side<'c> {
        let node = Node::new();
        if case["iptables"] == "legacy" {
            conformance::choose_iptables(&node, "legacy");
        }
        let inside: Vec<Vec<&str>> = list(&case["inside"]).iter().map(strings).collect();
        let containers: Vec<Container> = inside.iter().map(|_| node.container()).collect();
        // Paths that are the same on both nodes.
        node.enter(|| {
            fs::create_dir_all("/run/netns").expect("a folder");
            for (number, container) in containers.iter().enumerate() {
                symlink(container.netns(), format!("/run/netns/c{number}")).expect("a path to the namespace");
            }
            for (path, text) in case["files"].as_object().into_iter().flatten() {
                fs::create_dir_all(Path::new(path).parent().expect("a folder")).expect("a folder");
                fs::write(path, text.as_str().unwrap_or_default()).expect("a file");
            }
        });
        let host = strings(&case["host"]);
        if !host.is_empty() {
            node.ip(&host);
        }
        for (container, lines) in containers.iter().zip(&inside) {
            if !lines.is_empty() {
                container.ip(lines);
            }
        }
        Side {
            who,
            node,
            containers,
            case,
            literal: case.to_string().to_lowercase(),
            attached: Vec::new(),
            names: BTreeMap::new(),
        }
    }

    /// Runs a step of the case, with the other side's plugins if the step is swapped.
    pub(crate) fn step(&mut self, step: &Value) -> Did {
        let who = if step["swap"] == true { self.who.other() } else { self.who };
        let verb = step["verb"].as_str().unwrap_or_default();
        let key = key_of(step);
        match verb {
            "ADD" => self.add(who, key),
            "GC" => self.gc(who, step),
            "STATUS" => self.every(who, &key, "STATUS", None, step),
            "DEL" => {
                let prev = self.prev(&key).filter(|_| step["prev"] != false && self.keeps_results(&key));
                let did = self.every(who, &key, verb, prev.as_ref(), step);
                if did.refused.is_none() {
                    self.attached.retain(|(attached, _)| *attached != key);
                }
                did
            }
            _ => {
                let prev = self.prev(&key);
                self.every(who, &key, verb, prev.as_ref(), step)
            }
        }
    }

    fn add(&mut self, who: Who, key: Key) -> Did {
        if !self.attached.iter().any(|(attached, _)| *attached == key) {
            self.attached.push((key.clone(), None));
        }
        let mut prev: Option<Value> = None;
        for plugin in list(&self.case["lists"][key.0]["plugins"]) {
            let outcome = self.call(who, &key, "ADD", plugin, prev.as_ref(), &Value::Null);
            if outcome.status != Some(0) {
                return Did { refused: Some(refusal(plugin, &outcome)), result: None };
            }
            prev = outcome.json;
        }
        if let Some(entry) = self.attached.iter_mut().find(|(attached, _)| *attached == key) {
            entry.1.clone_from(&prev);
        }
        Did { refused: None, result: prev }
    }

    /// Runs DEL in reverse order and the other verbs forward, until the first error, as libcni
    /// does; or to the end, like a runtime that cleans up after a failed ADD.
    fn every(&self, who: Who, key: &Key, verb: &str, prev: Option<&Value>, step: &Value) -> Did {
        let mut plugins: Vec<&Value> = list(&self.case["lists"][key.0]["plugins"]).iter().collect();
        if verb == "DEL" {
            plugins.reverse();
        }
        for plugin in plugins {
            let outcome = self.call(who, key, verb, plugin, prev, step);
            if outcome.status != Some(0) && step["keepGoing"] != true {
                return Did { refused: Some(refusal(plugin, &outcome)), result: None };
            }
        }
        Did { refused: None, result: None }
    }

    /// Runs GC. Go's GC does nothing, so Go's side runs a DEL for each attachment that is not valid
    /// any more.
    fn gc(&mut self, who: Who, step: &Value) -> Did {
        let (list, keep) = (key_of(step).0, step["keep"].as_u64().unwrap_or_default() as usize);
        let of_list = self.attached.iter().map(|(key, _)| key.clone()).filter(|key| key.0 == list);
        let keys: Vec<Key> = of_list.collect();
        let (valid, dead) = keys.split_at(keep.min(keys.len()));
        if who == Who::Go {
            for key in dead {
                let prev = self.prev(key);
                let did = self.every(who, key, "DEL", prev.as_ref(), &Value::Null);
                if did.refused.is_some() {
                    return did;
                }
            }
        }
        let valid: Value =
            valid.iter().map(|key| json!({"containerID": self.containers[key.1].id, "ifname": key.2})).collect();
        let step = json!({"valid": valid});
        let did = self.every(who, &(list, 0, "eth0".to_owned()), "GC", None, &step);
        self.attached.retain(|(key, _)| !dead.contains(key));
        did
    }

    fn call(&self, who: Who, key: &Key, verb: &str, plugin: &Value, prev: Option<&Value>, step: &Value) -> Outcome {
        let list = &self.case["lists"][key.0];
        let mut config = plugin.clone();
        for field in ["cniVersion", "name"] {
            if !list[field].is_null() {
                config[field] = list[field].clone();
            }
        }
        if let Some(prev) = prev {
            config["prevResult"] = prev.clone();
        }
        if verb == "GC" {
            config["cni.dev/valid-attachments"] = step["valid"].clone();
        }
        let ordinal = self.attached.iter().position(|(attached, _)| attached == key).unwrap_or_default();
        if ordinal > 0 && self.case["same"] != true {
            personal(&mut config, ordinal);
        }
        let folder = who.folder();
        let program = folder.join(plugin["type"].as_str().unwrap_or_default());
        let netns = match step["netns"].as_str() {
            // The other side's plugins need this to do the same.
            Some(_) if self.who == Who::Go => format!("/run/netns/c{}", key.1),
            Some("empty") => String::new(),
            Some(path) => path.to_owned(),
            None => format!("/run/netns/c{}", key.1),
        };
        let mut call = Invocation::new(&self.node, program).cni_path(&folder).command(verb).bad_config(&config);
        if verb != "GC" && verb != "STATUS" {
            call = call.id(&self.containers[key.1].id).netns(netns).ifname(&key.2);
            if let Some(args) = self.case["args"].as_str().filter(|_| ordinal == 0 || self.case["same"] == true) {
                call = call.cni_args(args);
            }
        }
        call.run()
    }

    fn prev(&self, key: &Key) -> Option<Value> {
        self.attached.iter().find(|(attached, _)| attached == key).and_then(|(_, result)| result.clone())
    }

    /// Whether DEL gets the result: from 0.4.0 on.
    fn keeps_results(&self, key: &Key) -> bool {
        at_least(&self.case["lists"][key.0], "0.4.0")
    }
}

/// Whether the version of a list is `version` or a later one.
pub(crate) fn at_least(list: &Value, version: &str) -> bool {
    let place = |version: &str| VERSIONS.iter().position(|known| *known == version);
    place(list["cniVersion"].as_str().unwrap_or("0.1.0")) >= place(version)
}

pub(crate) fn key_of(step: &Value) -> Key {
    let number = |field: &str| step[field].as_u64().unwrap_or_default() as usize;
    (number("list"), number("container"), step["ifname"].as_str().unwrap_or("eth0").to_owned())
}

pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn strings(value: &Value) -> Vec<&str> {
    list(value).iter().filter_map(Value::as_str).collect()
}

/// Makes the runtime's requests different for each attachment: shifts host ports, removes addresses
/// and MACs.
fn personal(config: &mut Value, ordinal: usize) {
    for mapping in config["runtimeConfig"]["portMappings"].as_array_mut().into_iter().flatten() {
        if let Some(port) = mapping["hostPort"].as_i64().filter(|port| (1..50000).contains(port)) {
            mapping["hostPort"] = json!(port + 1000 * ordinal as i64);
        }
    }
    for pointer in ["/runtimeConfig", "/args/cni"] {
        if let Some(asked) = config.pointer_mut(pointer).and_then(Value::as_object_mut) {
            asked.retain(|key, _| key != "ips" && key != "mac");
        }
    }
    if config["runtimeConfig"].is_null()
        && let Some(config) = config.as_object_mut()
    {
        config.remove("runtimeConfig");
    }
}

fn refusal(plugin: &Value, outcome: &Outcome) -> (String, String) {
    let json = outcome.json.as_ref();
    let text = json.map_or_else(
        || outcome.report(),
        |json| format!("{} {} ({})", json["code"], json["msg"].as_str().unwrap_or("?"), json["details"]),
    );
    (plugin["type"].as_str().unwrap_or_default().to_owned(), text)
}
