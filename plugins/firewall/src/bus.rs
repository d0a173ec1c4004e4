//! firewalld on the system bus.
//!
//! The library is asynchronous: each call runs it, in this thread, until there is an answer, a
//! signal or the deadline.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use crate::firewalld::{Failure, Firewalld, Method, host};
use cni::machine::{Machine, OnSigterm};
use cni::steps::Step;
use cni_linux::watch::term_descriptor;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Builder, Runtime};
use zbus::{Connection, DBusError as _, Message};

/// How long an answer may take: firewalld does one thing at a time, and reloads for seconds.
const PATIENCE: Duration = Duration::from_secs(30);
const NAME: &str = "org.fedoraproject.FirewallD1";
const PATH: &str = "/org/fedoraproject/FirewallD1";
const ZONE: &str = "org.fedoraproject.FirewallD1.zone";
const BUS: &str = "org.freedesktop.DBus";
const BUS_PATH: &str = "/org/freedesktop/DBus";

struct System<'m> {
    // Before the runtime, which it needs to end.
    connection: Connection,
    runtime: Runtime,
    machine: &'m dyn Machine,
    on_sigterm: OnSigterm,
}

/// Connects to the system bus at DBUS_SYSTEM_BUS_ADDRESS, or at its usual place.
///
/// # Errors
/// [`Failure::NoBus`] if nothing listens there, otherwise [`Failure::Unreachable`].
pub(crate) fn open(machine: &dyn Machine, on_sigterm: OnSigterm) -> Result<Box<dyn Firewalld + '_>, Failure> {
    let failed = |error: io::Error| {
        let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS");
        let address = address.unwrap_or_else(|_| "unix:path=/var/run/dbus/system_bus_socket".to_owned());
        let is_absent = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
        let text = format!("failed to connect to the system bus at {address}: {error}");
        if is_absent { Failure::NoBus(text) } else { Failure::Unreachable(text) }
    };
    let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let connection = wait(&runtime, machine, on_sigterm, Connection::system()).and_then(|done| done.map_err(into_io));
    Ok(Box::new(System { connection: connection.map_err(failed)?, runtime, machine, on_sigterm }))
}

/// Runs until there is an answer.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] at the deadline and at a signal that ends this process.
fn wait<T>(
    runtime: &Runtime,
    machine: &dyn Machine,
    on_sigterm: OnSigterm,
    answer: impl Future<Output = T>,
) -> io::Result<T> {
    let interrupted = || io::Error::new(io::ErrorKind::TimedOut, "interrupted by a signal");
    if on_sigterm == OnSigterm::Kill && machine.terminated() {
        return Err(interrupted());
    }
    runtime.block_on(async {
        let signals = registered(term_descriptor()?)?;
        tokio::select! {
            answer = answer => Ok(answer),
            _ = signals.readable(), if on_sigterm == OnSigterm::Kill => Err(interrupted()),
            () = tokio::time::sleep(PATIENCE) => {
                let text = format!("there was no answer for {} s", PATIENCE.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
        }
    })
}

/// A descriptor that tokio waits for.
#[expect(
    deprecated,
    reason = "the function that replaces it is unsafe; no descriptor here is closed or replaced while it is registered"
)]
fn registered<T: AsRawFd>(fd: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}

fn into_io(error: zbus::Error) -> io::Error {
    match error {
        zbus::Error::InputOutput(error) | zbus::Error::Connection(error, _) => {
            io::Error::new(error.kind(), error.to_string())
        }
        error => io::Error::other(error),
    }
}

impl System<'_> {
    fn call(&self, call: impl Future<Output = zbus::Result<Message>>) -> Result<Message, Failure> {
        match wait(&self.runtime, self.machine, self.on_sigterm, call) {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(zbus::Error::MethodError(name, text, _))) => {
                Err(Failure::Refused(text.unwrap_or_else(|| name.to_string())))
            }
            Ok(Err(zbus::Error::FDO(error))) => {
                Err(Failure::Refused(error.description().map_or_else(|| error.to_string(), str::to_owned)))
            }
            Ok(Err(error)) => Err(Failure::Unreachable(into_io(error).to_string())),
            Err(error) => Err(Failure::Unreachable(error.to_string())),
        }
    }
}

/// The answer to a question; true for what answers with something else.
fn is_yes(answer: &Message) -> bool {
    answer.body().deserialize::<bool>().unwrap_or(true)
}

impl Firewalld for System<'_> {
    fn is_running(&self) -> Result<bool, Failure> {
        let step = Step::begin();
        let call = self.connection.call_method(Some(BUS), BUS_PATH, Some(BUS), "NameHasOwner", &NAME);
        let answer = self.call(call).map(|answer| is_yes(&answer));
        step.end("ask the system bus for firewalld", &answer);
        answer
    }

    fn call(&self, method: Method, zone: &str, source: IpAddr) -> Result<bool, Failure> {
        let step = Step::begin();
        let body = (zone, host(source));
        let call = self.connection.call_method(Some(NAME), PATH, Some(ZONE), method.name(), &body);
        let answer = System::call(self, call).map(|answer| is_yes(&answer));
        step.end(format_args!("ask firewalld: {} {zone} {}", method.name(), body.1), &answer);
        answer
    }
}
