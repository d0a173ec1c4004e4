//! SCTP: real associations through a mapping, where the kernel has the protocol.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::thread;
use std::time::Duration;

use cni_testkit::{patience, probe, require};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, listen, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;
use serde_json::json;

use super::world::{BACKENDS, Pod, ask_tcp, at, each, map};

fn sctp(family: AddressFamily) -> OwnedFd {
    socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, SockProtocol::Sctp).unwrap()
}

/// Serves SCTP on this address of the pod and sends every client the name.
///
/// Both sides use a single address: peers with several exchange them, and retransmissions to
/// another address would bypass the translation.
fn serve(pod: &Pod<'_>, family: usize, port: u16, name: &'static str) {
    let address = SocketAddr::new(pod.address(family), port);
    let listener = pod.container.enter(|| {
        let socket = sctp(if family == 0 { AddressFamily::Inet } else { AddressFamily::Inet6 });
        bind(socket.as_raw_fd(), &SockaddrStorage::from(address)).unwrap();
        listen(&socket, Backlog::new(8).unwrap()).unwrap();
        // The standard library's calls on this socket are not specific to TCP.
        TcpListener::from(socket)
    });
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(name.as_bytes());
        }
    });
}

/// Returns the answer of the server at `to`, `None` on timeout.
fn ask(to: &str, time: Duration) -> Option<String> {
    let to: SocketAddr = to.parse().unwrap();
    let probe = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
    probe.connect(to).ok()?;
    let from = SocketAddr::new(probe.local_addr().unwrap().ip(), 0);
    let socket = sctp(if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 });
    bind(socket.as_raw_fd(), &SockaddrStorage::from(from)).unwrap();
    // An association is given up after this time.
    let limit = TimeVal::new(time.as_secs().try_into().unwrap(), time.subsec_micros().into());
    setsockopt(&socket, sockopt::SendTimeout, &limit).unwrap();
    connect(socket.as_raw_fd(), &SockaddrStorage::from(to)).ok()?;
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(time)).unwrap();
    let mut said = [0; 64];
    let length = stream.read(&mut said).ok()?;
    Some(String::from_utf8_lossy(&said[..length]).into_owned())
}

#[test]
fn an_sctp_mapping_works_from_everywhere_until_del() {
    require!(probe::sctp());
    each(&BACKENDS, |world| {
        let pod = world.mapped(json!([map(8080, 80, "sctp"), map(8080, 81, "tcp")]));
        let other = world.dual();
        for family in [0, 1] {
            serve(&pod, family, 80, "by SCTP");
        }
        pod.serve_tcp(81, "by TCP");
        let long = patience(Duration::from_secs(10));
        let rules = || format!("{:?}\n{}", world.backend, world.rules());
        let heard = Some("by SCTP".to_owned());
        for family in [0, 1] {
            let to = at(family, 8080);
            assert_eq!(world.client.enter(|| ask(&to, long)), heard, "outside, {to} {}", rules());
            assert_eq!(world.node.enter(|| ask(&to, long)), heard, "the node, {to} {}", rules());
            assert_eq!(other.container.enter(|| ask(&to, long)), heard, "another pod, {to} {}", rules());
            // The same port number with another protocol is another mapping.
            assert!(world.client.enter(|| ask_tcp(&to)).is_some_and(|answer| answer.starts_with("by TCP")));
        }
        assert_eq!(world.node.enter(|| ask("127.0.0.1:8080", long)), heard, "{}", rules());
        assert_eq!(world.client.enter(|| ask(&at(0, 8081), Duration::from_secs(1))), None, "an unmapped port");
        pod.leave();
        assert_eq!(world.client.enter(|| ask(&at(0, 8080), Duration::from_secs(1))), None, "{}", rules());
        other.leave();
    });
}
