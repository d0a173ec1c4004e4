//! dhcp: the daemon's attempt ends before the plugin's, the plugin's before that of its caller;
//! calls that are interrupted; connections that send nothing.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use cni_testkit::{Attachment, bin_dir, patience, probe, require, wait_until};
use conformance::VERSION;
use conformance::lan::{Lan, Process};
use serde_json::json;

use super::wire::{DISCOVER, Wire};

/// What the daemon has written to its log.
fn daemon_log(lan: &Lan) -> String {
    fs::read_to_string(lan.node.dir().join("daemon.log")).unwrap_or_default()
}

#[test]
fn without_an_answer_add_fails_before_the_delegate_timeout() {
    let lan = Lan::silent();
    let container = lan.node.container();
    let ipam = json!({"type": "dhcp", "daemonSocketPath": lan.socket()});
    let bridge = json!({"cniVersion": VERSION, "name": "net1", "type": "bridge", "bridge": "lan", "ipam": ipam});
    let config = |seconds: u64| {
        let mut config = bridge.clone();
        config["delegateTimeout"] = json!(seconds);
        config
    };
    for flags in [&[][..], &["-timeout", "40s", "-resendmax", "40s", "-resendtimeout", "40s"]] {
        let daemon = lan.daemon_of(&bin_dir(), flags);
        let attachment = Attachment::new(&lan.node, &container, config(6));
        let began = Instant::now();
        let failure =
            attachment.add().fails_naming(11, &["eth0: no DHCP server answered: ", " messages sent in 4.5 s"]);
        assert_eq!(failure.msg, "error calling DHCP.Allocate: no more tries");
        assert!(began.elapsed() >= Duration::from_secs(4), "{:?}", began.elapsed());
        assert_eq!((lan.records(), container.link("eth0")), (0, None));
        attachment.del().success();
        daemon.kill();
        fs::remove_file(lan.socket()).unwrap();
    }
}

#[test]
fn add_ends_in_time_with_a_daemon_that_only_greets() {
    let lan = Lan::silent();
    let listener = UnixListener::bind(lan.socket()).unwrap();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let mut config = attachment.config.clone();
    config["delegateTimeout"] = json!(8);
    let attachment = attachment.config(config);
    // Not a scoped thread, which a plugin that does not connect twice would never let end.
    thread::spawn(move || {
        // The ADD, and its undo.
        for stream in listener.incoming().take(2) {
            let mut stream = stream.unwrap();
            stream.write_all(b"HTTP/1.0 200 Connected to Go RPC\n\n").unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    let began = Instant::now();
    let silent = format!("the DHCP daemon of {} has sent no answer", lan.socket().display());
    attachment.add().fails_naming(11, &["error calling DHCP.Allocate: ", &silent]);
    // The limits of the ADD and of its undo are 7 s and 7.5 s.
    assert!(began.elapsed() < patience(Duration::from_secs(20)), "{:?}", began.elapsed());
}

#[test]
fn a_search_ends_with_the_plugin_that_asked_for_it() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let _daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let mut started = attachment.invocation("ADD", None).start();
    started.release();
    wire.next(DISCOVER);
    lan.node.exec(&["kill", "-KILL", &started.pid().to_string()]);
    wait_until("the search ends", || daemon_log(&lan).contains("the plugin has ended, so the search for a lease ends"));
    while wire.received().is_some() {}
    thread::sleep(Duration::from_secs(2));
    assert!(wire.received().is_none(), "nothing more is sent");
    assert_eq!(lan.records(), 0);
    drop(started);
    let result = wire.during(|message| vec![message.granted(&[])], || attachment.add().success());
    assert_eq!(result["ips"][0]["address"], "192.168.1.9/24");
    attachment.del().success();
}

#[test]
fn sigterm_during_an_add_ends_the_daemon_without_a_panic() {
    let lan = Lan::silent();
    let wire = Wire::new(&lan.node);
    let mut daemon = lan.daemon();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    let mut started = attachment.invocation("ADD", None).start();
    started.release();
    wire.next(DISCOVER);
    lan.node.exec(&["kill", "-TERM", &daemon.0.id().to_string()]);
    assert!(daemon.0.wait().unwrap().success());
    let log = daemon_log(&lan);
    assert!(!log.contains("panicked"), "{log}");
    started.finish().fails_naming(11, &["error calling DHCP.Allocate"]);
    attachment.del().success();
}

#[test]
fn idle_connections_stop_no_add_and_are_closed() {
    require!(probe::dnsmasq().map(drop));
    let lan = Lan::new(10, &[]);
    let (program, socket) = (bin_dir().join("dhcp").display().to_string(), lan.socket().display().to_string());
    let script = "ulimit -Sn 1024; exec \"$0\" daemon -socketpath \"$1\"";
    let _daemon = Process::start(&lan.node, "daemon.log", &["sh", "-c", script, &program, &socket]);
    wait_until("the daemon listens", || UnixStream::connect(lan.socket()).is_ok());
    let idle: Vec<UnixStream> = (0..1100).map(|_| UnixStream::connect(lan.socket()).unwrap()).collect();
    let container = lan.container(&["eth0"]);
    let attachment = lan.attachment(&container);
    attachment.add().success();
    let mut first = &idle[0];
    first.set_read_timeout(Some(patience(Duration::from_secs(40)))).unwrap();
    assert_eq!(first.read_to_end(&mut Vec::new()).unwrap(), 0, "the daemon closes the connection");
    attachment.del().success();
}
