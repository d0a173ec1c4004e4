//! Logs: silent by default, one line per call, one per step, never in the way.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::time::Duration;

use cni_testkit::{Container, Invocation, Node, Outcome, probe, require};
use conformance::{bridge, patched};
use serde_json::json;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

struct Logged {
    node: Node,
    container: Container,
}

impl Logged {
    fn new() -> Logged {
        let node = Node::new();
        let container = node.container();
        Logged { node, container }
    }

    fn call(&self, verb: &str) -> Invocation<'_> {
        let config = bridge(&self.node, &["10.1.0.0/24"]);
        self.node.plugin("bridge").command(verb).container(&self.container).config(&config)
    }

    fn file(&self) -> PathBuf {
        self.node.dir().join("log")
    }

    fn lines(&self) -> Vec<String> {
        let text = fs::read_to_string(self.file()).unwrap_or_default();
        let _ = fs::remove_file(self.file());
        text.lines().map(str::to_owned).collect()
    }
}

/// Returns the value of a key of a log line.
#[track_caller]
fn field(line: &str, key: &str) -> String {
    let value = line.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    value.unwrap_or_else(|| panic!("no {key} in {line}")).to_owned()
}

#[track_caller]
fn quiet(outcome: &Outcome) {
    outcome.success();
    assert_eq!(outcome.stderr, "", "{}", outcome.report());
}

#[test]
fn nothing_is_said_unless_asked_for() {
    require!(probe::plugin("cnitool"));
    let logged = Logged::new();
    for level in ["", "off", "none", "false", "0"] {
        quiet(&logged.call("ADD").env("CNI_LOG_FILE", logged.file()).env("CNI_LOG", level).run());
        quiet(&logged.call("DEL").env("CNI_LOG_FILE", logged.file()).run());
        assert!(!logged.file().exists());
    }
}

#[test]
fn each_call_is_a_line_and_the_delegates_have_theirs() {
    require!(probe::plugin("cnitool"));
    let logged = Logged::new();
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let with_log = |verb: &str| {
        let call = logged.call(verb).env("CNI_LOG", "info").env("CNI_LOG_FILE", logged.file());
        call.env("TRACEPARENT", &parent).run()
    };
    quiet(&with_log("ADD"));
    let lines = logged.lines();
    assert_eq!(lines.len(), 2, "{lines:#?}");
    assert_ne!(field(&lines[0], "span"), field(&lines[1], "span"));
    let bridge_span = field(&lines[1], "span");
    for (line, plugin, parent) in [(&lines[0], "host-local", &*bridge_span), (&lines[1], "bridge", PARENT)] {
        for words in [
            format!(" info cni-{plugin} trace={TRACE} span={} parent={parent} pid=", field(line, "span")),
            format!(" plugin={plugin} verb=ADD network=net1 container={} ifname=eth0 code=0 ms=", logged.container.id),
        ] {
            assert!(line.contains(&words), "it should say `{words}`: {line}");
        }
    }
    let again = with_log("ADD");
    again.failure();
    let lines = logged.lines();
    let last = lines.last().unwrap();
    assert!(last.contains(" code=102 ms=") && last.contains(" error=\""), "{lines:#?}");
    quiet(&with_log("DEL"));
    assert_eq!(logged.lines().len(), 2);
}

/// An IPAM plugin that writes the variables of the trace to stderr and fails.
const TRACER: &str = "#!/bin/sh\ncat >/dev/null\necho \"$TRACEPARENT|$TRACESTATE|$BAGGAGE\" >&2\nexit 1\n";

#[test]
fn a_delegate_gets_the_trace_with_or_without_a_log() {
    require!(probe::plugin("cnitool"));
    let node = Node::new();
    let container = node.container();
    let folder = crate::delegation::executable(&node, "tracer", TRACER);
    let config = patched(bridge(&node, &[]), json!({"ipam": {"type": "tracer"}}));
    let call = |parent: &str| {
        let call = node.plugin("bridge").command("ADD").cni_path(&folder).container(&container).config(&config);
        call.env("TRACEPARENT", parent).env("TRACESTATE", "a=1,b=2").env("BAGGAGE", "user=x%20y;p")
    };
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let passed_on = |outcome: &Outcome, parent: &str| {
        let expected = format!("{parent}|a=1,b=2|user=x%20y;p");
        assert!(outcome.failure().msg.contains(&expected), "{}", outcome.report());
    };
    passed_on(&call(&parent).run(), &parent);
    let log = node.dir().join("log");
    let logged = |parent: &str| call(parent).env("CNI_LOG", "info").env("CNI_LOG_FILE", &log).run();
    let added = logged(&parent);
    let line = fs::read_to_string(&log).unwrap();
    passed_on(&added, &format!("00-{TRACE}-{}-01", field(&line, "span")));
    passed_on(&logged("00-malformed"), "00-malformed");
}

#[test]
fn steps_have_their_durations_and_name_the_request_that_failed() {
    require!(probe::plugin("cnitool"));
    let logged = Logged::new();
    let with_log = |verb: &str| logged.call(verb).env("CNI_LOG", "debug").env("CNI_LOG_FILE", logged.file()).run();
    quiet(&with_log("ADD"));
    let lines = logged.lines();
    let steps: Vec<&String> = lines.iter().filter(|line| line.contains(" step=")).collect();
    for words in
        ["netlink NewLink", "netlink NewAddress 10.1.0.2/24", "/host-local\" ms=", "/lock\" ms=", "ip_forward\" ms="]
    {
        assert!(steps.iter().any(|line| line.contains(words)), "no step says `{words}`: {lines:#?}");
    }
    assert!(steps.iter().all(|line| line.contains(" ms=")), "{steps:#?}");
    quiet(&with_log("DEL"));
    logged.lines();
    // The delegate fails after the links have been made.
    fs::remove_dir_all(logged.node.data_dir()).unwrap();
    fs::write(logged.node.data_dir(), "no folder").unwrap();
    with_log("ADD").failure();
    let lines = logged.lines();
    assert!(
        lines.iter().any(|line| line.contains("/host-local\" ms=") && line.contains("exit status 1")),
        "{lines:#?}"
    );
    assert!(lines.iter().any(|line| line.contains("plugin=host-local") && line.contains(" code=5 ")), "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains(" rollback=")), "{lines:#?}");
}

#[test]
fn a_file_that_cannot_be_used_or_an_unknown_level_fails_no_call() {
    require!(probe::plugin("cnitool"));
    let logged = Logged::new();
    let target = logged.node.file("target", "kept");
    let link = logged.node.dir().join("link");
    std::os::unix::fs::symlink(&target, &link).unwrap();
    for path in [&link, logged.node.dir(), &PathBuf::from("/nonexistent/folder/log")] {
        let add = logged.call("ADD").env("CNI_LOG", "info").env("CNI_LOG_FILE", path).run();
        add.success();
        assert!(
            add.stderr.contains("bridge: CNI_LOG_FILE ") && add.stderr.contains("cannot be used"),
            "{}",
            add.report()
        );
        assert!(!add.stderr.contains(" plugin=bridge "), "{}", add.report());
        logged.call("DEL").run().success();
    }
    let add = logged.call("ADD").env("CNI_LOG", "verbose").env("CNI_LOG_FILE", logged.file()).run();
    add.success();
    assert!(add.stderr.contains("bridge: CNI_LOG is \"verbose\""), "{}", add.report());
    assert!(!logged.file().exists());
    logged.call("DEL").run().success();
    assert_eq!(fs::read_to_string(target).unwrap(), "kept");
}

#[test]
fn logs_go_to_journald_where_it_runs_and_else_to_stderr() {
    require!(probe::plugin("cnitool"));
    let logged = Logged::new();
    let add = logged.call("ADD").env("CNI_LOG", "info").run();
    add.success();
    assert!(add.stderr.contains(" plugin=bridge verb=ADD "), "{}", add.report());
    let journal = logged.node.enter(|| {
        fs::create_dir_all("/run/systemd/journal").unwrap();
        UnixDatagram::bind("/run/systemd/journal/socket").unwrap()
    });
    journal.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    quiet(&logged.call("DEL").env("CNI_LOG", "info").run());
    let mut seen = String::new();
    for _ in 0..2 {
        let mut buffer = [0; 4096];
        let length = journal.recv(&mut buffer).unwrap();
        seen += std::str::from_utf8(&buffer[..length]).unwrap();
    }
    for words in
        ["MESSAGE=pid=", "plugin=bridge verb=DEL", "\nPRIORITY=6\n", "SYSLOG_IDENTIFIER=cni-bridge\n", "cni-host-local"]
    {
        assert!(seen.contains(words), "it should say `{words}`: {seen}");
    }
    // A journal that does not read blocks no call: its queue takes a few datagrams, then calls
    // continue without it.
    for _ in 0..20 {
        quiet(&logged.call("DEL").env("CNI_LOG", "debug").run());
    }
}

#[test]
fn cnitool_hands_the_log_on_to_the_plugins() {
    require!(probe::plugin("cnitool"));
    let operator = super::Operator::new();
    let log = operator.node.dir().join("log");
    let container = operator.node.container();
    let args = ["add", "net1", super::path(&container), "--container-id", &container.id];
    let add = operator.call(&args).env("CNI_LOG", "info").env("CNI_LOG_FILE", &log).run();
    assert_eq!(add.status, Some(0), "{}", add.report());
    let text = fs::read_to_string(&log).unwrap();
    assert!(text.contains("plugin=bridge verb=ADD") && text.contains("plugin=host-local verb=ADD"), "{text}");
    operator.detach(&container);
}
