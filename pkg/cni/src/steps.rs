//! What a call tells the log of itself: one line per call at `info`, one per step, with its duration, at `debug`.
//!
//! The facade of the crate `log` carries it; where it goes is decided by whoever installs a logger (`cni-linux` does,
//! if CNI_LOG asks for one). Without one a step costs a comparison: no clock is read and no text made.

use std::fmt;
use std::time::Instant;

use crate::Result;
use crate::machine::Exit;
use crate::skel::Environment;

/// A step that has begun; `None` inside where nobody listens.
#[derive(Debug)]
pub struct Step(Option<Instant>);

impl Step {
    /// Begins a step.
    #[inline]
    pub fn begin() -> Step {
        Step(log::log_enabled!(log::Level::Debug).then(Instant::now))
    }

    /// Whether somebody listens: whether it is worth to gather what [`end`](Step::end) will say.
    #[inline]
    pub fn is_heard(&self) -> bool {
        self.0.is_some()
    }

    /// Tells the step and its outcome, if somebody listens.
    pub fn end<T, E: fmt::Display>(self, what: impl fmt::Display, outcome: &Result<T, E>) {
        let Some(begun) = self.0 else { return };
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        match outcome {
            Ok(_) => log::debug!("step={} ms={ms:.3}", Quoted(what)),
            Err(error) => log::debug!("step={} ms={ms:.3} error={}", Quoted(what), Quoted(error)),
        }
    }

    /// The same for a program, whose end is no error by itself.
    pub fn end_program(self, what: impl fmt::Display, status: Option<Exit>) {
        let Some(begun) = self.0 else { return };
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        match status {
            Some(status) => log::debug!("step={} ms={ms:.3} end={}", Quoted(what), Quoted(status)),
            None => log::debug!("step={} ms={ms:.3} error=\"it did not run to its end\"", Quoted(what)),
        }
    }
}

/// A call that has begun.
#[derive(Debug)]
pub(crate) struct Called(Option<Instant>);

impl Called {
    pub(crate) fn begin() -> Called {
        Called(log::log_enabled!(log::Level::Info).then(Instant::now))
    }

    /// Tells the call: which plugin was asked for what, for whom, how it ended, how long it took in milliseconds.
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

/// A value of a line of `key=value`: bare if it can be, else in quotes, always on one line.
pub struct Quoted<T>(pub T);

impl<T: fmt::Debug> fmt::Debug for Quoted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: fmt::Display> fmt::Display for Quoted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        let is_bare = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '=' | '\\');
        if !text.is_empty() && text.chars().all(is_bare) { f.write_str(&text) } else { write!(f, "{text:?}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
