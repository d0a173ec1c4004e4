//! The verbs on a machine that runs no program, but records each call and answers as scripted.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use super::*;
use crate::{Cache, DEFAULT_TIMEOUT};
use cni::machine::{Child, Exit, Machine, Output, RunError};
use cni::rollback::Notes;

/// A call of a plugin.
#[derive(Clone, Debug)]
struct PluginCall {
    plugin: String,
    env: BTreeMap<String, String>,
    stdin: serde_json::Value,
}

impl PluginCall {
    fn verb(&self) -> &str {
        &self.env["CNI_COMMAND"]
    }
}

/// A machine with the answers of plugins, and the calls that it has recorded. A call without an
/// answer succeeds, ADD with an empty result.
#[derive(Default)]
struct Script {
    /// Exit status and stdout by plugin and verb, such as `a ADD`.
    answers: RefCell<BTreeMap<String, (i32, String)>>,
    calls: RefCell<Vec<PluginCall>>,
}

impl Machine for Script {
    fn is_own_netns(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }
    fn terminated(&self) -> bool {
        false
    }
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn run(&self, child: &Child<'_>) -> Result<Output, RunError> {
        let text = |text: &OsString| text.to_str().unwrap().to_owned();
        let env: BTreeMap<_, _> = child.env.iter().flatten().map(|(key, value)| (text(key), text(value))).collect();
        let plugin = child.program.file_name().unwrap().to_str().unwrap().to_owned();
        let call = PluginCall { plugin, env, stdin: serde_json::from_slice(child.stdin).unwrap() };
        let answer = self.answers.borrow().get(&format!("{} {}", call.plugin, call.verb())).cloned();
        let (status, stdout) = answer.unwrap_or_else(|| (0, if call.verb() == "ADD" { "{}" } else { "" }.to_owned()));
        self.calls.borrow_mut().push(call);
        // A plugin that dies writes the reason to stderr.
        let stderr = if status > 1 { "out of memory\n" } else { "" }.into();
        Ok(Output { status: Exit::Status(status), stdout: stdout.into_bytes(), stderr })
    }
}

/// A node with the plugins a, b and c.
struct Node {
    folder: tempfile::TempDir,
    script: Script,
    notes: Rc<RefCell<Vec<String>>>,
}

impl Node {
    fn new() -> Node {
        let folder = tempfile::tempdir().unwrap();
        for plugin in ["a", "b", "c"] {
            let path = folder.path().join(plugin);
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Node { folder, script: Script::default(), notes: Rc::default() }
    }

    fn runtime(&self) -> Runtime<'_> {
        let notes = Rc::clone(&self.notes);
        Runtime {
            machine: &self.script,
            plugin_folders: vec![self.folder.path().to_owned()],
            environment: [("HOME", "/root"), ("CNI_IFNAME", "inherited"), ("CNI_ARGS", "old")]
                .map(|(key, value)| (key.into(), value.into()))
                .to_vec(),
            cache: Cache::new(self.folder.path().join("cache")),
            timeout: DEFAULT_TIMEOUT,
            notes: Notes::new(move |line| notes.borrow_mut().push(line.to_owned())),
        }
    }

    fn answer(&self, call: &str, status: i32, stdout: &str) {
        self.script.answers.borrow_mut().insert(call.to_owned(), (status, stdout.to_owned()));
    }

    /// Makes a call fail with an error that the plugin prints.
    fn fail(&self, call: &str, code: u32) {
        self.answer(call, 1, &format!(r#"{{"cniVersion":"1.0.0","code":{code},"msg":"{call} went wrong"}}"#));
    }

    /// Returns the calls since the last time, and forgets them.
    fn take_calls(&self) -> Vec<PluginCall> {
        self.script.calls.take()
    }

    /// Returns plugin and verb of the calls since the last time, and forgets them.
    fn take_call_names(&self) -> Vec<String> {
        self.take_calls().iter().map(|call| format!("{} {}", call.plugin, call.verb())).collect()
    }

    /// Returns the names of the files in the result cache, sorted.
    fn cached_files(&self) -> Vec<String> {
        let Ok(files) = fs::read_dir(self.folder.path().join("cache/results")) else { return Vec::new() };
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| name != ".cni").collect();
        names.sort();
        names
    }

    /// Replaces the content of the file of attachment c1 in the result cache.
    fn damage(&self, text: &str) {
        fs::write(self.folder.path().join("cache/results/net-c1-eth0"), text).unwrap();
    }
}

/// Returns the network `net` with the plugins a, b and c. `head` is text with further keys.
fn list_with(version: &str, head: &str) -> NetworkList {
    let plugins = r#"[{"type":"a","capabilities":{"mac":true}},{"type":"b"},{"type":"c"}]"#;
    let text = format!(r#"{{"cniVersion":"{version}","name":"net",{head}"plugins":{plugins}}}"#);
    NetworkList::parse(text.as_bytes()).unwrap()
}

fn list(version: &str) -> NetworkList {
    list_with(version, "")
}

fn attachment(container_id: &str) -> Attachment {
    Attachment {
        container_id: container_id.to_owned(),
        netns: "/run/netns/x".to_owned(),
        ifname: "eth0".to_owned(),
        args: vec![("K".to_owned(), "v".to_owned()), ("L".to_owned(), "w".to_owned())],
        capability_args: Members::parse(r#"{"mac":"00:11:22:33:44:55"}"#).unwrap(),
    }
}

#[test]
fn add_runs_the_plugins_in_order_each_with_the_result_before_it() {
    let node = Node::new();
    node.answer("a ADD", 0, r#"{"ips":[{"address":"10.0.0.2/24"}]}"#);
    node.answer("b ADD", 0, r#"{"cniVersion":"1.0.0","x":1,"ips":[{"address":"10.0.0.3/24"}]}"#);
    node.answer("c ADD", 0, r#"{ "cniVersion": "0.4.0", "ips": [{"version":"4","address":"10.0.0.4/24"}] }"#);
    let result = node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap();
    assert_eq!(result.get(), r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.4/24"}]}"#);
    let calls = node.take_calls();
    let prev = |index: usize| &calls[index].stdin["prevResult"];
    assert!(prev(0).is_null());
    assert_eq!(
        (prev(1)["cniVersion"].as_str(), prev(1)["ips"][0]["address"].as_str()),
        (Some("1.0.0"), Some("10.0.0.2/24"))
    );
    assert_eq!(prev(2)["x"], 1);
    assert_eq!(calls[0].stdin["runtimeConfig"]["mac"], "00:11:22:33:44:55");
    assert!(calls[1].stdin["runtimeConfig"].is_null());
    assert_eq!(node.cached_files(), ["net-c1-eth0"]);
}

#[test]
fn the_six_variables_are_always_set_and_the_rest_is_inherited() {
    let node = Node::new();
    node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap();
    node.runtime().status(&list("1.1.0")).unwrap();
    let calls = node.take_calls();
    let folder = node.folder.path().to_str().unwrap();
    let expected = |values: [&str; 7]| {
        let names = ["CNI_ARGS", "CNI_COMMAND", "CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS", "CNI_PATH", "HOME"];
        names.map(str::to_owned).into_iter().zip(values.map(str::to_owned)).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(calls[0].env, expected(["K=v;L=w", "ADD", "c1", "eth0", "/run/netns/x", folder, "/root"]));
    assert_eq!(calls[3].env, expected(["", "STATUS", "", "", "", folder, "/root"]));
}

#[test]
fn a_failed_add_calls_every_del_and_reports_all_errors() {
    let node = Node::new();
    node.answer("a ADD", 0, r#"{"x":1}"#);
    node.fail("b ADD", 11);
    node.fail("b DEL", 7);
    node.answer("a DEL", 1, r#"{"code":7,"msg":"b ADD went wrong","details":"told already"}"#);
    let error = node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap_err();
    assert_eq!(error.code(), Code(11));
    assert_eq!(error.msg(), r#"plugin type="b" failed (add): b ADD went wrong"#);
    let expected = "the DEL after the failed ADD failed too: plugin type=\"b\" (delete): b DEL went wrong\n\
                    the DEL after the failed ADD failed too: plugin type=\"a\" (delete): for the same reason";
    assert_eq!(error.details(), expected);
    let calls = node.take_calls();
    let names: Vec<String> = calls.iter().map(|call| format!("{} {}", call.plugin, call.verb())).collect();
    assert_eq!(names, ["a ADD", "b ADD", "c DEL", "b DEL", "a DEL"]);
    assert!(calls[2..].iter().all(|call| call.stdin["prevResult"]["x"] == 1));
    assert!(node.cached_files().is_empty());
}

#[test]
fn the_last_output_of_a_dying_plugin_is_reported_once() {
    let node = Node::new();
    node.answer("b ADD", 137, "");
    node.answer("b DEL", 137, "");
    let error = node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap_err();
    assert!(error.msg().contains("netplugin failed: \"out of memory\": "), "{error}");
    assert_eq!(
        error.details(),
        "the DEL after the failed ADD failed too: plugin type=\"b\" (delete): for the same reason"
    );
    assert!(node.notes.borrow().is_empty(), "{:?}", node.notes);
}

#[test]
fn an_answer_that_is_not_a_result_fails_the_add() {
    for answer in ["", "hello", "[]", r#"{"cniVersion":"9.9.9"}"#, r#"{"ips":5}"#] {
        let node = Node::new();
        node.answer("a ADD", 0, answer);
        let error = node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap_err();
        assert_eq!(error.code(), Code::DECODE, "{answer}");
        assert!(error.msg().starts_with("plugin type=\"a\" failed (add): "), "{error}");
        assert_eq!(node.take_call_names(), ["a ADD", "c DEL", "b DEL", "a DEL"]);
    }
    let node = Node::new();
    node.answer("a ADD", 0, "null\n");
    assert!(node.runtime().add(&list("1.0.0"), &attachment("c1")).is_ok());
}

#[test]
fn invalid_requests_are_refused_before_any_plugin_runs() {
    let node = Node::new();
    let missing = NetworkList::parse(
        br#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"a"},{"type":"absent","name":"z"}]}"#,
    );
    let error = node.runtime().add(&missing.unwrap(), &attachment("c1")).unwrap_err();
    assert!(
        error
            .msg()
            .starts_with(r#"plugin type="absent" name="z" failed (add): failed to find plugin "absent" in path"#),
        "{error}"
    );
    assert_eq!(node.runtime().add(&list("9.9.9"), &attachment("c1")).unwrap_err().code(), Code(1));
    assert_eq!(node.runtime().add(&list("1.0.0"), &attachment("-")).unwrap_err().code(), Code(4));
    fs::write(node.folder.path().join("cache"), "a file where the folder should be").unwrap();
    assert_eq!(node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap_err().code(), Code::IO);
    assert!(node.take_call_names().is_empty());
}

#[test]
fn a_second_add_is_refused_and_leaves_the_first_one_alone() {
    let node = Node::new();
    node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap();
    node.take_calls();
    let error = node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap_err();
    assert_eq!(
        (error.code(), error.msg()),
        (Code::CONFLICT, "eth0 of container c1 is already attached to network net")
    );
    assert!(node.take_call_names().is_empty());
    assert_eq!(node.cached_files(), ["net-c1-eth0"]);
}

#[test]
fn check_gets_the_final_result_in_the_lists_version() {
    let node = Node::new();
    node.answer("c ADD", 0, r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.4/24"}]}"#);
    node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap();
    node.take_calls();
    node.runtime().check(&list("0.4.0"), &attachment("c1")).unwrap();
    let calls = node.take_calls();
    assert_eq!(calls.iter().map(|call| call.plugin.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
    for call in calls {
        let prev = &call.stdin["prevResult"];
        assert_eq!((prev["cniVersion"].as_str(), prev["ips"][0]["version"].as_str()), (Some("0.4.0"), Some("4")));
    }
}

#[test]
fn check_needs_0_4_0_and_a_cached_result_and_can_be_disabled() {
    let node = Node::new();
    let error = node.runtime().check(&list("0.3.1"), &attachment("c1")).unwrap_err();
    assert!(error.code() == Code(1) && error.msg().contains("does not support the CHECK command"), "{error}");
    node.runtime().check(&list_with("1.0.0", r#""disableCheck":"true","#), &attachment("c1")).unwrap();
    node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap();
    node.take_calls();
    for damage in ["broken", r#"{"cniVersion":"9.9.9"}"#] {
        node.damage(damage);
        let error = node.runtime().check(&list("1.0.0"), &attachment("c1")).unwrap_err();
        assert!(error.msg().starts_with("failed to get network \"net\" cached result: "), "{error}");
    }
    assert!(node.take_call_names().is_empty());
    node.fail("b CHECK", 101);
    let error = node.runtime().check(&list("1.0.0"), &attachment("c2")).unwrap_err();
    assert_eq!((error.code(), node.take_call_names()), (Code(101), vec!["a CHECK".to_owned(), "b CHECK".to_owned()]));
}

#[test]
fn del_stops_at_the_first_error_and_can_be_repeated() {
    let node = Node::new();
    node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap();
    node.take_calls();
    node.fail("b DEL", 5);
    let error = node.runtime().del(&list("1.0.0"), &attachment("c1"), OnError::Stop).unwrap_err();
    assert_eq!((error.code(), error.msg()), (Code(5), r#"plugin type="b" failed (delete): b DEL went wrong"#));
    assert_eq!(node.take_call_names(), ["c DEL", "b DEL"]);
    node.runtime().del(&list("1.0.0"), &attachment("c1"), OnError::GoOn).unwrap_err();
    assert_eq!(node.take_call_names(), ["c DEL", "b DEL", "a DEL"]);
    assert_eq!(node.cached_files(), ["net-c1-eth0"]);

    node.script.answers.borrow_mut().clear();
    node.runtime().del(&list("1.0.0"), &attachment("c1"), OnError::Stop).unwrap();
    assert!(node.take_calls().iter().all(|call| call.stdin["prevResult"].is_object()));
    assert!(node.cached_files().is_empty());
    node.runtime().del(&list("1.0.0"), &attachment("c1"), OnError::Stop).unwrap();
    assert!(node.take_calls().iter().all(|call| call.stdin["prevResult"].is_null()));
}

#[test]
fn del_below_0_4_0_passes_no_result_but_clears_the_cache() {
    let node = Node::new();
    node.runtime().add(&list("0.3.1"), &attachment("c1")).unwrap();
    node.take_calls();
    node.runtime().del(&list("0.3.1"), &attachment("c1"), OnError::Stop).unwrap();
    assert!(node.take_calls().iter().all(|call| call.stdin["prevResult"].is_null()));
    assert!(node.cached_files().is_empty());
}

#[test]
fn a_damaged_cache_entry_is_noted_and_does_not_stop_a_del() {
    let node = Node::new();
    node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap();
    node.damage("");
    node.take_calls();
    node.runtime().del(&list("1.0.0"), &attachment("c1"), OnError::Stop).unwrap();
    assert_eq!(node.take_call_names(), ["c DEL", "b DEL", "a DEL"]);
    assert!(node.notes.borrow()[0].contains("net-c1-eth0"), "{:?}", node.notes);
    assert!(node.cached_files().is_empty());
}

#[test]
fn gc_deletes_stale_cached_attachments_then_calls_every_plugin() {
    let node = Node::new();
    for id in ["c1", "c2"] {
        node.runtime().add(&list("1.1.0"), &attachment(id)).unwrap();
    }
    node.take_calls();
    node.fail("a GC", 7);
    let valid = ValidAttachments::from_iter([("c2", "eth0")]);
    let error = node.runtime().gc(&list("1.1.0"), &valid).unwrap_err();
    assert_eq!((error.code(), error.msg()), (Code(7), "failed to GC plugin a: a GC went wrong"));
    let calls = node.take_calls();
    let names: Vec<String> = calls.iter().map(|call| format!("{} {}", call.plugin, call.verb())).collect();
    assert_eq!(names, ["c DEL", "b DEL", "a DEL", "a GC", "b GC", "c GC"]);
    let del = &calls[2];
    assert_eq!((del.env["CNI_CONTAINERID"].as_str(), del.env["CNI_NETNS"].as_str()), ("c1", "/run/netns/x"));
    assert_eq!(del.env["CNI_ARGS"], "K=v;L=w");
    assert_eq!(del.stdin["runtimeConfig"]["mac"], "00:11:22:33:44:55");
    let gc = &calls[3].stdin;
    assert_eq!(gc["cni.dev/valid-attachments"].to_string(), r#"[{"containerID":"c2","ifname":"eth0"}]"#);
    assert!(gc["runtimeConfig"].is_null() && gc["prevResult"].is_null());
    assert_eq!(node.cached_files(), ["net-c2-eth0"]);
}

#[test]
fn gc_of_an_older_list_speaks_1_1_0_and_names_who_lacks_it() {
    let node = Node::new();
    node.answer("b GC", 1, r#"{"code":1,"msg":"incompatible CNI versions"}"#);
    node.answer("c GC", 1, r#"{"code":4,"msg":"unknown CNI_COMMAND: GC"}"#);
    node.runtime().gc(&list("0.3.1"), &ValidAttachments::default()).unwrap();
    let calls = node.take_calls();
    let versions: Vec<String> =
        calls.iter().map(|call| format!("{} {}", call.plugin, call.stdin["cniVersion"])).collect();
    assert_eq!(versions, [r#"a "1.1.0""#, r#"b "1.1.0""#, r#"c "1.1.0""#]);
    let notes = node.notes.borrow().join("\n");
    assert!(notes.contains("plugin b of net has no GC") && notes.contains("plugin c of net has no GC"), "{notes}");
    node.answer("c GC", 1, r#"{"code":5,"msg":"disk"}"#);
    assert_eq!(node.runtime().gc(&list("1.0.0"), &ValidAttachments::default()).unwrap_err().code(), Code::IO);
    // A list of version 1.1.0 promises that its plugins know GC.
    assert!(node.runtime().gc(&list("1.1.0"), &ValidAttachments::default()).unwrap_err().msg().contains("plugin b"));
}

#[test]
fn gc_runs_nothing_if_the_configuration_disables_it() {
    let node = Node::new();
    node.runtime().add(&list("1.0.0"), &attachment("c1")).unwrap();
    node.take_calls();
    let none = ValidAttachments::default();
    node.runtime().gc(&list_with("1.1.0", r#""disableGC":true,"#), &none).unwrap();
    assert!(node.take_call_names().is_empty());
    assert_eq!(node.cached_files(), ["net-c1-eth0"]);
}

#[test]
fn gc_with_an_unreadable_cache_fails_but_calls_every_plugin() {
    let node = Node::new();
    fs::write(node.folder.path().join("cache"), "a file where the folder should be").unwrap();
    let error = node.runtime().gc(&list("1.1.0"), &ValidAttachments::default()).unwrap_err();
    assert!(error.code() == Code::IO && error.msg().starts_with("failed to find stale attachments"), "{error}");
    assert_eq!(node.take_call_names(), ["a GC", "b GC", "c GC"]);
}

#[test]
fn status_stops_at_the_first_failing_plugin_with_its_code() {
    let node = Node::new();
    node.runtime().status(&list("1.0.0")).unwrap();
    assert!(node.take_call_names().is_empty());
    node.fail("b STATUS", 50);
    assert_eq!(node.runtime().status(&list("1.1.0")).unwrap_err().code(), Code::NOT_AVAILABLE);
    assert_eq!(node.take_call_names(), ["a STATUS", "b STATUS"]);
}

#[test]
fn versions_are_read_from_every_form_of_a_plugins_answer() {
    let node = Node::new();
    node.answer("a VERSION", 0, r#"{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}"#);
    node.answer("b VERSION", 0, r#"{"cniVersion":"0.2.0"}"#);
    node.answer("c VERSION", 1, r#"{"code":4,"msg":"unknown CNI_COMMAND: VERSION"}"#);
    let versions = |kind: &str| node.runtime().supported_versions(kind).map(|versions| versions.join(" "));
    assert_eq!(versions("a").unwrap(), "1.0.0 1.1.0");
    assert_eq!(versions("b").unwrap(), "0.1.0 0.2.0");
    assert_eq!(versions("c").unwrap(), "0.1.0");
    let env = &node.take_calls()[0].env;
    assert_eq!(
        [&env["CNI_NETNS"], &env["CNI_IFNAME"], &env["CNI_PATH"], &env["CNI_CONTAINERID"]],
        ["dummy", "dummy", "dummy", ""]
    );
    for bad in ["", "{}", r#"{"cniVersion":"1.0.0"}"#] {
        node.answer("a VERSION", 0, bad);
        assert!(versions("a").is_err(), "{bad}");
    }
}
