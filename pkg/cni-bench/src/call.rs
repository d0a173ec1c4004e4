//! Runs a plugin once and measures its time.
//!
//! The wall time runs from just before the process is created to just after it has been reaped. It
//! includes neither the creation of the files for its streams nor the parsing of its output. The
//! CPU time is that of the process and its own children.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;
use serde_json::Value;

use crate::error::{Doing as _, Result};

/// A call of a plugin.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) program: PathBuf,
    pub(crate) verb: &'static str,
    pub(crate) container: String,
    pub(crate) netns: PathBuf,
    pub(crate) conf: Value,
}

/// What one or more calls cost.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    /// The wall time in milliseconds.
    pub(crate) wall: f64,
    /// The user and system time in milliseconds.
    pub(crate) cpu: f64,
}

/// What a call writes, as files in memory.
#[derive(Debug)]
pub(crate) struct Streams {
    stdout: File,
    stderr: File,
}

impl Streams {
    /// Returns the result that the plugin wrote, or null if it wrote nothing. `succeeded` is
    /// whether the plugin exited with 0; if not, fails with the plugin's error and the beginning of
    /// its log.
    pub(crate) fn outcome(mut self, call: &Call, succeeded: bool) -> Result<Value> {
        let mut stdout = String::new();
        let read = self.stdout.rewind().and_then(|()| self.stdout.read_to_string(&mut stdout));
        read.doing(format_args!("failed to read the output of {call}"))?;
        if succeeded && stdout.trim().is_empty() {
            return Ok(Value::Null);
        }
        if succeeded {
            return serde_json::from_str(&stdout).doing(format_args!("the output of {call} is not JSON"));
        }
        let mut stderr = String::new();
        // Without the log, the error is still useful.
        let _ = self.stderr.rewind().and_then(|()| self.stderr.read_to_string(&mut stderr));
        let message = match serde_json::from_str::<Value>(&stdout) {
            Ok(error) => error["msg"].to_string(),
            Err(_) => stdout,
        };
        let why: String = format!("{} {}", message.trim(), stderr.trim()).chars().take(400).collect();
        Err(format!("{call} failed: {}", why.trim()))
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.program.display(), self.verb)
    }
}

impl Call {
    /// Returns the command that runs `program` with the environment and the streams that a runtime
    /// gives a plugin, and the streams for its output. `program` is the plugin, or a program that
    /// will exec it.
    pub(crate) fn command(&self, program: &Path) -> Result<(Command, Streams)> {
        let create = || memfd_create("stream", MFdFlags::MFD_CLOEXEC).map(File::from);
        let prepare = || -> io::Result<(Command, Streams)> {
            let (mut stdin, stdout, stderr) = (create()?, create()?, create()?);
            stdin.write_all(self.conf.to_string().as_bytes())?;
            stdin.rewind()?;
            let mut command = Command::new(program);
            command.stdin(stdin).stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
            Ok((command, Streams { stdout, stderr }))
        };
        let (mut command, streams) = prepare().doing(format_args!("failed to prepare the streams of {self}"))?;
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("CNI_COMMAND", self.verb);
        command.env("CNI_PATH", self.program.parent().unwrap_or(Path::new("/")));
        if !matches!(self.verb, "VERSION" | "STATUS" | "GC") {
            command.env("CNI_CONTAINERID", &self.container).env("CNI_NETNS", &self.netns).env("CNI_IFNAME", "eth0");
        }
        Ok((command, streams))
    }

    /// Runs the plugin to its end, adds its cost to `total`, and returns its result. Fails if the
    /// plugin fails.
    pub(crate) fn run(&self, total: &mut Cost) -> Result<Value> {
        let (mut command, streams) = self.command(&self.program)?;
        let before = children_cpu()?;
        let begin = Instant::now();
        let status = command.spawn().and_then(|mut child| child.wait()).doing(format_args!("failed to run {self}"))?;
        total.wall += milliseconds_since(begin);
        total.cpu += children_cpu()? - before;
        streams.outcome(self, status.success())
    }
}

/// Returns the time since `begin`, in milliseconds.
pub(crate) fn milliseconds_since(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e3
}

/// Returns the user and system time of all reaped children, in milliseconds.
pub(crate) fn children_cpu() -> Result<f64> {
    cpu_time(UsageWho::RUSAGE_CHILDREN)
}

/// Returns the user and system time of this process or of its reaped children, in milliseconds.
pub(crate) fn cpu_time(who: UsageWho) -> Result<f64> {
    let usage = getrusage(who).doing("failed to read the CPU time")?;
    Ok((usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64 / 1e3)
}
