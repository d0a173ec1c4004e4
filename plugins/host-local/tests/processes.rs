//! Real processes on one folder: ours, Go's, killed ones, and ones that wait.

#![allow(clippy::unwrap_used, reason = "a test may panic, and keeps the line number; so may what it calls")]

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use cni_testkit::{crowd, locks};
use serde_json::{Value, json};

const OURS: &str = env!("CARGO_BIN_EXE_host-local");

/// Go's plugin, or the reason why a test cannot have it.
fn go() -> Option<String> {
    let path = cni_testkit::go_bin_dir().join("host-local").to_str().unwrap().to_owned();
    if Path::new(&path).exists() {
        return Some(path);
    }
    let required = std::env::var("CNI_TEST_REQUIRE").is_ok_and(|value| value == "all");
    assert!(!required, "CNI_TEST_REQUIRE=all, but there is no {path}");
    let mut stderr = std::io::stderr();
    writeln!(stderr, "\nSKIP: no Go plugin {path}; set CNI_GO_BIN_DIR").unwrap();
    None
}

struct Net(tempfile::TempDir);

impl Net {
    fn new() -> Net {
        Net(tempfile::tempdir().unwrap())
    }

    fn conf(&self, ipam: Value) -> Value {
        let mut conf = json!({"cniVersion": "1.0.0", "name": "net", "type": "x", "ipam": ipam});
        conf["ipam"]["type"] = "host-local".into();
        conf["ipam"]["dataDir"] = self.0.path().to_str().unwrap().into();
        conf
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join("net").join(name)
    }

    /// Starts a plugin; it begins when its standard input is written.
    fn start(&self, program: &str, verb: &str, id: &str) -> Child {
        Command::new(program)
            .env_clear()
            .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", id), ("CNI_IFNAME", "eth0")])
            .envs([("CNI_NETNS", "/nonexistent"), ("CNI_PATH", "/bin")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn run(&self, program: &str, verb: &str, id: &str, conf: &Value) -> Output {
        let mut child = self.start(program, verb, id);
        feed(&mut child, conf);
        child.wait_with_output().unwrap()
    }

    fn ok(&self, program: &str, verb: &str, id: &str, conf: &Value) -> Value {
        let output = self.run(program, verb, id, conf);
        assert!(output.status.success(), "{program} {verb} {id}: {}", String::from_utf8_lossy(&output.stdout));
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    fn reservations(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("")).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != "lock" && !name.starts_with("last_reserved_ip."));
        names.sort();
        names
    }
}

fn feed(child: &mut Child, conf: &Value) {
    child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
}

fn address(result: &Value) -> String {
    result["ips"][0]["address"].as_str().unwrap().to_owned()
}

/// All of these at once: every process is there and waits for its input before the first one gets
/// it.
fn at_once(net: &Net, calls: &[(&str, &str, String)], conf: &Value) -> Vec<Value> {
    let mut children: Vec<Child> = calls.iter().map(|(program, verb, id)| net.start(program, verb, id)).collect();
    children.iter_mut().for_each(|child| feed(child, conf));
    let answer = |child: Child| {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_str(&text).unwrap_or(Value::Null)
    };
    children.into_iter().map(answer).collect()
}

#[test]
fn simultaneous_processes_get_distinct_addresses() {
    let net = Net::new();
    let conf = net.conf(json!({"subnet": "10.0.0.0/24"}));
    // They come one after the other through the lock, which each of them gives up after 30 s.
    let count = crowd(80);
    let add: Vec<_> = (0..count).map(|n| (OURS, "ADD", format!("c{n}"))).collect();
    let got: HashSet<String> = at_once(&net, &add, &conf).iter().map(address).collect();
    assert_eq!(got.len(), count);
    let del: Vec<_> = (0..count).map(|n| (OURS, "DEL", format!("c{n}"))).collect();
    at_once(&net, &del, &conf);
    assert_eq!(net.reservations(), [""; 0]);
}

#[test]
fn this_plugin_and_gos_share_a_folder_concurrently() {
    let Some(go) = go() else { return };
    let net = Net::new();
    let conf = net.conf(json!({"ranges": [[{"subnet": "10.0.0.0/25"}], [{"subnet": "fd00::/120"}]]}));
    let either = |n: usize| if n.is_multiple_of(2) { OURS } else { go.as_str() };
    // Both in one call: a range of IPv4 and one of IPv6, so twice as many reservations as
    // containers.
    let (count, newcomers) = (crowd(60), 100..100 + crowd(30));
    let add: Vec<_> = (0..count).map(|n| (either(n), "ADD", format!("c{n}"))).collect();
    let got: HashSet<String> = at_once(&net, &add, &conf).iter().map(address).collect();
    assert_eq!(got.len(), count);
    // CHECK and DEL by the other one.
    let check: Vec<_> = (0..count).map(|n| (either(n + 1), "CHECK", format!("c{n}"))).collect();
    at_once(&net, &check, &conf);
    let mixed: Vec<_> = (0..count)
        .map(|n| (either(n + 1), "DEL", format!("c{n}")))
        .chain(newcomers.clone().map(|n| (either(n), "ADD", format!("c{n}"))))
        .collect();
    at_once(&net, &mixed, &conf);
    assert_eq!(net.reservations().len(), 2 * newcomers.len());
    let del: Vec<_> = newcomers.map(|n| (either(n + 1), "DEL", format!("c{n}"))).collect();
    at_once(&net, &del, &conf);
    assert_eq!(net.reservations(), [""; 0]);
}

#[test]
fn round_robin_continues_after_go_and_the_reverse() {
    let Some(go) = go() else { return };
    let net = Net::new();
    let conf = net.conf(json!({"subnet": "10.0.0.0/29"}));
    for (program, id, expected) in
        [(go.as_str(), "a", 2), (OURS, "b", 3), (OURS, "c", 4), (&go, "d", 5), (OURS, "e", 6)]
    {
        assert_eq!(address(&net.ok(program, "ADD", id, &conf)), format!("10.0.0.{expected}/29"));
    }
    for (deleter, adder, id) in [(OURS, go.as_str(), "b"), (&go, OURS, "d")] {
        net.ok(deleter, "DEL", id, &conf);
        let before = net.reservations();
        net.ok(adder, "ADD", id, &conf);
        assert_eq!(net.reservations().len(), before.len() + 1);
    }
    assert!(!net.run(OURS, "ADD", "f", &conf).status.success());
    assert!(!net.run(&go, "ADD", "f", &conf).status.success());
}

#[test]
fn waiting_for_a_held_lock_ends_with_its_holders_pid() {
    let net = Net::new();
    net.ok(OURS, "ADD", "a", &net.conf(json!({"subnet": "10.0.0.0/24"})));
    let lock = File::open(net.path("lock")).unwrap();
    lock.lock().unwrap();
    let conf = net.conf(json!({"subnet": "10.0.0.0/24", "lockTimeout": 1}));
    for verb in ["ADD", "DEL", "CHECK"] {
        let refused = || {
            let output = net.run(OURS, verb, "b", &conf);
            let error: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(error["code"], 11, "{error}");
            error["msg"].as_str().unwrap().to_owned()
        };
        locks::assert_names_holder(&format!("it is held by process {} (", std::process::id()), refused);
    }
    assert_eq!(net.reservations(), ["10.0.0.2"]);
}

#[test]
fn sigterm_ends_the_wait_for_the_lock() {
    let net = Net::new();
    let conf = net.conf(json!({"subnet": "10.0.0.0/24"}));
    net.ok(OURS, "ADD", "a", &conf);
    let lock = File::open(net.path("lock")).unwrap();
    lock.lock().unwrap();
    let mut child = net.start(OURS, "ADD", "b");
    feed(&mut child, &conf);
    locks::wait_until_waiting(child.id());
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((error["code"].as_u64(), output.status.code()), (Some(11), Some(1)), "{error}");
    assert!(error["msg"].as_str().unwrap().contains("interrupted by a signal"), "{error}");
    drop(lock);
    assert_eq!(net.reservations(), ["10.0.0.2"]);
}

#[test]
fn a_process_killed_at_any_moment_leaves_a_store_that_works() {
    let net = Net::new();
    let conf = net.conf(json!({"ranges": [[{"subnet": "10.0.0.0/24"}], [{"subnet": "fd00::/64"}]]}));
    net.ok(OURS, "ADD", "stays", &conf);
    // Later and later into an ADD, and into a DEL, until both ends are well behind us.
    for round in 0..120u32 {
        let (verb, id) = if round.is_multiple_of(2) { ("ADD", "victim") } else { ("DEL", "victim") };
        let mut child = net.start(OURS, verb, id);
        feed(&mut child, &conf);
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(u64::from(round) * 25) {
            std::hint::spin_loop();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        net.ok(OURS, "CHECK", "stays", &conf);
        net.ok(OURS, "DEL", "victim", &conf);
        assert_eq!(net.reservations(), ["10.0.0.2", "fd00::2"], "round {round}");
        if round.is_multiple_of(2) {
            // Something for the next round's DEL.
            net.ok(OURS, "ADD", "victim", &conf);
        }
    }
}
