//! A verb explained, on values: plugins that write the log they are asked for.

use crate::Exit;
use crate::testing::Node;

#[test]
fn each_plugin_is_printed_with_its_steps_and_the_result_stays() {
    let mut node = Node::new();
    node.log("a ADD", "debug cni-a pid=1 step=\"netlink NewLink x\" ms=0.500");
    let text = node.done("explain add net x");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("a ADD, ") && lines[0].ends_with(" ms: done"), "{text}");
    assert_eq!(lines[1], "       0.500  netlink NewLink x");
    assert!(lines[2].starts_with("b ADD, "), "{text}");
    assert_eq!(lines[3].trim(), "this program writes no log");
    assert_eq!(lines[4], r#"{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2/24"}]}"#);
    let asked = node.asked();
    assert_eq!(asked[0].1["CNI_LOG"], "debug");
    assert!(!std::path::Path::new(&asked[0].1["CNI_LOG_FILE"]).exists(), "it goes with the call");
    assert_eq!(node.done("explain del net x --json").matches("\"verb\": \"DEL\"").count(), 2);
}

#[test]
fn the_step_it_failed_by_is_marked_and_the_verb_fails_as_ever() {
    let mut node = Node::new();
    node.fail("b ADD", 100);
    let refused =
        "debug cni-b pid=1 step=\"netlink NewAddress\" ms=1 error=\"b ADD went wrong\" request=\"type 20: 0a\"";
    node.log("b ADD", refused);
    let said = node.say("explain add net x");
    assert_eq!(said.exit, Exit::Failed);
    for line in ["b ADD, ", "!      1.000  netlink NewAddress: b ADD went wrong", "               request: type 20: 0a"]
    {
        assert!(said.stdout.lines().any(|one| one.starts_with(line)), "{line}\n{}", said.stdout);
    }
    assert!(
        said.stderr.starts_with("cnitool: add net: plugin type=\"b\" failed (add): b ADD went wrong\n"),
        "{}",
        said.stderr
    );
    let said = node.say("explain add net x --json");
    let json = said.json();
    assert_eq!((said.exit, &json["error"]["code"], said.stderr.as_str()), (Exit::Failed, &100.into(), ""));
    assert_eq!((&json["calls"][1]["steps"][0]["failed"], &json["result"]), (&true.into(), &serde_json::Value::Null));
    let said = node.say("explain add absent x");
    assert!(said.exit == Exit::Failed && said.stdout.is_empty() && said.stderr.contains("no net configuration"));
    assert_eq!(node.say("explain").exit, Exit::Usage);
}
