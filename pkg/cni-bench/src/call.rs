//! Runs a plugin once and measures its time.
//!
//! The wall time runs from just before the process is created to just after it has been reaped. It
//! includes neither the creation of the files for its streams nor the parsing of its output. The
//! CPU time is that of the process and its own children.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

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

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.wall += other.wall;
        self.cpu += other.cpu;
    }
}

/// The standard streams of a run, as files in the scratch folder.
#[derive(Debug)]
pub(crate) struct Streams {
    stdin: File,
    pub(crate) stdout: File,
    stderr: File,
}

impl Streams {
    /// Creates the files in `scratch`, and writes the configuration to stdin. Calls that run at the
    /// same time need different tags, which are a part of the files' names.
    pub(crate) fn new(scratch: &Path, tag: usize, conf: &Value) -> Result<Streams> {
        let open = |name: &str| {
            let path = scratch.join(format!("{name}{tag}"));
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(true);
            options.open(&path).doing(format_args!("failed to make {}", path.display()))
        };
        let (mut stdin, stdout, stderr) = (open("in")?, open("out")?, open("err")?);
        let written = stdin.write_all(conf.to_string().as_bytes()).and_then(|()| stdin.rewind());
        written.doing(format_args!("failed to write a configuration to in{tag} in {}", scratch.display()))?;
        Ok(Streams { stdin, stdout, stderr })
    }

    /// Returns the result that the plugin wrote, or null if it wrote nothing. `succeeded` is
    /// whether the plugin exited with 0; if not, fails with the plugin's error and the beginning of
    /// its log.
    pub(crate) fn outcome(&mut self, call: &Call, succeeded: bool) -> Result<Value> {
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
    /// gives a plugin. `program` is the plugin, or a program that will exec it.
    pub(crate) fn command(&self, program: &Path, streams: &Streams) -> Result<Command> {
        let clone = |file: &File| {
            file.try_clone().map(Stdio::from).doing(format_args!("failed to duplicate a stream for {self}"))
        };
        let mut command = Command::new(program);
        command.stdin(clone(&streams.stdin)?).stdout(clone(&streams.stdout)?).stderr(clone(&streams.stderr)?);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("CNI_COMMAND", self.verb);
        command.env("CNI_PATH", self.program.parent().unwrap_or(Path::new("/")));
        if !matches!(self.verb, "VERSION" | "STATUS" | "GC") {
            command.env("CNI_CONTAINERID", &self.container).env("CNI_NETNS", &self.netns).env("CNI_IFNAME", "eth0");
        }
        Ok(command)
    }

    /// Runs the plugin to its end, and returns its result and cost. Fails if the plugin fails.
    pub(crate) fn run(&self, scratch: &Path) -> Result<(Value, Cost)> {
        let mut streams = Streams::new(scratch, 0, &self.conf)?;
        let mut command = self.command(&self.program, &streams)?;
        let before = children_cpu()?;
        let begin = Instant::now();
        let status = command.spawn().and_then(|mut child| child.wait()).doing(format_args!("failed to run {self}"))?;
        let wall = begin.elapsed().as_secs_f64() * 1e3;
        let cpu = children_cpu()? - before;
        Ok((streams.outcome(self, status.success())?, Cost { wall, cpu }))
    }
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
