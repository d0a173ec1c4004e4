//! Wraps the system calls that neither std nor nix offers as safe functions; [`Arena`] is the
//! plugins' allocator. No other module of the workspace has unsafe code.
//!
//! Each function wraps one system call, except [`die_with_parent`], which prepares two that run
//! between fork and exec, where code must not allocate. No function has preconditions, so each is
//! safe for every caller.
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

/// Converts the result of a C function that returns a negative number and sets `errno` on failure.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Returns the type of the namespace that a descriptor refers to, as a `CLONE_NEW…` constant. Fails
/// with ENOTTY if the descriptor does not refer to a namespace, and on kernels before 4.11.
pub(crate) fn namespace_type(fd: impl AsFd) -> io::Result<libc::c_int> {
    // nix computes the number of the request, because powerpc numbers requests differently.
    const NS_GET_NSTYPE: libc::Ioctl = nix::request_code_none!(0xb7, 3) as libc::Ioctl;
    // SAFETY: the descriptor is open for as long as it is borrowed, and this request takes no
    // argument, so the kernel touches none of our memory.
    let kind = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), NS_GET_NSTYPE) };
    check(kind.into()).map(|_| kind)
}

/// The option `SO_NETNS_COOKIE` of a socket.
#[derive(Clone, Copy, Debug)]
struct NetnsCookie;

/// The same number on all architectures for which the plugins are built.
const SO_NETNS_COOKIE: libc::c_int = 71;

nix::getsockopt_impl!(NetnsCookie, libc::SOL_SOCKET, SO_NETNS_COOKIE, u64, nix::sys::socket::sockopt::GetStruct<u64>);

/// Returns the number of the socket's network namespace, which no other namespace gets until the
/// next boot. Fails with ENOPROTOOPT on kernels before 5.14.
pub(crate) fn netns_cookie(socket: &impl AsFd) -> io::Result<u64> {
    Ok(nix::sys::socket::getsockopt(socket, NetnsCookie)?)
}

/// A setting of a tun or tap interface whose value is a number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TunSetting {
    /// The ID of the only user that may attach to it.
    Owner,
    /// The ID of the only group that may attach to it.
    Group,
    /// 1 if the interface stays after its last user has closed it, else 0.
    Persist,
}

/// Returns a request about the interface `name`. Fails with EINVAL if the name is too long.
fn ifreq(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all zeroes is an ifreq: an empty name, and a union of plain numbers.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    // The last byte of the field stays zero: it ends the name.
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    for (field_byte, name_byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *field_byte = name_byte.cast_signed() as libc::c_char;
    }
    Ok(request)
}

/// A request about the features of an interface.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EthtoolRequest<'a> {
    /// Returns the names of all features. The third word of the answer is their number.
    FeatureNames,
    /// Returns the state of all features. The second word of the answer is the number of blocks.
    Features,
    /// Sets features. The blocks must be as many as those of the interface; the kernel refuses
    /// another number.
    SetFeatures(&'a [u32]),
}

/// The number of words of the buffer for requests and answers: 64 KiB. The kernel has had 64
/// features at most, whose names take 2 KiB.
const ETHTOOL_WORDS: usize = 16 * 1024;
/// The number of blocks of features, each for 32, that the buffer has room for.
const MAX_FEATURE_BLOCKS: u32 = 64;

/// Sends a request about the interface `ifname` of the socket's namespace. Returns the buffer,
/// which begins with the kernel's answer. Fails with EINVAL if the name or the request is too long.
pub(crate) fn ethtool(socket: impl AsFd, ifname: &str, request: EthtoolRequest<'_>) -> io::Result<Vec<u32>> {
    let mut buffer = match request {
        // ETHTOOL_GSTRINGS, ETH_SS_FEATURES.
        EthtoolRequest::FeatureNames => vec![0x1b, 4],
        // ETHTOOL_GFEATURES.
        EthtoolRequest::Features => vec![0x3a, MAX_FEATURE_BLOCKS],
        // ETHTOOL_SFEATURES, with two words in each block.
        EthtoolRequest::SetFeatures(blocks) => [&[0x3b, (blocks.len() / 2) as u32], blocks].concat(),
    };
    if buffer.len() > ETHTOOL_WORDS {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    buffer.resize(ETHTOOL_WORDS, 0);
    let mut request = ifreq(ifname)?;
    request.ifr_ifru.ifru_data = buffer.as_mut_ptr().cast();
    // SIOCETHTOOL.
    const REQUEST: libc::Ioctl = 0x8946;
    // SAFETY: the descriptor is open for as long as it is borrowed. The kernel reads the ifreq and
    // accesses `buffer`, which both live until after the call, according to the command at the
    // beginning of the buffer: it writes the names of its features, of which no kernel has more
    // than the buffer has room for, or at most the given number of blocks, or reads the given
    // blocks.
    check(unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), REQUEST, &raw mut request) }.into())?;
    Ok(buffer)
}

/// Creates a tun or tap interface in the calling thread's network namespace and attaches `device`,
/// an open `/dev/net/tun`, to it. `flags` are `IFF_*`. Fails with EINVAL if the name is too long.
pub(crate) fn create_tun(device: &File, name: &str, flags: libc::c_int) -> io::Result<()> {
    let mut request = ifreq(name)?;
    // The field of `ifreq` has 16 bits.
    let flags = flags as u16;
    request.ifr_ifru.ifru_flags = flags.cast_signed();
    // SAFETY: the descriptor is open for as long as it is borrowed; the kernel reads and writes one
    // ifreq, which lives until after the call. On another kind of file the request fails without an
    // access to the argument.
    check(unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) }.into()).map(drop)
}

/// Changes a setting of the tun or tap interface that `device` is attached to.
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

/// Returns a descriptor that becomes readable when the process ends. Fails with ENOSYS on kernels
/// before 5.3.
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

/// Whether this process ignores the signal, for example because nohup started it.
pub(crate) fn is_ignored(signal: Signal) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action nothing changes; the old one is written to our own memory of its
    // type.
    check(unsafe { libc::sigaction(signal as libc::c_int, ptr::null(), action.as_mut_ptr()) }.into())?;
    // SAFETY: all zeroes is a sigaction, and the call has filled it in.
    Ok(unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN)
}

/// Sets the default action of SIGCHLD. A process inherits from its caller that the signal is
/// ignored; the kernel then reaps its children by itself, and waiting for them fails with ECHILD.
///
/// # Errors
/// None is known: the arguments are valid.
pub fn default_sigchld() -> io::Result<()> {
    // SAFETY: all zeroes is a sigaction: SIG_DFL, without flags and with an empty mask.
    let action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
    // SAFETY: the kernel reads `action`, which lives until the end of this function. The default
    // action runs no code of this process.
    check(unsafe { libc::sigaction(libc::SIGCHLD, &raw const action, ptr::null_mut()) }.into()).map(drop)
}

/// Returns a copy of the descriptor `fd`, which this process was started with (0 to 2, for
/// example).
///
/// # Errors
/// EBADF if the descriptor is not open.
pub fn inherited(fd: u8) -> io::Result<OwnedFd> {
    /// The lowest number for the copy, above those of the standard descriptors, so that the copy
    /// does not get the number of a closed one.
    const LOWEST_COPY: libc::c_int = 10;
    // SAFETY: the call takes integers and accesses no memory of this process.
    let copy = check(unsafe { libc::fcntl(fd.into(), libc::F_DUPFD_CLOEXEC, LOWEST_COPY) }.into())?;
    let copy = libc::c_int::try_from(copy).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor, close-on-exec, and no other code has
    // it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Attaches a BPF filter to a packet socket (of type SOCK_RAW): the socket then receives only
/// unfragmented UDP packets over IPv4 to this port.
///
/// In the filter, a `load` reads a big-endian number at an offset of the frame, whose Ethernet
/// header has 14 bytes. A `jump` compares the number, and skips as many instructions as its last
/// argument gives for true and for false. Each check that fails skips to the last instruction,
/// which drops the frame.
pub(crate) fn filter_udp_port(socket: impl AsFd, port: u16) -> io::Result<()> {
    const WHOLE_PACKET: u32 = 0xffff;
    /// The jump that skips no instruction.
    const NEXT: u8 = 0;
    // All codes fit: the kernel's instruction has 16 bits for them.
    let code = |code: u32| u16::try_from(code).unwrap_or_default();
    let load = |size: u32, mode: u32, offset: u32| libc::sock_filter {
        code: code(libc::BPF_LD | size | mode),
        jt: 0,
        jf: 0,
        k: offset,
    };
    let jump = |test: u32, value: u32, [jt, jf]: [u8; 2]| libc::sock_filter {
        code: code(libc::BPF_JMP | test | libc::BPF_K),
        jt,
        jf,
        k: value,
    };
    // Ends the filter: the socket receives `length` bytes of the frame; 0 drops the frame.
    let deliver = |length: u32| libc::sock_filter { code: code(libc::BPF_RET | libc::BPF_K), jt: 0, jf: 0, k: length };
    let mut program = [
        // The Ethernet type is IPv4.
        load(libc::BPF_H, libc::BPF_ABS, 12),
        jump(libc::BPF_JEQ, 0x0800, [NEXT, 8]),
        // The protocol is UDP.
        load(libc::BPF_B, libc::BPF_ABS, 23),
        jump(libc::BPF_JEQ, 17, [NEXT, 6]),
        // The packet is not a fragment: neither an offset nor the flag "more fragments".
        load(libc::BPF_H, libc::BPF_ABS, 20),
        jump(libc::BPF_JSET, 0x3fff, [4, NEXT]),
        // The index register gets the length of the IP header, which is in the header's first byte.
        libc::sock_filter { code: code(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH), jt: 0, jf: 0, k: 14 },
        // The UDP destination port is `port`: the offset is that of the Ethernet header's end (14),
        // of the port in the UDP header (2), and the index register.
        load(libc::BPF_H, libc::BPF_IND, 16),
        jump(libc::BPF_JEQ, port.into(), [NEXT, 1]),
        deliver(WHOLE_PACKET),
        deliver(0),
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

/// Binds a packet socket to the interface `index`, so that the socket receives the interface's IPv4
/// packets.
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

/// Makes the kernel kill the program that `command` starts when the thread that starts it ends.
///
/// The child's signal mask and SIGPIPE need no code here: std resets both, which the tests of
/// `child` check.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let in_child = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // If the parent died before the call above, no signal will come, and this process already
        // has another parent.
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
