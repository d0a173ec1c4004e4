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
//! lost.
//!
//! `TRACEPARENT` (W3C Trace Context) makes a process that logs a span: each line has the trace ID,
//! the ID of the span and that of its parent, and the processes that this one starts get a
//! `TRACEPARENT` with this span as the parent. `TRACESTATE` and `BAGGAGE` reach them unchanged.
//!
//! Logging starts before the call is parsed, so this module reads its environment variables itself.

use std::ffi::OsString;
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
    /// The span of this process, if `TRACEPARENT` is set and valid.
    span: Option<Span>,
    level: LevelFilter,
}

/// The span of this process in a trace of `TRACEPARENT`. All parts are hexadecimal digits.
#[derive(Debug)]
struct Span {
    version: String,
    trace_id: String,
    parent_id: String,
    id: String,
    flags: String,
}

/// Installs the logger that the environment variables ask for, if any. Returns the `TRACEPARENT` of
/// the processes that this one starts, if it differs from that of this process.
pub fn install(program: &str) -> Option<(OsString, OsString)> {
    let value = std::env::var_os("CNI_LOG")?;
    // As with a line of the log, a note that cannot be written is lost.
    let note = |what: std::fmt::Arguments<'_>| {
        drop(writeln!(io::stderr(), "{program}: {what}"));
        None
    };
    let level = match parse_level(&value.to_string_lossy()) {
        Some(LevelFilter::Off) => return None,
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
    // With an invalid TRACEPARENT, the lines have no span.
    let span = std::env::var("TRACEPARENT").ok().and_then(|parent| Span::below(&parent));
    let traceparent = span.as_ref().map(Span::traceparent);
    let logger = Logger { sink, identifier: format!("cni-{program}"), span, level };
    // Fails only if this process already has a logger, which then stays in use.
    log::set_boxed_logger(Box::new(logger)).ok()?;
    log::set_max_level(level);
    Some(("TRACEPARENT".into(), traceparent?.into()))
}

impl Span {
    /// Returns a new span below a `traceparent`, which is `version-traceid-parentid-flags` with 2,
    /// 32, 16 and 2 hexadecimal digits. Returns `None` if it is malformed or the trace ID is zero.
    fn below(traceparent: &str) -> Option<Span> {
        let parts: Vec<&str> = traceparent.split('-').collect();
        let [version, trace_id, parent_id, flags] = *parts else { return None };
        let is_hex = |text: &str, len| text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_well_formed = is_hex(version, 2) && is_hex(trace_id, 32) && is_hex(parent_id, 16) && is_hex(flags, 2);
        if !is_well_formed || trace_id.bytes().all(|byte| byte == b'0') {
            return None;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let parts = [traceparent.as_bytes(), &std::process::id().to_ne_bytes(), &now.as_nanos().to_ne_bytes()];
        let [version, trace_id, parent_id, flags] = [version, trace_id, parent_id, flags].map(str::to_owned);
        Some(Span { version, trace_id, parent_id, id: cni::hash::sha512_hex(&parts, 16), flags })
    }

    /// Returns the `TRACEPARENT` of a process whose parent is this span.
    fn traceparent(&self) -> String {
        format!("{}-{}-{}-{}", self.version, self.trace_id, self.id, self.flags)
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
        if let Some(Span { trace_id, id, parent_id, .. }) = &self.span {
            text = format!("trace={trace_id} span={id} parent={parent_id} {text}");
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
    fn only_a_well_formed_traceparent_has_a_span() {
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        let span = Span::below(&format!("00-{id}-00f067aa0ba902b7-01")).unwrap();
        assert_eq!((&*span.trace_id, &*span.parent_id), (id, "00f067aa0ba902b7"));
        // The next process is a span below this one.
        let next = Span::below(&span.traceparent()).unwrap();
        assert_eq!((next.trace_id, next.parent_id, next.flags), (span.trace_id, span.id.clone(), span.flags));
        assert_ne!(next.id, span.id);
        for bad in [
            "",
            id,
            "00-x-y-z",
            &format!("00-{id}-00f067aa0ba902b7"),
            &format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            &format!("00-{id}\n-00f067aa0ba902b7-01"),
        ] {
            assert!(Span::below(bad).is_none(), "{bad}");
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
    fn a_log_of_another_user_or_hard_linked_is_not_written() {
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
    fn only_known_values_enable_the_log() {
        for off in ["", "off", "OFF", "none", "false", "0"] {
            assert_eq!(parse_level(off), Some(LevelFilter::Off), "{off}");
        }
        assert_eq!(parse_level("Debug"), Some(LevelFilter::Debug));
        for unknown in ["1", "true", "yes", "warn", "infos", " info"] {
            assert_eq!(parse_level(unknown), None, "{unknown}");
        }
    }
}
