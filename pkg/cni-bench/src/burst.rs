//! Runs many attachments at once, as a runtime does after a reboot of its node.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::Value;

use crate::call::{Call, Streams, children_cpu};
use crate::cases::Ready;
use crate::error::{Doing as _, Result};
use crate::world::World;

/// The cost and the results of one verb for many attachments at once.
#[derive(Debug, Default)]
pub(crate) struct Crowd {
    /// The time from the start of the first process to the end of the last, in milliseconds.
    pub(crate) wall: f64,
    /// The time from the start of the first process to the end of each attachment's last plugin, in
    /// milliseconds.
    pub(crate) latencies: Vec<f64>,
    /// The user and system time of all processes, in milliseconds.
    pub(crate) cpu: f64,
    /// The result of each attachment's ADD; null for DEL.
    pub(crate) results: Vec<Value>,
}

/// The running plugin of one attachment.
struct Progress {
    /// The number of the attachment.
    number: usize,
    /// The number of plugins that have already run for this attachment.
    step: usize,
    call: Call,
    streams: Streams,
}

/// Starts a plugin and returns its process ID.
fn start(mut command: Command) -> Result<Pid> {
    let child = command.spawn();
    let program = Path::new(command.get_program()).display();
    let id = child.doing(format_args!("failed to start {program}"))?.id();
    Ok(Pid::from_raw(i32::try_from(id).doing(format_args!("invalid process ID {id} of {program}"))?))
}

/// Runs `verb`, ADD or DEL, for all containers of `ready` at once. The plugins of one attachment
/// run one after the other. `results` are the results of the ADDs as DEL's prevResult; empty for
/// ADD. If a plugin fails, the other attachments still run to their end, and the first error is
/// returned.
pub(crate) fn run(world: &World, ready: &Ready, round: usize, verb: &'static str, results: &[Value]) -> Result<Crowd> {
    let count = ready.containers.len();
    let plugin_count = ready.chain.plugins.len();
    let mut crowd = Crowd { results: vec![Value::Null; count], ..Crowd::default() };
    let mut running: HashMap<Pid, Progress> = HashMap::new();
    let call_at = |number: usize, step: usize, prev: Option<&Value>| {
        // DEL runs the plugins in reverse order.
        let place = if verb == "DEL" { plugin_count - 1 - step } else { step };
        ready.chain.call(verb, place, &ready.attachment(round, number), prev)
    };
    // The streams of the first plugins are created before the measurement starts.
    let mut first_plugins = Vec::new();
    for number in 0..count {
        let call = call_at(number, 0, results.get(number));
        let streams = Streams::new(world.scratch(), number, &call.conf)?;
        first_plugins.push((call.command(&call.program, &streams)?, Progress { number, step: 0, call, streams }));
    }
    let before = children_cpu()?;
    let begin = Instant::now();
    for (command, progress) in first_plugins {
        running.insert(start(command)?, progress);
    }
    let mut failure = None;
    while !running.is_empty() {
        let (pid, succeeded) = match waitpid(None, None).doing("failed to wait for the plugins")? {
            WaitStatus::Exited(pid, status) => (pid, status == 0),
            WaitStatus::Signaled(pid, ..) => (pid, false),
            _ => continue,
        };
        let ended_after = begin.elapsed().as_secs_f64() * 1e3;
        let Some(Progress { number, step, call, mut streams }) = running.remove(&pid) else { continue };
        let output = match streams.outcome(&call, succeeded) {
            Ok(output) => output,
            // The attachment's other plugins do not run.
            Err(error) => {
                failure.get_or_insert(error);
                continue;
            }
        };
        if verb == "ADD" {
            crowd.results[number] = output;
        }
        if step + 1 == plugin_count {
            crowd.latencies.push(ended_after);
            continue;
        }
        let prev = if verb == "ADD" { crowd.results.get(number) } else { results.get(number) };
        let next_step = step + 1;
        let next_call = call_at(number, next_step, prev);
        let streams = Streams::new(world.scratch(), number, &next_call.conf)?;
        let next_pid = start(next_call.command(&next_call.program, &streams)?)?;
        running.insert(next_pid, Progress { number, step: next_step, call: next_call, streams });
    }
    crowd.wall = begin.elapsed().as_secs_f64() * 1e3;
    crowd.cpu = children_cpu()? - before;
    match failure {
        None => Ok(crowd),
        Some(error) => Err(format!("{count} at once: {error}")),
    }
}
