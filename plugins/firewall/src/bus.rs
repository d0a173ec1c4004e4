//! Calls firewalld on the system bus.
//!
//! The library zbus is asynchronous: each call runs its tasks, in this thread, until there is an
//! answer, SIGTERM or a timeout.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use cni::machine::{Machine, OnSigterm};
use cni::steps::Step;
use cni::{Cidr, Code, Error};
use cni_linux::watch::term_descriptor;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Builder, Runtime};
use zbus::{Connection, DBusError as _, Message};

/// The timeout of a call. firewalld handles one call at a time, and a reload takes seconds.
const TIMEOUT: Duration = Duration::from_secs(30);
// The bus names, object paths and interfaces of firewalld and of the bus itself.
const FIREWALLD: &str = "org.fedoraproject.FirewallD1";
const FIREWALLD_PATH: &str = "/org/fedoraproject/FirewallD1";
const ZONE_INTERFACE: &str = "org.fedoraproject.FirewallD1.zone";
const BUS: &str = "org.freedesktop.DBus";
const BUS_PATH: &str = "/org/freedesktop/DBus";
// The methods of firewalld's zones.
pub(crate) const ADD_SOURCE: &str = "addSource";
pub(crate) const REMOVE_SOURCE: &str = "removeSource";
pub(crate) const QUERY_SOURCE: &str = "querySource";

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The system bus does not run.
    #[error("{0}")]
    NoBus(String),
    /// firewalld, or the bus if firewalld does not run, refused the call with this text.
    #[error("{0}")]
    Refused(String),
    /// The bus or firewalld cannot be reached, or did not answer.
    #[error("{0}")]
    Unreachable(String),
}

impl Failure {
    /// Whether firewalld's text contains its error code `code`, such as `ZONE_CONFLICT`.
    pub(crate) fn has_firewalld_code(&self, code: &str) -> bool {
        matches!(self, Failure::Refused(text) if text.contains(code))
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        let code = match &failure {
            // The bus's answer if firewalld does not run and cannot be started.
            Failure::Refused(text) if text.contains("not provided by any") => Code::TRY_AGAIN,
            failure if failure.has_firewalld_code("INVALID_ZONE") => Code::INVALID_CONFIG,
            Failure::Refused(_) => Code::KERNEL,
            Failure::NoBus(_) | Failure::Unreachable(_) => Code::TRY_AGAIN,
        };
        Error::new(code, failure.to_string())
    }
}

/// Returns the address in the form that these plugins and Go's send to firewalld: with /32 or /128.
pub(crate) fn source_text(address: IpAddr) -> String {
    Cidr::host(address).to_string()
}

/// A connection to firewalld on the system bus.
pub(crate) struct Firewalld<'m> {
    // Declared, and so dropped, before the runtime, which the connection needs to close.
    connection: Connection,
    runtime: Runtime,
    machine: &'m dyn Machine,
    on_sigterm: OnSigterm,
}

/// Runs `task` until it completes, and returns its result.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] after [`TIMEOUT`] and, with [`OnSigterm::Kill`], at SIGTERM, SIGINT
/// or SIGHUP.
fn wait<T>(
    runtime: &Runtime,
    machine: &dyn Machine,
    on_sigterm: OnSigterm,
    task: impl Future<Output = T>,
) -> io::Result<T> {
    let interrupted = || io::Error::new(io::ErrorKind::TimedOut, "interrupted by a signal");
    // An earlier call of `terminated` may have consumed the signal, and the descriptor below would
    // not become readable.
    if on_sigterm == OnSigterm::Kill && machine.terminated() {
        return Err(interrupted());
    }
    runtime.block_on(async {
        #[expect(
            deprecated,
            reason = "the function that replaces it is unsafe; the descriptor is not closed or replaced meanwhile"
        )]
        let sigterm = AsyncFd::with_interest(term_descriptor()?, Interest::READABLE)?;
        tokio::select! {
            result = task => Ok(result),
            _ = sigterm.readable(), if on_sigterm == OnSigterm::Kill => Err(interrupted()),
            () = tokio::time::sleep(TIMEOUT) => {
                let text = format!("there was no answer for {} s", TIMEOUT.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
        }
    })
}

/// Converts a zbus error, and keeps the kind of an I/O error in it.
fn into_io(error: zbus::Error) -> io::Error {
    match error {
        zbus::Error::InputOutput(error) | zbus::Error::Connection(error, _) => {
            io::Error::new(error.kind(), error.to_string())
        }
        error => io::Error::other(error),
    }
}

impl<'m> Firewalld<'m> {
    /// Connects to the system bus at the address in DBUS_SYSTEM_BUS_ADDRESS, or at the default one.
    /// Does not check whether firewalld runs.
    ///
    /// # Errors
    /// [`Failure::NoBus`] if no process listens there; [`Failure::Unreachable`] if connecting fails
    /// for another reason.
    pub(crate) fn connect(machine: &'m dyn Machine, on_sigterm: OnSigterm) -> Result<Firewalld<'m>, Failure> {
        let connect_error = |error: io::Error| {
            let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS");
            let address = address.unwrap_or_else(|_| "unix:path=/var/run/dbus/system_bus_socket".to_owned());
            let is_absent = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
            let text = format!("failed to connect to the system bus at {address}: {error}");
            if is_absent { Failure::NoBus(text) } else { Failure::Unreachable(text) }
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(connect_error)?;
        let connection = wait(&runtime, machine, on_sigterm, Connection::system())
            .and_then(|result| result.map_err(into_io))
            .map_err(connect_error)?;
        Ok(Firewalld { connection, runtime, machine, on_sigterm })
    }

    /// Waits for the answer to a method call. Returns the boolean in it; true if the content is not
    /// a boolean, as with [`ADD_SOURCE`].
    ///
    /// # Errors
    /// [`Failure::Refused`] if the answer is an error, [`Failure::Unreachable`] if there is no
    /// answer.
    fn answer_to(&self, call: impl Future<Output = zbus::Result<Message>>) -> Result<bool, Failure> {
        match wait(&self.runtime, self.machine, self.on_sigterm, call) {
            Ok(Ok(answer)) => Ok(answer.body().deserialize::<bool>().unwrap_or(true)),
            Ok(Err(zbus::Error::MethodError(name, text, _))) => {
                Err(Failure::Refused(text.unwrap_or_else(|| name.to_string())))
            }
            // An error whose name the D-Bus specification defines. zbus does not return these as
            // `MethodError`.
            Ok(Err(zbus::Error::FDO(error))) => {
                Err(Failure::Refused(error.description().map_or_else(|| error.to_string(), str::to_owned)))
            }
            Ok(Err(error)) => Err(Failure::Unreachable(into_io(error).to_string())),
            Err(error) => Err(Failure::Unreachable(error.to_string())),
        }
    }

    /// Whether firewalld runs, by the bus's answer whether its name has an owner. Never starts
    /// firewalld. Reports the call to the step log.
    pub(crate) fn is_running(&self) -> Result<bool, Failure> {
        let step = Step::begin();
        let call = self.connection.call_method(Some(BUS), BUS_PATH, Some(BUS), "NameHasOwner", &FIREWALLD);
        let answer = self.answer_to(call);
        step.end("ask the system bus for firewalld", &answer);
        answer
    }

    /// Calls a method for a source of a zone. Returns the answer to [`QUERY_SOURCE`], or `true` for
    /// the other methods. If firewalld does not run, the bus may start it. Reports the call to the
    /// step log.
    pub(crate) fn call(&self, method: &'static str, zone: &str, source: IpAddr) -> Result<bool, Failure> {
        let step = Step::begin();
        let source = source_text(source);
        let arguments = (zone, &source);
        let call =
            self.connection.call_method(Some(FIREWALLD), FIREWALLD_PATH, Some(ZONE_INTERFACE), method, &arguments);
        let answer = self.answer_to(call);
        step.end(format_args!("ask firewalld: {method} {zone} {source}"), &answer);
        answer
    }
}
