//! Tests the verbs of a network on a simulated node.

use crate::call::Exit;
use crate::target::container_id;
use crate::testing::Node;

#[test]
fn add_prints_the_result_and_derives_the_id_from_the_path() {
    let node = Node::new();
    let expected = "{\"cniVersion\":\"1.1.0\",\"ips\":[{\"address\":\"10.0.0.2/24\"}]}\n";
    assert_eq!(node.call_ok("add net ../netns//x"), expected);
    let calls = node.take_calls();
    let env = &calls[0].1;
    assert_eq!((env["CNI_NETNS"].as_str(), env["CNI_IFNAME"].as_str()), ("/run/netns/x", "eth0"));
    assert_eq!(env["CNI_CONTAINERID"], container_id("/run/netns/x"));
    assert_eq!(node.call_ok("check net x"), "");
    assert_eq!(node.call_ok("del net x"), "");
    assert_eq!(node.take_call_names(), "a CHECK, b CHECK, b DEL, a DEL");
}

#[test]
fn the_ifname_is_the_option_then_the_variable_then_eth0() {
    let mut node = Node::new();
    node.set_variable("CNI_IFNAME", "net7");
    node.call_ok("add net x");
    node.call_ok("add -i net8 net x");
    node.call_ok("add net x --ifname=net9 --container-id c1");
    let ids: Vec<_> = node
        .take_calls()
        .into_iter()
        .map(|(_, env, _)| (env["CNI_IFNAME"].clone(), env["CNI_CONTAINERID"].clone()))
        .collect();
    let id = container_id("/run/netns/x");
    let pair = |ifname: &str, id: &str| (ifname.to_owned(), id.to_owned());
    assert_eq!([&ids[0], &ids[2], &ids[4]], [&pair("net7", &id), &pair("net8", &id), &pair("net9", "c1")]);
}

#[test]
fn plugin_arguments_come_from_the_environment_then_the_cache() {
    let mut node = Node::new();
    node.set_variable("CNI_ARGS", "K=v;L=a=b;");
    node.set_variable("CAP_ARGS", r#"{"mac":"00:11:22:33:44:55","other":1}"#);
    node.call_ok("add net x");
    node.set_variable("CNI_ARGS", "");
    node.set_variable("CAP_ARGS", "");
    node.call_ok("check net x");
    node.call_ok("del net x");
    for (call, env, conf) in node.take_calls() {
        assert_eq!(env["CNI_ARGS"], "K=v;L=a=b", "{call}");
        let runtime_config = &conf["runtimeConfig"];
        assert_eq!(call.starts_with('a'), runtime_config == &serde_json::json!({"mac": "00:11:22:33:44:55"}), "{call}");
    }
}

#[test]
fn malformed_variables_are_named() {
    for (key, value, expected) in [
        ("CNI_ARGS", "K=", "invalid CNI_ARGS pair \"K=\""),
        ("CNI_ARGS", "=v", "invalid CNI_ARGS pair \"=v\""),
        ("CNI_ARGS", "K", "invalid CNI_ARGS pair \"K\""),
        ("CAP_ARGS", "[]", "failed to read CAP_ARGS: it is not a JSON object"),
    ] {
        let mut node = Node::new();
        node.set_variable(key, value);
        let outcome = node.call("add net x --json");
        assert_eq!(
            (outcome.exit, outcome.json()["code"].as_u64(), outcome.json()["msg"].as_str()),
            (Exit::Failed, Some(4), Some(expected))
        );
        assert_eq!(node.take_call_names(), "");
    }
}

#[test]
fn an_error_is_text_on_stderr_or_json_on_stdout() {
    let mut node = Node::new();
    node.fail("b ADD", 11);
    let outcome = node.call("add net x");
    assert_eq!((outcome.exit, outcome.stdout.as_str()), (Exit::Failed, ""));
    assert_eq!(
        outcome.stderr,
        "cnitool: add net: plugin type=\"b\" failed (add): b ADD went wrong\n    d\n    CNI error code 11: try again later\n"
    );
    assert_eq!(node.take_call_names(), "a ADD, b ADD, b DEL, a DEL");
    let outcome = node.call("--json add net x");
    let expected = serde_json::json!({"cniVersion": "1.1.0", "code": 11, "msg": "plugin type=\"b\" failed (add): b ADD went wrong", "details": "d"});
    assert_eq!((outcome.json(), outcome.stderr.as_str()), (expected, ""));
}

#[test]
fn a_name_given_for_a_path_is_recognised() {
    let mut node = Node::new();
    node.working_folder = "/tmp";
    let outcome = node.call("add net x");
    let expected = "cnitool: add net: /tmp/x is not a network namespace: it does not exist (CNI_NETNS)\n    a path is expected; did you mean /run/netns/x?\n";
    assert!(outcome.stderr.starts_with(expected), "{}", outcome.stderr);
    for elsewhere in ["add net y", "add net ./x"] {
        let outcome = node.call(elsewhere);
        assert!(outcome.exit == Exit::Failed && !outcome.stderr.contains("did you mean"), "{}", outcome.stderr);
    }
    assert_eq!(node.take_call_names(), "");
}

#[test]
fn del_works_without_the_namespace_and_the_networks_file() {
    let mut node = Node::new();
    node.call_ok("add net x");
    node.call_ok("add net x --container-id c1");
    node.remove_namespace("/run/netns/x");
    node.call_ok("del net x");
    node.take_calls();
    node.configure(r#"{"name":"other","plugins":[{"type":"a"}]}"#);
    let outcome = node.call("del net --container-id c1");
    assert_eq!(outcome.exit, Exit::Done, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("the configuration at the time of ADD is used"), "{}", outcome.stderr);
    let calls = node.take_calls();
    assert_eq!((calls.len(), calls[0].1["CNI_NETNS"].as_str()), (2, "/run/netns/x"));
    let outcome = node.call("del net --container-id c1");
    assert!(outcome.stderr.contains("no net configuration with name \"net\" in "), "{}", outcome.stderr);
}

#[test]
fn del_stops_at_the_first_error_unless_it_is_to_keep_going() {
    let mut node = Node::new();
    node.call_ok("add net x");
    node.fail("b DEL", 5);
    node.take_calls();
    assert_eq!(node.call("del net x").exit, Exit::Failed);
    assert_eq!(node.take_call_names(), "b DEL");
    assert_eq!(node.call("del net x --keep-going").exit, Exit::Failed);
    assert_eq!(node.take_call_names(), "b DEL, a DEL");
}

#[test]
fn gc_keeps_what_has_a_namespace_or_is_named() {
    let mut node = Node::new();
    for path in ["/run/netns/y", "/run/netns/z"] {
        node.add_namespace(path);
    }
    for name in ["x", "y", "z"] {
        node.call_ok(&format!("add net {name} --container-id {name}"));
    }
    node.remove_namespace("/run/netns/y");
    node.remove_namespace("/run/netns/z");
    node.take_calls();
    let dry = node.call_ok("gc net --keep z/eth0 --keep far/eth1 --dry-run");
    assert!(dry.contains("remove  y/eth0  (its namespace /run/netns/y is gone: it does not exist)\n"), "{dry}");
    assert!(dry.contains("keep    z/eth0  (named with --keep)\n") && dry.contains("keep    far/eth1  (named"), "{dry}");
    assert!(
        dry.contains("keep    x/eth0  (its namespace /run/netns/x exists)\n") && dry.contains("Nothing was changed."),
        "{dry}"
    );
    assert_eq!(node.take_call_names(), "");

    let text = node.call_ok("gc net --keep z/eth0 --keep far/eth1");
    assert!(text.contains("remove  y/eth0"), "{text}");
    let calls = node.take_calls();
    let names: Vec<_> = calls.iter().map(|(call, env, _)| format!("{call} {}", env["CNI_CONTAINERID"])).collect();
    assert_eq!(names, ["b DEL y", "a DEL y", "a GC ", "b GC "]);
    let valid = calls[2].2["cni.dev/valid-attachments"].to_string();
    assert_eq!(
        valid,
        r#"[{"containerID":"far","ifname":"eth1"},{"containerID":"x","ifname":"eth0"},{"containerID":"z","ifname":"eth0"}]"#
    );

    let json = node.call("gc net --dry-run --json").json()["networks"][0].clone();
    assert_eq!((json["changed"].as_bool(), json["removed"][0]["containerID"].as_str()), (Some(false), Some("z")));
}

#[test]
fn gc_removes_everything_only_if_requested() {
    let mut node = Node::new();
    let refused = |node: &Node| {
        let outcome = node.call("gc net");
        assert_eq!(outcome.exit, Exit::Failed);
        assert!(outcome.stderr.contains("no attachment of this network is known to be in use"), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("--all") && outcome.stderr.contains("103: refused"), "{}", outcome.stderr);
        assert_eq!(node.take_call_names(), "");
    };
    refused(&node); // The cache has no attachment, so the plugins would remove everything.
    // The plugins of an older list are asked too.
    node.configure(r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"a"},{"type":"b"}]}"#);
    refused(&node);
    node.call_ok("add net x");
    node.remove_namespace("/run/netns/x");
    node.take_calls();
    refused(&node);
    node.call_ok("gc net --dry-run");
    assert_eq!(node.take_call_names(), "");
    node.call_ok("gc net --all");
    assert_eq!(node.take_call_names(), "b DEL, a DEL, a GC, b GC");
}

#[test]
fn gc_removes_nothing_beside_an_unreadable_file_without_all() {
    let node = Node::new();
    node.call_ok("add net x --container-id c");
    let results = node.folder.path().join("cache/results");
    std::fs::write(results.join("net-empty-eth0"), "").unwrap();
    std::fs::write(results.join("net-old-eth0"), r#"{"cniVersion":"0.4.0","dns":{}}"#).unwrap();
    node.take_calls();
    let outcome = node.call("gc net");
    assert!(outcome.exit == Exit::Failed && outcome.stderr.contains("103: refused"), "{}", outcome.stderr);
    let named = node.call("gc net --keep empty/eth0 --keep old/eth0");
    let said = "so their attachments would be removed unless --keep names them\n";
    assert!(named.exit == Exit::Failed && named.stderr.contains(said), "{}", named.stderr);
    for file in ["net-empty-eth0", "net-old-eth0"] {
        assert!(outcome.stderr.contains(&format!("/{file}: ")), "{}", outcome.stderr);
        let dry = node.call_ok("gc net --dry-run");
        assert!(dry.contains(&format!("unknown {}: ", results.join(file).display())), "{dry}");
    }
    let json = node.call("gc net --dry-run --json").json()["networks"][0].clone();
    assert_eq!(json["unreadable"].as_array().map(Vec::len), Some(2), "{json}");
    assert_eq!(node.take_call_names(), "");
    node.call_ok("gc net --all --keep old/eth0");
    assert_eq!(node.take_call_names(), "a GC, b GC");
}

#[test]
fn gc_keeps_what_it_cannot_judge_and_lets_disable_gc_rule() {
    let node = Node::new();
    node.call_ok("add net /secret --container-id c");
    node.take_calls();
    let text = node.call_ok("gc net");
    assert!(text.contains("keep    c/eth0  (whether its namespace exists is unknown"), "{text}");
    let outcome = node.call("add net /plain/file");
    assert!(
        outcome.exit == Exit::Failed && outcome.stderr.contains("/plain/file is not a network namespace"),
        "{}",
        outcome.stderr
    );
    assert_eq!(node.take_call_names(), "a GC, b GC");
    node.configure(r#"{"cniVersion":"1.1.0","name":"net","disableGC":true,"plugins":[{"type":"a"}]}"#);
    let outcome = node.call("gc net");
    assert!(outcome.exit == Exit::Done && outcome.stderr.contains("disableGC"), "{}", outcome.stderr);
    assert_eq!(node.take_call_names(), "");
}

#[test]
fn status_needs_no_namespace_and_keeps_the_code() {
    let mut node = Node::new();
    assert_eq!(node.call_ok("status net"), "  net          ready\n");
    assert_eq!(node.call_ok("status net /run/netns/ignored"), node.call_ok("status"));
    assert_eq!(node.call("status --json").json()["networks"][0]["ready"], true);
    node.fail("a STATUS", 50);
    let outcome = node.call("status");
    assert!(outcome.exit == Exit::Failed && outcome.stdout.contains("! net          plugin "), "{}", outcome.stdout);
    assert!(outcome.stderr.starts_with("cnitool: status: ") && outcome.stderr.contains(" 50: "), "{}", outcome.stderr);
    let outcome = node.call("status net --json");
    assert_eq!((outcome.exit, outcome.json()["networks"][0]["error"]["code"].as_u64()), (Exit::Failed, Some(50)));
}

#[test]
fn colours_are_for_terminals_unless_an_option_decides() {
    let node = Node::new();
    node.configure(r#"{"cniVersion":"1.1.0","name":"net","plugins":[{"type":"a"}],"pluginz":[]}"#);
    for (option, is_coloured) in
        [("", false), ("--color auto", false), ("--color never", false), ("--color always", true)]
    {
        let text = node.call_ok(&format!("validate {option}"));
        assert_eq!(text.contains("\u{1b}[33mwarning:"), is_coloured, "{option}: {text}");
    }
    assert_eq!(node.call("validate --color blue").exit, Exit::Usage);
}

#[test]
fn a_mistyped_network_is_answered_with_the_nearest_name() {
    let node = Node::new();
    for args in ["status nat", "add nte x", "gc nets --plugins", "validate ney"] {
        let outcome = node.call(args);
        let hint = outcome.stderr.contains("; did you mean \"net\"?");
        assert!(outcome.exit == Exit::Failed && hint, "{args}: {}", outcome.stderr);
    }
    assert!(!node.call("status other").stderr.contains("did you mean"));
}

#[test]
fn version_lists_the_plugins_and_fails_if_one_does_not_fit() {
    let node = Node::new();
    let text = node.call_ok("version net");
    let path = node.folder.path().join("bin/a");
    assert!(text.starts_with("network net uses CNI version 1.1.0\n"), "{text}");
    assert!(text.contains(&format!("a  {}  1.0.0 1.1.0\n", path.display())), "{text}");
    let json = node.call("version --json").json()["networks"][0].clone();
    assert_eq!((json["plugins"][1]["type"].as_str(), json["capabilities"][0].as_str()), (Some("b"), Some("mac")));
    node.configure(r#"{"cniVersion":"0.4.0","name":"net","plugins":[{"type":"a"},{"type":"absent"}]}"#);
    let outcome = node.call("version net");
    assert_eq!(outcome.exit, Exit::Failed);
    assert!(outcome.stdout.contains("absent  not found  -\n"), "{}", outcome.stdout);
    let expected = "plugin a does not support config version \"0.4.0\"; failed to find plugin \"absent\"";
    assert!(outcome.stderr.contains(expected), "{}", outcome.stderr);
}

#[test]
fn version_as_json_names_the_plugin_that_fails() {
    let mut node = Node::new();
    node.fail("b VERSION", 7);
    let outcome = node.call("version net --json");
    assert_eq!((outcome.exit, outcome.stderr.as_str()), (Exit::Failed, ""));
    let [a, b] = [0, 1].map(|index| outcome.json()["networks"][0]["plugins"][index].clone());
    assert_eq!((&a["versions"][1], &a["error"]), (&"1.1.0".into(), &serde_json::Value::Null));
    assert_eq!((b["type"].as_str(), b["error"]["code"].as_u64()), (Some("b"), Some(7)));
    node.configure(r#"{"cniVersion":"0.4.0","name":"net","plugins":[{"type":"a"},{"type":"absent"}]}"#);
    let outcome = node.call("version net --json");
    let codes = [0, 1].map(|index| outcome.json()["networks"][0]["plugins"][index]["error"]["code"].as_u64());
    assert_eq!((outcome.exit, codes), (Exit::Failed, [Some(1), Some(4)]));
}

#[test]
fn calls_that_make_no_sense_are_refused_before_anything_runs() {
    let node = Node::new();
    for (args, expected) in [
        ("", "requires a subcommand"),
        ("frobnicate net", "unrecognized subcommand 'frobnicate'"),
        ("chek net x", "'check'"),
        ("--frob add", "unexpected argument '--frob'"),
        ("add", "<NETWORK>"),
        ("add net", "<NETNS>"),
        ("check net --container-id c", "<NETNS>"),
        ("del net", "<NETNS>"),
        ("add net x y", "unexpected argument 'y'"),
        ("add net x --keep-going", "unexpected argument '--keep-going'"),
        ("status net --all", "unexpected argument '--all'"),
        ("gc net --keep c", "CONTAINER-ID/IFNAME is expected"),
        ("add net x --timeout 0", "0 is not in 1..=86400"),
        ("add net x --ifname", "a value is required for '--ifname <NAME>'"),
    ] {
        let outcome = node.call(args);
        assert_eq!((outcome.exit, outcome.stdout.as_str()), (Exit::Usage, ""), "{args}");
        assert!(outcome.stderr.contains(expected) && outcome.stderr.contains("--help'"), "{args}: {}", outcome.stderr);
    }
    assert_eq!(node.take_call_names(), "");
}

#[test]
fn an_empty_path_is_none() {
    let node = Node::new();
    for args in [&["add", "net", ""][..], &["check", "net", ""], &["del", "net", ""]] {
        let outcome = node.call_with(args);
        assert_eq!((outcome.exit, outcome.stdout.as_str()), (Exit::Usage, ""), "{args:?}");
        assert!(outcome.stderr.contains("the path of") && outcome.stderr.contains("--help'"), "{}", outcome.stderr);
    }
    assert_eq!(node.call_with(&["del", "net", "", "--container-id", "c"]).exit, Exit::Done);
}

#[test]
fn help_is_a_result_and_names_every_verb_and_option() {
    let node = Node::new();
    let overview = node.call_ok("--help");
    assert_eq!(node.call_ok("help"), overview);
    for verb in ["add", "check", "del", "gc", "status", "version"] {
        assert!(overview.contains(&format!("\n  {verb} ")), "{verb}");
        let text = node.call_ok(&format!("{verb} --help"));
        assert!(text.contains("Exit codes: 0") && text.contains("Example"), "{text}");
        assert!(text.contains(&format!("Usage: cnitool {verb} ")) && text.contains("Environment: "), "{text}");
        assert_eq!(node.call_ok(&format!("help {verb}")), text);
        assert_eq!(node.call_ok(&format!("{verb} -h")), text);
        assert!(text.lines().chain(overview.lines()).all(|line| line.len() <= 100), "{text}");
    }
    for option in ["--conf-dir", "--cache-dir", "--timeout", "--json", "CNI_PATH", "NETCONFPATH", "CAP_ARGS"] {
        assert!(overview.contains(option), "{option}");
    }
    assert_eq!(node.call_ok("--version"), format!("cnitool {}\n", cni::release::release()));
}

#[test]
fn completions_and_man_pages_know_every_verb() {
    let node = Node::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = node.call_ok(&format!("completions {shell}"));
        for word in ["add", "check", "--keep-going", "conf-dir"] {
            assert!(script.contains(word.trim_start_matches("--")), "{shell}: {word}");
        }
    }
    assert_eq!(node.call("completions cobol").exit, Exit::Usage);
    node.call_ok("add net x --container-id c1");
    for (words, names) in [
        ("inspect", "net\n"),
        ("explain add --json", "net\n"),
        ("ipam show", "net\n"),
        ("inspect net", "c1\n"),
        ("del net --container-id", "c1\n"),
        ("inspect net c1", ""),
        ("doctor", ""),
    ] {
        assert_eq!(node.call_ok(&format!("complete -- {words}")), names, "{words}");
    }
    let dir = node.folder.path().join("man/man1");
    node.call_ok(&format!("man {}", dir.display()));
    let page = std::fs::read_to_string(dir.join("cnitool-gc.1")).unwrap();
    for words in ["dry\\-run", "get a full DEL", "cnitool gc mynet"] {
        assert!(page.starts_with(".ie") && page.contains(words), "{words}: {page}");
    }
    assert!(dir.join("cnitool.1").exists() && !dir.join("cnitool-help.1").exists());
    assert_eq!(node.call(&format!("man {}/cnitool.1", dir.display())).exit, Exit::Failed);
}
