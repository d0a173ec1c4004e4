//! Writes the log if `CNI_LOG` is `info`, `debug` or `trace`: to the file `CNI_LOG_FILE` if set,
//! else to journald, else to stderr, never to stdout, which carries the result.
//!
//! Nothing is logged if `CNI_LOG` is unset, empty, `off`, `none`, `false` or `0`. With an unknown
//! value, or a file that cannot be opened or trusted, nothing is logged either, and a note on
//! stderr reports why.
//!
//! Runtimes pass their environment on, so a variable set for containerd's service reaches every
//! plugin, and through it the delegates. Each line is one write, so that the lines of several
//! processes do not mix. Logging never fails or delays a call: a line that cannot be written is
//! lost. The trace ID of `TRACEPARENT` (W3C Trace Context) is part of each line.
//!
//! Logging starts before the call is parsed, so this module reads its environment variables itself.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use cni::text::cut;
use log::{Level, LevelFilter, Log, Metadata, Record};
use nix::unistd::geteuid;

/// The socket on which journald receives log entries.
const JOURNAL: &str = "/run/systemd/journal/socket";

/// The longest text of a line, without time, level and identifier, in bytes. Longer texts are
/// truncated.
const MAX_TEXT: usize = 32 << 10;

/// The destination of the log.
#[derive(Debug)]
enum Sink {
    File(File),
    Journal(UnixDatagram),
    Stderr,
}

/// The logger of this process.
#[derive(Debug)]
struct Logger {
    sink: Sink,
    /// The name that each line has, for example `cni-bridge`.
    identifier: String,
    /// The trace ID of `TRACEPARENT`, if that is set and valid.
    trace_id: Option<String>,
    level: LevelFilter,
}

/// Installs the logger that the environment variables ask for, if any.
pub fn install(program: &str) {
    let Some(value) = std::env::var_os("CNI_LOG") else { return };
    // As with a line of the log, a note that cannot be written is lost.
    let note = |what: std::fmt::Arguments<'_>| drop(writeln!(io::stderr(), "{program}: {what}"));
    let level = match parse_level(&value.to_string_lossy()) {
        Some(LevelFilter::Off) => return,
        Some(level) => level,
        None => {
            return note(format_args!("CNI_LOG is {value:?}, not info, debug, trace or off: nothing is logged"));
        }
    };
    let sink = match std::env::var_os("CNI_LOG_FILE").filter(|path| !path.is_empty()) {
        Some(path) => match open_log_file(Path::new(&path)) {
            Ok(file) => Sink::File(file),
            Err(error) => {
                let path = path.display();
                return note(format_args!("CNI_LOG_FILE {path} cannot be used, nothing is logged: {error}"));
            }
        },
        None => connect_to_journald().map_or(Sink::Stderr, Sink::Journal),
    };
    // With an invalid TRACEPARENT, the lines have no trace ID.
    let trace_id = std::env::var("TRACEPARENT").ok().and_then(|parent| parse_trace_id(&parent).map(str::to_owned));
    let logger = Logger { sink, identifier: format!("cni-{program}"), trace_id, level };
    // Fails only if this process already has a logger, which then stays in use.
    if log::set_boxed_logger(Box::new(logger)).is_ok() {
        log::set_max_level(level);
    }
}

/// Parses a value of `CNI_LOG`. Returns `None` if it is unknown.
fn parse_level(value: &str) -> Option<LevelFilter> {
    match value.to_ascii_lowercase().as_str() {
        "" | "off" | "none" | "false" | "0" => Some(LevelFilter::Off),
        "info" => Some(LevelFilter::Info),
        "debug" => Some(LevelFilter::Debug),
        "trace" => Some(LevelFilter::Trace),
        _ => None,
    }
}

/// Opens the log file for appending, and creates it if it does not exist.
///
/// # Errors
/// The file cannot be opened, or is not a regular file with one hard link that this user owns and
/// that only this user can access. Without these checks another user could make root write to any
/// file.
fn open_log_file(path: &Path) -> io::Result<File> {
    // O_NONBLOCK: opening a FIFO must not wait for a reader.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let user = geteuid();
    if found.uid() != user.as_raw() {
        return Err(io::Error::other(format!("it must belong to user {user}, but belongs to user {}", found.uid())));
    }
    if found.nlink() != 1 {
        return Err(io::Error::other(format!("it has {} hard links", found.nlink())));
    }
    if found.mode() & 0o077 != 0 {
        let mode = found.mode() & 0o7777;
        return Err(io::Error::other(format!("other users can access it (mode {mode:o}): run chmod 600 on it")));
    }
    Ok(file)
}

/// Connects to journald. Returns `None` if that is not possible.
fn connect_to_journald() -> Option<UnixDatagram> {
    let socket = UnixDatagram::unbound().ok()?;
    // A slow journal must not delay the call.
    socket.set_nonblocking(true).ok()?;
    socket.connect(JOURNAL).ok()?;
    Some(socket)
}

/// Returns the trace ID in a `traceparent`, which is `version-traceid-parentid-flags` with 2, 32,
/// 16 and 2 hexadecimal digits. Returns `None` if one of the first three parts is malformed or the
/// trace ID is zero.
fn parse_trace_id(traceparent: &str) -> Option<&str> {
    let mut parts = traceparent.split('-');
    let (version, trace, parent_id) = (parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, len| text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_well_formed = is_hex(version, 2) && is_hex(trace, 32) && is_hex(parent_id, 16);
    let is_zero = trace.bytes().all(|byte| byte == b'0');
    if is_well_formed && !is_zero { Some(trace) } else { None }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // The target is the path of the module that logs. Messages of other libraries are logged
        // only if the configured level is trace.
        let is_ours = metadata.target().starts_with("cni") || metadata.target().starts_with("plugin_");
        metadata.level() <= self.level && (is_ours || self.level == LevelFilter::Trace)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        // A line break would end the line, or begin another field of the journal's entry.
        let mut text = format!("pid={} {}", std::process::id(), record.args()).replace('\n', "\\n");
        if let Some(trace_id) = &self.trace_id {
            text = format!("trace={trace_id} {text}");
        }
        text.truncate(cut(&text, MAX_TEXT).len());
        // Errors are ignored below: a line that cannot be written is lost.
        let level = record.level().as_str().to_ascii_lowercase();
        match &self.sink {
            Sink::Journal(socket) => {
                // The numbers that syslog has for these levels.
                let priority = match record.level() {
                    Level::Error => 3,
                    Level::Warn => 4,
                    Level::Info => 6,
                    Level::Debug | Level::Trace => 7,
                };
                let identifier = &self.identifier;
                let entry = format!("MESSAGE={text}\nPRIORITY={priority}\nSYSLOG_IDENTIFIER={identifier}\n");
                let _ = socket.send(entry.as_bytes());
            }
            Sink::File(file) => {
                let _ = (&*file).write_all(format_line(&level, &self.identifier, &text).as_bytes());
            }
            Sink::Stderr => {
                let _ = io::stderr().write_all(format_line(&level, &self.identifier, &text).as_bytes());
            }
        }
    }

    fn flush(&self) {}
}

/// Returns a line of the log file or stderr, with the time.
fn format_line(level: &str, identifier: &str, text: &str) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{} {level} {identifier} {text}\n", cni::time::rfc3339(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_has_an_id_only_if_it_is_well_formed() {
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        assert_eq!(parse_trace_id(&format!("00-{id}-00f067aa0ba902b7-01")), Some(id));
        for bad in [
            "",
            id,
            "00-x-y-z",
            &format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            &format!("00-{id}\n-00f067aa0ba902b7-01"),
        ] {
            assert_eq!(parse_trace_id(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_a_plain_file_is_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, link, fifo) = (folder.path().join("plain"), folder.path().join("link"), folder.path().join("fifo"));
        open_log_file(&plain).unwrap().write_all(b"one\n").unwrap();
        open_log_file(&plain).unwrap().write_all(b"two\n").unwrap();
        assert_eq!(std::fs::read_to_string(&plain).unwrap(), "one\ntwo\n");
        let mode = std::fs::metadata(&plain).unwrap().mode();
        assert_eq!(mode & 0o177, 0, "{mode:o}");
        std::os::unix::fs::symlink(&plain, &link).unwrap();
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(
            open_log_file(&link).is_err() && open_log_file(&fifo).is_err() && open_log_file(folder.path()).is_err()
        );
    }

    #[test]
    fn a_file_of_others_or_with_a_second_name_is_not_written_to() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        drop(open_log_file(&path).unwrap());
        for (mode, trusted) in [(0o640, false), (0o602, false), (0o604, false), (0o600, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(open_log_file(&path).is_ok(), trusted, "{mode:o}");
        }
        let second = folder.path().join("second");
        std::fs::hard_link(&path, &second).unwrap();
        assert!(open_log_file(&path).is_err() && open_log_file(&second).is_err());
        std::fs::remove_file(&second).unwrap();
        assert!(open_log_file(&path).is_ok());
        match std::os::unix::fs::chown(&path, Some(1), None) {
            Ok(()) => assert!(open_log_file(&path).is_err(), "it belongs to another"),
            Err(error) => cni_testkit::skipped(&format!("cannot give a file away: {error}")),
        }
    }

    #[test]
    fn only_known_values_ask_for_a_log() {
        for off in ["", "off", "OFF", "none", "false", "0"] {
            assert_eq!(parse_level(off), Some(LevelFilter::Off), "{off}");
        }
        assert_eq!(parse_level("Debug"), Some(LevelFilter::Debug));
        for unknown in ["1", "true", "yes", "warn", "infos", " info"] {
            assert_eq!(parse_level(unknown), None, "{unknown}");
        }
    }
}
