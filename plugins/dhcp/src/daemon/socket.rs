//! The daemon's socket: systemd passes it, or the daemon creates it and replaces the socket of
//! an earlier daemon.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt::PeerCredentials,
};
use nix::sys::stat::{Mode, umask};
use tokio::net::UnixListener;

use super::own_file::kind_name;

/// The number of the first descriptor that systemd passes.
const FIRST_PASSED: u8 = 3;

/// The process that created the socket, and that therefore removes the socket's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketOwner {
    /// The daemon.
    Daemon,
    /// systemd, which continues to listen after the daemon has ended.
    Systemd,
}

/// Returns the daemon's socket and its owner.
///
/// # Errors
/// Those of [`passed_by_systemd`] and [`bind`].
pub(super) fn listen(path: &Path) -> io::Result<(UnixListener, SocketOwner)> {
    let (listener, owner) = match passed_by_systemd()? {
        Some(listener) => (listener, SocketOwner::Systemd),
        None => (bind(path)?, SocketOwner::Daemon),
    };
    listener.set_nonblocking(true)?;
    Ok((UnixListener::from_std(listener)?, owner))
}

/// Returns the socket that systemd passes (sd_listen_fds(3)), or `None` if it passes none.
///
/// # Errors
/// systemd passes several sockets, or the descriptor is invalid.
fn passed_by_systemd() -> io::Result<Option<StdListener>> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some(cni_linux::inherited(FIRST_PASSED)?.into())),
        Some(count) => Err(io::Error::other(format!("Too many sockets passed in through socket activation: {count}"))),
    }
}

/// Creates the socket's folder and the socket. Replaces the socket of a daemon that has ended.
///
/// # Errors
/// The path is not a socket, another process listens on it, or the socket cannot be created.
fn bind(path: &Path) -> io::Result<StdListener> {
    let failed = |error: io::Error| io::Error::other(format!("failed to listen on {}: {error}", path.display()));
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
    }
    match create(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            refuse_in_use(path).and_then(|()| fs::remove_file(path)).and_then(|()| create(path)).map_err(failed)
        }
        bound => bound.map_err(failed),
    }
}

/// Checks that an existing path is a socket on which no process listens. Connecting alone does not
/// show that: connecting to a regular file is refused too.
///
/// # Errors
/// The kind of another file, the process that listens on the socket, or the kernel's error.
fn refuse_in_use(path: &Path) -> io::Result<()> {
    let kind = fs::symlink_metadata(path)?.file_type();
    if !kind.is_socket() {
        return Err(io::Error::other(format!("it exists and is {}, not a socket; it is kept", kind_name(kind))));
    }
    // Without blocking: the queue of a daemon that hangs may be full.
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let other = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match connect(other.as_raw_fd(), &UnixAddr::new(path)?) {
        Err(Errno::ECONNREFUSED) => Ok(()),
        Ok(()) => {
            let pid = getsockopt(&other, PeerCredentials).map(|peer| peer.pid()).unwrap_or_default();
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            Err(io::Error::other(format!("process {pid} ({}) already listens on it", name.trim_end())))
        }
        Err(Errno::EAGAIN) => Err(io::Error::other("another process already listens on it, and its queue is full")),
        Err(error) => Err(io::Error::other(format!("it exists, and connecting to it failed: {}", error.desc()))),
    }
}

/// Creates the socket with the mode 0600. The umask sets the mode, so that the file never has
/// another mode. The umask applies to the whole process, but no other thread runs yet.
fn create(path: &Path) -> io::Result<StdListener> {
    let previous = umask(Mode::from_bits_truncate(0o177));
    let listener = StdListener::bind(path);
    umask(previous);
    listener
}
