//! cnitool's verbs for operators: each reports the damage of a node, and the printed command
//! repairs it.

mod blocks;
mod devices;
mod doctor;
mod explain;
mod inspect;
mod ipam;
mod logs;
mod metrics;
mod rules;
mod runtime;
mod sound;
mod sweep;
mod validate;

use cni_testkit::{Container, Invocation, Node, Outcome, bin_dir, report_errors};
use conformance::bridge;
use serde_json::{Value, json};

/// A node with a configured network `net1`: bridge with host-local, and what a test adds.
pub(crate) struct Operator {
    pub(crate) node: Node,
}

impl Operator {
    /// Creates the node with network `net1` on 10.1.0.0/24.
    pub(crate) fn new() -> Operator {
        let operator = Operator { node: Node::new() };
        operator.configure(json!({}), &[]);
        operator
    }

    /// Rewrites the network, with these keys merged into bridge's and these plugins after bridge.
    pub(crate) fn configure(&self, keys: Value, behind: &[Value]) {
        let unnamed = json!({"name": null, "cniVersion": null});
        let first = conformance::patched(conformance::patched(bridge(&self.node, &["10.1.0.0/24"]), unnamed), keys);
        let plugins: Vec<Value> = [&[first], behind].concat();
        let list = json!({"cniVersion": "1.1.0", "name": "net1", "plugins": plugins});
        self.node.file("net.d/10-net1.conflist", list.to_string());
    }

    pub(crate) fn call(&self, args: &[&str]) -> Invocation<'_> {
        let call = Invocation::new(&self.node, bin_dir().join("cnitool")).cni_path(bin_dir());
        let call = call.env("NETCONFPATH", self.node.dir().join("net.d"));
        args.iter().fold(call, |call, arg| call.arg(arg))
    }

    /// Asserts success and returns the output.
    #[track_caller]
    pub(crate) fn done(&self, args: &[&str]) -> String {
        let outcome = self.call(args).run();
        assert_eq!(outcome.status, Some(0), "{}", outcome.report());
        outcome.stdout
    }

    /// Returns the printed document, regardless of the exit status. Asserts that it is as
    /// documented.
    #[track_caller]
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let outcome = self.call(args).arg("--json").run();
        let document = outcome.json.clone().unwrap_or_else(|| panic!("no JSON\n{}", outcome.report()));
        let verb = if ["ipam", "rules"].contains(&args[0]) { args[..2].join(" ") } else { args[0].to_owned() };
        assert_eq!(report_errors(&verb, &document), [""; 0], "{}", outcome.report());
        document
    }

    /// Asserts that cnitool exits with 1 and prints these words.
    #[track_caller]
    pub(crate) fn failed(&self, args: &[&str], words: &[&str]) -> Outcome {
        let outcome = self.call(args).run();
        assert_eq!(outcome.status, Some(1), "{}", outcome.report());
        for word in words {
            let said = format!("{}{}", outcome.stdout, outcome.stderr);
            assert!(said.contains(word), "it should name `{word}`\n{}", outcome.report());
        }
        outcome
    }

    /// Runs a command that cnitool printed, as an operator would paste it.
    #[track_caller]
    pub(crate) fn paste(&self, command: &str) -> String {
        let (bin, path) = (bin_dir(), std::env::var("PATH").unwrap_or_default());
        let variables = [
            format!("PATH={}:{path}", bin.display()),
            format!("CNI_PATH={}", bin.display()),
            format!("NETCONFPATH={}", self.node.dir().join("net.d").display()),
        ];
        let mut argv = vec!["env"];
        argv.extend(variables.iter().map(String::as_str));
        argv.extend(["sh", "-c", command]);
        self.node.exec(&argv)
    }

    /// Adds a container to the network.
    #[track_caller]
    pub(crate) fn attach(&self) -> Container {
        let container = self.node.container();
        self.done(&["add", "net1", path(&container), "--container-id", &container.id]);
        container
    }

    #[track_caller]
    pub(crate) fn detach(&self, container: &Container) {
        self.done(&["del", "net1", path(container), "--container-id", &container.id]);
    }
}

/// The path of a container's namespace, as an argument.
pub(crate) fn path(container: &Container) -> &str {
    container.netns().to_str().unwrap()
}
