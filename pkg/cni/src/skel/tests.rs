//! The protocol on values: environment in, bytes out.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::Instant;

use super::*;
use crate::machine::{Child, Output, RunError};

/// A machine on which `/own` is the plugin's own namespace and no program can be run.
#[derive(Default)]
struct FakeMachine {
    terminated: Cell<bool>,
}

impl Machine for FakeMachine {
    fn is_own_netns(&self, path: &Path) -> io::Result<bool> {
        Ok(path == Path::new("/own"))
    }
    fn terminated(&self) -> bool {
        self.terminated.get()
    }
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn run(&self, _: &Child<'_>) -> Result<Output, RunError> {
        Err(RunError::Start(io::Error::from_raw_os_error(2)))
    }
}

/// A plugin that records its calls. Its ADD can be undone.
#[derive(Default)]
struct Recorder {
    calls: RefCell<Vec<String>>,
    undone: Rc<Cell<bool>>,
    result: AddResult,
    panics: bool,
}

impl Recorder {
    fn record(&self, verb: &str, call: &Call<'_>) {
        let netns = call.netns.as_deref().map(|path| path.display().to_string()).unwrap_or_default();
        self.calls.borrow_mut().push(format!("{verb} {} {netns} {}", call.container_id, call.ifname));
    }
}

impl Plugin for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }
    fn role(&self) -> Role {
        Role::Interface
    }
    fn examine(&self, _: &NetConf) -> Result<()> {
        Ok(())
    }
    fn unknown_keys(&self, _: &Json) -> Vec<UnknownKey> {
        Vec::new()
    }
    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        self.record("add", call);
        let mut rollback = call.rollback();
        let undone = Rc::clone(&self.undone);
        rollback.push("undo", move || {
            undone.set(true);
            Ok::<_, Error>(())
        });
        assert!(!self.panics, "on purpose");
        Ok(Added { result: self.result.clone(), rollback })
    }
    fn check(&self, call: &Call<'_>) -> Result<()> {
        self.record("check", call);
        Ok(())
    }
    fn del(&self, call: &Call<'_>) -> Result<()> {
        self.record("del", call);
        if call.container_id == "bad" { Err(Error::new(Code::IO, "del went wrong")) } else { Ok(()) }
    }
    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        self.record(&format!("gc{:?}", valid.iter().collect::<Vec<_>>()), call);
        Ok(())
    }
    fn status(&self, call: &Call<'_>) -> Result<()> {
        self.record("status", call);
        Err(Error::new(Code::NOT_AVAILABLE, "full").with_details("d"))
    }
}

/// The exit and the output of a call.
struct Outcome {
    failed: bool,
    stdout: String,
    notes: String,
}

impl Outcome {
    fn code(&self) -> u64 {
        assert!(self.failed, "succeeded: {}", self.stdout);
        self.json()["code"].as_u64().unwrap()
    }
    fn msg(&self) -> String {
        self.json()["msg"].as_str().unwrap().to_owned()
    }
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap()
    }
}

const BASE: [(&str, &str); 4] =
    [("CNI_CONTAINERID", "c1"), ("CNI_NETNS", "/other"), ("CNI_IFNAME", "eth0"), ("CNI_PATH", "/p")];

fn environment(command: &str, changes: &[(&str, &str)]) -> Environment {
    let pairs = BASE.iter().chain(changes).chain([("CNI_COMMAND", command)].iter()).copied().collect::<Vec<_>>();
    Environment::new(pairs.into_iter().map(|(key, value)| (key.into(), value.into())))
}

fn call(plugin: &Recorder, environment: &Environment, stdin: &str) -> Outcome {
    call_on(plugin, &FakeMachine::default(), environment, stdin, &mut Vec::new())
}

/// The stdout of a plugin, whose text can be read afterwards.
trait Stdout: Write {
    fn text(&self) -> String;
}

impl Stdout for Vec<u8> {
    fn text(&self) -> String {
        String::from_utf8(self.clone()).unwrap()
    }
}

fn call_on(
    plugin: &Recorder,
    machine: &FakeMachine,
    environment: &Environment,
    stdin: &str,
    stdout: &mut dyn Stdout,
) -> Outcome {
    let notes = Rc::new(RefCell::new(String::new()));
    let sink = Rc::clone(&notes);
    let mut stdin = stdin.as_bytes();
    let streams = Streams {
        stdin: Some(&mut stdin),
        stdout: &mut *stdout,
        notes: Notes::new(move |line| sink.borrow_mut().push_str(line)),
    };
    let failed = dispatch(plugin, machine, environment, streams).is_err();
    Outcome { failed, stdout: stdout.text(), notes: notes.borrow().clone() }
}

const CONF: &str = r#"{"cniVersion":"1.1.0","name":"net","type":"recorder","cni.dev/valid-attachments":[]}"#;

fn conf(version: &str) -> String {
    CONF.replace("1.1.0", version)
}

#[test]
fn each_verb_calls_its_handler_and_no_other() {
    for (command, expected) in [
        ("ADD", "add c1 /other eth0"),
        ("CHECK", "check c1 /other eth0"),
        ("DEL", "del c1 /other eth0"),
        ("GC", "gc[]   "),
        ("STATUS", "status   "),
    ] {
        let plugin = Recorder::default();
        call(&plugin, &environment(command, &[]), CONF);
        assert_eq!(*plugin.calls.borrow(), [expected]);
    }
}

#[test]
fn a_result_is_written_and_committed() {
    let plugin = Recorder::default();
    let outcome = call(&plugin, &environment("ADD", &[]), CONF);
    assert_eq!(outcome.stdout, "{\n    \"cniVersion\": \"1.1.0\"\n}");
    assert!(!outcome.failed && !plugin.undone.get());
}

#[test]
fn all_missing_variables_that_the_verb_needs_are_named_at_once() {
    let none = [("CNI_CONTAINERID", ""), ("CNI_NETNS", ""), ("CNI_IFNAME", ""), ("CNI_PATH", "")];
    for (command, missing) in [
        ("ADD", "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"),
        ("CHECK", "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"),
        ("DEL", "CNI_CONTAINERID,CNI_IFNAME,CNI_PATH"),
        ("GC", "CNI_PATH"),
        ("STATUS", "CNI_PATH"),
    ] {
        let outcome = call(&Recorder::default(), &environment(command, &none), CONF);
        assert_eq!((outcome.code(), outcome.msg()), (4, format!("required env variables [{missing}] missing")));
    }
}

#[test]
fn an_invalid_variable_is_reported_before_a_missing_later_one() {
    let bad = environment("ADD", &[("CNI_CONTAINERID", "some-%%container-id"), ("CNI_IFNAME", "")]);
    let outcome = call(&Recorder::default(), &bad, CONF);
    assert!(outcome.msg().starts_with("invalid characters in containerID"));
    assert_eq!(outcome.json()["details"], "some-%%container-id");
    let long = environment("DEL", &[("CNI_IFNAME", "1234567890123456")]);
    assert!(call(&Recorder::default(), &long, CONF).msg().starts_with("interface name is too long"));
    let ignored = environment("STATUS", &[("CNI_IFNAME", "a/b"), ("CNI_CONTAINERID", "%")]);
    assert_eq!(call(&Recorder::default(), &ignored, CONF).code(), 50);
}

#[test]
fn a_variable_that_is_not_text_is_named() {
    use std::os::unix::ffi::OsStringExt;
    let mut pairs: Vec<_> = BASE.iter().map(|(key, value)| (key.into(), value.into())).collect();
    pairs.push(("CNI_COMMAND".into(), "ADD".into()));
    pairs.push(("CNI_ARGS".into(), std::ffi::OsString::from_vec(vec![0xff])));
    let outcome = call(&Recorder::default(), &Environment::new(pairs.clone()), CONF);
    assert_eq!((outcome.code(), outcome.msg().contains("CNI_ARGS")), (4, true));
    pairs.push(("CNI_COMMAND".into(), "VERSION".into()));
    assert!(!call(&Recorder::default(), &Environment::new(pairs), CONF).failed, "VERSION never fails");
}

#[test]
fn without_a_command_plugin_and_versions_are_printed() {
    let outcome = call(&Recorder::default(), &environment("", &[]), "");
    assert!(!outcome.failed && outcome.stdout.is_empty());
    let lines: Vec<&str> = outcome.notes.lines().collect();
    let version = concat!("CNI recorder plugin v1.9.1+rust.", env!("CARGO_PKG_VERSION"));
    let release = format!("CNI plugins in Rust: release {}", crate::release::release());
    let supported = "CNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0";
    assert_eq!(lines, [version, supported, release.as_str()]);
    let outcome = call(&Recorder::default(), &environment("add", &[]), CONF);
    assert_eq!((outcome.code(), outcome.msg()), (4, "unknown CNI_COMMAND: add".into()));
}

#[test]
fn version_echoes_a_supported_version_and_never_fails() {
    let list = r#""supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]"#;
    for (stdin, version) in [
        (r#"{"cniVersion":"0.4.0"}"#, "0.4.0"),
        ("", "1.1.0"),
        ("hello", "1.1.0"),
        (r#"{"cniVersion":"9.0.0"}"#, "1.1.0"),
    ] {
        let outcome = call(&Recorder::default(), &environment("VERSION", &[("CNI_PATH", "")]), stdin);
        assert_eq!(outcome.stdout, format!("{{\"cniVersion\":\"{version}\",{list}}}\n"));
    }
}

#[test]
fn versions_are_checked_in_gos_order() {
    for (command, version, code, msg) in [
        ("ADD", "0.5.0", 1, "incompatible CNI versions"),
        ("ADD", "x", 1, "incompatible CNI versions"),
        ("CHECK", "0.3.1", 1, "config version does not allow CHECK"),
        ("CHECK", "9.0.0", 1, "plugin version does not allow CHECK"),
        ("CHECK", "0.4.5", 1, "incompatible CNI versions"),
        ("CHECK", "x", 6, "failed to convert version part"),
        ("GC", "1.0.0", 1, "config version does not allow GC"),
        ("STATUS", "1.0.0", 1, "config version does not allow STATUS"),
    ] {
        let outcome = call(&Recorder::default(), &environment(command, &[]), &conf(version));
        assert_eq!(outcome.code(), code, "{command} {version}");
        assert!(outcome.msg().starts_with(msg), "{command} {version}: {}", outcome.msg());
        // Go's runtimes append details to the text, which other programs compare for equality.
        assert_eq!(outcome.json().get("details").is_some(), msg.starts_with("incompatible"), "{command} {version}");
    }
    let outcome = call(&Recorder::default(), &environment("ADD", &[]), &conf("0.5.0"));
    assert!(
        outcome.json()["details"].as_str().unwrap().starts_with("config is \"0.5.0\", plugin supports [\"0.1.0\" ")
    );
}

#[test]
fn errors_carry_the_configurations_version() {
    let outcome = call(&Recorder::default(), &environment("STATUS", &[]), CONF);
    assert_eq!(
        outcome.stdout,
        "{\n    \"cniVersion\": \"1.1.0\",\n    \"code\": 50,\n    \"msg\": \"full\",\n    \"details\": \"d\"\n}"
    );
    let outcome = call(&Recorder::default(), &environment("CHECK", &[]), &conf("0.3.1"));
    assert_eq!(outcome.json()["cniVersion"], "0.3.1");
    assert_eq!(call(&Recorder::default(), &environment("ADD", &[]), "{").json()["cniVersion"], "1.1.0");
}

#[test]
fn the_plugins_own_namespace_is_refused_before_any_work() {
    for command in ["ADD", "CHECK"] {
        let plugin = Recorder::default();
        let outcome = call(&plugin, &environment(command, &[("CNI_NETNS", "/own")]), CONF);
        assert_eq!(outcome.msg(), "plugin's netns and netns from CNI_NETNS should not be the same");
        assert_eq!((outcome.code(), plugin.calls.borrow().len()), (8, 0));
        for yes in ["1", "TRUE"] {
            let allowed = environment(command, &[("CNI_NETNS", "/own"), ("CNI_NETNS_OVERRIDE", yes)]);
            assert!(!call(&Recorder::default(), &allowed, CONF).failed);
        }
    }
}

#[test]
fn del_in_the_plugins_own_namespace_cleans_outside_then_fails() {
    let plugin = Recorder::default();
    assert_eq!(call(&plugin, &environment("DEL", &[("CNI_NETNS", "/own")]), CONF).code(), 8);
    assert_eq!(*plugin.calls.borrow(), ["del c1  eth0"]);
    let both = environment("DEL", &[("CNI_NETNS", "/own"), ("CNI_CONTAINERID", "bad")]);
    let outcome = call(&Recorder::default(), &both, CONF);
    assert_eq!((outcome.code(), outcome.msg().ends_with("; del went wrong")), (8, true));
}

#[test]
fn a_version_that_cannot_express_the_result_rolls_back() {
    let plugin = Recorder::default();
    let outcome = call(&plugin, &environment("ADD", &[]), &conf("0.2.0"));
    assert_eq!(outcome.msg(), "cannot convert: no valid IP addresses");
    assert!(plugin.undone.get());
}

/// A pipe that takes some bytes and then breaks.
struct Breaks(usize);

impl Write for Breaks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let taken = bytes.len().min(self.0);
        self.0 -= taken;
        Ok(taken)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stdout for Breaks {
    fn text(&self) -> String {
        String::new()
    }
}

#[test]
fn a_broken_stdout_rolls_back_at_whatever_byte() {
    for taken in [0, 1, 10] {
        let plugin = Recorder::default();
        let outcome = call_on(&plugin, &FakeMachine::default(), &environment("ADD", &[]), CONF, &mut Breaks(taken));
        assert!(outcome.failed && plugin.undone.get());
        assert!(outcome.notes.contains("could not be written to stdout"), "{}", outcome.notes);
    }
}

#[test]
fn a_panic_is_an_error_after_the_rollback() {
    let plugin = Recorder { panics: true, ..Recorder::default() };
    let outcome = call(&plugin, &environment("ADD", &[]), CONF);
    assert_eq!((outcome.code(), outcome.msg()), (999, "internal error in recorder: on purpose".into()));
    assert!(plugin.undone.get());
}

#[test]
fn sigterm_rolls_back_a_finished_add() {
    let (plugin, machine) = (Recorder::default(), FakeMachine::default());
    machine.terminated.set(true);
    let outcome = call_on(&plugin, &machine, &environment("ADD", &[]), CONF, &mut Vec::new());
    assert_eq!((outcome.code(), plugin.undone.get()), (11, true));
}

#[test]
fn a_long_network_name_is_refused_by_add_and_accepted_by_del() {
    let long = |length: usize| CONF.replace("\"net\"", &format!("{:?}", "n".repeat(length)));
    assert!(!call(&Recorder::default(), &environment("ADD", &[]), &long(200)).failed);
    assert_eq!(call(&Recorder::default(), &environment("ADD", &[]), &long(201)).code(), 7);
    assert!(!call(&Recorder::default(), &environment("DEL", &[]), &long(201)).failed);
}

#[test]
fn gc_without_a_list_touches_nothing() {
    let plugin = Recorder::default();
    let outcome = call(&plugin, &environment("GC", &[]), r#"{"cniVersion":"1.1.0","name":"net"}"#);
    assert_eq!((outcome.code(), plugin.calls.borrow().len()), (7, 0));
}

#[test]
fn stdin_is_bounded_and_must_not_be_a_terminal() {
    let huge = " ".repeat(MAX_STDIN + 1);
    assert_eq!(call(&Recorder::default(), &environment("ADD", &[]), &huge).code(), 5);
    let mut out = Vec::new();
    let streams = Streams { stdin: None, stdout: &mut out, notes: Notes::silent() };
    assert_eq!(dispatch(&Recorder::default(), &FakeMachine::default(), &environment("ADD", &[]), streams), Err(Failed));
    assert!(String::from_utf8(out).unwrap().contains("error reading from stdin"));
}
