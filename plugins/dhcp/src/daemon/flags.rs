//! The daemon's command line: the flags of Go's daemon, with one dash or two.

use std::path::PathBuf;
use std::time::Duration;

use cni_dhcp::lease::Limits;
use cni_dhcp::message::ReplyMode;

use crate::conf::DEFAULT_SOCKET;

/// What happens to the leases when a signal ends the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnExit {
    /// The leases and their records stay.
    Keep,
    /// The leases are released.
    Release,
}

/// The values of the flags.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Flags {
    pub(crate) pidfile: Option<PathBuf>,
    pub(crate) host_prefix: String,
    pub(crate) socket: PathBuf,
    /// From the flag `-broadcast`.
    pub(crate) reply_mode: ReplyMode,
    /// From the flags `-timeout`, `-resendmax` and `-resendtimeout`.
    pub(crate) limits: Limits,
    /// From the flag `-release-on-exit`.
    pub(crate) on_exit: OnExit,
}

impl Flags {
    /// Parses the arguments after `daemon`. The error is the text for the user, as Go words it.
    pub(crate) fn parse(args: Vec<String>) -> Result<Flags, String> {
        let mut flags = Flags {
            pidfile: None,
            host_prefix: String::new(),
            socket: DEFAULT_SOCKET.into(),
            reply_mode: ReplyMode::Unicast,
            limits: Limits::default(),
            on_exit: OnExit::Keep,
        };
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let name = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-'));
            let name = name.ok_or_else(|| format!("unexpected argument: {arg}"))?;
            let (name, value_in_arg) = match name.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (name, None),
            };
            let is_enabled = || parse_bool(name, value_in_arg.as_deref().unwrap_or("true"));
            let mut take_value = || {
                let value = value_in_arg.clone().or_else(|| args.next());
                value.ok_or_else(|| format!("flag needs an argument: -{name}"))
            };
            match name {
                "broadcast" => flags.reply_mode = if is_enabled()? { ReplyMode::Broadcast } else { ReplyMode::Unicast },
                "release-on-exit" => flags.on_exit = if is_enabled()? { OnExit::Release } else { OnExit::Keep },
                "pidfile" => flags.pidfile = parse_pidfile(take_value()?)?,
                "hostprefix" => flags.host_prefix = take_value()?,
                "socketpath" => flags.socket = take_value()?.into(),
                "timeout" => flags.limits.answer = parse_limit(name, &take_value()?)?,
                "resendmax" => flags.limits.pause = parse_limit(name, &take_value()?)?,
                "resendtimeout" => flags.limits.total = parse_limit(name, &take_value()?)?,
                _ => return Err(format!("flag provided but not defined: -{name}")),
            }
        }
        Ok(flags)
    }
}

/// Parses the value of the boolean flag `name`.
fn parse_bool(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        other => Err(format!("invalid boolean value {other:?} for -{name}")),
    }
}

/// Checks the path of the PID file, which must be absolute. Returns `None` for an empty path, with
/// which no PID file is written.
fn parse_pidfile(path: String) -> Result<Option<PathBuf>, String> {
    if path.is_empty() {
        Ok(None)
    } else if path.starts_with('/') {
        Ok(Some(path.into()))
    } else {
        Err(format!("Error writing pidfile {path:?}: path not absolute"))
    }
}

/// Parses the value of the flag `name`, which is a duration.
fn parse_limit(name: &str, value: &str) -> Result<Duration, String> {
    parse_duration(value).ok_or_else(|| format!("invalid value {value:?} for flag -{name}"))
}

/// Parses a duration in Go's format, for example `1h2m3.5s` or `500ms`. Returns `None` if it is
/// invalid.
fn parse_duration(mut text: &str) -> Option<Duration> {
    let mut sum = Duration::ZERO;
    if text.is_empty() {
        return None;
    }
    while !text.is_empty() {
        let number_end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
        let (number, rest) = text.split_at(number_end);
        let unit_end = rest.find(|letter: char| letter.is_ascii_digit()).unwrap_or(rest.len());
        let (unit, rest) = rest.split_at(unit_end);
        let seconds_of_unit = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        let seconds = number.parse::<f64>().ok()? * seconds_of_unit;
        sum = sum.checked_add(Duration::try_from_secs_f64(seconds).ok()?)?;
        text = rest;
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Flags, String> {
        Flags::parse(args.iter().map(|arg| (*arg).to_owned()).collect())
    }

    #[test]
    fn flags_accept_one_or_two_dashes_and_both_value_forms() {
        let one = parse(&["-hostprefix", "/host", "-timeout=2s", "--broadcast", "-pidfile", "/p"]).unwrap();
        let two = parse(&["--hostprefix=/host", "--timeout", "2000ms", "-broadcast=true", "--pidfile=/p"]).unwrap();
        assert_eq!(one, two);
        assert_eq!((one.reply_mode, one.limits.answer), (ReplyMode::Broadcast, Duration::from_secs(2)));
        assert_eq!(parse(&[]).unwrap().limits, Limits::default());
    }

    #[test]
    fn wrong_flags_are_refused() {
        for args in [
            &["-nope"][..],
            &["x"],
            &["-timeout"],
            &["-timeout", "2"],
            &["-timeout", "2 s"],
            &["-broadcast=2"],
            &["-pidfile=p"],
        ] {
            assert!(parse(args).is_err(), "{args:?}");
        }
    }

    #[test]
    fn durations_are_written_as_in_go() {
        let read = |text| parse_duration(text).map(|duration| duration.as_millis());
        assert_eq!([read("1h2m3.5s"), read("500ms"), read(""), read("1x")], [Some(3_723_500), Some(500), None, None]);
    }
}
