//! The plugins' allocator.
//!
//! This file needs nothing but std, so that `scripts/test --soak` can build it alone, for Miri and
//! ThreadSanitizer.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An allocator for a program of a few milliseconds: it hands out memory from the front of one
/// block, and takes back only what was handed out last. Large memory, and all memory once the block
/// is full, is the C library's.
///
/// musl maps and unmaps memory page by page: with it alone a bridge + host-local ADD makes 12 %
/// more system calls, and takes 8 % more CPU time, a DEL 17 %. Never taking memory back would be
/// simpler, and costs up to 8 %: more pages are touched.
#[derive(Debug)]
pub struct Arena {
    used: AtomicUsize,
    block: UnsafeCell<Block>,
}

/// So many bytes serve any ordinary call; what is not touched takes no memory.
const BLOCK: usize = 512 << 10;

/// The size from which on freed memory is given back to the kernel, which also returns it zeroed.
const LARGE: usize = 16 << 10;

/// The alignment serves every type there is; who asks for more gets the C library's.
#[derive(Debug)]
#[repr(C, align(16))]
struct Block([u8; BLOCK]);

// SAFETY: the bytes of the block are only reached through pointers that `alloc` has handed out,
// each range to one owner.
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

    /// Returns the pointer to a place of the block, usable for all that follows it: the block's
    /// own, never a caller's.
    fn at(&self, place: usize) -> *mut u8 {
        self.block.get().cast::<u8>().wrapping_add(place)
    }

    /// Moves the end of the used part from `from` to `to`, if it is at `from`.
    ///
    /// Release: the owner has done with what it gives back. Acquire: what former owners did is done
    /// before the next one uses the bytes. All changes are read-modify-write, so this holds with
    /// any number of moves between the two.
    fn move_end(&self, from: usize, to: usize) -> bool {
        to <= BLOCK && self.used.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

// SAFETY: a range is handed out by moving `used` from its beginning to its end, in one atomic step,
// and never again before its owner has given it back; it lies in the block, whose address does not
// change while the allocator is in use, and it begins at a multiple of the layout's alignment.
// Whatever does not lie in the block is, and was, left to `System`.
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
                    return self.at(begin);
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
            // SAFETY: so many bytes have just been allocated, and only for this caller.
            unsafe { ptr.write_bytes(0, layout.size()) };
        }
        ptr
    }

    #[inline(never)]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match self.place(ptr) {
            // The last one grows and shrinks where it is.
            Some(begin) if self.move_end(begin + layout.size(), begin + size) => return self.at(begin),
            Some(_) => {}
            // SAFETY: it does not lie in the block, so it came from `System`, with this layout.
            None => return unsafe { System.realloc(ptr, layout, size) },
        }
        // SAFETY: the caller vouches that `size` is not 0 and, rounded up to the alignment, fits an
        // `isize`.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: its size is not 0.
        let new = unsafe { self.alloc(wanted) };
        if !new.is_null() {
            // SAFETY: both have at least so many bytes, and a range just handed out overlaps with
            // none in use.
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
        assert!(arena.used.load(Ordering::Relaxed) > BLOCK - 1024);
        assert!(owned.iter().any(|(ptr, ..)| arena.place(*ptr).is_none()));
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
