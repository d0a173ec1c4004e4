//! A verb explained: each step of each plugin, and of a failure the very request.

use std::fs;
use std::os::unix::fs::symlink;

use cni_testkit::{probe, report_errors, require};
use serde_json::{Value, json};

use super::{Operator, path};

#[test]
fn each_step_is_printed_and_the_log_is_removed() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let tmp = operator.node.dir().join("tmp");
    fs::create_dir(&tmp).unwrap();
    let container = operator.node.container();
    let args = ["explain", "add", "net1", path(&container), "--container-id", &container.id];
    let said = operator.call(&args).env("TMPDIR", &tmp).run();
    assert_eq!((said.status, said.stderr.as_str()), (Some(0), ""), "{}", said.report());
    for words in [
        "bridge ADD, ",
        "netlink NewLink br0 ",
        " type bridge",
        "netlink NewAddress 10.1.0.2/24 dev index ",
        "  host-local: create ",
        "/10.1.0.2\n",
        "  host-local: ADD in all",
        "\n{",
    ] {
        assert!(said.stdout.contains(words), "it should say `{words}`\n{}", said.report());
    }
    let marked = said.stdout.lines().filter(|line| line.starts_with('!')).count();
    assert_eq!((marked, fs::read_dir(&tmp).unwrap().count()), (0, 0), "{}", said.report());
    let args = ["explain", "del", "net1", path(&container), "--container-id", &container.id];
    let json = operator.json(&args);
    let steps = json["calls"][0]["steps"].as_array().unwrap();
    assert!(steps.iter().any(|step| step["step"].as_str().unwrap().contains("netlink DelLink")), "{json:#}");
    assert!(steps.iter().all(|step| step["ms"].is_number()), "{json:#}");
}

/// The steps that the ADD failed by.
fn failed_by(json: &Value) -> Vec<&Value> {
    let calls = json["calls"].as_array().unwrap();
    calls.iter().flat_map(|call| call["steps"].as_array().unwrap()).filter(|step| step["failed"] == true).collect()
}

#[test]
fn the_request_that_failed_is_shown_whole() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.node.container();
    let args = ["explain", "add", "net1", path(&container), "--container-id", &container.id];
    // A link of the kernel's takes no such MTU.
    operator.configure(json!({}), &[json!({"type": "tuning", "mtu": 70000})]);
    let said = operator.failed(&args, &["tuning ADD, ", "failed with code 100"]);
    let line = said.stdout.lines().find(|line| line.starts_with('!')).unwrap_or_default();
    assert!(line.contains("netlink SetLink index ") && line.contains("mtu 70000"), "{}", said.report());
    assert!(said.stdout.contains("request: type 19: "), "{}", said.report());
    let json = operator.json(&args);
    assert_eq!((failed_by(&json).len(), &json["error"]["code"]), (1, &json!(100)), "{json:#}");
    // A program, with what it was given and what it said.
    let bin = operator.node.dir().join("sbin");
    operator.node.script("sbin/xtables-legacy-multi", "#!/bin/sh\ncat >/dev/null\necho line 2 failed >&2\nexit 4\n");
    symlink("xtables-legacy-multi", bin.join("iptables-restore")).unwrap();
    symlink("xtables-legacy-multi", bin.join("ip6tables-restore")).unwrap();
    operator.configure(json!({"ipMasq": true, "ipMasqBackend": "iptables"}), &[]);
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let said = operator.call(&args).arg("--json").env("PATH", path).run();
    let json = said.json.clone().unwrap();
    assert_eq!(report_errors("explain", &json), [""; 0], "{json:#}");
    let failed = failed_by(&json);
    assert_eq!((said.status, failed.len()), (Some(1), 1), "{}", said.report());
    let text = |key: &str| failed[0][key].as_str().unwrap_or_default();
    assert!(text("step").contains("/iptables-restore") && text("said") == "line 2 failed", "{json:#}");
    assert!(text("request").starts_with("*nat\n") && text("request").contains("-A POSTROUTING"), "{json:#}");
}
