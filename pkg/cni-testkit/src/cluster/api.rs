//! A server of the part of the Kubernetes API that cluster-local uses: TLS 1.3, HTTP/1.1, and
//! faults that a test chooses.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read as _, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::socket::{Shutdown, shutdown};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use super::Authority;
use super::objects::{Objects, Reply, Request, User};

/// What the server does instead of answering.
#[derive(Debug, Clone)]
pub enum Fault {
    /// Answers with this status, headers (each line with `\r\n`) and body, without effect.
    Answer(u16, &'static str, String),
    /// Closes the connection; the request has no effect.
    LoseRequest,
    /// Closes the connection; the request has taken effect.
    LoseAnswer,
    /// Closes the connection; the request takes effect after this time.
    Late(Duration),
    /// Sends nothing and keeps the connection for this time. The request has no effect.
    Silence(Duration),
    /// Sends half of the answer; the request has taken effect.
    Truncate,
    /// Sends one byte of the answer each time this time has passed; the request has taken effect.
    Slow(Duration),
    /// Sends these bytes and closes the connection; the request has no effect.
    Bytes(Vec<u8>),
}

/// Chooses the fault of a request, such as `POST /apis/ipam.cni-plugins-rust.dev/v1/ipblocks`.
type Decide = Box<dyn FnMut(&str) -> Option<Fault> + Send>;

/// The state that all connections share.
struct State {
    objects: Objects,
    requests: Vec<String>,
    decide: Decide,
    /// The users, by certificate.
    certificates: BTreeMap<Vec<u8>, User>,
    listeners: Vec<TcpListener>,
}

/// A server of the Kubernetes API.
pub struct ApiServer {
    authority: Authority,
    tls: Arc<ServerConfig>,
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiServer").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl ApiServer {
    /// Creates a server without objects, with the certificate of 127.0.0.1. It does not listen yet.
    #[expect(clippy::new_without_default, reason = "creating it has side effects")]
    pub fn new() -> ApiServer {
        let authority = Authority::new();
        let certificate = authority.issue("/CN=kube-apiserver", "IP:127.0.0.1,DNS:kubernetes");
        ApiServer::with(authority, &certificate)
    }

    /// Creates a server without objects, with the certificate and key in a file.
    pub fn with(authority: Authority, certificate: &Path) -> ApiServer {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(authority.ca_file()).unwrap()).unwrap();
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let pem = std::fs::read(certificate).unwrap();
        let chain = CertificateDer::pem_slice_iter(&pem).map(Result::unwrap).collect();
        let tls = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_client_cert_verifier(verifier.allow_unauthenticated().build().unwrap())
            .with_single_cert(chain, PrivateKeyDer::from_pem_slice(&pem).unwrap())
            .unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let state = State {
            objects: Objects { now, ..Objects::default() },
            requests: Vec::new(),
            decide: Box::new(|_| None),
            certificates: BTreeMap::new(),
            listeners: Vec::new(),
        };
        ApiServer { authority, tls: Arc::new(tls), state: Arc::new(Mutex::new(state)) }
    }

    /// Listens on 127.0.0.1 in the calling thread's network namespace, and returns the port. A
    /// server can listen in many namespaces, so that nodes reach it without links.
    pub fn listen(&self) -> u16 {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        self.state().listeners.push(listener.try_clone().unwrap());
        let (tls, state) = (Arc::clone(&self.tls), Arc::clone(&self.state));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let (tls, state) = (Arc::clone(&tls), Arc::clone(&state));
                thread::spawn(move || serve(stream, tls, &state));
            }
        });
        port
    }

    /// Returns a node's file for a port of this server, with the certificate of the kubelet of
    /// `node`.
    pub fn node_file(&self, node: &str, port: u16) -> Value {
        let user = format!("system:node:{node}");
        let pem = self.authority.issue(&format!("/O=system:nodes/CN={user}"), "DNS:kubelet");
        let certificate = CertificateDer::from_pem_file(&pem).unwrap();
        self.state().certificates.insert(certificate.to_vec(), User { name: user, node: Some(node.to_owned()) });
        let mut file = self.anonymous_file(port);
        file["kubernetes"]["certFile"] = json!(pem);
        file["kubernetes"]["keyFile"] = json!(pem);
        file
    }

    /// Returns a node's file with a token that is bound to `node`, or to no node if `node` is
    /// empty.
    pub fn token_file(&self, node: &str, port: u16) -> Value {
        let path = self.authority.folder().join(format!("token-{node}"));
        std::fs::write(&path, format!("token-{node}\n")).unwrap();
        let mut file = self.anonymous_file(port);
        file["kubernetes"]["tokenFile"] = json!(path);
        file
    }

    /// Returns a node's file without credentials.
    fn anonymous_file(&self, port: u16) -> Value {
        let server = format!("https://127.0.0.1:{port}");
        json!({"kubernetes": {"server": server, "caFile": self.authority.ca_file()}})
    }

    /// Returns the authority of the server and of the nodes.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Chooses the faults from now on. The function gets each request, such as `GET
    /// /api/v1/nodes/node1`, without its query.
    pub fn decide(&self, decide: impl FnMut(&str) -> Option<Fault> + Send + 'static) {
        self.state().decide = Box::new(decide);
    }

    /// Returns the requests since the last call.
    pub fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state().requests)
    }

    /// Returns the specs of all objects of a resource (`ippools` or `ipblocks`), by name.
    pub fn specs(&self, resource: &str) -> BTreeMap<String, Value> {
        let state = self.state();
        let of_resource = state.objects.all.iter().filter_map(|(key, object)| {
            let name = key.strip_prefix(resource)?.strip_prefix('/')?;
            Some((name.to_owned(), object["spec"].clone()))
        });
        of_resource.collect()
    }

    /// Writes an object, as an operator does.
    pub fn write(&self, resource: &str, name: &str, spec: &Value) {
        self.state().objects.store(resource, name, spec);
    }

    /// Deletes an object, as an operator does.
    pub fn delete(&self, resource: &str, name: &str) {
        self.state().objects.all.remove(&format!("{resource}/{name}"));
    }

    /// Registers a node with its machine ID, or deletes it.
    pub fn set_node(&self, node: &str, machine: Option<&str>) {
        let nodes = &mut self.state().objects.nodes;
        match machine {
            Some(machine) => drop(nodes.insert(node.to_owned(), machine.to_owned())),
            None => drop(nodes.remove(node)),
        }
    }

    /// Advances the server's clock.
    pub fn advance_clock(&self, by: Duration) {
        self.state().objects.now += by.as_secs();
    }

    /// Removes the two kinds with all their objects.
    pub fn uninstall(&self) {
        let objects = &mut self.state().objects;
        objects.lacks_kinds = true;
        objects.all.clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        for listener in &self.state().listeners {
            // Ends the thread that accepts.
            let _ = shutdown(listener.as_raw_fd(), Shutdown::Both);
        }
    }
}

type Stream = BufReader<StreamOwned<ServerConnection, TcpStream>>;

/// Answers the requests of one connection.
fn serve(stream: TcpStream, tls: Arc<ServerConfig>, state: &Mutex<State>) {
    let Ok(session) = ServerConnection::new(tls) else { return };
    // As programs in Go, which the real API server is, do by default. Otherwise an answer waits 40
    // ms for the acknowledgement of the handshake's last message.
    let _ = stream.set_nodelay(true);
    let mut stream = BufReader::new(StreamOwned::new(session, stream));
    while let Ok((request, token)) = read_request(&mut stream) {
        let answered = answer(&request, &token, &mut stream, state);
        if !answered.is_ok_and(|is_open| is_open) {
            // Without the end of the TLS connection, as a server that dies.
            return;
        }
    }
}

/// Reads one request, and the token that it has.
fn read_request(stream: &mut Stream) -> io::Result<(Request, String)> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut words = line.split(' ');
    let method = words.next().unwrap_or_default().to_owned();
    let target = words.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let query = pairs.map(|(key, value)| (key.to_owned(), value.replace("%3D", "="))).collect();
    let mut request = Request { method, path: path.to_owned(), query, ..Request::default() };
    let (mut length, mut token) = (0, String::new());
    loop {
        let mut header = String::new();
        stream.read_line(&mut header)?;
        let Some((name, value)) = header.trim().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "accept" => value.clone_into(&mut request.accept),
            "authorization" => value.trim_start_matches("Bearer ").clone_into(&mut token),
            _ => {}
        }
    }
    stream.by_ref().take(length).read_to_string(&mut request.body)?;
    Ok((request, token))
}

/// Answers one request. Returns whether the connection stays open.
fn answer(request: &Request, token: &str, stream: &mut Stream, shared: &Mutex<State>) -> io::Result<bool> {
    let line = format!("{} {}", request.method, request.path);
    let certificates = stream.get_ref().conn.peer_certificates();
    let certificate = certificates.and_then(|all| all.first()).map(|first| first.to_vec()).unwrap_or_default();
    let (user, fault, now) = {
        let mut state = shared.lock().unwrap();
        state.requests.push(line.clone());
        let of_token = token.strip_prefix("token-").map(|node| User {
            name: "system:serviceaccount:kube-system:cluster-local".to_owned(),
            node: (!node.is_empty()).then(|| node.to_owned()),
        });
        let user = state.certificates.get(&certificate).cloned().or(of_token);
        (user, (state.decide)(&line), state.objects.now)
    };
    let act = || match &user {
        Some(user) => shared.lock().unwrap().objects.answer(user, request),
        None => Reply::error(401, "Unauthorized", "Unauthorized"),
    };
    let output = stream.get_mut();
    match fault {
        None => output.write_all(&encode(&act(), "", now))?,
        Some(Fault::Answer(status, headers, body)) => {
            output.write_all(&encode(&Reply { status, body, is_chunked: false }, headers, now))?;
        }
        Some(Fault::LoseRequest) => return Ok(false),
        Some(Fault::LoseAnswer) => {
            act();
            return Ok(false);
        }
        Some(Fault::Late(time)) => {
            output.sock.shutdown(std::net::Shutdown::Both)?;
            thread::sleep(time);
            act();
            return Ok(false);
        }
        Some(Fault::Silence(time)) => {
            thread::sleep(time);
            return Ok(false);
        }
        Some(Fault::Truncate) => {
            let bytes = encode(&act(), "", now);
            output.write_all(&bytes[..bytes.len() / 2])?;
            output.flush()?;
            return Ok(false);
        }
        Some(Fault::Slow(time)) => {
            for byte in encode(&act(), "", now) {
                output.write_all(&[byte])?;
                output.flush()?;
                thread::sleep(time);
            }
        }
        Some(Fault::Bytes(bytes)) => {
            output.write_all(&bytes)?;
            output.flush()?;
            return Ok(false);
        }
    }
    output.flush()?;
    Ok(true)
}

/// Returns the bytes of an answer.
fn encode(reply: &Reply, headers: &str, now: u64) -> Vec<u8> {
    let Reply { status, body, is_chunked } = reply;
    let kind = if body.starts_with('{') { "application/json" } else { "text/plain; charset=utf-8" };
    let head =
        format!("HTTP/1.1 {status} Status\r\nAudit-Id: 1\r\nContent-Type: {kind}\r\nDate: {}\r\n{headers}", date(now));
    if *is_chunked {
        let chunks = body.as_bytes().chunks(1000).map(|chunk| {
            let text = String::from_utf8_lossy(chunk);
            format!("{:x}\r\n{text}\r\n", chunk.len())
        });
        format!("{head}Transfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n", chunks.collect::<String>()).into_bytes()
    } else {
        format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    }
}

/// Formats a time for the header `Date`. The day of the week is not correct.
fn date(now: u64) -> String {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let is_leap_year = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut days, mut year, mut month) = (now / 86_400, 1970, 0);
    loop {
        let february = if is_leap_year(year) { 29 } else { 28 };
        let length = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month];
        if days < length {
            break;
        }
        days -= length;
        (year, month) = if month == 11 { (year + 1, 0) } else { (year, month + 1) };
    }
    let (hour, minute, second) = (now % 86_400 / 3600, now % 3600 / 60, now % 60);
    format!("Fri, {:02} {} {year} {hour:02}:{minute:02}:{second:02} GMT", days + 1, MONTHS[month])
}
