//! Signals that a plugin inherits from its caller, ignored or blocked, and signals that ask for
//! nothing.

use cni_testkit::{Attachment, Invocation, Node, bin_dir, probe, require};
use conformance::{ipam, patched};
use serde_json::{Value, json};

use crate::delegation::executable;

/// A network of `ptp`, whose verbs run host-local and iptables.
fn config(node: &Node) -> Value {
    json!({"cniVersion": "1.0.0", "name": "net1", "type": "ptp", "ipMasq": true, "ipam": ipam(node, &["10.1.0.0/24"])})
}

/// Prepares a call of `ptp` by a program that has executed this statement of Python.
fn called_after<'n>(node: &'n Node, statement: &str) -> Invocation<'n> {
    let script = format!("import os, signal, sys\n{statement}\nos.execv(sys.argv[1], sys.argv[1:])");
    let call = Invocation::new(node, "/usr/bin/python3").arg("-c").arg(script);
    call.arg(bin_dir().join("ptp")).cni_path(bin_dir())
}

#[test]
fn signals_that_the_caller_ignores_or_blocks_change_no_verb() {
    require!(probe::tool("python3"));
    for statement in [
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "[signal.signal(s, signal.SIG_IGN) for s in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}]",
    ] {
        let node = Node::new();
        let container = node.container();
        let config = config(&node);
        let call = |verb: &str, config: &Value| {
            let outcome = called_after(&node, statement).command(verb).container(&container).config(config).run();
            assert_eq!(outcome.status, Some(0), "{statement}, {verb}\n{}", outcome.report());
            outcome
        };
        let result = call("ADD", &config).success();
        let with_result = patched(config.clone(), json!({"prevResult": result}));
        call("CHECK", &with_result);
        let path = node.data_dir().join("net1/10.1.0.2");
        assert!(path.exists(), "{statement}");
        call("DEL", &with_result);
        assert!(!path.exists(), "{statement}");
    }
}

#[test]
fn a_blocked_or_ignored_sigterm_is_still_received_or_not() {
    require!(probe::tool("python3"));
    for (statement, is_received) in [
        ("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})", true),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", false),
    ] {
        let node = Node::new();
        let container = node.container();
        let folder = executable(&node, "slow-ipam", &signalling("TERM"));
        let config = patched(config(&node), json!({"ipam": {"type": "slow-ipam"}}));
        let outcome =
            called_after(&node, statement).command("ADD").container(&container).cni_path(folder).config(&config).run();
        if is_received {
            outcome.fails_with(11, "");
            assert!(container.link("eth0").is_none());
        } else {
            outcome.success();
        }
        Attachment::new(&node, &container, self::config(&node)).del().success();
    }
}

/// A script in the place of host-local that sends a signal to its plugin, and then is host-local.
fn signalling(signal: &str) -> String {
    format!(
        "#!/bin/sh\n[ $CNI_COMMAND = ADD ] && kill -{signal} $PPID\nexec {}\n",
        bin_dir().join("host-local").display()
    )
}

#[test]
fn signals_that_do_not_terminate_end_no_add() {
    for signal in ["ALRM", "VTALRM", "PROF", "USR1", "USR2", "IO", "PWR", "STKFLT", "XCPU", "XFSZ", "CHLD"] {
        let node = Node::new();
        let container = node.container();
        let folder = executable(&node, "slow-ipam", &signalling(signal));
        let config = patched(config(&node), json!({"ipam": {"type": "slow-ipam"}}));
        let attachment = Attachment::new(&node, &container, config.clone());
        let outcome = node.plugin("ptp").command("ADD").container(&container).cni_path(&folder).config(&config).run();
        assert_eq!(outcome.status, Some(0), "{signal}\n{}", outcome.report());
        drop(attachment);
        let config = patched(self::config(&node), json!({"prevResult": outcome.success()}));
        node.plugin("ptp").command("DEL").container(&container).config(&config).run().success();
    }
}
