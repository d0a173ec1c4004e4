//! Delegates that misbehave, as real executables. Each must give an error that names the file, and
//! DEL must still remove bridge's own resources.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cni_testkit::{Invocation, Node, Outcome, wait_until};
use conformance::{attach, bridge, patched};
use serde_json::{Value, json};

/// Writes an executable `name` into a folder of the node and returns the folder, for `CNI_PATH`.
pub(crate) fn executable(node: &Node, name: &str, script: &str) -> PathBuf {
    let path = node.script(&format!("plugins/{name}"), script);
    path.parent().unwrap().to_owned()
}

/// Waits until a file that a delegate writes is there and not empty.
pub(crate) fn wait_for(path: &Path) {
    let has_content = || fs::metadata(path).is_ok_and(|meta| meta.len() > 0);
    wait_until(&format!("{} has content", path.display()), has_content);
}

const ADDRESS: &str = r#"{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.9/24","gateway":"10.1.0.1"}]}"#;

fn config(node: &Node, extra: Value) -> Value {
    let base = patched(bridge(node, &[]), json!({"ipam": {"type": "odd-ipam", "ranges": null, "dataDir": null}}));
    patched(base, extra)
}

fn call<'n>(node: &'n Node, folder: &Path, verb: &str, extra: Value) -> Invocation<'n> {
    node.plugin("bridge").command(verb).cni_path(folder).config(&config(node, extra)).timeout(Duration::from_secs(20))
}

/// Returns a short `delegateTimeout` for a script that sleeps, enough for its work before, and the
/// default for any other.
fn timeout_of(script: &str) -> Value {
    let seconds = cni_testkit::patience(Duration::from_secs(1)).as_secs().min(10);
    if script.contains("sleep") { json!({"delegateTimeout": seconds}) } else { json!({}) }
}

/// Asserts that ADD with this delegate fails and leaves nothing, and that DEL fails but removes
/// bridge's own part.
#[track_caller]
fn misbehaves(script: &str, mode: u32, words: &[&str]) {
    let node = Node::new();
    let container = node.container();
    let folder = executable(&node, "odd-ipam", script);
    fs::set_permissions(folder.join("odd-ipam"), fs::Permissions::from_mode(mode)).unwrap();
    let extra = timeout_of(script);
    let added = call(&node, &folder, "ADD", extra.clone()).container(&container).run();
    speaks_of_the_file(&added, words);
    assert!(container.link("eth0").is_none(), "{}", added.report());
    assert_eq!(node.ports("br0"), Vec::<String>::new());

    let (container, attachment, result) = attach(&node, &bridge(&node, &["10.1.0.0/24"]), 1).remove(0);
    let deleted = call(&node, &folder, "DEL", extra).container(&container).run();
    speaks_of_the_file(&deleted, words);
    assert!(container.link("eth0").is_none(), "bridge's own part\n{}", deleted.report());
    assert_eq!(node.ports("br0"), Vec::<String>::new());
    attachment.del_with(&result).success();
}

#[track_caller]
fn speaks_of_the_file(outcome: &Outcome, words: &[&str]) {
    let failure = outcome.failure();
    assert_ne!(failure.code, Some(0), "{}", outcome.report());
    for word in ["odd-ipam"].iter().chain(words) {
        let all = format!("{} {}", failure.msg, failure.details);
        assert!(all.contains(word), "the error should name `{word}`\n{}", outcome.report());
    }
}

#[test]
fn a_delegate_that_is_absent() {
    let node = Node::new();
    let container = node.container();
    fs::create_dir(node.dir().join("plugins")).unwrap();
    let folder = node.dir().join("plugins");
    let failure = call(&node, &folder, "ADD", json!({})).container(&container).run().failure();
    assert!(failure.msg.contains("failed to find plugin \"odd-ipam\" in path"), "{failure:?}");
    assert!(failure.msg.contains(folder.to_str().unwrap()), "{failure:?}");
    assert!(container.link("eth0").is_none());
}

#[test]
fn a_delegate_without_an_execute_bit() {
    misbehaves("#!/bin/sh\n", 0o644, &[]);
}

#[test]
fn a_delegate_that_dies_by_a_signal() {
    misbehaves("#!/bin/sh\nkill -SEGV $$\n", 0o755, &["signal"]);
}

#[test]
fn a_delegate_that_prints_hello() {
    misbehaves("#!/bin/sh\necho hello\nexit 1\n", 0o755, &["hello"]);
}

#[test]
fn a_delegate_that_writes_only_to_standard_error() {
    misbehaves("#!/bin/sh\necho no luck today >&2\nexit 3\n", 0o755, &["no luck today"]);
}

#[test]
fn a_delegate_that_never_ends() {
    misbehaves("#!/bin/sh\nexec sleep 1000\n", 0o755, &[]);
}

#[test]
fn a_delegate_that_succeeds_without_an_answer_fails_the_add() {
    for script in ["#!/bin/sh\necho hello\n", "#!/bin/sh\n", "#!/bin/sh\necho '[]'\n"] {
        let node = Node::new();
        let container = node.container();
        let folder = executable(&node, "odd-ipam", script);
        let outcome = call(&node, &folder, "ADD", json!({})).container(&container).run();
        speaks_of_the_file(&outcome, &[]);
        assert!(container.link("eth0").is_none() && node.ports("br0").is_empty());
    }
}

#[test]
fn the_error_of_a_delegate_keeps_its_code_and_its_text() {
    let node = Node::new();
    let container = node.container();
    let script = "#!/bin/sh\necho '{\"cniVersion\":\"1.0.0\",\"code\":123,\"msg\":\"no more\",\"details\":\"at all\"}'\nexit 1\n";
    let folder = executable(&node, "odd-ipam", script);
    let failure = call(&node, &folder, "ADD", json!({})).container(&container).run().failure();
    assert_eq!(failure.code, Some(123));
    assert!(failure.msg.contains("no more") && failure.details.contains("at all"), "{failure:?}");
}

#[test]
fn standard_error_of_a_delegate_is_passed_on() {
    let node = Node::new();
    let container = node.container();
    let script =
        format!("#!/bin/sh\ncat >/dev/null\necho a warning >&2\n[ $CNI_COMMAND != ADD ] || echo '{ADDRESS}'\n");
    let folder = executable(&node, "odd-ipam", &script);
    let added = call(&node, &folder, "ADD", json!({})).container(&container).run();
    added.success();
    assert!(added.stderr.contains("a warning"), "{}", added.report());
    call(&node, &folder, "DEL", json!({})).container(&container).run().success();
}

#[test]
fn a_delegate_gets_the_environment_of_its_parent() {
    let node = Node::new();
    let container = node.container();
    let seen = node.dir().join("seen");
    let script = format!(
        "#!/bin/sh\ncat >/dev/null\necho $CNI_COMMAND $CNI_CONTAINERID $CNI_NETNS $CNI_IFNAME $CNI_ARGS $CNI_PATH $OTHER >> {}\n[ $CNI_COMMAND != ADD ] || echo '{ADDRESS}'\n",
        seen.display()
    );
    let folder = executable(&node, "odd-ipam", &script);
    let of = |verb: &str| {
        let call = call(&node, &folder, verb, json!({})).container(&container);
        call.cni_args("IgnoreUnknown=1;A=B").env("OTHER", "kept").run().success()
    };
    of("ADD");
    of("DEL");
    let (id, netns, path) = (&container.id, container.netns().display(), folder.display());
    let expected: Vec<String> =
        ["ADD", "DEL"].iter().map(|verb| format!("{verb} {id} {netns} eth0 IgnoreUnknown=1;A=B {path} kept")).collect();
    assert_eq!(fs::read_to_string(seen).unwrap().lines().collect::<Vec<_>>(), expected);
}

/// Returns the calls of a delegate with an ADD that ends with `end`.
#[track_caller]
fn asked_for(end: &str) -> String {
    asked_in_failing_add(&format!("[ $CNI_COMMAND != ADD ] || {{ {end}; }}"), timeout_of(end))
}

/// Returns the calls of a delegate, whose shell script has the line `answer`, during an ADD that
/// fails.
#[track_caller]
fn asked_in_failing_add(answer: &str, extra: Value) -> String {
    let node = Node::new();
    let container = node.container();
    let seen = node.dir().join("seen");
    let script = format!("#!/bin/sh\ncat >/dev/null\necho $CNI_COMMAND >> {}\n{answer}\n", seen.display());
    let folder = executable(&node, extra["ipam"]["type"].as_str().unwrap_or("odd-ipam"), &script);
    call(&node, &folder, "ADD", extra).container(&container).run().failure();
    fs::read_to_string(seen).unwrap()
}

#[test]
fn a_delegate_that_refused_its_add_gets_no_del() {
    let refusal = r#"echo '{"cniVersion":"1.0.0","code":11,"msg":"later"}'; exit 1"#;
    assert_eq!(asked_for(refusal), "ADD\n");
}

#[test]
fn a_delegate_whose_add_gave_no_answer_gets_a_del() {
    for end in ["kill -KILL $$", "exec sleep 1000", "echo hello; exit 1", "exit 3", "echo hello"] {
        assert_eq!(asked_for(end), "ADD\nDEL\n", "{end}");
    }
}

#[test]
fn with_reuse_the_code_of_check_decides_about_add_and_del() {
    let asked_of = |ipam_type: &str, code: u32| {
        let answer =
            format!(r#"[ $CNI_COMMAND != CHECK ] || {{ echo '{{"code":{code},"msg":"m"}}'; exit 1; }}; exit 3"#);
        asked_in_failing_add(&answer, json!({"ipam": {"type": ipam_type, "reuse": true}}))
    };
    let asked = |code| asked_of("host-local", code);
    // The container has no address, or CHECK is not possible for any container.
    for code in [1, 3, 7, 999] {
        assert_eq!(asked(code), "CHECK\nADD\nDEL\n", "code {code}");
    }
    // The container has an address, which a DEL would release.
    assert_eq!(asked(101), "CHECK\nADD\n");
    // The container may have an address.
    for code in [5, 11, 100] {
        assert_eq!(asked(code), "CHECK\n", "code {code}");
    }
    assert_eq!(asked_of("cluster-local", 101), "CHECK\nADD\n");
    // Another IPAM plugin can use the key and the codes from 100 for something else.
    assert_eq!(asked_of("odd-ipam", 101), "ADD\nDEL\n");
}

#[test]
fn a_second_add_that_ipam_refuses_leaves_the_first_its_address() {
    let node = Node::new();
    let config = bridge(&node, &["10.1.0.0/24"]);
    let (_living, attachment, result) = attach(&node, &config, 1).remove(0);
    // In another namespace, so that only IPAM can refuse.
    let (other, before) = (node.container(), node.reservations("net1"));
    attachment.clone().netns(other.netns()).add().fails_naming(102, &["10.1.0.2", "duplicate"]);
    assert_eq!(node.reservations("net1"), before);
    attachment.del_with(&result).success();
}

#[test]
fn a_type_that_is_not_a_plain_file_name_is_refused() {
    let node = Node::new();
    let container = node.container();
    let folder = executable(&node, "odd-ipam", "#!/bin/sh\n");
    for name in ["../plugins/odd-ipam", "a/b", "/bin/true"] {
        let failure =
            call(&node, &folder, "ADD", json!({"ipam": {"type": name}})).container(&container).run().failure();
        assert!(failure.msg.contains(name), "{failure:?}");
    }
}

#[test]
fn the_first_folder_of_the_path_wins() {
    let node = Node::new();
    let container = node.container();
    let answer = |address: &str| {
        format!(
            "#!/bin/sh\ncat >/dev/null\n[ $CNI_COMMAND != ADD ] || echo '{}'\n",
            ADDRESS.replace("10.1.0.9", address)
        )
    };
    let first = executable(&node, "odd-ipam", &answer("10.1.0.7"));
    let second = node.script("more/odd-ipam", &answer("10.1.0.8"));
    let path = format!("/nowhere:{}:{}", first.display(), second.parent().unwrap().display());
    let run = |verb: &str| call(&node, Path::new(&path), verb, json!({})).container(&container).run().success();
    assert_eq!(conformance::address(&run("ADD")), "10.1.0.7");
    run("DEL");
}

#[test]
fn a_delegate_without_a_version_speaks_the_configuration_s() {
    let node = Node::new();
    let container = node.container();
    let script = "#!/bin/sh\ncat >/dev/null\n[ $CNI_COMMAND != ADD ] || echo '{\"ips\":[{\"version\":\"4\",\"address\":\"10.1.0.9/24\"}]}'\n";
    let folder = executable(&node, "odd-ipam", script);
    let run =
        |verb: &str| call(&node, &folder, verb, json!({"cniVersion": "0.4.0"})).container(&container).run().success();
    assert_eq!(conformance::address(&run("ADD")), "10.1.0.9");
    run("DEL");
}
