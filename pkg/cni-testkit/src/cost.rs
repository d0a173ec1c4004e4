//! How the time that something takes grows with what it is given.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Asserts that `large` takes less than `times` as long as `small`.
///
/// It is a ratio, so it does not matter how fast the machine is. It is the CPU time of the calling
/// thread, the least of several runs of each, so it hardly matters who else is at work. What that
/// still leaves is met by another run: the least values come closer to the truth with each, and
/// what grows too fast stays above it in all of them.
///
/// # Panics
/// If it takes longer.
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

fn cost(work: impl Fn()) -> Duration {
    let now = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a thread has a clock"));
    let begun = now();
    work();
    now() - begun
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
