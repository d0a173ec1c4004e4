//! gc that asks a runtime for its pods, and gc that is repeated.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cni_testkit::{Invocation, bin_dir, patience, probe, require, wait_until};
use serde_json::json;

use super::Operator;
use super::sweep::{decision, owners};

/// Returns a frame of HTTP/2 of this kind on a stream.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// Returns the block of header lines.
fn lines(pairs: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    pairs.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

/// Answers one request at this socket as a runtime with these pods: with the answer's head, a
/// message, and gRPC's status.
fn serve(socket: &Path, pods: &[&str], status: &'static str) -> JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    let length = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap();
    let field = |content: &[u8]| [&[0x0a, length(content)], content].concat();
    let message: Vec<u8> = pods.iter().flat_map(|id| field(&field(id.as_bytes()))).collect();
    let framed = [&[0, 0, 0, 0, length(&message)], message.as_slice()].concat();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (mut header, mut skipped) = ([0; 9], vec![0; 24]);
        stream.write_all(&frame(4, 0, 0, &[])).unwrap();
        stream.read_exact(&mut skipped).unwrap();
        // Up to the end of the request, in a frame of data.
        while (header[3], header[4] & 1) != (0, 1) {
            stream.read_exact(&mut header).unwrap();
            skipped.resize(u32::from_be_bytes([0, header[0], header[1], header[2]]) as usize, 0);
            stream.read_exact(&mut skipped).unwrap();
        }
        let head = lines(&[(":status", "200"), ("content-type", "application/grpc")]);
        let answer =
            [frame(1, 4, 1, &head), frame(0, 0, 1, &framed), frame(1, 5, 1, &lines(&[("grpc-status", status)]))];
        stream.write_all(&answer.concat()).unwrap();
        let _ = stream.read_to_end(&mut skipped);
    })
}

#[test]
fn runtimes_and_lists_together_decide_what_is_valid() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let (first, second, third, dead) = (operator.attach(), operator.attach(), operator.attach(), operator.attach());
    let sockets: Vec<PathBuf> = (0..2).map(|n| operator.node.dir().join(format!("cri{n}.sock"))).collect();
    let place = |n: usize| format!("unix://{}", sockets[n].display());
    let list = operator.node.file("valid", format!("{}/eth0\n", third.id));
    operator.node.exec(&["sh", "-c", "touch -d '1 hour ago' /var/lib/cni/results/*"]);
    let servers = [serve(&sockets[0], &[&first.id], "0"), serve(&sockets[1], &[&second.id], "0")];
    let places = ["--valid-from", &place(0), "--valid-from", list.to_str().unwrap(), "--valid-from", &place(1)];
    let json = operator.json(&[&["gc", "--min-age", "60"], &places[..]].concat());
    servers.into_iter().for_each(|server| server.join().unwrap());
    for container in [&first, &second, &third] {
        assert_eq!(decision(&json, "net1", &container.id), ("kept", "listed"));
    }
    assert_eq!(decision(&json, "net1", &dead.id), ("removed", "over"));
    assert_eq!(owners(&operator, "net1").len(), 3);
    first.ping("10.1.0.1");
    [&first, &second, &third].into_iter().for_each(|container| operator.detach(container));
}

#[test]
fn a_runtime_without_a_whole_answer_stops_gc_before_any_change() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let (lives, dies) = (operator.attach(), operator.attach());
    dies.destroy();
    let socket = operator.node.dir().join("cri.sock");
    let place = format!("unix://{}", socket.display());
    let list = operator.node.file("valid", format!("{}/eth0\n", lives.id));
    let lists = ["--valid-from", list.to_str().unwrap(), "--valid-from", &place];
    let gc = [&["gc", "--min-age", "0", "--timeout", "1"], &lists[..]].concat();
    operator.failed(&gc, &["cri.sock: failed to connect", "No such file"]);
    // A runtime refuses requests until it has read its own state.
    for (pods, status, why) in
        [(&["x"][..], "2", "it refused ListPodSandbox: gRPC status 2"), (&[""], "0", "a pod in the list has no ID")]
    {
        let server = serve(&socket, pods, status);
        operator.failed(&gc, &[why]);
        server.join().unwrap();
        fs::remove_file(&socket).unwrap();
    }
    // A runtime without pods, and no other one.
    let server = serve(&socket, &[], "0");
    operator.failed(&["gc", "--min-age", "0", "--valid-from", &place], &["names none", "code 103"]);
    server.join().unwrap();
    fs::remove_file(&socket).unwrap();
    // It takes the connection and is silent.
    let listener = UnixListener::bind(&socket).unwrap();
    operator.failed(&gc, &["no answer within 1 s"]);
    drop(listener);
    assert_eq!(owners(&operator, "net1").len(), 2);
    operator.done(&["gc"]);
    assert_eq!(owners(&operator, "net1"), [format!("{}/eth0", lives.id)]);
    operator.detach(&lives);
}

#[test]
fn a_repeated_gc_survives_errors_and_ends_at_a_signal() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let (lives, dies, later) = (operator.attach(), operator.attach(), operator.attach());
    let list = operator.node.dir().join("valid");
    let args = ["gc", "--every", "1", "--valid-from", list.to_str().unwrap(), "--min-age", "0"];
    let running = operator.call(&args).start();
    // The list is missing at first.
    thread::sleep(Duration::from_millis(1500));
    operator.node.file("valid", format!("{}/eth0\n{}/eth0\n", lives.id, later.id));
    wait_until("the first is removed", || owners(&operator, "net1").len() == 2);
    assert!(dies.link("eth0").is_none());
    operator.node.file("valid", format!("{}/eth0\n", lives.id));
    wait_until("the second is removed", || owners(&operator, "net1").len() == 1);
    thread::sleep(Duration::from_millis(300));
    let began = Instant::now();
    running.terminate();
    let outcome = running.finish_without_end_of_input();
    assert_eq!(outcome.status, Some(0), "{}", outcome.report());
    assert!(began.elapsed() < patience(Duration::from_millis(700)), "{:?}", began.elapsed());
    assert!(outcome.stderr.contains("valid: it cannot be read"), "{}", outcome.report());
    for id in [&dies.id, &later.id] {
        assert_eq!(outcome.stdout.matches(&format!("remove  {id}/eth0")).count(), 1, "{}", outcome.report());
    }
    let stdin = operator.call(&["gc", "--every", "1", "--valid-from", "-"]).run();
    assert_eq!(stdin.status, Some(2), "{}", stdin.report());
    operator.detach(&lives);
}

#[test]
fn a_signal_lets_the_running_del_end_and_starts_no_other() {
    require!(probe::plugin("cnitool"));
    let operator = Operator::new();
    let folder = operator.node.dir().to_owned();
    // Its DEL waits for the file `go`.
    let script = format!(
        "#!/bin/sh\ncat >/dev/null\ncd {}\ncase $CNI_COMMAND in\nADD) echo '{{\"cniVersion\":\"1.1.0\"}}' ;;\n\
         DEL) echo begun >>dels; while [ ! -e go ]; do sleep 0.02; done; echo ended >>dels ;;\nesac\n",
        folder.display()
    );
    let plugin = operator.node.file("bin/slow", script);
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
    let list = json!({"cniVersion": "1.1.0", "name": "slow", "plugins": [{"type": "slow"}]});
    operator.node.file("net.d/20-slow.conflist", list.to_string());
    let path = format!("{}:{}", folder.join("bin").display(), bin_dir().display());
    let call = |args: &[&str]| {
        let call = Invocation::new(&operator.node, bin_dir().join("cnitool")).cni_path(&path);
        args.iter().fold(call.env("NETCONFPATH", folder.join("net.d")), |call, arg| call.arg(arg))
    };
    for _ in 0..2 {
        let container = operator.node.container();
        let added = call(&["add", "slow", super::path(&container), "--container-id", &container.id]).run();
        assert_eq!(added.status, Some(0), "{}", added.report());
        container.destroy();
    }
    let running = call(&["gc", "--every", "600"]).start();
    let dels = || fs::read_to_string(folder.join("dels")).unwrap_or_default();
    wait_until("a DEL has begun", || dels() == "begun\n");
    running.terminate();
    thread::sleep(Duration::from_millis(300));
    operator.node.file("go", "");
    let outcome = running.finish_without_end_of_input();
    assert_eq!((outcome.status, dels().as_str()), (Some(0), "begun\nended\n"), "{}", outcome.report());
    assert!(outcome.stderr.contains("interrupted by a signal"), "{}", outcome.report());
    let rest = call(&["gc"]).run();
    assert_eq!((rest.status, dels().matches("ended").count()), (Some(0), 2), "{}", rest.report());
}
