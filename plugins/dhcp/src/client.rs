//! The plugin's end of a connection to the daemon.
//!
//! A function that calls the daemon returns nested results: the outer error means that there is no
//! valid answer, the inner result is the daemon's answer.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cni::config::NetConf;
use cni::delegate::{self, answer_margin};
use cni::machine::{Machine, OnSigterm};
use cni::result::AddResult;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_dhcp::rpc::{CONNECT, CmdArgs, Connection, Method, write_request};
use cni_linux::stream::wait_readable;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::conf::{self, Conf};

/// How long each of these may take: connecting, the answer to the first line, and writing a call.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// How long a release may take. DHCP servers do not answer it, but Go's daemon may be renewing the
/// lease.
const RELEASE_LIMIT: Duration = Duration::from_secs(30);
/// The longest wait for a lease. The client's deadline is earlier.
const MAX_ALLOCATE: Duration = Duration::from_secs(300);
/// What precedes the reason in the daemon's error if no server has granted a lease. Go's daemon
/// gives no reason.
pub(crate) const NO_MORE_TRIES: &str = "no more tries";

/// Returns how long the daemon tries to get a lease. The interface plugin ends this plugin after
/// `delegateTimeout`. The daemon ends before, so that its error reaches the user.
pub(crate) fn daemon_limit(conf: &NetConf) -> Duration {
    // The interface plugin reports an invalid value. Go's interface plugins do not read the key.
    let limit = delegate::timeout(conf).unwrap_or(delegate::DEFAULT_TIMEOUT);
    limit - answer_margin(limit)
}

/// Returns how long this plugin waits for the daemon to acquire a lease: longer than the daemon
/// tries, and shorter than the interface plugin waits.
fn allocate_limit(conf: &NetConf) -> Duration {
    let limit = delegate::timeout(conf).unwrap_or(delegate::DEFAULT_TIMEOUT);
    limit - answer_margin(limit) / 2
}

/// Returns how much longer than [`allocate_limit`] the undo of an ADD may take. Its caller still
/// gets the error afterwards.
fn undo_limit(conf: &NetConf) -> Duration {
    answer_margin(delegate::timeout(conf).unwrap_or(delegate::DEFAULT_TIMEOUT)) / 4
}

/// A client of the daemon that listens on a socket.
#[derive(Clone)]
pub(crate) struct DaemonClient<'a> {
    pub(crate) socket: PathBuf,
    machine: &'a dyn Machine,
    /// When the daemon must have answered, for the calls that acquire a lease and for their undo.
    deadline: Option<Instant>,
    /// Whether a signal to end also ends the waits for the daemon.
    on_sigterm: OnSigterm,
}

/// A connection whose first line the daemon has answered.
pub(crate) struct DaemonConnection<'a> {
    stream: UnixStream,
    decoder: Connection,
    client: DaemonClient<'a>,
}

impl<'a> DaemonClient<'a> {
    /// Returns a client of the daemon that the configuration names.
    ///
    /// # Errors
    /// Code 6 or 7 if the configuration is invalid.
    pub(crate) fn for_call(call: &Call<'a>) -> Result<DaemonClient<'a>> {
        Conf::read(&call.conf, &call.environment.args)?;
        let deadline = call.machine.now() + allocate_limit(&call.conf);
        Ok(DaemonClient { deadline: Some(deadline), ..DaemonClient::for_call_unchecked(call) })
    }

    /// Returns a client without checking the configuration: DEL and GC must work even if keys other
    /// than the socket's path are invalid.
    pub(crate) fn for_call_unchecked(call: &Call<'a>) -> DaemonClient<'a> {
        DaemonClient {
            socket: conf::socket(&call.conf),
            machine: call.machine,
            deadline: None,
            on_sigterm: OnSigterm::Kill,
        }
    }

    /// Returns a client for the undo of an ADD, whose own deadline may have passed, and which a
    /// signal may have ended.
    pub(crate) fn for_undo(&self, conf: &NetConf) -> DaemonClient<'a> {
        let deadline = self.deadline.map(|deadline| deadline + undo_limit(conf));
        DaemonClient { deadline, on_sigterm: OnSigterm::Finish, ..self.clone() }
    }

    /// Returns the time after `limit`, but not later than the client's deadline.
    fn deadline_after(&self, limit: Duration) -> Instant {
        let deadline = self.machine.now() + limit;
        self.deadline.map_or(deadline, |latest| deadline.min(latest))
    }

    /// Connects to the daemon's socket, within [`GREETING_LIMIT`].
    fn connect(&self) -> io::Result<UnixStream> {
        let stream: UnixStream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?.into();
        // This timeout also limits `connect`, which blocks if the daemon's queue is full.
        stream.set_write_timeout(Some(GREETING_LIMIT))?;
        connect(stream.as_raw_fd(), &UnixAddr::new(&self.socket)?)?;
        Ok(stream)
    }

    /// Connects, sends the first line, and waits for the daemon's answer to this line. Connecting
    /// alone proves nothing: the kernel accepts connections even for a daemon that hangs. Nothing
    /// else is sent before the answer, because a Go daemon can lose bytes that arrive earlier.
    ///
    /// # Errors
    /// Code 11 if the daemon does not answer, 6 if the answer is not that of a DHCP daemon.
    pub(crate) fn greet(&self) -> Result<DaemonConnection<'a>> {
        let socket = self.socket.display();
        let mut stream = self.connect().map_err(|error| {
            let msg = format!("error dialing DHCP daemon: dial unix {socket}: connect");
            Error::caused(Code::TRY_AGAIN, msg, error)
        })?;
        let no_answer = |error: io::Error| {
            Error::caused(Code::TRY_AGAIN, format_args!("the DHCP daemon of {socket} does not answer"), error)
        };
        let deadline = self.deadline_after(GREETING_LIMIT);
        stream.write_all(CONNECT).map_err(no_answer)?;
        let mut connection = DaemonConnection { stream, decoder: Connection::default(), client: self.clone() };
        while !connection.decoder.handshake_done() {
            connection.receive(deadline).map_err(no_answer)?;
            // There has been no call yet, so this only checks the answer to the first line.
            connection.decoder.response().map_err(|error| {
                Error::caused(
                    Code::DECODE,
                    format_args!("the process that listens on {socket} is not the DHCP daemon"),
                    error,
                )
            })?;
        }
        Ok(connection)
    }

    /// Connects and makes one call; see [`DaemonConnection::call`].
    pub(crate) fn call(&self, method: Method, args: &CmdArgs) -> Result<Result<AddResult>> {
        self.greet()?.call(method, args)
    }
}

impl DaemonConnection<'_> {
    /// Waits for bytes from the daemon, and passes them to the decoder.
    fn receive(&mut self, deadline: Instant) -> io::Result<()> {
        let mut buffer = [0; 4096];
        wait_readable(&self.stream, deadline, self.client.machine, self.client.on_sigterm)?;
        match self.stream.read(&mut buffer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            length => {
                self.decoder.push(&buffer[..length]);
                Ok(())
            }
        }
    }

    /// Makes a call, and returns the daemon's answer as the inner result. A release is answered
    /// with an empty result.
    ///
    /// # Errors
    /// Code 11 if the daemon does not answer, 6 if its answer cannot be decoded. The inner error is
    /// the daemon's, with code 11.
    pub(crate) fn call(mut self, method: Method, args: &CmdArgs) -> Result<Result<AddResult>> {
        let doing = format!("error calling {}", method.name());
        let silent = format!("{doing}: the DHCP daemon of {} has sent no answer", self.client.socket.display());
        let no_answer = |error: io::Error| Error::caused(Code::TRY_AGAIN, &silent, error);
        let deadline = self.client.deadline_after(if method == Method::Release { RELEASE_LIMIT } else { MAX_ALLOCATE });
        self.stream.write_all(&write_request(method, args)).map_err(no_answer)?;
        loop {
            let answer = self.decoder.response().map_err(|error| Error::caused(Code::DECODE, &doing, error))?;
            match answer {
                Some(Ok(result)) => return Ok(Ok(result)),
                Some(Err(text)) => return Ok(Err(daemon_error(&doing, &text))),
                // The daemon stops its attempt when this process closes the connection.
                None => self.receive(deadline).map_err(no_answer)?,
            }
        }
    }
}

/// Returns the daemon's error. Other programs compare Go's text, so a reason that follows it
/// becomes the details.
fn daemon_error(doing: &str, text: &str) -> Error {
    // Go's text of an unknown call.
    if text.starts_with("rpc: can't find") && doing.ends_with(Method::AllocateIpv6.name()) {
        return Error::new(Code::TRY_AGAIN, format!("{doing}: the daemon does not support DHCPv6"))
            .with_details("start the daemon of these plugins instead, or remove the key ipv6");
    }
    let reason = text.strip_prefix(NO_MORE_TRIES).and_then(|rest| rest.strip_prefix(": "));
    match reason {
        Some(reason) => Error::new(Code::TRY_AGAIN, format!("{doing}: {NO_MORE_TRIES}")).with_details(reason),
        None => Error::new(Code::TRY_AGAIN, format!("{doing}: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeouts_of_daemon_plugin_and_caller_nest() {
        for (key, seconds) in [
            ("", 55),
            (r#","delegateTimeout":1"#, 1),
            (r#","delegateTimeout":20"#, 20),
            (r#","delegateTimeout":300"#, 300),
            // The interface plugin refuses it.
            (r#","delegateTimeout":0"#, 55),
            (r#","delegateTimeout":"x""#, 55),
        ] {
            let conf = format!(r#"{{"cniVersion":"1.0.0","name":"n","type":"x"{key}}}"#);
            let conf = NetConf::parse(conf).unwrap();
            let (daemon, plugin) = (daemon_limit(&conf), allocate_limit(&conf));
            assert!(daemon < plugin && plugin < Duration::from_secs(seconds), "{key}: {daemon:?} {plugin:?}");
            assert!(daemon >= Duration::from_secs(seconds) * 3 / 4, "{key}: {daemon:?}");
        }
    }

    #[test]
    fn the_cause_behind_gos_text_becomes_the_details() {
        let error = daemon_error("doing", "no more tries: eth0: why");
        assert_eq!((error.msg(), error.details()), ("doing: no more tries", "eth0: why"));
        let error = daemon_error("doing", "no more tries");
        assert_eq!((error.msg(), error.details()), ("doing: no more tries", ""));
    }
}
