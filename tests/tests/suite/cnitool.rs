//! cnitool: adds and deletes attachments like Go's cnitool, and what operators need in addition.
//!
//! Networks here are chains of spies: small scripts that record their calls.

use std::fs;
use std::path::PathBuf;

use cni_testkit::{Container, Invocation, Node, Outcome, bin_dir, probe, require};
use conformance::bridge;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const SPY: &str = r#"#!/bin/sh
log=${0%/*}/log me=${0##*/}
if [ "$CNI_COMMAND" = VERSION ]; then
    echo '{"cniVersion":"1.1.0","supportedVersions":["0.4.0","1.0.0","1.1.0"]}'; exit 0
fi
echo "$CNI_COMMAND $me" >> "$log"
cat > "$log.$me.$CNI_COMMAND"
echo "$CNI_CONTAINERID $CNI_NETNS $CNI_IFNAME $CNI_ARGS" > "$log.$me.$CNI_COMMAND.env"
if [ -e "$log.fail.$me.$CNI_COMMAND" ]; then
    echo '{"cniVersion":"1.0.0","code":123,"msg":"'"$me"' fails on request"}'; exit 1
fi
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion":"1.0.0","interfaces":[{"name":"'"$me"'"}]}'
"#;

/// A node with a folder of configurations and one of plugins.
struct Operator {
    node: Node,
    container: Container,
}

impl Operator {
    fn new() -> Operator {
        let node = Node::new();
        for spy in ["spy1", "spy2", "spy3"] {
            node.script(&format!("plugins/{spy}"), SPY);
        }
        let container = node.container();
        Operator { node, container }
    }

    fn configuration(&self, file: &str, config: &Value) {
        self.node.file(&format!("net.d/{file}"), config.to_string());
    }

    /// A list `net1` of three spies, with these additional keys.
    fn chain(&self, more: Value) {
        let plugins =
            json!([{"type": "spy1"}, {"type": "spy2", "capabilities": {"mac": true, "ips": false}}, {"type": "spy3"}]);
        let list = json!({"cniVersion": "1.0.0", "name": "net1", "plugins": plugins});
        self.configuration("10-net1.conflist", &conformance::patched(list, more));
    }

    fn call(&self, args: &[&str]) -> Invocation<'_> {
        let call = Invocation::new(&self.node, bin_dir().join("cnitool"));
        let path = format!("{}:{}", self.node.dir().join("plugins").display(), bin_dir().display());
        let call = call.cni_path(path).env("NETCONFPATH", self.node.dir().join("net.d"));
        args.iter().fold(call, |call, arg| call.arg(arg))
    }

    fn run(&self, verb: &str) -> Outcome {
        self.call(&[verb, "net1", self.netns()]).run()
    }

    fn netns(&self) -> &str {
        self.container.netns().to_str().unwrap()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.node.dir().join("plugins").join(name)
    }

    /// Returns the calls since the last look, in order, and clears the log.
    fn log(&self) -> Vec<String> {
        let log = fs::read_to_string(self.file("log")).unwrap_or_default();
        let _ = fs::remove_file(self.file("log"));
        log.lines().map(str::to_owned).collect()
    }

    /// The configuration that a spy received.
    fn request(&self, spy: &str, verb: &str) -> Value {
        serde_json::from_str(&fs::read_to_string(self.file(&format!("log.{spy}.{verb}"))).unwrap()).unwrap()
    }

    fn make_fail(&self, spy: &str, verb: &str) {
        fs::write(self.file(&format!("log.fail.{spy}.{verb}")), "").unwrap();
    }

    fn container_id(&self) -> String {
        let sum = self.node.exec(&["sh", "-c", &format!("printf %s {} | sha512sum", self.netns())]);
        format!("cnitool-{}", &sum[..20])
    }

    /// Returns the file names in the result cache.
    fn cached(&self) -> Vec<String> {
        let listing = self.node.run(&["ls", "/var/lib/cni/results"]);
        listing.stdout.lines().map(str::to_owned).collect()
    }
}

#[track_caller]
fn succeeded(outcome: &Outcome) -> String {
    assert_eq!(outcome.status, Some(0), "{}", outcome.report());
    outcome.stdout.clone()
}

#[track_caller]
fn failed(outcome: &Outcome, words: &[&str]) {
    assert_eq!(outcome.status, Some(1), "{}", outcome.report());
    for word in words {
        assert!(outcome.stderr.contains(word), "standard error should name `{word}`\n{}", outcome.report());
    }
}

#[test]
fn a_real_network_lives_from_add_to_del() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let mut plugin = bridge(&operator.node, &["10.1.0.0/24"]);
    plugin.as_object_mut().unwrap().remove("name");
    operator.configuration("10.conflist", &json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [plugin]}));
    let result: Value = serde_json::from_str(&succeeded(&operator.run("add"))).unwrap();
    assert_eq!(conformance::addresses(&result), ["10.1.0.2/24"]);
    operator.container.ping("10.1.0.1");
    succeeded(&operator.run("check"));
    assert_eq!(operator.cached(), [format!("net1-{}-eth0", operator.container_id())]);
    succeeded(&operator.run("del"));
    assert_eq!(operator.cached(), Vec::<String>::new());
    assert!(operator.container.link("eth0").is_none());
    succeeded(&operator.run("del"));
}

#[test]
fn plugins_are_called_in_order_and_deleted_in_reverse() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({}));
    succeeded(&operator.run("add"));
    assert_eq!(operator.log(), ["ADD spy1", "ADD spy2", "ADD spy3"]);
    succeeded(&operator.run("check"));
    assert_eq!(operator.log(), ["CHECK spy1", "CHECK spy2", "CHECK spy3"]);
    succeeded(&operator.run("del"));
    assert_eq!(operator.log(), ["DEL spy3", "DEL spy2", "DEL spy1"]);
}

#[test]
fn requests_are_derived_as_the_specification_says() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({}));
    let capabilities = r#"{"mac":"02:00:00:00:00:01","ips":["10.0.0.9"],"portMappings":[]}"#;
    let add = operator.call(&["add", "net1", operator.netns()]).env("CAP_ARGS", capabilities);
    succeeded(&add.cni_args("IgnoreUnknown=1;A=B").env("CNI_IFNAME", "net7").run());
    assert_eq!(operator.request("spy1", "ADD"), json!({"cniVersion": "1.0.0", "name": "net1", "type": "spy1"}));
    let second = operator.request("spy2", "ADD");
    assert_eq!(second["prevResult"]["interfaces"], json!([{"name": "spy1"}]));
    assert_eq!(second["runtimeConfig"], json!({"mac": "02:00:00:00:00:01"}), "declared and true");
    assert!(second.get("capabilities").is_none(), "{second:#}");
    let environment = fs::read_to_string(operator.file("log.spy1.ADD.env")).unwrap();
    let (id, netns) = (operator.container_id(), operator.netns());
    assert_eq!(environment.trim(), format!("{id} {netns} net7 IgnoreUnknown=1;A=B"));

    succeeded(&operator.call(&["del", "net1", operator.netns()]).env("CNI_IFNAME", "net7").run());
    for spy in ["spy1", "spy2", "spy3"] {
        let prev = &operator.request(spy, "DEL")["prevResult"];
        assert_eq!(prev["interfaces"], json!([{"name": "spy3"}]), "the final result, for every plugin");
    }
}

#[test]
fn the_cache_is_what_go_s_libcni_reads() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({}));
    succeeded(&operator.call(&["add", "net1", operator.netns()]).cni_args("A=B").run());
    let path = format!("/var/lib/cni/results/net1-{}-eth0", operator.container_id());
    let cached: Value = serde_json::from_str(&operator.node.exec(&["cat", &path])).unwrap();
    assert_eq!(cached["kind"], "cniCacheV1");
    assert_eq!(cached["containerId"], operator.container_id());
    assert_eq!((&cached["networkName"], &cached["ifName"]), (&json!("net1"), &json!("eth0")));
    assert_eq!((&cached["netns"], &cached["cniArgs"]), (&json!(operator.netns()), &json!([["A", "B"]])));
    assert_eq!(cached["result"]["interfaces"], json!([{"name": "spy3"}]));
    let config =
        operator.node.exec(&["sh", "-c", &format!("sed 's/.*\"config\":\"\\([^\"]*\\)\".*/\\1/' {path} | base64 -d")]);
    assert_eq!(config, fs::read_to_string(operator.node.dir().join("net.d/10-net1.conflist")).unwrap());
    assert_eq!(operator.node.exec(&["stat", "-c", "%a", &path]).trim(), "600");
    succeeded(&operator.run("del"));
}

#[test]
fn a_failed_add_is_undone_in_reverse_order() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({}));
    operator.make_fail("spy2", "ADD");
    failed(&operator.run("add"), &["spy2", "fails on request"]);
    assert_eq!(operator.log(), ["ADD spy1", "ADD spy2", "DEL spy3", "DEL spy2", "DEL spy1"]);
    assert_eq!(operator.cached(), Vec::<String>::new());
}

/// The interface can be that of a running pod, and each plugin gets a DEL after a failed ADD.
#[test]
fn an_add_to_an_interface_that_exists_calls_no_plugin() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({}));
    operator.container.ip(&["link add eth0 type veth peer name other0"]);
    failed(&operator.run("add"), &["code 102", operator.netns(), "eth0", "nothing was changed"]);
    assert_eq!(operator.log(), [""; 0]);
    succeeded(&operator.call(&["add", "net1", operator.netns(), "--ifname", "eth1"]).run());
    succeeded(&operator.call(&["del", "net1", operator.netns(), "--ifname", "eth1"]).run());
}

/// loopback ignores CNI_IFNAME, which cnitool sets to eth0, but other plugins of its list do not.
#[test]
fn loopback_is_added_beside_another_interface() {
    require!(probe::plugin("cnitool"));
    require!(probe::plugin("loopback"));
    let operator = Operator::new();
    operator.configuration("10-net1.conf", &json!({"cniVersion": "1.0.0", "name": "net1", "type": "loopback"}));
    operator.container.ip(&["link add eth0 type veth peer name other0"]);
    let result = succeeded(&operator.run("add"));
    assert!(result.contains("127.0.0.1/8"), "{result}");
    succeeded(&operator.run("del"));

    let plugins = json!([{"type": "loopback"}, {"type": "spy1"}]);
    operator.configuration("20-net2.conflist", &json!({"cniVersion": "1.0.0", "name": "net2", "plugins": plugins}));
    failed(&operator.call(&["add", "net2", operator.netns()]).run(), &["code 102", "nothing was changed"]);
    assert_eq!(operator.log(), [""; 0]);
}

#[test]
fn a_del_that_fails_stops_and_can_be_repeated() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({}));
    succeeded(&operator.run("add"));
    operator.log();
    operator.make_fail("spy2", "DEL");
    failed(&operator.run("del"), &["spy2", "fails on request"]);
    assert_eq!(operator.log(), ["DEL spy3", "DEL spy2"]);
    assert_eq!(operator.cached().len(), 1, "kept, so that it can be repeated");
    failed(&operator.call(&["del", "--keep-going", "net1", operator.netns()]).run(), &["fails on request"]);
    assert_eq!(operator.log(), ["DEL spy3", "DEL spy2", "DEL spy1"]);
    fs::remove_file(operator.file("log.fail.spy2.DEL")).unwrap();
    succeeded(&operator.run("del"));
    assert_eq!(operator.cached(), Vec::<String>::new());
}

#[test]
fn ctrl_c_and_a_hang_up_end_an_add_and_leave_nothing() {
    require!(probe::plugin("cnitool"));
    // Hangs in ADD, after it has written a file.
    let script = "#!/bin/sh\n[ $CNI_COMMAND = ADD ] || { touch \"${0%/*}/deleted\"; exit 0; }\necho $$ > \"${0%/*}/pid\"\nexec sleep 60\n";
    for signal in [Signal::SIGINT, Signal::SIGHUP] {
        let operator = Operator::new();
        let folder = crate::delegation::executable(&operator.node, "slow", script);
        let slow = json!({"name": null, "ipam": {"type": "slow", "ranges": null, "dataDir": null}});
        let plugin = conformance::patched(bridge(&operator.node, &[]), slow);
        operator.configuration("10.conflist", &json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [plugin]}));
        // The test runner may ignore these signals.
        let call = Invocation::new(&operator.node, "/usr/bin/env").arg("--default-signal=INT,HUP");
        let call = call.arg(bin_dir().join("cnitool")).arg("add").arg("net1").arg(operator.netns());
        let call = call.env("NETCONFPATH", operator.node.dir().join("net.d"));
        let mut started = call.cni_path(format!("{}:{}", folder.display(), bin_dir().display())).start();
        started.release();
        crate::delegation::wait_for(&folder.join("pid"));
        started.signal_group(signal);
        let outcome = started.finish();
        failed(&outcome, &["it was killed or not started because this process received a signal to end"]);
        assert!(folder.join("deleted").exists(), "{}", outcome.report());
        assert!(operator.container.link("eth0").is_none() && operator.node.ports("br0").is_empty());
        assert_eq!(operator.cached(), Vec::<String>::new());
    }
}

#[test]
fn under_nohup_a_hang_up_ends_nothing() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let script = "#!/bin/sh\n[ $CNI_COMMAND = ADD ] || exit 0\ncd ${0%/*} && mkfifo go && echo $$ > pid && read line < go && echo '{\"cniVersion\":\"1.0.0\"}'\n";
    let folder = crate::delegation::executable(&operator.node, "slow", script);
    let list = json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [{"type": "slow"}]});
    operator.configuration("10.conflist", &list);
    let call = Invocation::new(&operator.node, "/usr/bin/env").arg("--ignore-signal=HUP");
    let call = call.arg(bin_dir().join("cnitool")).arg("add").arg("net1").arg(operator.netns());
    let mut started = call.env("NETCONFPATH", operator.node.dir().join("net.d")).cni_path(&folder).start();
    started.release();
    crate::delegation::wait_for(&folder.join("pid"));
    started.signal_group(Signal::SIGHUP);
    fs::write(folder.join("go"), "on\n").unwrap();
    succeeded(&started.finish());
    succeeded(&operator.run("del"));
}

#[test]
fn a_network_may_be_one_plugin_in_a_file_of_its_own() {
    require!(probe::plugin("cnitool"));
    for file in ["20-net1.conf", "20-net1.json"] {
        let operator = Operator::new();
        operator.configuration(file, &json!({"cniVersion": "1.0.0", "name": "net1", "type": "spy1"}));
        succeeded(&operator.run("add"));
        succeeded(&operator.run("del"));
        assert_eq!(operator.log(), ["ADD spy1", "DEL spy1"]);
    }
}

#[test]
fn a_list_is_preferred_and_the_first_of_a_name_wins() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let list = |plugin: &str| json!({"cniVersion": "1.0.0", "name": "net1", "plugins": [{"type": plugin}]});
    operator.configuration("00-net1.conf", &json!({"cniVersion": "1.0.0", "name": "net1", "type": "spy3"}));
    operator.configuration("30-net1.conflist", &list("spy2"));
    operator.configuration("20-net1.conflist", &list("spy1"));
    operator.configuration(
        "10-other.conflist",
        &json!({"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "spy3"}]}),
    );
    succeeded(&operator.run("add"));
    succeeded(&operator.run("del"));
    assert_eq!(operator.log(), ["ADD spy1", "DEL spy1"]);
}

#[test]
fn the_highest_version_that_is_known_is_spoken() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({"cniVersion": "0.4.0", "cniVersions": ["0.4.0", "1.0.0", "7.0.0"]}));
    succeeded(&operator.run("add"));
    assert_eq!(operator.request("spy1", "ADD")["cniVersion"], "1.0.0");
    succeeded(&operator.run("del"));
}

#[test]
fn check_of_a_version_without_it_does_not_blame_the_cache() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({"cniVersion": "0.3.1"}));
    let outcome = operator.run("check");
    failed(&outcome, &["does not support the CHECK command"]);
    assert!(!outcome.stderr.contains("result cache"), "{}", outcome.report());
}

#[test]
fn check_can_be_disabled() {
    require!(probe::plugin("cnitool"));
    for more in [json!({"disableCheck": true}), json!({"disableCheck": "true"})] {
        let operator = Operator::new();
        operator.chain(more);
        succeeded(&operator.run("add"));
        operator.log();
        succeeded(&operator.run("check"));
        assert_eq!(operator.log(), Vec::<String>::new());
        succeeded(&operator.run("del"));
    }
}

#[test]
fn gc_keeps_live_attachments_and_those_named_with_keep() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({"cniVersion": "1.1.0"}));
    succeeded(&operator.run("add"));
    let other = operator.node.container();
    let gone = other.netns().to_str().unwrap().to_owned();
    succeeded(&operator.call(&["add", "net1", &gone]).run());
    other.destroy();
    operator.log();
    let outcome = operator.call(&["gc", "net1", "--keep", "kept-by-hand/eth0"]).run();
    succeeded(&outcome);
    let valid = operator.request("spy1", "GC")["cni.dev/valid-attachments"].clone();
    let alive = json!({"containerID": operator.container_id(), "ifname": "eth0"});
    assert_eq!(valid.as_array().unwrap().len(), 2, "{valid}");
    assert!(valid.as_array().unwrap().contains(&alive), "{valid}");
    assert!(valid.as_array().unwrap().contains(&json!({"containerID": "kept-by-hand", "ifname": "eth0"})), "{valid}");
    assert_eq!(operator.cached(), [format!("net1-{}-eth0", operator.container_id())]);
    succeeded(&operator.run("del"));
}

#[test]
fn status_asks_every_plugin_until_one_is_not_ready() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.chain(json!({"cniVersion": "1.1.0"}));
    succeeded(&operator.call(&["status", "net1"]).run());
    assert_eq!(operator.log(), ["STATUS spy1", "STATUS spy2", "STATUS spy3"]);
    operator.make_fail("spy2", "STATUS");
    failed(&operator.call(&["status", "net1"]).run(), &["spy2", "fails on request"]);
    assert_eq!(operator.log(), ["STATUS spy1", "STATUS spy2"]);
}

#[test]
fn errors_say_what_is_wrong_and_where() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let folder = operator.node.dir().join("net.d");
    failed(&operator.run("add"), &["no net configurations found in", folder.to_str().unwrap()]);
    operator.chain(json!({}));
    failed(&operator.call(&["add", "other", operator.netns()]).run(), &["no net configuration with name \"other\" in"]);
    let add = operator.call(&["add", "net1", operator.netns()]);
    failed(&add.clone().cni_args("A").run(), &["CNI_ARGS", "A"]);
    failed(&add.clone().env("CAP_ARGS", "{").run(), &["CAP_ARGS"]);
    failed(&add.env("CNI_PATH", "/nowhere").run(), &["spy1", "/nowhere"]);
    assert_eq!(operator.log(), Vec::<String>::new());
}

#[test]
fn help_is_help_and_nonsense_is_not() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let help = succeeded(&operator.call(&["--help"]).run());
    for word in ["add", "check", "del", "gc", "status", "version", "CNI_PATH", "NETCONFPATH", "CAP_ARGS"] {
        assert!(help.contains(word), "the help should name {word}: {help}");
    }
    for args in [
        vec![],
        vec!["frobnicate", "net1", "/x"],
        vec!["add"],
        vec!["add", "net1"],
        vec!["add", "--nonsense", "a", "b"],
    ] {
        let outcome = operator.call(&args).run();
        assert!(outcome.status.is_some_and(|status| status != 0) && !outcome.stderr.is_empty(), "{}", outcome.report());
    }
}
