//! Compares the CPU time of two functions.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Asserts that `large` takes less than `times` as long as `small`.
///
/// It compares the CPU time of the calling thread, in the fastest of 3 to 6 runs of each, so
/// neither the speed of the machine nor other processes matter much.
///
/// # Panics
/// If it takes as long or longer.
#[track_caller]
pub fn assert_cost_below(times: u32, small: impl Fn(), large: impl Fn()) {
    let (mut least_small, mut least_large) = (Duration::MAX, Duration::MAX);
    for run in 1..=6 {
        least_small = least_small.min(cost(&small));
        least_large = least_large.min(cost(&large));
        if run >= 3 && least_large < least_small * times {
            return;
        }
    }
    panic!("{least_large:?}, not less than {times} times {least_small:?}");
}

/// Returns the CPU time that the calling thread spends on `work`, in the kernel too.
///
/// # Panics
/// If the thread has no clock.
pub fn cost(work: impl FnOnce()) -> Duration {
    let now = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a thread has a clock"));
    let start = now();
    work();
    now() - start
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(steps: u64) {
        for step in 0..steps {
            std::hint::black_box(step);
        }
    }

    #[test]
    fn linear_and_quadratic_growth_are_distinguished() {
        assert_cost_below(8, || work(100_000), || work(400_000));
        let square = || assert_cost_below(8, || work(100_000), || work(1_600_000));
        assert!(std::panic::catch_unwind(square).is_err());
    }
}
