//! A blocking HTTP/1.1 client over TLS 1.3, for the few requests of one call of a plugin.
//!
//! It uses no proxy, no compression and no certificates of the system, and follows no redirects.
//! Every wait ends at the deadline or with a signal.

use std::borrow::Cow;
use std::io::{self, BufRead, BufReader, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use cni::machine::Machine;
use cni::{Code, Error, Result};
use cni_linux::flock::Limit;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConfig, ClientConnection, StreamOwned};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::conf::{Conf, Credentials, read_text};
use crate::tls;

/// The longest line of a head, and the longest body of an answer, in bytes.
const MAX_LINE: u64 = 16 << 10;
const MAX_BODY: u64 = 16 << 20;

/// How often a wait looks for a signal and at the clock, and how long at least it takes until a
/// request is repeated. A refused connection is refused again within microseconds.
const TICK: Duration = Duration::from_millis(100);

/// An answer.
#[derive(Debug, Default)]
pub(crate) struct Response {
    /// The method and the URL of the request, for messages.
    pub(crate) request: String,
    pub(crate) status: u16,
    /// The server's time in seconds since 1970.
    pub(crate) date: Option<u64>,
    /// After how long the server wants the request again (`Retry-After`), or zero.
    retry_after: Duration,
    /// Whether the connection can be used for another request.
    is_reusable: bool,
    pub(crate) body: Vec<u8>,
    /// The body, or `null` if it is not JSON.
    pub(crate) json: Value,
}

impl Response {
    /// Whether the same request would get the same answer. Success without JSON proves nothing.
    fn is_final(&self) -> bool {
        match self.status {
            200 | 201 => !self.json.is_null(),
            408 | 429 | 500.. => false,
            _ => true,
        }
    }

    /// Returns an error with the status and the server's own text.
    pub(crate) fn error(&self, code: Code) -> Error {
        let text = ["message", "error"].into_iter().find_map(|key| self.json[key].as_str());
        let text: String =
            text.map_or_else(|| String::from_utf8_lossy(&self.body), Cow::from).chars().take(400).collect();
        Error::new(code, format!("{}: HTTP {}: {}", self.request, self.status, text.trim()))
    }
}

type Connection = BufReader<StreamOwned<ClientConnection, TcpStream>>;

/// A client of one store, with at most one connection.
pub(crate) struct Client<'m> {
    /// The first endpoint is used, or tried next.
    pub(crate) conf: Conf,
    machine: &'m dyn Machine,
    /// How long the next requests may take, repetitions included.
    pub(crate) limit: Limit,
    /// The server's time in the last answer, in seconds since 1970.
    pub(crate) date: Option<u64>,
    tls: Arc<ClientConfig>,
    connection: Option<Connection>,
}

impl<'m> Client<'m> {
    /// Reads the files that `conf` names. Connects to nothing.
    ///
    /// # Errors
    /// Code 5 if a file cannot be read, 7 if it does not have what it should have.
    pub(crate) fn new(conf: &Conf, machine: &'m dyn Machine) -> Result<Client<'m>> {
        let tls = tls::config(conf)?;
        let mut conf = conf.clone();
        let first = getrandom::u32().unwrap_or(0) as usize % conf.endpoints.len();
        conf.endpoints.rotate_left(first);
        let limit = Limit { deadline: machine.now() + conf.timeout, length: conf.timeout };
        Ok(Client { conf, machine, limit, date: None, tls, connection: None })
    }

    /// Sends a request with a path and query, and a body of JSON or none, until it is answered. A
    /// successful answer has JSON. Gives up at once if the server asks for a pause beyond the
    /// deadline.
    ///
    /// # Errors
    /// - Code 11 if there was no answer until the deadline or a signal, or only one that passes.
    /// - Code 103 if the server does not accept the connection; 5 if the token cannot be read.
    pub(crate) fn send(&mut self, method: &str, path: &str, accept: &str, body: &str) -> Result<Response> {
        loop {
            let (error, pause) = match self.attempt(method, path, accept, body) {
                Ok(response) if response.is_final() => return Ok(response),
                Ok(response) => (response.error(Code::TRY_AGAIN), response.retry_after),
                Err(error) if error.code() == Code::TRY_AGAIN => (error, Duration::ZERO),
                Err(error) => return Err(error),
            };
            let give_up = |why: String| Err(Error::new(Code::TRY_AGAIN, format!("{error}; {why}")));
            let end = self.machine.now() + pause.max(TICK);
            if end >= self.limit.deadline {
                return give_up(format!("gave up after {:.1} s", self.limit.length.as_secs_f32()));
            }
            while self.machine.now() < end {
                if self.machine.terminated() {
                    return give_up("interrupted by a signal".to_owned());
                }
                thread::sleep(TICK);
            }
        }
    }

    /// Sends a request once. Returns the answer, whatever its status. After a failure the next
    /// request goes to another endpoint.
    ///
    /// # Errors
    /// As [`send`](Client::send).
    fn attempt(&mut self, method: &str, path: &str, accept: &str, body: &str) -> Result<Response> {
        let endpoint = &self.conf.endpoints[0];
        let mut headers = format!("Host: {endpoint}\r\nUser-Agent: cluster-local\r\nAccept: {accept}\r\n");
        if let Credentials::Token(file) = &self.conf.credentials {
            headers += &format!("Authorization: Bearer {}\r\n", read_text(file)?);
        }
        headers += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        let request = format!("{method} https://{endpoint}{}", path.split('?').next().unwrap_or_default());
        match self.exchange(format!("{method} {path} HTTP/1.1\r\n{headers}\r\n{body}")) {
            Ok(response) => {
                self.date = response.date;
                let json = serde_json::from_slice(&response.body).unwrap_or_default();
                Ok(Response { request, json, ..response })
            }
            Err(error) => {
                self.conf.endpoints.rotate_left(1);
                Err(failure(request, &self.conf.credentials, error))
            }
        }
    }

    /// Sends a request and reads the answer, on a thread: resolving a name, and the calls that
    /// connect, write and read, do not end with a signal. After a signal or the deadline nothing
    /// waits for the thread any more, which ends with the process.
    fn exchange(&mut self, request: String) -> io::Result<Response> {
        // An endpoint that does not answer must leave time for the others.
        let begin = self.machine.now();
        let share = self.limit.deadline.saturating_duration_since(begin) / self.conf.endpoints.len().min(3) as u32;
        let machine = self.machine;
        let may_go_on = || {
            if machine.terminated() {
                return Err(io::Error::other("interrupted by a signal"));
            }
            let is_over = machine.now() >= begin + share;
            if is_over { Err(io::Error::new(ErrorKind::TimedOut, "no answer in time")) } else { Ok(()) }
        };
        // Nothing is sent that could take effect after the caller has got an error.
        may_go_on()?;
        let (endpoint, server_name) = (self.conf.endpoints[0].clone(), self.conf.server_name.clone());
        let (connection, tls) = (self.connection.take(), Arc::clone(&self.tls));
        let exchange = move || {
            let mut connection = connection.map_or_else(|| connect(endpoint, server_name, tls), Ok)?;
            let stream = connection.get_mut();
            stream.write_all(request.as_bytes())?;
            stream.flush()?;
            let response = read_response(&mut connection)?;
            Ok::<_, io::Error>((response, connection))
        };
        let (sender, receiver) = mpsc::channel();
        thread::Builder::new().spawn(move || drop(sender.send(exchange())))?;
        let answer = loop {
            match receiver.recv_timeout(TICK) {
                Err(mpsc::RecvTimeoutError::Timeout) => may_go_on()?,
                answer => break answer,
            }
        };
        let (response, connection) = answer.map_err(io::Error::other)??;
        self.connection = response.is_reusable.then_some(connection);
        Ok(response)
    }
}

/// Connects to an endpoint. TLS begins with the first request.
fn connect(endpoint: String, server_name: Option<String>, tls: Arc<ClientConfig>) -> io::Result<Connection> {
    let host = endpoint.rsplit_once(':').map_or("", |(host, _)| host.trim_matches(['[', ']']));
    let name = ServerName::try_from(server_name.unwrap_or_else(|| host.to_owned())).map_err(io::Error::other)?;
    let session = ClientConnection::new(tls, name).map_err(io::Error::other)?;
    let stream = TcpStream::connect(endpoint)?;
    stream.set_nodelay(true)?;
    Ok(BufReader::new(StreamOwned::new(session, stream)))
}

/// Returns the error of an answer that proves nothing.
pub(crate) fn unclear(text: String) -> Error {
    Error::new(Code::TRY_AGAIN, text)
}

/// Decodes a pool or a claim. All answers become a `Value` first, which takes 40 KB less of code.
pub(crate) fn decode<T: DeserializeOwned>(record: &Value) -> Result<T> {
    T::deserialize(record).map_err(|error| unclear(format!("invalid record {record}: {error}")))
}

/// Returns the elements of the array that an answer has under this key. An answer can be any JSON:
/// `answer[key].take()` panics if it is not an object.
pub(crate) fn array(mut answer: Value, key: &str) -> Option<Vec<Value>> {
    if let Value::Array(elements) = answer.get_mut(key)?.take() { Some(elements) } else { None }
}

/// Returns the failure of a connection. Neither the rejection of a certificate nor of the version
/// passes.
fn failure(mut doing: String, credentials: &Credentials, error: io::Error) -> Error {
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
        _ => return Error::caused(Code::TRY_AGAIN, doing, error),
    }
    Error::caused(Code::REFUSED, doing, error)
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
            "retry-after" => response.retry_after = Duration::from_secs(value.parse::<u32>().unwrap_or(0).into()),
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
