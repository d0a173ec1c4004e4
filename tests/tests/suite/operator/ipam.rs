//! The reservations of host-local, seen and repaired.

use cni_testkit::{probe, require};
use serde_json::{Value, json};

use super::{Operator, path};

fn addresses(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|one| one["address"].as_str().unwrap()).collect()
}

#[test]
fn ranges_and_networks_without_configuration_are_listed() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let containers = [operator.attach(), operator.attach()];
    operator.node.file("networks/old/10.9.0.2", "gone\r\neth0");
    let text = operator.done(&["ipam", "list"]);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NETWORK", "RANGE", "USED", "TOTAL", "PERCENT", "FOLDER", "NOTE"], "{text}");
    assert_eq!(rows[1][..5], ["net1", "10.1.0.1-10.1.0.254", "2", "253", "0"], "{text}");
    assert_eq!(rows[2][..2], ["old", "1"], "{text}");
    assert!(text.contains("/networks/old   no configured network of this name"), "{text}");
    let json = operator.json(&["ipam", "list"]);
    let [of_net1, of_old] = [0, 1].map(|index| &json["ranges"][index]);
    assert_eq!((&of_net1["used"], &of_net1["total"]), (&json!(2), &json!(253)), "{json:#}");
    assert_eq!((&of_old["used"], &of_old["total"]), (&json!(1), &Value::Null), "{json:#}");
    operator.done(&["ipam", "release", "old", "10.9.0.2"]);
    containers.iter().for_each(|container| operator.detach(container));
}

#[test]
fn gc_removes_reservations_of_gone_containers_only() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let lives = operator.attach();
    let dies = operator.attach();
    let id = dies.id.clone();
    dies.destroy();
    // One of an unknown container; and one in a very old form, of a container that lives.
    let held = |name: &str, content: &str| operator.node.file(&format!("networks/net1/{name}"), content);
    held("10.1.0.77", "stranger\r\neth0");
    held("10.1.0.78", &lives.id);

    let shown = operator.json(&["ipam", "show", "net1"]);
    let states: Vec<&str> =
        shown["reservations"].as_array().unwrap().iter().map(|one| one["state"].as_str().unwrap()).collect();
    // The kernel removes a namespace asynchronously; until then the host's link has the mark.
    assert!(["over", "in use"].contains(&states[1]), "{shown:#}");
    assert_eq!((states[0], states[2], states[3]), ("in use", "unknown", "in use"), "{shown:#}");
    let deadline = std::time::Instant::now() + cni_testkit::patience(std::time::Duration::from_secs(20));
    while operator.json(&["ipam", "show", "net1"])["reservations"][1]["state"] != "over" {
        assert!(std::time::Instant::now() < deadline, "{}", operator.done(&["ipam", "show", "net1"]));
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let text = operator.done(&["ipam", "show", "net1"]);
    assert!(text.contains(&id) && text.contains("is gone: it does not exist"), "{text}");

    let dry = operator.done(&["ipam", "gc", "net1", "--dry-run"]);
    assert!(dry.contains("remove  10.1.0.3") && dry.contains("1 of 4 would be removed. Nothing was changed."), "{dry}");
    assert_eq!(operator.node.reservations("net1").len(), 4);
    let json = operator.json(&["ipam", "gc", "net1"]);
    assert_eq!((addresses(&json["removed"]), json["kept"].as_array().unwrap().len()), (vec!["10.1.0.3"], 3));
    let young = operator.done(&["ipam", "gc", "net1", "--unknown"]);
    assert!(young.contains("keep    10.1.0.77  stranger eth0") && young.contains("may still be running"), "{young}");
    operator.done(&["ipam", "gc", "net1", "--unknown", "--min-age", "0", "--keep", "stranger"]);
    assert_eq!(operator.node.reservations("net1").len(), 3);
    operator.done(&["ipam", "gc", "net1", "--unknown", "--min-age", "0"]);
    assert_eq!(operator.node.reservations("net1").len(), 2, "that of the container that lives stays in either form");
    // What was freed is given out again.
    operator.detach(&lives);
    operator.done(&["ipam", "release", "net1", "10.1.0.78", "--force"]);
    operator.done(&["del", "net1", "--container-id", &id]);
}

#[test]
fn a_failed_gc_prints_one_document_without_removed_entries() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let held = operator.node.file("networks/net1/10.1.0.77", "stranger\r\neth0");
    // The kernel refuses to unlink what something is mounted on.
    operator.node.exec(&["sh", "-c", &format!("mount --bind {0} {0}", held.display())]);
    let outcome = operator.call(&["ipam", "gc", "net1", "--unknown", "--min-age", "0", "--json"]).run();
    assert_eq!(outcome.status, Some(1), "{}", outcome.report());
    let error = outcome.json.clone().unwrap_or_else(|| panic!("one document\n{}", outcome.report()));
    assert!(error["msg"].to_string().contains("failed to remove"), "{}", outcome.report());
    assert!(error["removed"].is_null(), "{}", outcome.report());
    operator.node.exec(&["sh", "-c", &format!("umount {}", held.display())]);
    let json = operator.json(&["ipam", "gc", "net1", "--unknown", "--min-age", "0"]);
    assert_eq!(addresses(&json["removed"]), ["10.1.0.77"], "{json:#}");
}

#[test]
fn what_is_in_use_is_released_only_by_force() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let container = operator.attach();
    operator
        .failed(&["ipam", "release", "net1", "10.1.0.2"], &["is in use: its namespace", path(&container), "--force"]);
    operator.failed(&["ipam", "release", "net1", "10.1.0.9"], &["10.1.0.9 is not reserved"]);
    operator.failed(&["ipam", "show", "nowhere"], &["network \"nowhere\" has no reservations", "or host-local: net1"]);
    let by_id = ["ipam", "release", "net1", "--container-id", &container.id, "--force"];
    let text = operator.done(&by_id);
    assert_eq!(text, format!("remove  10.1.0.2  {} eth0  (selected)\n1 of 1 are removed.\n", container.id));
    operator.failed(&by_id, &["has no reservation"]);
    operator.detach(&container);
}

#[test]
fn a_network_with_two_folders_is_suggested_once() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    operator.node.exec(&["mkdir", "-p", "/var/lib/cni/networks/net1"]);
    let said = operator.failed(&["ipam", "show", "nowhere"], &["or host-local: net1"]);
    assert!(!said.stderr.contains("net1, net1"), "{}", said.report());
}

#[test]
fn a_lock_that_is_held_is_waited_for_and_its_holder_named() {
    require!(probe::plugin("cnitool"));
    require!(probe::tool("flock"));
    let operator = Operator::new();
    operator.configure(json!({"ipam": {"lockTimeout": 1}}), &[]);
    let container = operator.attach();
    let lock = operator.node.data_dir().join("net1/lock");
    let cnitool = cni_testkit::bin_dir().join("cnitool");
    let conf = operator.node.dir().join("net.d");
    let [lock, cnitool, conf] = [&lock, &cnitool, &conf].map(|path| path.to_str().unwrap());
    let ran = operator.node.run(&["flock", lock, cnitool, "ipam", "show", "net1", "--conf-dir", conf]);
    assert!(!ran.ok && ran.stderr.contains("failed to lock") && ran.stderr.contains("within 1 s"), "{}", ran.stderr);
    let ran = operator.node.run(&["flock", lock, cnitool, "ipam", "list", "--conf-dir", conf]);
    assert!(ran.ok, "the list takes no lock: {}", ran.stderr);
    operator.detach(&container);
}

#[test]
fn a_watched_verb_is_repeated_until_a_signal_arrives() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    for verb in [&["inspect"][..], &["ipam", "list"]] {
        let once = operator.done(verb);
        let program = cni_testkit::bin_dir().join("cnitool").display().to_string();
        let conf = operator.node.dir().join("net.d").display().to_string();
        let call = ["timeout", "-s", "INT", "3", &program, "--conf-dir", &conf];
        let ran = operator.node.run(&[&call, verb, &["--watch=1"]].concat());
        let times = ran.stdout.matches(&once).count();
        assert!(times >= 2, "{times} times: {ran:?}");
    }
}

#[test]
fn an_unprivileged_call_says_once_that_root_is_needed() {
    require!(probe::plugin("cnitool"));
    require!(probe::tool("setpriv"));
    let operator = Operator::new();
    let program = cni_testkit::bin_dir().join("cnitool").display().to_string();
    let drop =
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"];
    let ran = operator.node.run(&[&drop[..], &[&program, "inspect", "--conf-dir", "/nonexistent"]].concat());
    assert!(!ran.ok && ran.stderr.matches("run this as root").count() == 1, "{ran:?}");
    let ran = operator.node.run(&[&program, "inspect", "--conf-dir", "/nonexistent"]);
    assert!(ran.ok && !ran.stderr.contains("root"), "{ran:?}");
}

/// Calls the completion of bash and prints what it offers.
const BASH: &str = r#"
    source <(cnitool completions bash)
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _cnitool_names cnitool "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    printf ' %s ' "${COMPREPLY[@]}"
"#;

/// As [`BASH`], with a zsh on a terminal, in which Tab prints what the completion offers.
const ZSH: &str = r#"
    export INNER='
        PS1= RPS1=
        autoload -U compinit && compinit -u -D
        source <(cnitool completions zsh)
        offered=()
        compadd() { local -a matches; builtin compadd -O matches "$@"; offered+=($matches); builtin compadd "$@" }
        offer() { _main_complete; print -r "OFFERED ${(j:  :)offered} END" }
        zle -C offer complete-word offer
        bindkey "^I" offer
        print READY
    '
    zmodload zsh/zpty
    zpty terminal zsh -f -i
    zpty -w terminal 'eval "$INNER"'
    zpty -r terminal line '*READY*'
    zpty -w -n terminal "$*"$'\t'
    zpty -r terminal line '*OFFERED*END*'
    print -r -- "$line"
"#;

/// Checks what the completion of a shell offers.
fn assert_completes(shell: &str, script: &str) {
    let operator = Operator::new();
    let container = operator.attach();
    let path = format!("PATH={}:{}", cni_testkit::bin_dir().display(), std::env::var("PATH").unwrap());
    let folder = format!("NETCONFPATH={}", operator.node.dir().join("net.d").display());
    for (words, name) in [
        (&["inspect", ""][..], "net1"),
        (&["inspect", "net1", "con"], &container.id),
        (&["del", "net1", "--container-id", ""], &container.id),
        (&["ipam", "release", "net1", "10."], "10.1.0.2"),
        (&["status", "--js"], "--json"),
    ] {
        let call = [&["env", &path, &folder, shell, "-c", script, shell, "cnitool"], words].concat();
        let ran = operator.node.run(&call);
        assert!(ran.stdout.contains(&format!(" {name} ")), "{words:?}: {ran:?}");
    }
    operator.detach(&container);
}

#[test]
fn bash_completes_networks_containers_and_addresses() {
    require!(probe::plugin("cnitool"));
    assert_completes("bash", BASH);
}

#[test]
fn zsh_completes_networks_containers_and_addresses() {
    require!(probe::plugin("cnitool"));
    require!(probe::tool("zsh"));
    assert_completes("zsh", ZSH);
}
