//! The plugin's end of a connection to the daemon.
//!
//! The socket of a daemon that hangs still accepts connections. The outer results here fail if the
//! daemon is silent, the inner ones with its answer.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use cni::machine::Machine;
use cni::result::AddResult;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_dhcp::rpc::{CONNECT, CmdArgs, Connection, Method, write_request};
use cni_linux::stream::wait_readable;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::conf::{self, Conf};

/// How long a daemon may take to accept a connection, to greet, and to read a call.
const GREETING: Duration = Duration::from_secs(10);
/// How long a release may take. A daemon waits for no server then, but Go's may be busy with a
/// renewal of the lease.
const RELEASE: Duration = Duration::from_secs(30);
/// How long an ADD may take: longer than a daemon tries to get a lease, unless its flags say
/// otherwise. Then the runtime's patience ends the wait.
const ALLOCATE: Duration = Duration::from_secs(600);

/// The daemon, as a client sees it.
#[derive(Clone)]
pub(crate) struct Daemon<'a> {
    pub(crate) socket: PathBuf,
    machine: &'a dyn Machine,
}

/// A connection that the daemon has greeted.
pub(crate) struct DaemonConnection<'a> {
    stream: UnixStream,
    conversation: Connection,
    machine: &'a dyn Machine,
}

impl<'a> Daemon<'a> {
    pub(crate) fn of(call: &Call<'a>) -> Result<Daemon<'a>> {
        Conf::read(&call.conf, &call.environment.args)?;
        Ok(Daemon::lenient(call))
    }

    /// For DEL and GC, which clean up whatever else the configuration says.
    pub(crate) fn lenient(call: &Call<'a>) -> Daemon<'a> {
        Daemon { socket: conf::socket(&call.conf), machine: call.machine }
    }

    fn connect(&self) -> io::Result<UnixStream> {
        let stream: UnixStream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?.into();
        // The bound for the connection too, for which a full queue of the daemon would block.
        stream.set_write_timeout(Some(GREETING))?;
        connect(stream.as_raw_fd(), &UnixAddr::new(&self.socket)?)?;
        Ok(stream)
    }

    /// Connects, and waits for the greeting. What a Go daemon has read beyond the first line by
    /// then is lost, so nothing is sent before.
    pub(crate) fn greet(&self) -> Result<DaemonConnection<'a>> {
        let socket = self.socket.display();
        let mut stream = self.connect().map_err(|error| {
            let doing = format!("error dialing DHCP daemon: dial unix {socket}: connect");
            Error::caused(Code::TRY_AGAIN, doing, error)
        })?;
        let silent = |error: io::Error| {
            Error::caused(Code::TRY_AGAIN, format_args!("the DHCP daemon of {socket} does not answer"), error)
        };
        let deadline = self.machine.now() + GREETING;
        stream.write_all(CONNECT).map_err(silent)?;
        let mut greeted = DaemonConnection { stream, conversation: Connection::default(), machine: self.machine };
        while !greeted.conversation.handshake_done() {
            greeted.receive(deadline).map_err(silent)?;
            greeted.conversation.response().map_err(|error| {
                Error::caused(
                    Code::DECODE,
                    format_args!("the process that listens on {socket} is not the DHCP daemon"),
                    error,
                )
            })?;
        }
        Ok(greeted)
    }

    pub(crate) fn call(&self, method: Method, args: &CmdArgs) -> Result<Result<AddResult>> {
        self.greet()?.call(method, args)
    }
}

impl DaemonConnection<'_> {
    fn receive(&mut self, deadline: std::time::Instant) -> io::Result<()> {
        let mut buffer = [0; 4096];
        wait_readable(&self.stream, deadline, self.machine)?;
        match self.stream.read(&mut buffer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            length => {
                self.conversation.push(&buffer[..length]);
                Ok(())
            }
        }
    }

    pub(crate) fn call(mut self, method: Method, args: &CmdArgs) -> Result<Result<AddResult>> {
        let doing = format!("error calling {}", method.name());
        let silent = |error: io::Error| Error::caused(Code::TRY_AGAIN, &doing, error);
        let patience = if method == Method::Release { RELEASE } else { ALLOCATE };
        let deadline = self.machine.now() + patience;
        self.stream.write_all(&write_request(method, args)).map_err(silent)?;
        loop {
            let answer = self.conversation.response();
            match answer.map_err(|error| Error::caused(Code::DECODE, &doing, error))? {
                Some(Ok(result)) => return Ok(Ok(result)),
                Some(Err(text)) => return Ok(Err(Error::new(Code::TRY_AGAIN, format!("{doing}: {text}")))),
                None => self.receive(deadline).map_err(silent)?,
            }
        }
    }
}
