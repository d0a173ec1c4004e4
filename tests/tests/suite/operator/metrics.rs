//! The metrics of a node, as Prometheus' own programs read them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use cni_testkit::{locks, patience, probe, require};
use serde_json::json;

use super::Operator;

/// Returns the samples of a text, by name and labels.
fn samples(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(' ').unwrap()).map(|(name, value)| (name, value.parse().unwrap())).collect()
}

/// Asserts that `promtool check` accepts a text without a remark.
#[track_caller]
fn assert_accepted(what: &[&str], text: &str) {
    let promtool = probe::prometheus("promtool").unwrap();
    let mut check = Command::new(promtool);
    let check = check.arg("check").args(what).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut started = check.spawn().unwrap();
    started.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = started.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    // Of rules, it prints how many there are.
    let is_silent = said.is_empty() || said.contains("SUCCESS");
    assert!(output.status.success() && is_silent, "{said}\n{text}");
}

#[test]
fn the_documented_alerts_are_rules_about_existing_metrics() {
    require!(probe::plugin("cnitool"));
    require!(probe::prometheus("promtool"));
    let page = include_str!("../../../../docs/recipes.md");
    let rules = page.split_once("```yaml\n").unwrap().1.split_once("```").unwrap().0;
    assert_accepted(&["rules", "/dev/stdin"], rules);
    let operator = Operator::new();
    let container = operator.attach();
    let text = operator.done(&["metrics"]);
    let metrics: Vec<&str> = samples(&text).into_keys().map(|name| name.split('{').next().unwrap()).collect();
    for expr in rules.lines().filter(|line| line.contains("expr:")) {
        for word in expr.split_whitespace().filter(|word| word.starts_with("cni_")) {
            assert!(metrics.contains(&word), "{word}\n{text}");
        }
    }
    operator.detach(&container);
}

#[test]
fn metrics_count_addresses_attachments_and_leftovers() {
    require!(probe::plugin("cnitool"));
    require!(probe::prometheus("promtool"));
    let operator = Operator::new();
    let (lives, dies) = (operator.attach(), operator.attach());
    let dead = dies.id.clone();
    dies.destroy();
    // The kernel removes the namespace, and with it the link of the container, asynchronously.
    let deadline = std::time::Instant::now() + patience(std::time::Duration::from_secs(20));
    while operator.json(&["ipam", "show", "net1"])["reservations"][1]["state"] != "over" {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    let text = operator.done(&["metrics"]);
    assert_accepted(&["metrics"], &text);
    let found = samples(&text);
    let range = "{network=\"net1\",range=\"10.1.0.1-10.1.0.254\"}";
    for (name, value) in [
        (format!("cni_range_addresses{range}"), 253.0),
        (format!("cni_range_addresses_used{range}"), 2.0),
        (format!("cni_range_addresses_free{range}"), 251.0),
        (format!("cni_range_addresses_reclaimable{range}"), 1.0),
        ("cni_attachments{network=\"net1\"}".to_owned(), 2.0),
        ("cni_plugin_attachments{network=\"net1\",plugin=\"bridge\"}".to_owned(), 2.0),
        ("cni_leftovers{kind=\"attachment\"}".to_owned(), 1.0),
        ("cni_doctor_findings{check=\"left over\",severity=\"warning\"}".to_owned(), 1.0),
        ("cni_doctor_findings{check=\"networks\",severity=\"error\"}".to_owned(), 0.0),
        ("cni_lock_wait_seconds".to_owned(), 0.0),
        ("cni_metrics_complete".to_owned(), 1.0),
    ] {
        assert_eq!(found.get(name.as_str()), Some(&value), "{name}\n{text}");
    }
    operator.done(&["gc"]);
    assert_eq!(
        samples(&operator.done(&["metrics"]))[format!("cni_range_addresses_used{range}").as_str()],
        1.0,
        "{dead}"
    );
    operator.detach(&lives);
}

#[test]
fn a_textfile_is_replaced_whole_and_node_exporter_reads_it() {
    require!(probe::plugin("cnitool"));
    require!(probe::prometheus("prometheus-node-exporter"));
    let operator = Operator::new();
    let container = operator.attach();
    let path = operator.node.file("textfile/cni.prom", "old 1\n");
    let folder = path.parent().unwrap();
    let written = ["metrics", "--textfile", path.to_str().unwrap()];
    assert_eq!(operator.done(&written), "");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
    assert_eq!(fs::read_dir(folder).unwrap().count(), 1, "no temporary file is left");

    let scraped = operator.node.enter(|| scrape(folder));
    let text = fs::read_to_string(&path).unwrap();
    let (scraped, mine) = (samples(&scraped), samples(&text));
    for (name, value) in &mine {
        assert_eq!(scraped.get(name), Some(value), "{name}");
    }
    assert_eq!(scraped["node_textfile_scrape_error"], 0.0);

    // What is not a regular file stays.
    let link = folder.join("link.prom");
    symlink("/nowhere", &link).unwrap();
    for other in [&link, folder] {
        operator.failed(&["metrics", "--textfile", other.to_str().unwrap()], &["is not a regular file"]);
    }
    assert!(link.is_symlink());
    operator.detach(&container);
}

/// Returns what node_exporter serves with the textfiles of a folder.
fn scrape(folder: &Path) -> String {
    let mut exporter = Command::new(probe::prometheus("prometheus-node-exporter").unwrap());
    let textfiles = format!("--collector.textfile.directory={}", folder.display());
    exporter.args(["--collector.disable-defaults", "--collector.textfile", &textfiles]);
    let mut exporter = exporter.arg("--web.listen-address=127.0.0.1:9100").stderr(Stdio::piped()).spawn().unwrap();
    // Its log stays open, because it would end at the next line otherwise.
    let mut log = BufReader::new(exporter.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(log.any(|line| line.contains("Listening on")), "it does not listen");
    let mut stream = TcpStream::connect("127.0.0.1:9100").unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    exporter.kill().unwrap();
    exporter.wait().unwrap();
    answer.split_once("\r\n\r\n").expect("a body").1.to_owned()
}

#[test]
fn metrics_read_each_cache_entry_once_and_enter_no_container() {
    require!(probe::plugin("cnitool"));
    require!(probe::tool("strace"));
    let operator = Operator::new();
    operator.configure(json!({}), &[json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}})]);
    let container = operator.attach();
    let trace = operator.node.dir().join("trace").display().to_string();
    let program = cni_testkit::bin_dir().join("cnitool").display().to_string();
    let folder = operator.node.dir().join("net.d").display().to_string();
    let strace =
        ["strace", "-qq", "-e", "trace=open,openat,setns", "-o", &trace, &program, "metrics", "--conf-dir", &folder];
    let ran = operator.node.run(&strace);
    assert!(ran.ok && ran.stdout.contains("cni_metrics_complete 1"), "{ran:?}");
    let text = fs::read_to_string(&trace).unwrap();
    for file in ["/results/net1-", "/run/cni/tuning/"] {
        assert_eq!(text.lines().filter(|line| line.contains(file)).count(), 1, "{file}: {text}");
    }
    assert!(!text.contains("setns("), "{text}");
    operator.detach(&container);
}

#[test]
fn a_held_lock_leaves_the_age_of_its_oldest_waiter() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.attach();
    let lock = fs::File::open(operator.node.dir().join("networks/net1/lock")).unwrap();
    lock.lock().unwrap();
    let mut waiting = operator.call(&["ipam", "show", "net1"]).start();
    waiting.release();
    locks::wait_until_waiting(waiting.pid());
    // metrics itself waits for the lock too.
    operator.configure(json!({"ipam": {"lockTimeout": 1}}), &[]);
    let outcome = operator.call(&["metrics"]).run();
    lock.unlock().unwrap();
    waiting.finish();
    assert_eq!(outcome.status, Some(1), "{}", outcome.report());
    let found = samples(&outcome.stdout);
    assert_eq!(found["cni_metrics_complete"], 0.0);
    assert!(found["cni_lock_wait_seconds"] > 0.0 && outcome.stderr.contains("failed to lock"), "{}", outcome.report());
    operator.detach(&container);
}
