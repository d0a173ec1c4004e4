//! The plugin's end of a connection to the daemon.
//!
//! A function that calls the daemon returns nested results: the outer error means that there is no
//! valid answer, the inner result is the daemon's answer.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cni::machine::Machine;
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
/// How long acquiring a lease may take. A daemon with default flags gives up earlier.
const ALLOCATE_LIMIT: Duration = Duration::from_secs(600);

/// A client of the daemon that listens on a socket.
#[derive(Clone)]
pub(crate) struct DaemonClient<'a> {
    pub(crate) socket: PathBuf,
    machine: &'a dyn Machine,
}

/// A connection whose first line the daemon has answered.
pub(crate) struct DaemonConnection<'a> {
    stream: UnixStream,
    decoder: Connection,
    machine: &'a dyn Machine,
}

impl<'a> DaemonClient<'a> {
    /// Returns a client of the daemon that the configuration names.
    ///
    /// # Errors
    /// Code 6 or 7 if the configuration is invalid.
    pub(crate) fn for_call(call: &Call<'a>) -> Result<DaemonClient<'a>> {
        Conf::read(&call.conf, &call.environment.args)?;
        Ok(DaemonClient::for_call_unchecked(call))
    }

    /// Returns a client without checking the configuration: DEL and GC must work even if keys other
    /// than the socket's path are invalid.
    pub(crate) fn for_call_unchecked(call: &Call<'a>) -> DaemonClient<'a> {
        DaemonClient { socket: conf::socket(&call.conf), machine: call.machine }
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
        let deadline = self.machine.now() + GREETING_LIMIT;
        stream.write_all(CONNECT).map_err(no_answer)?;
        let mut connection = DaemonConnection { stream, decoder: Connection::default(), machine: self.machine };
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
        wait_readable(&self.stream, deadline, self.machine)?;
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
        let no_answer = |error: io::Error| Error::caused(Code::TRY_AGAIN, &doing, error);
        let timeout = if method == Method::Release { RELEASE_LIMIT } else { ALLOCATE_LIMIT };
        let deadline = self.machine.now() + timeout;
        self.stream.write_all(&write_request(method, args)).map_err(no_answer)?;
        loop {
            let answer = self.decoder.response().map_err(|error| Error::caused(Code::DECODE, &doing, error))?;
            match answer {
                Some(Ok(result)) => return Ok(Ok(result)),
                Some(Err(text)) => return Ok(Err(Error::new(Code::TRY_AGAIN, format!("{doing}: {text}")))),
                None => self.receive(deadline).map_err(no_answer)?,
            }
        }
    }
}
