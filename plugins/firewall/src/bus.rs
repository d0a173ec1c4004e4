//! Calls firewalld on the system bus.
//!
//! The library zbus is asynchronous: each call runs its tasks, in this thread, until there is an
//! answer, SIGTERM or a timeout.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use crate::firewalld::{Failure, Firewalld, Method, source_text};
use cni::machine::{Machine, OnSigterm};
use cni::steps::Step;
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

/// A connection to firewalld on the system bus.
struct SystemBus<'m> {
    // Declared, and so dropped, before the runtime, which the connection needs to close.
    connection: Connection,
    runtime: Runtime,
    machine: &'m dyn Machine,
    on_sigterm: OnSigterm,
}

/// Connects to the system bus at the address in DBUS_SYSTEM_BUS_ADDRESS, or at the default one.
///
/// # Errors
/// [`Failure::NoBus`] if no process listens there; [`Failure::Unreachable`] if connecting fails for
/// another reason.
pub(crate) fn open(machine: &dyn Machine, on_sigterm: OnSigterm) -> Result<Box<dyn Firewalld + '_>, Failure> {
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
    Ok(Box::new(SystemBus { connection, runtime, machine, on_sigterm }))
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
        let sigterm = register(term_descriptor()?)?;
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

/// Registers a descriptor with tokio's reactor, so that a task can wait until it is readable.
#[expect(
    deprecated,
    reason = "the function that replaces it is unsafe; no descriptor here is closed or replaced while it is registered"
)]
fn register<T: AsRawFd>(fd: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
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

impl SystemBus<'_> {
    /// Waits for the answer to a method call. The failure is [`Failure::Refused`] if the answer is
    /// an error, and [`Failure::Unreachable`] if there is no answer.
    fn answer_to(&self, call: impl Future<Output = zbus::Result<Message>>) -> Result<Message, Failure> {
        match wait(&self.runtime, self.machine, self.on_sigterm, call) {
            Ok(Ok(answer)) => Ok(answer),
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
}

/// Returns the boolean in an answer; true if the content is not a boolean, as with `addSource`.
fn boolean(answer: &Message) -> bool {
    answer.body().deserialize::<bool>().unwrap_or(true)
}

impl Firewalld for SystemBus<'_> {
    /// Asks the bus whether firewalld's name has an owner, and reports the call to the step log.
    fn is_running(&self) -> Result<bool, Failure> {
        let step = Step::begin();
        let call = self.connection.call_method(Some(BUS), BUS_PATH, Some(BUS), "NameHasOwner", &FIREWALLD);
        let answer = self.answer_to(call).map(|answer| boolean(&answer));
        step.end("ask the system bus for firewalld", &answer);
        answer
    }

    /// Calls firewalld, and reports the call to the step log.
    fn call(&self, method: Method, zone: &str, source: IpAddr) -> Result<bool, Failure> {
        let step = Step::begin();
        let source = source_text(source);
        let arguments = (zone, &source);
        let call = self.connection.call_method(
            Some(FIREWALLD),
            FIREWALLD_PATH,
            Some(ZONE_INTERFACE),
            method.name(),
            &arguments,
        );
        let answer = self.answer_to(call).map(|answer| boolean(&answer));
        step.end(format_args!("ask firewalld: {} {zone} {source}", method.name()), &answer);
        answer
    }
}
