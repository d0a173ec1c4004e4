//! Formats times for people, and reads them.

use std::time::Duration;

/// Formats a time, the duration since the Unix epoch, as `2026-11-21T01:02:03.456Z`.
pub fn rfc3339(since_epoch: Duration) -> String {
    let (seconds, ms) = (since_epoch.as_secs(), since_epoch.subsec_millis());
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// Returns the seconds since the Unix epoch of a time such as `2026-11-21T01:02:03Z`. A fraction of
/// the second is ignored. Returns `None` for another format, another time zone than `Z`, or a time
/// before 1970 or after 9999.
pub fn parse_rfc3339(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let [year, month, day] = numbers(date, '-')?;
    let [hour, minute, second] = numbers(time.split('.').next()?, ':')?;
    let is_valid =
        (1970..=9999).contains(&year) && (1..=12).contains(&month) && hour < 24 && minute < 60 && second < 60;
    if !is_valid || day == 0 || day > days_of_month(year, month) {
        return None;
    }
    let days_of_years: u64 = (1970..year).map(|year| if is_leap_year(year) { 366 } else { 365 }).sum();
    let days_of_months: u64 = (1..month).map(|month| days_of_month(year, month)).sum();
    Some((days_of_years + days_of_months + day - 1) * 86_400 + hour * 3600 + minute * 60 + second)
}

/// Returns the three unsigned numbers of a text, or `None` if the text has another form.
fn numbers(text: &str, separator: char) -> Option<[u64; 3]> {
    let parts: Vec<u64> = text.split(separator).map(|part| part.parse().ok()).collect::<Option<_>>()?;
    parts.try_into().ok()
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

/// Whether February of this year has 29 days.
fn is_leap_year(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Returns the number of days of a month from 1 to 12.
fn days_of_month(year: u64, month: u64) -> u64 {
    match month {
        2 if is_leap_year(year) => 29,
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
            assert_eq!(parse_rfc3339(expected), Some(seconds));
        }
    }

    #[test]
    fn only_times_of_the_calendar_in_utc_are_read() {
        assert_eq!(parse_rfc3339("2026-11-21T01:43:04Z"), Some(1_795_225_384));
        for text in [
            "",
            "2026-11-21T01:43:04",
            "2026-11-21T01:43:04+01:00",
            "2026-11-21 01:43:04Z",
            "2026-02-29T01:43:04Z",
            "2026-13-01T01:43:04Z",
            "2026-00-01T01:43:04Z",
            "2026-11-00T01:43:04Z",
            "2026-11-21T24:00:00Z",
            "2026-11-21T01:60:00Z",
            "2026-11-21T01:43Z",
            "2026-11-21T01:43:-4Z",
            "1969-12-31T23:59:59Z",
            "18446744073709551615-01-01T00:00:00Z",
        ] {
            assert_eq!(parse_rfc3339(text), None, "{text}");
        }
    }
}
