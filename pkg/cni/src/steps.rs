//! Log lines with durations: one for each call at the level `info`, one for each step at `debug`.
//!
//! The lines go to the logger of the crate `log`, which `cni-plugin` installs if CNI_LOG is set.
//! Without a logger a step costs one comparison: no clock is read and no text is formatted.
//! [`fields`] parses a line.

use std::fmt;
use std::time::Instant;

use crate::Result;
use crate::machine::{Exit, Output};
use crate::skel::Environment;

/// A step that has begun, with its start time, or `None` if steps are not logged.
#[derive(Debug)]
pub struct Step(Option<Instant>);

impl Step {
    /// Begins a step.
    #[inline]
    pub fn begin() -> Step {
        Step(log::log_enabled!(log::Level::Debug).then(Instant::now))
    }

    /// Whether the step is logged. If not, the caller need not format a text for
    /// [`end`](Step::end).
    #[inline]
    pub fn is_logged(&self) -> bool {
        self.0.is_some()
    }

    /// Logs the step and its outcome.
    pub fn end<T, E: fmt::Display>(self, what: impl fmt::Display, outcome: &Result<T, E>) {
        let Some(begun) = self.0 else { return };
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        match outcome {
            Ok(_) => log::debug!("step={} ms={ms:.3}", Quoted(what)),
            Err(error) => log::debug!("step={} ms={ms:.3} error={}", Quoted(what), Quoted(error)),
        }
    }

    /// Logs the step as [`end`](Step::end) does. If it failed, also logs the request.
    pub fn end_request<T, E: fmt::Display>(
        self,
        what: impl fmt::Display,
        outcome: &Result<T, E>,
        request: impl FnOnce() -> String,
    ) {
        let Some(begun) = self.0 else { return };
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        match outcome {
            Ok(_) => log::debug!("step={} ms={ms:.3}", Quoted(what)),
            Err(error) => {
                log::debug!("step={} ms={ms:.3} error={} request={}", Quoted(what), Quoted(error), Quoted(request()));
            }
        }
    }

    /// Logs the run of a program and how it ended (key `end`). If the program failed, also logs its
    /// output (key `said`) and its input (key `request`).
    pub fn end_program(self, what: impl fmt::Display, stdin: &[u8], output: &Output) {
        let Some(begun) = self.0 else { return };
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let (what, end) = (Quoted(what), Quoted(output.status));
        if output.status == Exit::Status(0) {
            return log::debug!("step={what} ms={ms:.3} end={end}");
        }
        let printed = beginning(&output.stdout) + &beginning(&output.stderr);
        let printed = Quoted(printed.trim().to_owned());
        log::debug!("step={what} ms={ms:.3} end={end} said={printed} request={}", Quoted(beginning(stdin)));
    }
}

/// Returns the first 8 KiB of a program's input or output, so that a log line does not become too
/// long.
fn beginning(bytes: &[u8]) -> String {
    const LIMIT: usize = 8 << 10;
    String::from_utf8_lossy(bytes.get(..LIMIT).unwrap_or(bytes)).into_owned()
}

/// Formats bytes as two hex digits each, for the log.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A call that has begun, with its start time, or `None` if calls are not logged.
#[derive(Debug)]
pub(crate) struct CallTimer(Option<Instant>);

impl CallTimer {
    /// Begins a call.
    pub(crate) fn begin() -> CallTimer {
        CallTimer(log::log_enabled!(log::Level::Info).then(Instant::now))
    }

    /// Logs the call: plugin, verb, attachment, outcome and duration.
    pub(crate) fn end(self, plugin: &str, environment: &Environment, network: &str, outcome: &Result<()>) {
        let Some(begun) = self.0 else { return };
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let (code, error) = match outcome {
            Ok(()) => (0, String::new()),
            Err(error) => (error.code().0, format!(" error={}", Quoted(error))),
        };
        let Environment { command, container_id, ifname, .. } = environment;
        let [command, container, ifname, network] = [command, container_id, ifname, network].map(Quoted);
        log::info!(
            "plugin={plugin} verb={command} network={network} container={container} ifname={ifname} code={code} ms={ms:.3}{error}"
        );
    }
}

/// Formats a value for a log line of `key=value` pairs. An empty value, and a value with `"`, `=`,
/// `\` or anything but visible ASCII characters, is quoted and escaped.
#[derive(Debug)]
pub struct Quoted<T>(pub T);

impl<T: fmt::Display> fmt::Display for Quoted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        let is_bare = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '=' | '\\');
        if !text.is_empty() && text.chars().all(is_bare) { f.write_str(&text) } else { write!(f, "{text:?}") }
    }
}

/// Returns the keys and values of a log line, whose values were formatted by [`Quoted`]. Skips
/// words without `=`.
pub fn fields(line: &str) -> Vec<(String, String)> {
    let (mut fields, mut rest) = (Vec::new(), line);
    while let Some(end_of_word) = rest.find([' ', '=']) {
        let (word, delimiter_and_rest) = rest.split_at(end_of_word);
        if let Some(after_equals) = delimiter_and_rest.strip_prefix('=') {
            let (value, after_value) = split_value(after_equals);
            fields.push((word.to_owned(), value));
            rest = after_value;
        } else {
            rest = delimiter_and_rest.trim_start_matches(' ');
        }
    }
    fields
}

/// Splits the value off the beginning of a text. Returns the value, without quotes and escapes, and
/// the text after the following space. The escapes are those of Rust's `Debug`, which [`Quoted`]
/// uses. An escape that is incomplete because the line was cut is left out.
fn split_value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let (bare, rest) = text.split_once(' ').unwrap_or((text, ""));
        return (bare.to_owned(), rest);
    };
    let (mut value, mut chars) = (String::new(), quoted.chars());
    while let Some(next) = chars.next() {
        match next {
            '"' => break,
            '\\' => match chars.next() {
                Some('n') => value.push('\n'),
                Some('t') => value.push('\t'),
                Some('r') => value.push('\r'),
                Some('0') => value.push('\0'),
                Some('u') => {
                    // The digits are in braces: `\u{1b}`.
                    let digits: String = chars.by_ref().skip(1).take_while(|digit| *digit != '}').collect();
                    let code_point = u32::from_str_radix(&digits, 16).ok();
                    value.extend(code_point.and_then(char::from_u32));
                }
                Some(escaped) => value.push(escaped),
                None => break,
            },
            unescaped => value.push(unescaped),
        }
    }
    (value, chars.as_str().trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let values = ["c1", "", "two words", "a=b c=d", "\"\\\n\t\r\0", "\u{1b}[31m é \u{202e}", "'x'"];
        let line: Vec<String> = values.iter().map(|value| format!("key={}", Quoted(value))).collect();
        let read = fields(&format!("2026-11-21T01:02:03.456Z debug cni-bridge {}", line.join(" ")));
        assert_eq!(read, values.map(|value| ("key".to_owned(), value.to_owned())));
        // A line that was cut.
        assert_eq!(fields("a=b c=\"d"), [("a", "b"), ("c", "d")].map(|(k, v)| (k.to_owned(), v.to_owned())));
        assert_eq!(fields("a=b c=\"\\u{"), [("a", "b"), ("c", "")].map(|(k, v)| (k.to_owned(), v.to_owned())));
    }

    #[test]
    fn a_value_stays_on_one_line_and_in_one_piece() {
        for (value, expected) in [
            ("c1", "c1"),
            ("", "\"\""),
            ("two words", "\"two words\""),
            ("a\nplugin=forged code=0", "\"a\\nplugin=forged code=0\""),
            ("\"", "\"\\\"\""),
            ("a=b", "\"a=b\""),
            ("\u{1b}[31m", "\"\\u{1b}[31m\""),
        ] {
            assert_eq!(Quoted(value).to_string(), expected);
        }
    }
}
