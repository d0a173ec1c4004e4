//! How long the tests may take, by which seed they choose, and the figures they end with.

use std::io::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// `CNI_SOAK`: how many times over; `None` for the share of an ordinary run.
pub fn soak() -> Option<u64> {
    let text = std::env::var("CNI_SOAK").ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("CNI_SOAK={text}: a number of rounds is expected")))
}

/// How long the sweeps of one test may go on in a soak run: `CNI_SOAK_MINUTES`, else half an hour.
pub fn patience() -> Duration {
    let text = std::env::var("CNI_SOAK_MINUTES").ok().filter(|text| !text.is_empty());
    let minutes = text.map_or(30, |text| {
        text.parse().unwrap_or_else(|_| panic!("CNI_SOAK_MINUTES={text}: a number of minutes is expected"))
    });
    Duration::from_secs(60 * minutes)
}

/// `CNI_SEED`, else for an ordinary run always the same, so that what passes today passes tomorrow;
/// a soak run looks elsewhere each hour.
pub fn seed() -> u64 {
    match std::env::var("CNI_SEED") {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("CNI_SEED={text}: a number is expected")),
        Err(_) if soak().is_none() => 1,
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() / 3600,
    }
}

/// Writes one line to stderr directly, because libtest hides the output of passing tests.
/// `scripts/test` shows the line.
pub fn figure(text: &str) {
    let line = format!("\nFIGURE {text}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Reports a finding at once instead of at the end of a run that may take hours.
pub fn found(text: &str) {
    let _ = std::io::stderr().write_all(format!("\nFOUND {text}\n").as_bytes());
}

/// Numbers that look like chance and are the same for the same seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Starts at `seed`.
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
}
