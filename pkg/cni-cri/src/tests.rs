//! Tests the client with servers that write prepared bytes.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use cni::machine::{Child, Output, RunError};

use super::*;

/// A machine that has received a signal to end, or not.
struct Simulated(bool);

impl Machine for Simulated {
    fn is_own_netns(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }
    fn terminated(&self) -> bool {
        self.0
    }
    fn now(&self) -> Instant {
        Instant::now()
    }
    fn run(&self, child: &Child<'_>) -> Result<Output, RunError> {
        Err(RunError::Timeout(child.timeout))
    }
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
/// The flags of HTTP/2.
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Returns a frame of HTTP/2. Only settings and goaway are about the connection.
fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let stream = u8::from(![SETTINGS, GOAWAY].contains(&kind));
    [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// Returns the block of header lines.
fn lines(pairs: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    pairs.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

/// Returns the frames of an answer: its head, a message, and gRPC's status.
fn answer(message: &[u8], status: &str) -> Vec<u8> {
    let framed = [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes(), message].concat();
    let end = frame(HEADERS, END_HEADERS | END_STREAM, &lines(&[("grpc-status", status), ("grpc-message", "why")]));
    [head("application/grpc"), frame(DATA, 0, &framed), end].concat()
}

fn head(kind: &str) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, &lines(&[(":status", "200"), ("content-type", kind)]))
}

/// Reads the client's frames up to the end of its request.
fn read_request(stream: &mut UnixStream) {
    let mut preface = [0; 24];
    stream.read_exact(&mut preface).unwrap();
    let mut header = [0; 9];
    while header[3] != DATA || header[4] & END_STREAM == 0 {
        stream.read_exact(&mut header).unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, header[0], header[1], header[2]]) as usize];
        stream.read_exact(&mut payload).unwrap();
        // The end of the loop compares the first header, too.
        assert!(header[3] != DATA || payload == message::EMPTY);
    }
}

/// What a server does when it has written its bytes.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Close,
    Wait,
}

/// Asks a server that writes `first` at once and `second` after the request.
fn ask(first: Vec<u8>, second: Vec<u8>, then: Then, limit: Duration) -> Result<Vec<String>, Error> {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("cri.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // The client may close the connection before it has read everything.
        let _ = stream.write_all(&first);
        if !second.is_empty() {
            read_request(&mut stream);
            let _ = stream.write_all(&second);
        }
        if then == Then::Close {
            // In one direction: a frame of the client must not meet a closed socket.
            let _ = stream.shutdown(Shutdown::Write);
        }
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let outcome = list_pods(&socket, &Simulated(false), limit);
    server.join().unwrap();
    outcome
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_whole_answer_lists_the_pods() {
    for then in [Then::Close, Then::Wait] {
        let settings = frame(SETTINGS, 0, &[]);
        let pods = ask(settings.clone(), answer(b"\x0a\x05\x0a\x03abc\x0a\x05\x0a\x03def", "0"), then, LONG).unwrap();
        assert_eq!(pods, ["abc", "def"]);
        assert_eq!(ask(settings, answer(b"", "0"), then, LONG).unwrap(), Vec::<String>::new());
    }
}

/// Answers one request as a server that waits for the client to take what it has sent.
async fn serve(listener: UnixListener, message: Vec<u8>) {
    listener.set_nonblocking(true).unwrap();
    let (stream, _) = tokio::net::UnixListener::from_std(listener).unwrap().accept().await.unwrap();
    let mut connection = h2::server::handshake(stream).await.unwrap();
    let (request, mut respond) = connection.accept().await.unwrap().unwrap();
    assert_eq!((request.uri().to_string().as_str(), request.method().as_str()), (METHOD, "POST"));
    let head = http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
    let mut body = respond.send_response(head, false).unwrap();
    body.send_data(message.into(), false).unwrap();
    body.send_trailers(HeaderMap::from_iter([("grpc-status".parse().unwrap(), "0".parse().unwrap())])).unwrap();
    while connection.accept().await.is_some() {}
}

#[test]
fn an_answer_longer_than_the_windows_is_read() {
    let pod = |n: u32| [b"\x0a\x08\x0a\x06".as_slice(), format!("{n:06}").as_bytes()].concat();
    let pods: Vec<u8> = (0..200_000).flat_map(pod).collect();
    let framed = [&[0][..], &u32::try_from(pods.len()).unwrap().to_be_bytes(), &pods].concat();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("cri.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let server = thread::spawn(move || runtime.block_on(serve(listener, framed)));
    let listed = list_pods(&socket, &Simulated(false), LONG).unwrap();
    server.join().unwrap();
    assert_eq!((listed.len(), listed.last().unwrap().as_str()), (200_000, "199999"));
}

#[test]
fn an_answer_that_is_not_whole_and_not_of_a_runtime_is_refused() {
    let settings = frame(SETTINGS, 0, &[]);
    let whole = answer(b"\x0a\x05\x0a\x03abc", "0");
    let end = frame(HEADERS, END_HEADERS | END_STREAM, &lines(&[("grpc-status", "0")]));
    let refusal = [
        (":status", "200"),
        ("content-type", "application/grpc"),
        ("grpc-status", "12"),
        ("grpc-message", "unknown service"),
    ];
    let cases = [
        ("closed", Vec::new(), Vec::new(), Code::IO, "connection"),
        ("HTTP/1.1", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), Vec::new(), Code::IO, "connection"),
        ("garbage", vec![0xff; 4096], Vec::new(), Code::IO, "connection"),
        ("a huge frame", frame(SETTINGS, 0, &[0; 1 << 20]), Vec::new(), Code::IO, "connection"),
        ("goaway", [settings.clone(), frame(GOAWAY, 0, &[0; 8])].concat(), Vec::new(), Code::IO, "connection"),
        ("reset", settings.clone(), frame(RESET, 0, &[0, 0, 0, 2]), Code::IO, "connection"),
        ("another kind", settings.clone(), [head("text/html"), end.clone()].concat(), Code::DECODE, "not gRPC"),
        (
            "no status",
            settings.clone(),
            [head("application/grpc"), frame(DATA, END_STREAM, &[0; 5])].concat(),
            Code::DECODE,
            "incomplete",
        ),
        (
            "no message",
            settings.clone(),
            [head("application/grpc"), end].concat(),
            Code::DECODE,
            "not one whole message",
        ),
        (
            "an error after the message",
            settings.clone(),
            answer(b"\x0a\x05\x0a\x03abc", "14"),
            Code::IO,
            "gRPC status 14: why",
        ),
        (
            "no such service",
            settings.clone(),
            frame(HEADERS, END_HEADERS | END_STREAM, &lines(&refusal)),
            Code::IO,
            "status 12: unknown service",
        ),
        ("malformed pods", settings.clone(), answer(b"\x0a\x05\x0a\x04abc", "0"), Code::DECODE, "malformed"),
    ];
    for (what, first, second, code, why) in cases {
        let error = ask(first, second, Then::Close, LONG).unwrap_err();
        assert!(error.code() == code && error.to_string().contains(why), "{what}: {error}");
    }
    for end in (1..whole.len()).step_by(3) {
        let error = ask(settings.clone(), whole[..end].to_vec(), Then::Close, LONG).unwrap_err();
        assert_eq!(error.code(), Code::IO, "{end} bytes: {error}");
    }
}

#[test]
fn silence_a_signal_and_a_missing_socket_end_the_request() {
    for first in [Vec::new(), frame(SETTINGS, 0, &[])] {
        let error = ask(first, Vec::new(), Then::Wait, Duration::from_millis(200)).unwrap_err();
        assert!(error.code() == Code::IO && error.msg().contains("no answer within 0.2 s"), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    let _listener = UnixListener::bind(path("silent")).unwrap();
    let error = list_pods(&path("silent"), &Simulated(true), LONG).unwrap_err();
    assert!(error.msg().contains("interrupted by a signal"), "{error}");
    std::fs::write(path("file"), "").unwrap();
    for (name, why) in [("absent", "No such file"), ("file", "Connection refused")] {
        let error = list_pods(&path(name), &Simulated(false), LONG).unwrap_err();
        assert!(error.code() == Code::IO && error.to_string().contains(why), "{error}");
    }
}
