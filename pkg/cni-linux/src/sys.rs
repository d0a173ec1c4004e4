//! The only unsafe code of the workspace: what neither std nor nix offers as a safe function.
//!
//! Each function is a few lines over one system call and has a contract without preconditions, so that no caller
//! needs to think. [`Arena`] is the plugins' allocator. The newcomer's mistake is in [`die_with_parent`]: between fork and
//! exec nothing may allocate.
#![allow(unsafe_code, reason = "the workspace's one room for it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::signal::Signal;

/// Turns a C result into an `io::Result`.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The kind of namespace behind a descriptor, as a `CLONE_NEW…` constant. ENOTTY if it is none (or on a kernel before
/// 4.11).
pub(crate) fn namespace_type(fd: impl AsFd) -> io::Result<libc::c_int> {
    // Powerpc numbers its requests differently from all others; nix knows.
    const NS_GET_NSTYPE: libc::Ioctl = nix::request_code_none!(0xb7, 3) as libc::Ioctl;
    // SAFETY: the descriptor is open for as long as it is borrowed, and this request takes no argument, so the kernel
    // touches none of our memory.
    let kind = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), NS_GET_NSTYPE) };
    check(kind.into()).map(|_| kind)
}

/// A descriptor that becomes readable when the process ends. ENOSYS on a kernel before 5.3.
pub(crate) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    // SAFETY: the call takes two integers and touches none of our memory.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let fd = libc::c_int::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor, close-on-exec, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether this process ignores the signal, because whoever started it did (nohup).
pub(crate) fn is_ignored(signal: Signal) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action nothing changes; the old one is written to memory of ours that has its type.
    check(unsafe { libc::sigaction(signal as libc::c_int, ptr::null(), action.as_mut_ptr()) }.into())?;
    // SAFETY: all zeroes is a sigaction, and the call has filled it in.
    Ok(unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN)
}

/// Makes the child die by SIGKILL when the thread that starts it dies. std itself gives the child an empty signal
/// mask and the default action for SIGPIPE; the tests of `child` hold it to that.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let in_child = move || {
        // SAFETY: an integer in, nothing out; async-signal-safe.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) }.into())?;
        // If the parent died before the call above, no signal will come: we are already somebody else's child. A parent
        // outside this pid namespace reads as 0 and cannot be ours, which we forked from inside it.
        // SAFETY: no arguments, cannot fail, async-signal-safe.
        if u32::try_from(unsafe { libc::getppid() }) != Ok(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec: it makes two async-signal-safe calls, allocates nothing (an
    // io::Error of an errno is a plain number), takes no lock and touches no memory but its own copy of `parent`.
    unsafe { command.pre_exec(in_child) };
}

/// The memory of a program that ends in a moment: handed out from the front of one block, and taken back only from its
/// end. What is large, and everything once the block is full, is the C library's business as ever.
///
/// musl maps and unmaps memory page by page, which was a third of the system calls of an ADD.
#[derive(Debug)]
pub struct Arena {
    used: AtomicUsize,
    block: UnsafeCell<Block>,
}

/// So many bytes serve any ordinary call; what is not touched takes no memory.
const BLOCK: usize = 512 << 10;

/// From here on memory is worth giving back, and the kernel's is zeroed already.
const LARGE: usize = 16 << 10;

/// The alignment serves every type there is; who asks for more gets the C library's.
#[derive(Debug)]
#[repr(C, align(16))]
struct Block([u8; BLOCK]);

// SAFETY: the bytes of the block are only reached through pointers that `alloc` has handed out, each range to one owner.
unsafe impl Sync for Arena {}

impl Default for Arena {
    fn default() -> Arena {
        Arena::new()
    }
}

impl Arena {
    /// One of which nothing is used.
    pub const fn new() -> Arena {
        Arena { used: AtomicUsize::new(0), block: UnsafeCell::new(Block([0; BLOCK])) }
    }

    /// Where in the block a pointer lies.
    fn place(&self, ptr: *const u8) -> Option<usize> {
        let place = ptr.addr().wrapping_sub(self.block.get().addr());
        (place < BLOCK).then_some(place)
    }

    /// Moves the end of what is used from `from`, if that is where it is.
    fn move_end(&self, from: usize, to: usize) -> bool {
        to <= BLOCK && self.used.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

// SAFETY: a range is handed out by moving `used` from its beginning to its end, in one atomic step, and never again before
// its owner has given it back; it lies in the block, whose address does not change while the allocator is in use, and it
// begins at a multiple of the layout's alignment. Whatever does not lie in the block is, and was, left to `System`.
unsafe impl GlobalAlloc for Arena {
    // Inlined into every place that allocates, these few lines were 30 kB of each plugin.
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() < LARGE && layout.align() <= align_of::<Block>() {
            let mut used = self.used.load(Ordering::Relaxed);
            while let begin = used.next_multiple_of(layout.align())
                && let end = begin + layout.size()
                && end <= BLOCK
            {
                if self.move_end(used, end) {
                    // SAFETY: `begin` is at most BLOCK.
                    return unsafe { self.block.get().cast::<u8>().add(begin) };
                }
                used = self.used.load(Ordering::Relaxed);
            }
        }
        // SAFETY: the caller keeps `alloc`'s contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    #[inline(never)]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        match self.place(ptr) {
            // Only the last one can be taken back.
            Some(begin) => drop(self.move_end(begin + layout.size(), begin)),
            // SAFETY: it does not lie in the block, so it came from `System`, with this layout.
            None => unsafe { System.dealloc(ptr, layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE {
            // SAFETY: the caller keeps the contract. What is so large is `System`'s in `alloc` too.
            return unsafe { System.alloc_zeroed(layout) };
        }
        // SAFETY: the caller keeps the contract.
        let ptr = unsafe { self.alloc(layout) };
        if !ptr.is_null() {
            // SAFETY: so many bytes have just been handed out, to nobody but us.
            unsafe { ptr.write_bytes(0, layout.size()) };
        }
        ptr
    }

    #[inline(never)]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match self.place(ptr) {
            // The last one grows and shrinks where it is.
            Some(begin) if self.move_end(begin + layout.size(), begin + size) => return ptr,
            Some(_) => {}
            // SAFETY: it does not lie in the block, so it came from `System`, with this layout.
            None => return unsafe { System.realloc(ptr, layout, size) },
        }
        // SAFETY: the caller vouches that `size` is not 0 and, rounded up to the alignment, fits an `isize`.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: its size is not 0.
        let new = unsafe { self.alloc(wanted) };
        if !new.is_null() {
            // SAFETY: both have at least so many bytes, and a range just handed out overlaps with none in use.
            unsafe { ptr::copy_nonoverlapping(ptr, new, layout.size().min(size)) };
            // SAFETY: the caller gives it up, with its layout.
            unsafe { self.dealloc(ptr, layout) };
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    #[test]
    fn memory_is_nobody_elses_and_keeps_what_is_in_it() {
        static ARENA: Arena = Arena::new();
        let arena = &ARENA;
        let mut owned: Vec<(*mut u8, Layout, u8)> = Vec::new();
        // Until the block is full and beyond, sizes and alignments mixed, every third given back, every fifth resized.
        for round in 1..4_000_usize {
            let wanted = layout(1 + round * 37 % 700, 1 << (round % 7));
            let byte = u8::try_from(round % 251).unwrap();
            // SAFETY: no size is 0.
            let ptr = unsafe { arena.alloc(wanted) };
            assert_eq!(ptr.addr() % wanted.align(), 0);
            // SAFETY: just allocated.
            unsafe { ptr.write_bytes(byte, wanted.size()) };
            owned.push((ptr, wanted, byte));
            if round % 3 == 0 {
                let (ptr, layout, _) = owned.swap_remove(round * 7 % owned.len());
                // SAFETY: allocated with this layout, and forgotten.
                unsafe { arena.dealloc(ptr, layout) };
            }
            if round % 5 == 0 {
                let last = owned.last_mut().unwrap();
                let grown = layout(last.1.size() * (1 + round % 90), last.1.align());
                // SAFETY: allocated with this layout; the new bytes are written before they are read.
                unsafe {
                    last.0 = arena.realloc(last.0, last.1, grown.size());
                    last.0.add(last.1.size()).write_bytes(last.2, grown.size() - last.1.size());
                }
                last.1 = grown;
            }
        }
        assert!(arena.used.load(Ordering::Relaxed) > BLOCK - 1024);
        assert!(owned.iter().any(|(ptr, ..)| arena.place(*ptr).is_none()));
        for (ptr, layout, byte) in owned {
            // SAFETY: all its bytes have been written.
            let bytes = unsafe { std::slice::from_raw_parts(ptr, layout.size()) };
            assert!(bytes.iter().all(|there| *there == byte));
            // SAFETY: allocated with this layout.
            unsafe { arena.dealloc(ptr, layout) };
        }
    }

    #[test]
    fn the_last_one_goes_back_and_what_comes_zeroed_is() {
        static ARENA: Arena = Arena::new();
        let arena = &ARENA;
        let small = layout(100, 8);
        // SAFETY: each is given back with its layout, once.
        unsafe {
            let first = arena.alloc(small);
            first.write_bytes(7, small.size());
            arena.dealloc(first, small);
            assert_eq!(arena.used.load(Ordering::Relaxed), 0);
            let again = arena.alloc_zeroed(small);
            assert_eq!(again, first);
            assert!(std::slice::from_raw_parts(again, small.size()).iter().all(|byte| *byte == 0));
            assert_eq!(arena.realloc(again, small, 200), again);
            arena.dealloc(again, layout(200, 8));
            let large = arena.alloc_zeroed(layout(LARGE, 8));
            assert_eq!((arena.place(large), arena.used.load(Ordering::Relaxed)), (None, 0));
            arena.dealloc(large, layout(LARGE, 8));
        }
    }

    #[test]
    fn threads_get_different_memory() {
        static ARENA: Arena = Arena::new();
        let arena = &ARENA;
        let all = std::thread::scope(|scope| {
            let one = || {
                // SAFETY: the size is not 0.
                (0..2_000).map(|_| unsafe { arena.alloc(layout(24, 8)) }.addr()).collect::<Vec<_>>()
            };
            let threads = [0; 4].map(|_| scope.spawn(one));
            threads.map(|thread| thread.join().unwrap()).concat()
        });
        let different: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len());
        assert!(different.iter().all(|addr| (**addr - arena.block.get().addr()).is_multiple_of(24)));
    }
}
