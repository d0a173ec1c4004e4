//! The memory allocator of the plugins and of cnitool.
//!
//! This file uses only std, so that `scripts/test --soak` can build it alone, for Miri and
//! ThreadSanitizer.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An allocator for a program that runs for a few milliseconds. It allocates consecutive ranges of
/// one block of `SIZE` bytes, and reuses a freed range only if it is the last one. Memory that is
/// large or does not fit into the rest of the block comes from the C library. The default size is
/// enough for an ordinary call of a plugin. Untouched pages of the block take no memory.
///
/// musl maps and unmaps memory page by page: without this allocator a bridge + host-local ADD makes
/// 13 % more system calls and takes 8 % more CPU time, a DEL 17 %. Not reusing the last range would
/// be simpler, but takes up to 8 % more CPU time, because more pages are touched.
#[derive(Debug)]
pub struct Arena<const SIZE: usize = { 512 << 10 }> {
    /// The offset of the block's unused part.
    used: AtomicUsize,
    block: UnsafeCell<Block<SIZE>>,
}

/// Allocations of this size and more come from the C library, which returns them to the kernel when
/// they are freed, and gets zeroed memory from it.
const LARGE: usize = 16 << 10;

/// The memory to allocate from. Allocations with an alignment above 16 come from the C library.
#[derive(Debug)]
#[repr(C, align(16))]
struct Block<const SIZE: usize>([u8; SIZE]);

// SAFETY: the bytes of the block are accessed only through pointers that `alloc` returned, each
// range by one owner.
unsafe impl<const SIZE: usize> Sync for Arena<SIZE> {}

impl<const SIZE: usize> Default for Arena<SIZE> {
    fn default() -> Arena<SIZE> {
        Arena::new()
    }
}

impl<const SIZE: usize> Arena<SIZE> {
    /// Returns an arena without allocations.
    pub const fn new() -> Arena<SIZE> {
        Arena { used: AtomicUsize::new(0), block: UnsafeCell::new(Block([0; SIZE])) }
    }

    /// Returns the offset at which a pointer points into the block; `None` if it points elsewhere.
    fn offset(&self, ptr: *const u8) -> Option<usize> {
        let offset = ptr.addr().wrapping_sub(self.block.get().addr());
        if offset < SIZE { Some(offset) } else { None }
    }

    /// Returns a pointer to an offset in the block. It is derived from the block's own pointer, so
    /// it is valid for all bytes up to the block's end.
    fn pointer(&self, offset: usize) -> *mut u8 {
        self.block.get().cast::<u8>().wrapping_add(offset)
    }

    /// Moves the end of the used part from the offset `from` to the offset `to`. Returns `false`,
    /// and changes nothing, if the end is not at `from` or `to` is beyond the block.
    ///
    /// Release: an owner that frees its range has finished its accesses before the move. Acquire:
    /// an owner that gets a range begins its accesses after the move. All changes of `used` are
    /// read-modify-write operations, so this order holds even with other moves between these two.
    fn move_end(&self, from: usize, to: usize) -> bool {
        to <= SIZE && self.used.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

// SAFETY: a range is allocated by moving `used` from the range's begin to its end in one atomic
// step, and not allocated again before its owner frees it. Each range is inside the block, whose
// address does not change while the allocator is in use, and begins at a multiple of the layout's
// alignment. Memory outside the block is allocated, reallocated and freed by `System`.
unsafe impl<const SIZE: usize> GlobalAlloc for Arena<SIZE> {
    /// Returns the next unused range of the block, or memory from the C library if `layout` is
    /// large, has a larger alignment than the block, or does not fit.
    // Inlining this function at each allocation would add 30 kB to each plugin.
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() < LARGE && layout.align() <= align_of::<Block<SIZE>>() {
            loop {
                let used = self.used.load(Ordering::Relaxed);
                let begin = used.next_multiple_of(layout.align());
                let end = begin + layout.size();
                if end > SIZE {
                    break;
                }
                if self.move_end(used, end) {
                    return self.pointer(begin);
                }
                // Another thread has moved the end: try again.
            }
        }
        // SAFETY: the caller keeps `alloc`'s contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    /// Frees memory. A range of the block becomes unused only if it is the last one.
    #[inline(never)]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        match self.offset(ptr) {
            // Only the last range of the used part can be reused. Any other stays used.
            Some(begin) => drop(self.move_end(begin + layout.size(), begin)),
            // SAFETY: memory outside the block was allocated by `System`, with this layout.
            None => unsafe { System.dealloc(ptr, layout) },
        }
    }

    /// Allocates zeroed memory. Large ranges come from the C library, which gets them zeroed from
    /// the kernel.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE {
            // SAFETY: the caller keeps the contract. `alloc` would use `System` for this size, too.
            return unsafe { System.alloc_zeroed(layout) };
        }
        // SAFETY: the caller keeps the contract.
        let ptr = unsafe { self.alloc(layout) };
        if !ptr.is_null() {
            // SAFETY: `alloc` has just returned a range of this size.
            unsafe { ptr.write_bytes(0, layout.size()) };
        }
        ptr
    }

    /// Changes the size of a range: in place if it is the last one of the block and fits, else by a
    /// copy. Memory outside the block is resized by the C library. Returns null, and leaves the old
    /// range, if there is no memory.
    #[inline(never)]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match self.offset(ptr) {
            Some(begin) if self.move_end(begin + layout.size(), begin + size) => return self.pointer(begin),
            Some(_) => {}
            // SAFETY: memory outside the block was allocated by `System`, with this layout.
            None => return unsafe { System.realloc(ptr, layout, size) },
        }
        // SAFETY: by the contract of `realloc`, `size` is not 0 and, rounded up to the alignment,
        // fits into an `isize`.
        let new_layout = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: the size of `new_layout` is not 0.
        let new = unsafe { self.alloc(new_layout) };
        if !new.is_null() {
            // SAFETY: both ranges have at least this many bytes, and a new range does not overlap
            // with one in use.
            unsafe { ptr::copy_nonoverlapping(ptr, new, layout.size().min(size)) };
            // SAFETY: the caller no longer uses the old range, which has this layout.
            unsafe { self.dealloc(ptr, layout) };
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The default size of the block.
    const SIZE: usize = 512 << 10;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    #[test]
    fn allocations_do_not_overlap_and_keep_their_content() {
        static ARENA: Arena = Arena::new();
        let arena = &ARENA;
        let mut owned: Vec<(*mut u8, Layout, u8)> = Vec::new();
        // Until the block is full and beyond, sizes and alignments mixed, every third given back,
        // every fifth resized.
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
                // SAFETY: allocated with this layout; the new bytes are written before they are
                // read.
                unsafe {
                    last.0 = arena.realloc(last.0, last.1, grown.size());
                    last.0.add(last.1.size()).write_bytes(last.2, grown.size() - last.1.size());
                }
                last.1 = grown;
            }
        }
        assert!(arena.used.load(Ordering::Relaxed) > SIZE - 1024);
        assert!(owned.iter().any(|(ptr, ..)| arena.offset(*ptr).is_none()));
        for (ptr, layout, byte) in owned {
            // SAFETY: all its bytes have been written.
            let bytes = unsafe { std::slice::from_raw_parts(ptr, layout.size()) };
            // As a whole, not byte by byte: Miri takes minutes for that.
            assert!(bytes == vec![byte; layout.size()]);
            // SAFETY: allocated with this layout.
            unsafe { arena.dealloc(ptr, layout) };
        }
    }

    #[test]
    fn freed_memory_is_reused_and_zeroed_memory_is_zero() {
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
            assert_eq!((arena.offset(large), arena.used.load(Ordering::Relaxed)), (None, 0));
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

    /// The pointer that is handed back may be used for less than the new size, as that of a slice
    /// is: Miri would object.
    #[test]
    fn memory_grown_in_place_is_usable_to_its_end() {
        static ARENA: Arena = Arena::new();
        let small = layout(100, 8);
        // SAFETY: given back with its layout, once; bytes beyond the first hundred are written
        // after the growth.
        unsafe {
            let first = ARENA.alloc_zeroed(small);
            let narrow = std::slice::from_raw_parts_mut(first, small.size()).as_mut_ptr();
            let grown = ARENA.realloc(narrow, small, 200);
            assert_eq!(grown, first);
            grown.write_bytes(7, 200);
            ARENA.dealloc(grown, layout(200, 8));
        }
    }

    /// The threads share one relaxed counter, which orders nothing else: a data race here is the
    /// arena's. It is seen by Miri and by ThreadSanitizer, in which `scripts/test --soak` runs this
    /// file.
    #[test]
    fn another_thread_can_reuse_freed_memory() {
        static ARENA: Arena = Arena::new();
        static TURN: AtomicUsize = AtomicUsize::new(0);
        fn wait_for(turn: usize) {
            while TURN.load(Ordering::Relaxed) != turn {
                std::thread::yield_now();
            }
        }
        fn use_and_free(byte: u8) {
            let small = layout(64, 8);
            // SAFETY: the size is not 0, all bytes are written before they are read, and it is
            // given back once.
            unsafe {
                let ptr = ARENA.alloc(small);
                ptr.write_bytes(byte, small.size());
                assert!(std::slice::from_raw_parts(ptr, small.size()).iter().all(|there| *there == byte));
                ARENA.dealloc(ptr, small);
            }
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Starting a thread orders what was done before: the other one must run by now.
                wait_for(1);
                use_and_free(1);
                TURN.store(2, Ordering::Relaxed);
            });
            scope.spawn(|| {
                TURN.store(1, Ordering::Relaxed);
                wait_for(2);
                use_and_free(2);
            });
        });
    }
}
