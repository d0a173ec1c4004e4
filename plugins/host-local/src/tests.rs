//! Runs the plugin in this process, with an environment and a configuration, and compares the JSON
//! document and the files that it writes.

use std::cell::RefCell;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

use cni::machine::{Child, Machine, Output, RunError};
use cni::rollback::Notes;
use cni::skel::{Environment, Streams, dispatch};
use serde_json::{Value, json};

use super::*;

/// A machine without signals, on which no program can be run.
struct Calm;

impl Machine for Calm {
    fn is_own_netns(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }
    fn terminated(&self) -> bool {
        false
    }
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn run(&self, _: &Child<'_>) -> Result<Output, RunError> {
        Err(RunError::Start(io::ErrorKind::Unsupported.into()))
    }
}

/// A folder of reservations, and the notes of the plugin's calls.
struct Host {
    data: tempfile::TempDir,
    notes: Rc<RefCell<Vec<String>>>,
}

impl Host {
    fn new() -> Host {
        Host { data: tempfile::tempdir().unwrap(), notes: Rc::default() }
    }

    /// The network `net` with these keys in `ipam`, besides type and dataDir.
    fn conf(&self, version: &str, ipam: Value) -> Value {
        let mut conf = json!({"cniVersion": version, "name": "net", "type": "bridge", "ipam": ipam});
        conf["ipam"]["type"] = "host-local".into();
        conf["ipam"]["dataDir"] = self.data.path().to_str().unwrap().into();
        conf
    }

    fn run(&self, verb: &str, id: &str, args: &str, conf: &Value) -> Result<Value, (u64, String)> {
        self.run_into(verb, id, args, conf, &mut Vec::new())
    }

    fn run_into(
        &self,
        verb: &str,
        id: &str,
        args: &str,
        conf: &Value,
        stdout: &mut Vec<u8>,
    ) -> Result<Value, (u64, String)> {
        let variables = [
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", id),
            ("CNI_IFNAME", "eth0"),
            ("CNI_NETNS", "/netns"),
            ("CNI_PATH", "/bin"),
            ("CNI_ARGS", args),
        ];
        let environment =
            Environment::new(variables.map(|(name, value)| (OsString::from(name), OsString::from(value))));
        let bytes = conf.to_string();
        let mut stdin = bytes.as_bytes();
        let notes = Rc::clone(&self.notes);
        let streams = Streams {
            stdin: Some(&mut stdin),
            stdout,
            notes: Notes::new(move |line| notes.borrow_mut().push(line.to_owned())),
        };
        let outcome = dispatch(&HostLocal, &Calm, &environment, streams);
        let document = serde_json::from_slice(stdout).unwrap_or(Value::Null);
        match outcome {
            Ok(()) => Ok(document),
            Err(_) => Err((document["code"].as_u64().unwrap(), document["msg"].as_str().unwrap().to_owned())),
        }
    }

    fn ok(&self, verb: &str, id: &str, conf: &Value) -> Value {
        self.run(verb, id, "", conf).unwrap()
    }

    fn fails(&self, verb: &str, id: &str, conf: &Value) -> (u64, String) {
        self.run(verb, id, "", conf).unwrap_err()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.data.path().join("net").join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path("")).into_iter().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != "lock" && !name.starts_with("last_reserved_ip."));
        names.sort();
        names
    }
}

fn subnet(subnet: &str) -> Value {
    json!({ "subnet": subnet })
}

#[test]
fn an_add_answers_with_addresses_routes_and_dns() {
    let host = Host::new();
    std::fs::write(host.data.path().join("resolv.conf"), "nameserver 192.0.2.1\nsearch a b\n").unwrap();
    let ipam = json!({
        "ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "fd00::/64", "rangeStart": "fd00::2", "gateway": "fd00::ff"}]],
        "routes": [{"dst": "0.0.0.0/0", "mtu": 1400, "advmss": 1, "priority": 5, "table": 7, "scope": 0}],
        "resolvConf": host.data.path().join("resolv.conf"),
    });
    for (id, version) in [("a", "1.1.0"), ("b", "0.3.1")] {
        let result = host.ok("ADD", id, &host.conf(version, ipam.clone()));
        let last = if id == "a" { 2 } else { 3 };
        assert_eq!(result["ips"][0]["address"], format!("10.1.2.{last}/24"));
        assert_eq!(result["ips"][1]["address"], format!("fd00::{last}/64"));
        assert_eq!(result["ips"][1]["gateway"], "fd00::ff");
        assert_eq!(result["routes"], ipam["routes"], "version {version}");
        assert_eq!(result["dns"], json!({"nameservers": ["192.0.2.1"], "search": ["a", "b"]}));
    }
    let old = host.ok("ADD", "c", &host.conf("0.2.0", ipam));
    assert_eq!((&old["ip4"]["ip"], &old["ip6"]["ip"]), (&json!("10.1.2.4/24"), &json!("fd00::4/64")));
}

#[test]
fn resolv_conf_is_read_only_if_configured() {
    let host = Host::new();
    let result = host.ok("ADD", "a", &host.conf("1.0.0", subnet("10.0.0.0/24")));
    assert!(result.get("dns").is_none_or(|dns| dns == &json!({})), "{result}");
    let conf = host.conf("1.0.0", json!({"subnet": "10.0.0.0/24", "resolvConf": "/nonexistent"}));
    assert_eq!(host.fails("ADD", "b", &conf).0, 5);
    assert_eq!(host.names(), ["10.0.0.2"]);
}

#[test]
fn an_invalid_configuration_is_code_7_with_gos_text() {
    let host = Host::new();
    for (version, ipam, msg) in [
        ("1.0.0", json!({}), "no IP ranges specified"),
        ("1.0.0", subnet("10.0.0.3/24"), "invalid range set 0: Network has host bits set."),
        ("1.0.0", subnet(""), "invalid CIDR address: "),
        ("1.0.0", json!({"ranges": [[]]}), "invalid range set 0: empty range set"),
        (
            "1.0.0",
            json!({"subnet": "10.0.0.0/24", "ranges": [[{"subnet": "10.0.0.0/25"}]]}),
            "range set 0 overlaps with 1",
        ),
        (
            "0.2.0",
            json!({"subnet": "10.0.0.0/24", "ranges": [[{"subnet": "10.0.0.0/25"}]]}),
            "CNI version 0.2.0 does not support more than 1 address per family",
        ),
        ("1.0.0", json!({"subnet": "10.0.0.0/24", "lockTimeout": 0}), "ipam.lockTimeout must be"),
        ("1.0.0", json!({"subnet": "10.0.0.0/24", "lockTimeout": "5"}), "ipam.lockTimeout must be"),
        ("1.0.0", json!({"subnet": "10.0.0.0/24", "releaseCooldown": -1}), "ipam.releaseCooldown must be"),
        ("1.0.0", json!({"subnet": "10.0.0.0/24", "releaseCooldown": 1.5}), "ipam.releaseCooldown must be"),
        ("1.0.0", json!({"subnet": "10.0.0.0/24", "releaseCooldown": 86_401}), "ipam.releaseCooldown must be"),
        ("1.0.0", json!({"subnet": "10.0.0.0/24", "releaseCooldown": "30"}), "ipam.releaseCooldown must be"),
    ] {
        let (code, text) = host.fails("ADD", "a", &host.conf(version, ipam));
        assert_eq!(code, 7, "{text}");
        assert!(text.starts_with(msg), "{text}");
    }
    let (code, msg) = host.fails("ADD", "a", &json!({"cniVersion": "1.0.0", "name": "net", "type": "x"}));
    assert_eq!((code, msg.as_str()), (7, "IPAM config missing 'ipam' key"));
    assert!(!host.path("").exists(), "a refused ADD makes no folder");
}

#[test]
fn ranges_of_the_runtime_come_first() {
    let host = Host::new();
    let mut conf = host.conf("1.0.0", subnet("10.9.0.0/24"));
    conf["RuntimeConfig"] = json!({"ipRanges": [[{"subnet": "10.3.0.0/24", "rangeStart": "10.3.0.50"}]]});
    let result = host.ok("ADD", "a", &conf);
    assert_eq!(result["ips"][0]["address"], "10.3.0.50/24");
    assert_eq!(result["ips"][1]["address"], "10.9.0.2/24");
    assert_eq!(std::fs::read_to_string(host.path("last_reserved_ip.1")).unwrap(), "10.9.0.2");
}

#[test]
fn requests_come_from_three_places_and_the_strongest_wins() {
    let host = Host::new();
    let mut conf = host.conf("1.0.0", json!({"ranges": [[{"subnet": "10.0.0.0/24"}], [{"subnet": "fd00::/64"}]]}));
    conf["args"] = json!({"cni": {"ips": ["10.0.0.20/24", "fd00::20"], "other": [1]}, "labels": 5});
    let result = host.run("ADD", "a", "IgnoreUnknown=1;IP=10.0.0.30;X=y;", &conf).unwrap();
    assert_eq!(result["ips"][0]["address"], "10.0.0.20/24");
    assert_eq!(result["ips"][1]["address"], "fd00::20/64");
    assert_eq!(
        *host.notes.borrow(),
        ["10.0.0.30 from CNI_ARGS IP is not used, because args.cni.ips requests 10.0.0.20"]
    );
    conf["runtimeConfig"] = json!({"ips": ["10.0.0.10"]});
    conf["args"] = json!("anything");
    assert_eq!(host.ok("ADD", "b", &conf)["ips"][0]["address"], "10.0.0.10/24");

    for (ips, args, code, msg) in [
        (json!(["1.1.1.1"]), "", 7, "failed to allocate all requested IPs: 1.1.1.1"),
        (json!(["foo"]), "", 7, "invalid IP address foo"),
        (json!([""]), "", 7, "cannot understand ip: IP <nil> not v4 nor v6"),
        (json!([]), "IP=foo", 4, "ARGS: error parsing value of pair \"IP=foo\": invalid IP address foo"),
        (json!([]), "FOO=1", 4, "ARGS: unknown args [\"FOO=1\"]"),
        (json!(["10.0.0.1"]), "", 7, "failed to allocate for range 0: requested ip 10.0.0.1 is subnet's gateway"),
        (
            json!(["10.0.0.10"]),
            "",
            102,
            "failed to allocate for range 0: requested IP address 10.0.0.10 is not available",
        ),
    ] {
        conf["runtimeConfig"] = json!({ "ips": ips });
        let (got, text) = host.run("ADD", "c", args, &conf).unwrap_err();
        assert_eq!(got, code, "{text}");
        assert!(text.starts_with(msg), "{text}");
    }
    assert_eq!(host.names(), ["10.0.0.10", "10.0.0.20", "fd00::20", "fd00::21"]);
    assert!(host.run("ADD", "c", "IP=;K8S_POD_NAME=x", &host.conf("1.0.0", subnet("10.0.0.0/24"))).is_ok());
}

#[test]
fn a_second_add_is_refused_and_a_second_del_succeeds() {
    let host = Host::new();
    let conf = host.conf("1.0.0", subnet("10.0.0.0/24"));
    host.ok("ADD", "a", &conf);
    let (code, msg) = host.fails("ADD", "a", &conf);
    assert_eq!(code, 102);
    assert!(msg.ends_with("10.0.0.2 has been allocated to a, duplicate allocation is not allowed"), "{msg}");
    host.ok("CHECK", "a", &conf);
    host.ok("DEL", "a", &conf);
    host.ok("DEL", "a", &conf);
    assert!(host.names().is_empty());
}

#[test]
fn an_undeliverable_result_releases_its_addresses() {
    struct Closed;
    impl io::Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let host = Host::new();
    let conf = host.conf("1.0.0", subnet("10.0.0.0/24")).to_string();
    let variables = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "a"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", "/x"),
        ("CNI_PATH", "/x"),
    ];
    let environment = Environment::new(variables.map(|(name, value)| (OsString::from(name), OsString::from(value))));
    let mut stdin = conf.as_bytes();
    let streams = Streams { stdin: Some(&mut stdin), stdout: &mut Closed, notes: Notes::silent() };
    assert!(dispatch(&HostLocal, &Calm, &environment, streams).is_err());
    assert!(host.path("last_reserved_ip.0").exists(), "it had come as far as reserving");
    assert!(host.names().is_empty());
}

#[test]
fn only_add_creates_a_folder_and_only_add_and_check_read_ranges() {
    let host = Host::new();
    for ipam in [
        json!({}),
        json!({"ranges": "nonsense"}),
        json!({"subnet": "x", "lockTimeout": -1, "releaseCooldown": -1, "routes": 5}),
    ] {
        let mut conf = host.conf("1.1.0", ipam);
        host.ok("DEL", "a", &conf);
        conf["cni.dev/valid-attachments"] = json!([]);
        host.ok("GC", "", &conf);
    }
    host.ok("STATUS", "", &host.conf("1.1.0", json!({})));
    let (code, msg) = host.fails("CHECK", "a", &host.conf("1.1.0", subnet("10.0.0.0/24")));
    assert_eq!((code, msg.as_str()), (3, "host-local: Failed to find address added by container a"));
    assert_eq!(std::fs::read_dir(host.data.path()).unwrap().count(), 0, "nothing was made");
}

#[test]
fn del_and_gc_work_with_a_changed_configuration() {
    let host = Host::new();
    for id in ["a", "b", "c"] {
        host.ok("ADD", id, &host.conf("1.1.0", subnet("10.0.0.0/24")));
    }
    host.ok("DEL", "a", &host.conf("1.1.0", subnet("bad")));
    assert_eq!(host.names(), ["10.0.0.3", "10.0.0.4"]);
    let mut conf = host.conf("1.1.0", json!({}));
    conf["cni.dev/valid-attachments"] = json!([{"containerID": "c", "ifname": "eth0"}]);
    host.ok("GC", "", &conf);
    assert_eq!(host.names(), ["10.0.0.4"]);
    assert_eq!(
        *host.notes.borrow(),
        ["gc: released, as its attachment is not valid any more: 10.0.0.3 is held by b eth0"]
    );
}

#[test]
fn check_compares_the_previous_result_within_its_ranges() {
    let host = Host::new();
    let mut conf = host.conf("1.0.0", subnet("10.0.0.0/24"));
    conf["prevResult"] = host.ok("ADD", "a", &conf);
    host.ok("CHECK", "a", &conf);
    conf["prevResult"]["ips"] = json!([{"address": "192.168.0.1/24"}, {"address": "10.0.0.2/24"}]);
    host.ok("CHECK", "a", &conf);
    conf["prevResult"]["ips"] = json!([{"address": "10.0.0.9/24"}]);
    let (code, msg) = host.fails("CHECK", "a", &conf);
    assert_eq!(code, 101);
    assert_eq!(msg, "host-local: prevResult has 10.0.0.9, but the reservation of a eth0 is 10.0.0.2");
}

#[test]
fn status_reports_a_full_range_with_figures() {
    let host = Host::new();
    let conf = host.conf("1.1.0", subnet("10.0.0.0/29"));
    for id in ["a", "b", "c", "d", "e"] {
        host.ok("STATUS", "", &conf);
        host.ok("ADD", id, &conf);
    }
    assert_eq!(*host.notes.borrow(), [""; 0]);
    host.ok("STATUS", "", &conf);
    let used_up = "no IP addresses available in range set: 10.0.0.1-10.0.0.6: 5 of 5 used";
    assert!(host.notes.borrow_mut().pop().unwrap().starts_with(used_up));
    let mut strict = conf.clone();
    strict["ipam"]["fullIsUnavailable"] = true.into();
    assert_eq!(host.fails("STATUS", "", &strict), (50, used_up.to_owned()));
    let (code, msg) = host.fails("ADD", "f", &conf);
    assert_eq!(code, 11);
    assert!(msg.contains("no IP addresses available in range set: 10.0.0.1-10.0.0.6; 5 of 5 are used"), "{msg}");
    host.ok("DEL", "c", &conf);
    host.ok("STATUS", "", &strict);
    assert_eq!(*host.notes.borrow(), [""; 0]);

    let mut conf = conf;
    conf["ipam"]["dataDir"] = host.path("10.0.0.2").to_str().unwrap().into();
    let (code, msg) = host.fails("STATUS", "", &conf);
    assert_eq!(code, 50, "{msg}");
}

#[test]
fn a_too_long_network_name_fails_add_but_not_del() {
    let host = Host::new();
    let name = "n".repeat(240);
    let folder = host.data.path().join(&name);
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("10.0.0.2"), "a\r\neth0").unwrap();
    let mut conf = host.conf("1.0.0", subnet("10.0.0.0/24"));
    conf["name"] = name.into();
    assert_eq!(host.fails("ADD", "b", &conf).0, 7);
    host.ok("DEL", "a", &conf);
    assert!(!folder.join("10.0.0.2").exists());
    conf["name"] = "n".repeat(300).into();
    host.ok("DEL", "a", &conf);
}
