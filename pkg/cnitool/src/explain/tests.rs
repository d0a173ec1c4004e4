//! Tests explain on a simulated node, whose plugins write a log.

use crate::call::Exit;
use crate::testing::Node;

#[test]
fn each_plugin_is_printed_with_its_steps_and_the_result_stays() {
    let mut node = Node::new();
    node.log("a ADD", "debug cni-a pid=1 step=\"netlink NewLink x\" ms=0.500");
    let text = node.call_ok("explain add net x");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("a ADD, ") && lines[0].ends_with(" ms: done"), "{text}");
    assert_eq!(lines[1], "       0.500  netlink NewLink x");
    assert!(lines[2].starts_with("b ADD, "), "{text}");
    assert_eq!(lines[3].trim(), "this program writes no log");
    assert_eq!(lines[4], r#"{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2/24"}]}"#);
    let calls = node.take_calls();
    assert_eq!(calls[0].1["CNI_LOG"], "debug");
    assert!(!std::path::Path::new(&calls[0].1["CNI_LOG_FILE"]).exists(), "the log is removed after the call");
    assert_eq!(node.call_ok("explain del net x --json").matches("\"verb\": \"DEL\"").count(), 2);
}

#[test]
fn the_step_it_failed_by_is_marked_and_the_verb_fails_as_ever() {
    let mut node = Node::new();
    node.fail("b ADD", 100);
    let refused =
        "debug cni-b pid=1 step=\"netlink NewAddress\" ms=1 error=\"b ADD went wrong\" request=\"type 20: 0a\"";
    node.log("b ADD", refused);
    let outcome = node.call("explain add net x");
    assert_eq!(outcome.exit, Exit::Failed);
    for line in ["b ADD, ", "!      1.000  netlink NewAddress: b ADD went wrong", "               request: type 20: 0a"]
    {
        assert!(outcome.stdout.lines().any(|one| one.starts_with(line)), "{line}\n{}", outcome.stdout);
    }
    assert!(
        outcome.stderr.starts_with("cnitool: add net: plugin type=\"b\" failed (add): b ADD went wrong\n"),
        "{}",
        outcome.stderr
    );
    let outcome = node.call("explain add net x --json");
    let json = outcome.json();
    assert_eq!((outcome.exit, &json["error"]["code"], outcome.stderr.as_str()), (Exit::Failed, &100.into(), ""));
    assert_eq!((&json["calls"][1]["steps"][0]["failed"], &json["result"]), (&true.into(), &serde_json::Value::Null));
    let outcome = node.call("explain add absent x");
    assert!(
        outcome.exit == Exit::Failed && outcome.stdout.is_empty() && outcome.stderr.contains("no net configuration")
    );
    assert_eq!(node.call("explain").exit, Exit::Usage);
}
