//! The daemon's socket: systemd's, or one of its own in the place of one that an earlier daemon
//! left.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::path::Path;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::sys::stat::{Mode, umask};
use tokio::net::UnixListener;

/// The first descriptor that systemd passes.
const FIRST: u8 = 3;

/// The process that created the socket, and removes its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketOwner {
    /// The daemon.
    Daemon,
    /// systemd, which goes on listening when the daemon has ended.
    Systemd,
}

/// Returns the socket to accept connections from.
pub(super) fn listen(path: &Path) -> io::Result<(UnixListener, SocketOwner)> {
    let (listener, owner) = match passed()? {
        Some(listener) => (listener, SocketOwner::Systemd),
        None => (bind(path)?, SocketOwner::Daemon),
    };
    listener.set_nonblocking(true)?;
    Ok((UnixListener::from_std(listener)?, owner))
}

fn passed() -> io::Result<Option<StdListener>> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some(cni_linux::inherited(FIRST)?.into())),
        Some(count) => Err(io::Error::other(format!("Too many sockets passed in through socket activation: {count}"))),
    }
}

fn bind(path: &Path) -> io::Result<StdListener> {
    let failed = |error: io::Error| io::Error::other(format!("failed to listen on {}: {error}", path.display()));
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
    }
    match create(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => match StdStream::connect(path) {
            Ok(other) => {
                let pid = getsockopt(&other, PeerCredentials).map(|peer| peer.pid()).unwrap_or_default();
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                Err(failed(io::Error::other(format!("process {pid} ({}) already listens on it", name.trim_end()))))
            }
            // The process that listened has ended.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                fs::remove_file(path).and_then(|()| create(path)).map_err(failed)
            }
            Err(_) => Err(failed(error)),
        },
        bound => bound.map_err(failed),
    }
}

/// Creates the socket for root alone, from its first moment on. A daemon's other threads start
/// later, so the umask changes for no one else.
fn create(path: &Path) -> io::Result<StdListener> {
    let usual = umask(Mode::from_bits_truncate(0o177));
    let bound = StdListener::bind(path);
    umask(usual);
    bound
}
