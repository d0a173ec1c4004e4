//! Formats times for people.

use std::time::Duration;

/// Formats a time, the duration since the Unix epoch, as `2026-11-21T01:02:03.456Z`.
pub fn rfc3339(since_epoch: Duration) -> String {
    let (seconds, ms) = (since_epoch.as_secs(), since_epoch.subsec_millis());
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// Returns the year, month and day of the date `days` after 1970-01-01, in the Gregorian calendar.
fn civil_date(days: u64) -> (u64, u64, u64) {
    // Any 400 years in a row have this number of days. They are skipped to keep the loop short.
    const DAYS_OF_400_YEARS: u64 = 146_097;
    let mut year = 1970 + days / DAYS_OF_400_YEARS * 400;
    let mut month = 1;
    let mut days = days % DAYS_OF_400_YEARS;
    while days >= days_of_month(year, month) {
        days -= days_of_month(year, month);
        (year, month) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
    }
    (year, month, days + 1)
}

/// Returns the number of days of a month from 1 to 12.
fn days_of_month(year: u64, month: u64) -> u64 {
    let is_leap_year = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    match month {
        2 if is_leap_year => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_format_of_date() {
        // date -u -d @SECONDS +%FT%TZ
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (1_709_251_199, "2024-02-29T23:59:59.007Z"),
            (1_795_225_384, "2026-11-21T01:43:04.007Z"),
            (4_107_542_399, "2100-02-28T23:59:59.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
            (16_725_225_599, "2499-12-31T23:59:59.007Z"),
        ] {
            assert_eq!(rfc3339(Duration::new(seconds, 7_000_000)), expected);
        }
    }
}
