//! A blocking HTTP/1.1 client over TLS 1.3, for the few requests of one call of a plugin.
//!
//! It uses no proxy, no compression and no certificates of the system, and follows no redirects.
//! Every wait ends at the deadline or with a signal.

use std::borrow::Cow;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use cni::machine::Machine;
use cni::{Code, Error};
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConfig, ClientConnection, StreamOwned};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::conf::{Conf, Credentials, read};
use crate::store::{Answer, Failure};
use crate::tls;

/// The longest line of a head, and the longest body of an answer, in bytes.
const MAX_LINE: u64 = 16 << 10;
const MAX_BODY: u64 = 16 << 20;

/// How often a wait looks for a signal and at the clock.
const TICK: Duration = Duration::from_millis(100);

/// An answer.
#[derive(Debug, Default)]
pub(crate) struct Response {
    /// The method and the URL of the request, for messages.
    pub(crate) request: String,
    pub(crate) status: u16,
    /// The server's time in seconds since 1970.
    pub(crate) date: Option<u64>,
    /// After how many seconds the server wants the request again (`Retry-After`).
    retry_after: Option<u32>,
    /// Whether the connection can be used for another request.
    is_reusable: bool,
    pub(crate) body: Vec<u8>,
}

impl Response {
    /// Returns the body. One that is not JSON proves nothing, so it is unknown.
    pub(crate) fn json(&self) -> Answer<Value> {
        let wrong = |error| Failure::Unknown(format!("{}: HTTP {}, but {error}", self.request, self.status));
        serde_json::from_slice(&self.body).map_err(wrong)
    }

    /// Returns what a status means that the operation does not expect, with the server's own text.
    pub(crate) fn failure(&self) -> Failure {
        let json: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        let text = ["message", "error"].into_iter().find_map(|key| json[key].as_str());
        let text: String =
            text.map_or_else(|| String::from_utf8_lossy(&self.body), Cow::from).chars().take(400).collect();
        let msg = format!("{}: HTTP {}: {}", self.request, self.status, text.trim());
        match (self.status, self.retry_after) {
            (429 | 503, Some(seconds)) => Failure::Busy(msg, Duration::from_secs(seconds.into())),
            (408 | 429 | 500.., _) => Failure::Unknown(msg),
            _ => Failure::Refused(Error::new(Code::REFUSED, msg)),
        }
    }
}

/// The end of a wait.
#[derive(Clone, Copy)]
pub(crate) struct Patience<'m> {
    machine: &'m dyn Machine,
    pub(crate) deadline: Instant,
}

impl Patience<'_> {
    fn check(&self) -> io::Result<()> {
        if self.machine.terminated() {
            return Err(io::Error::other("interrupted by a signal"));
        }
        let has_time = self.machine.now() < self.deadline;
        if has_time { Ok(()) } else { Err(io::Error::new(ErrorKind::TimedOut, "no answer in time")) }
    }

    /// Repeats a system call while the timeout of the socket ends it.
    fn repeat(&self, mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
        loop {
            self.check()?;
            match call() {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                outcome => return outcome,
            }
        }
    }
}

/// A TCP connection whose waits end.
struct Socket<'m>(TcpStream, Patience<'m>);

impl Read for Socket<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.1.repeat(|| self.0.read(bytes))
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.repeat(|| self.0.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Connection<'m> = BufReader<StreamOwned<ClientConnection, Socket<'m>>>;

/// A client of one store, with at most one connection.
pub(crate) struct Client<'m> {
    /// The first endpoint is used, or tried next.
    pub(crate) conf: Conf,
    pub(crate) patience: Patience<'m>,
    /// The server's time in the last answer, in seconds since 1970.
    pub(crate) date: Option<u64>,
    tls: Arc<ClientConfig>,
    connection: Option<Connection<'m>>,
}

impl<'m> Client<'m> {
    /// Reads the files that `conf` names. Connects to nothing.
    ///
    /// # Errors
    /// Code 5 if a file cannot be read, 7 if it does not have what it should have.
    pub(crate) fn new(conf: &Conf, machine: &'m dyn Machine) -> cni::Result<Client<'m>> {
        let tls = tls::config(conf)?;
        let mut conf = conf.clone();
        let first = getrandom::u32().unwrap_or(0) as usize % conf.endpoints.len();
        conf.endpoints.rotate_left(first);
        let patience = Patience { machine, deadline: machine.now() + conf.timeout };
        Ok(Client { conf, patience, date: None, tls, connection: None })
    }

    /// Sends a request with a path and query, and a body of JSON or none. Returns the answer,
    /// whatever its status. After a failure the next request goes to another endpoint.
    pub(crate) fn send(&mut self, method: &str, path: &str, accept: &str, body: &str) -> Answer<Response> {
        let endpoint = &self.conf.endpoints[0];
        let mut headers = format!("Host: {endpoint}\r\nUser-Agent: cluster-local\r\nAccept: {accept}\r\n");
        if let Credentials::Token(file) = &self.conf.credentials {
            let token = read(file).map_err(Failure::Refused)?;
            headers += &format!("Authorization: Bearer {}\r\n", String::from_utf8_lossy(&token).trim());
        }
        headers += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        let url = format!("{method} https://{endpoint}{}", path.split('?').next().unwrap_or_default());
        match self.exchange(format!("{method} {path} HTTP/1.1\r\n{headers}\r\n{body}").as_bytes()) {
            Ok(response) => {
                self.date = response.date;
                Ok(Response { request: url, ..response })
            }
            Err(error) => {
                self.conf.endpoints.rotate_left(1);
                Err(failure(url, &self.conf.credentials, error))
            }
        }
    }

    fn exchange(&mut self, request: &[u8]) -> io::Result<Response> {
        let mut connection = self.connection.take().map_or_else(|| self.connect(), Ok)?;
        let stream = connection.get_mut();
        stream.sock.1 = self.patience;
        stream.write_all(request)?;
        stream.flush()?;
        let response = read_response(&mut connection)?;
        self.connection = response.is_reusable.then_some(connection);
        Ok(response)
    }

    fn connect(&self) -> io::Result<Connection<'m>> {
        let Patience { machine, deadline } = self.patience;
        // An endpoint that does not answer must leave time for the others.
        let now = machine.now();
        let share = deadline.saturating_duration_since(now) / self.conf.endpoints.len().min(3) as u32;
        let patience = Patience { machine, deadline: now + share };
        let endpoint = self.conf.endpoints[0].clone();
        let host = endpoint.rsplit_once(':').map_or("", |(host, _)| host.trim_matches(['[', ']']));
        let name = ServerName::try_from(self.conf.server_name.as_deref().unwrap_or(host).to_owned());
        let name = name.map_err(io::Error::other)?;
        let mut session = ClientConnection::new(Arc::clone(&self.tls), name).map_err(io::Error::other)?;
        // On a thread, because neither the resolution of a name nor connect(2) looks for a signal.
        let (sender, receiver) = mpsc::channel();
        thread::Builder::new().spawn(move || sender.send(TcpStream::connect(endpoint)))?;
        let stream = loop {
            patience.check()?;
            match receiver.recv_timeout(TICK) {
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                connected => break connected.map_err(io::Error::other)??,
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(TICK))?;
        let mut socket = Socket(stream, patience);
        while session.is_handshaking() {
            session.complete_io(&mut socket)?;
        }
        Ok(BufReader::new(StreamOwned::new(session, socket)))
    }
}

/// Decodes a pool or a claim. All answers become a `Value` first, which takes 40 KB less of code.
pub(crate) fn decode<T: DeserializeOwned>(record: &Value) -> Answer<T> {
    T::deserialize(record).map_err(|error| Failure::Unknown(format!("invalid record {record}: {error}")))
}

/// Returns the failure of a connection. Neither the rejection of a certificate nor of the version
/// passes.
fn failure(mut doing: String, credentials: &Credentials, error: io::Error) -> Failure {
    use rustls::Error::{AlertReceived, InvalidCertificate, PeerIncompatible};
    match error.get_ref().and_then(|cause| cause.downcast_ref()) {
        Some(InvalidCertificate(_)) => {}
        Some(AlertReceived(AlertDescription::ProtocolVersion) | PeerIncompatible(_)) => {
            doing += ": the server must support TLS 1.3";
        }
        Some(AlertReceived(alert)) if *alert != AlertDescription::InternalError => {
            if let Credentials::Certificate(file, _) = credentials {
                doing += &format!(" with {}", file.display());
            }
        }
        _ => return Failure::Unknown(format!("{doing}: {error}")),
    }
    Failure::Refused(Error::caused(Code::REFUSED, doing, error))
}

/// Reads one answer. An answer with neither a length nor chunks has no body.
///
/// # Errors
/// The answer is truncated, too long, or not HTTP/1.
pub(crate) fn read_response(input: &mut impl BufRead) -> io::Result<Response> {
    let status = line(input)?;
    let status = status.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1)?.parse().ok());
    let mut response = Response { status: status.ok_or_else(|| wrong("status"))?, ..Response::default() };
    let (mut length, mut is_chunked, mut closes) = (None, false, false);
    loop {
        let header = line(input)?;
        if header.is_empty() {
            break;
        }
        let (name, value) = header.split_once(':').ok_or_else(|| wrong("header"))?;
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = Some(value.parse().map_err(|_| wrong("length"))?),
            "transfer-encoding" => is_chunked = value.eq_ignore_ascii_case("chunked"),
            "connection" => closes = value.eq_ignore_ascii_case("close"),
            "date" => response.date = parse_date(value),
            "retry-after" => response.retry_after = value.parse().ok(),
            _ => {}
        }
    }
    response.is_reusable = !closes && (is_chunked || length.is_some());
    loop {
        let size = match is_chunked {
            true => u64::from_str_radix(line(input)?.split(';').next().unwrap_or_default().trim(), 16),
            false => Ok(length.unwrap_or(0)),
        };
        let size = size.map_err(|_| wrong("chunk"))?;
        if size > MAX_BODY - response.body.len() as u64
            || input.take(size).read_to_end(&mut response.body)? as u64 != size
        {
            return Err(wrong("body"));
        }
        if !is_chunked || (line(input)?.is_empty() && size == 0) {
            return Ok(response);
        }
    }
}

/// Reads one line.
fn line(input: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    input.take(MAX_LINE).read_line(&mut line)?;
    line.strip_suffix("\r\n").map(str::to_owned).ok_or_else(|| wrong("line"))
}

fn wrong(part: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("the answer is not HTTP or has a wrong, truncated or huge {part}"))
}

/// Returns the seconds since 1970 of a time such as `Fri, 27 Nov 2026 17:26:27 GMT`.
fn parse_date(text: &str) -> Option<u64> {
    let [_, day, month, year, time, "GMT"] = text.split(' ').collect::<Vec<_>>()[..] else { return None };
    let month = "JanFebMarAprMayJunJulAugSepOctNovDec".find(month)? / 3 + 1;
    cni::time::parse_rfc3339(&format!("{year}-{month}-{day}T{time}Z"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_is_cut_anywhere_is_refused() {
        for answer in [
            "HTTP/1.1 200 OK\r\nDate: Fri, 27 Nov 2026 17:26:27 GMT\r\nContent-Length: 13\r\n\r\n{\"items\": []}",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n9;a=b\r\n{\"items\":\r\n4\r\n []}\r\n0\r\n\r\n",
        ] {
            let read = |length: usize| read_response(&mut &answer.as_bytes()[..length]);
            let response = read(answer.len()).unwrap();
            assert_eq!((response.status, response.body.as_slice()), (200, &b"{\"items\": []}"[..]));
            assert!(response.is_reusable);
            for length in 0..answer.len() {
                assert!(read(length).is_err(), "{length} bytes of {answer:?}");
            }
        }
    }

    #[test]
    fn a_server_that_closes_gets_no_other_request() {
        for (headers, expected) in
            [("Content-Length: 0", true), ("X: y", false), ("Connection: close\r\nContent-Length: 0", false)]
        {
            let answer = format!("HTTP/1.1 404 Not Found\r\n{headers}\r\n\r\n");
            assert_eq!(read_response(&mut answer.as_bytes()).unwrap().is_reusable, expected, "{headers}");
        }
    }

    #[test]
    fn the_date_of_an_answer_is_read() {
        assert_eq!(parse_date("Fri, 27 Nov 2026 17:26:27 GMT"), Some(1_795_800_387));
        for wrong in ["", "Fri, 27 Nov 2026 17:26:27", "Fri, 27 nov 2026 17:26:27 GMT", "27 Nov 2026 17:26:27 GMT"] {
            assert_eq!(parse_date(wrong), None, "{wrong}");
        }
    }
}
