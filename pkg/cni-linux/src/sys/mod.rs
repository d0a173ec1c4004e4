//! The only unsafe code of the workspace: what neither std nor nix offers as a safe function.
//!
//! Each function is a few lines over one system call and has a contract without preconditions, so a
//! caller cannot use it wrongly. Between fork and exec nothing may allocate: see
//! [`die_with_parent`]. [`Arena`] is the plugins' allocator.
#![allow(unsafe_code, reason = "the one module of the workspace that has unsafe code")]

mod arena;

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;

use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::getppid;

pub use arena::Arena;

/// Turns a C result into an `io::Result`.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The kind of namespace behind a descriptor, as a `CLONE_NEW…` constant. ENOTTY if it is none (or
/// on a kernel before 4.11).
pub(crate) fn namespace_type(fd: impl AsFd) -> io::Result<libc::c_int> {
    // Powerpc numbers its requests differently from all others; nix knows.
    const NS_GET_NSTYPE: libc::Ioctl = nix::request_code_none!(0xb7, 3) as libc::Ioctl;
    // SAFETY: the descriptor is open for as long as it is borrowed, and this request takes no
    // argument, so the kernel touches none of our memory.
    let kind = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), NS_GET_NSTYPE) };
    check(kind.into()).map(|_| kind)
}

/// The settings of a tun or tap interface that are numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TunSetting {
    /// The user that may open it.
    Owner,
    /// The group that may open it.
    Group,
    /// Whether it stays when nothing has it open any more.
    Persist,
}

/// Creates a tun or tap interface behind `device`, an open `/dev/net/tun`, in the calling thread's
/// namespace. EINVAL for a name that does not fit.
pub(crate) fn create_tun(device: &File, name: &str, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: all zeroes is an ifreq: an empty name, and a union of plain numbers.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    // The last byte stays zero: the kernel reads up to it.
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed() as libc::c_char;
    }
    let flags = flags as u16;
    request.ifr_ifru.ifru_flags = flags.cast_signed();
    // SAFETY: the descriptor is open for as long as it is borrowed; the kernel reads and writes one
    // ifreq, which lives until after the call. On another kind of file the request fails without a
    // look at the argument.
    check(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) }.into()).map(drop)
}

/// Changes the tun or tap interface behind `device`.
pub(crate) fn set_tun(device: &File, setting: TunSetting, value: u32) -> io::Result<()> {
    let request = match setting {
        TunSetting::Owner => libc::TUNSETOWNER,
        TunSetting::Group => libc::TUNSETGROUP,
        TunSetting::Persist => libc::TUNSETPERSIST,
    };
    // SAFETY: the descriptor is open for as long as it is borrowed; the argument is a number, so
    // the kernel touches none of our memory.
    check(unsafe { libc::ioctl(device.as_raw_fd(), request, libc::c_ulong::from(value)) }.into()).map(drop)
}

/// A descriptor that becomes readable when the process ends. ENOSYS on a kernel before 5.3.
pub(crate) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    // The variadic `syscall` reads each argument as a `c_long`.
    let (pid, flags): (libc::c_long, libc::c_long) = (pid.into(), 0);
    // SAFETY: the call takes two integers and accesses no memory of this process.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) })?;
    let fd = libc::c_int::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor, close-on-exec, and no other code has
    // it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether this process ignores the signal, because its parent did (nohup).
pub(crate) fn is_ignored(signal: Signal) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action nothing changes; the old one is written to our own memory of its
    // type.
    check(unsafe { libc::sigaction(signal as libc::c_int, ptr::null(), action.as_mut_ptr()) }.into())?;
    // SAFETY: all zeroes is a sigaction, and the call has filled it in.
    Ok(unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN)
}

/// Returns a copy of a descriptor that this process was started with.
pub fn inherited(fd: u8) -> io::Result<OwnedFd> {
    // SAFETY: the call takes integers and accesses no memory of this process; a number that is not
    // open is EBADF.
    let copy = check(unsafe { libc::fcntl(fd.into(), libc::F_DUPFD_CLOEXEC, 10) }.into())?;
    let copy = libc::c_int::try_from(copy).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor, close-on-exec, and no other code has
    // it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Lets a packet socket of whole frames receive nothing but UDP over IPv4 to this port.
pub(crate) fn filter_udp_port(socket: impl AsFd, port: u16) -> io::Result<()> {
    const ACCEPT: u32 = 0xffff;
    let code = |code: u32| u16::try_from(code).unwrap_or_default();
    let load = |size: u32, mode: u32, at: u32| libc::sock_filter {
        code: code(libc::BPF_LD | size | mode),
        jt: 0,
        jf: 0,
        k: at,
    };
    let jump = |test: u32, value: u32, [jt, jf]: [u8; 2]| libc::sock_filter {
        code: code(libc::BPF_JMP | test | libc::BPF_K),
        jt,
        jf,
        k: value,
    };
    let end = |length: u32| libc::sock_filter { code: code(libc::BPF_RET | libc::BPF_K), jt: 0, jf: 0, k: length };
    let mut program = [
        load(libc::BPF_H, libc::BPF_ABS, 12),
        jump(libc::BPF_JEQ, 0x0800, [0, 8]),
        load(libc::BPF_B, libc::BPF_ABS, 23),
        jump(libc::BPF_JEQ, 17, [0, 6]),
        // A fragment has no ports.
        load(libc::BPF_H, libc::BPF_ABS, 20),
        jump(libc::BPF_JSET, 0x3fff, [4, 0]),
        libc::sock_filter { code: code(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH), jt: 0, jf: 0, k: 14 },
        load(libc::BPF_H, libc::BPF_IND, 16),
        jump(libc::BPF_JEQ, port.into(), [0, 1]),
        end(ACCEPT),
        end(0),
    ];
    let length = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len: length, filter: program.as_mut_ptr() };
    let size = libc::socklen_t::try_from(size_of::<libc::sock_fprog>()).map_err(io::Error::other)?;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open while it is borrowed; the kernel reads `size` bytes of
    // `program`, and the `len` instructions it points to, which live until the end of this
    // function.
    check(
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, (&raw const program).cast(), size) }
            .into(),
    )
    .map(drop)
}

/// Binds a packet socket to an interface's IPv4 packets.
pub(crate) fn bind_packet(socket: impl AsFd, index: u32) -> io::Result<()> {
    // SAFETY: all zeroes is a sockaddr_ll.
    let mut address = unsafe { MaybeUninit::<libc::sockaddr_ll>::zeroed().assume_init() };
    address.sll_family = libc::sa_family_t::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
    address.sll_protocol = u16::try_from(libc::ETH_P_IP).map_err(io::Error::other)?.to_be();
    address.sll_ifindex = libc::c_int::try_from(index).map_err(io::Error::other)?;
    let size = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open while it is borrowed; the kernel reads `size` bytes of
    // `address`.
    check(unsafe { libc::bind(socket.as_fd().as_raw_fd(), (&raw const address).cast(), size) }.into()).map(drop)
}

/// Makes the child die by SIGKILL when the thread that starts it dies. std itself gives the child
/// an empty signal mask and the default action for SIGPIPE; the tests of `child` hold it to that.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let in_child = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // If the parent died before the call above, no signal will come, and this process has
        // another parent by now. A parent outside this pid namespace reads as 0 and cannot be the
        // one that forked from inside it.
        if u32::try_from(getppid().as_raw()) != Ok(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec: it makes two async-signal-safe calls,
    // allocates nothing (an io::Error of an errno is a plain number), takes no lock and touches no
    // memory but its own copy of `parent`.
    unsafe { command.pre_exec(in_child) };
}
