//! The plugin's end of a connection to the daemon.
//!
//! The functions that call the daemon return two results: the outer one is an error if the daemon
//! does not answer, the inner one is its answer. The kernel accepts connections even for a daemon
//! that hangs, so a successful connection is not enough.

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

/// The longest time in which the daemon must accept a connection, answer its first line, and read a
/// call.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// The longest time for a release. It does not wait for a server, but Go's daemon may be renewing
/// the lease.
const RELEASE_LIMIT: Duration = Duration::from_secs(30);
/// The longest time for a new lease. It is longer than a daemon with default flags tries to get
/// one.
const ALLOCATE_LIMIT: Duration = Duration::from_secs(600);

/// The access to a daemon, by its socket.
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
    /// Returns the daemon that the configuration names.
    ///
    /// # Errors
    /// Code 6 or 7 if the configuration is invalid.
    pub(crate) fn of(call: &Call<'a>) -> Result<DaemonClient<'a>> {
        Conf::read(&call.conf, &call.environment.args)?;
        Ok(DaemonClient::of_unchecked(call))
    }

    /// Returns the daemon that the configuration names, even if other keys are invalid: for DEL and
    /// GC, which must work then too.
    pub(crate) fn of_unchecked(call: &Call<'a>) -> DaemonClient<'a> {
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

    /// Connects, sends the first line, and waits for the daemon's answer to it. Nothing else is
    /// sent before that answer, because a Go daemon can lose it.
    ///
    /// # Errors
    /// Code 11 if the daemon does not answer, 6 if the answer is not a daemon's.
    pub(crate) fn greet(&self) -> Result<DaemonConnection<'a>> {
        let socket = self.socket.display();
        let mut stream = self.connect().map_err(|error| {
            let msg = format!("error dialing DHCP daemon: dial unix {socket}: connect");
            Error::caused(Code::TRY_AGAIN, msg, error)
        })?;
        let silent = |error: io::Error| {
            Error::caused(Code::TRY_AGAIN, format_args!("the DHCP daemon of {socket} does not answer"), error)
        };
        let deadline = self.machine.now() + GREETING_LIMIT;
        stream.write_all(CONNECT).map_err(silent)?;
        let mut connection = DaemonConnection { stream, decoder: Connection::default(), machine: self.machine };
        while !connection.decoder.handshake_done() {
            connection.receive(deadline).map_err(silent)?;
            // This decodes only the answer to the first line: there has been no call yet.
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
    /// Waits for further bytes, and gives them to the decoder.
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
        let silent = |error: io::Error| Error::caused(Code::TRY_AGAIN, &doing, error);
        let timeout = if method == Method::Release { RELEASE_LIMIT } else { ALLOCATE_LIMIT };
        let deadline = self.machine.now() + timeout;
        self.stream.write_all(&write_request(method, args)).map_err(silent)?;
        loop {
            let answer = self.decoder.response();
            match answer.map_err(|error| Error::caused(Code::DECODE, &doing, error))? {
                Some(Ok(result)) => return Ok(Ok(result)),
                Some(Err(text)) => return Ok(Err(Error::new(Code::TRY_AGAIN, format!("{doing}: {text}")))),
                None => self.receive(deadline).map_err(silent)?,
            }
        }
    }
}
