//! explain: runs a verb of a network and prints the steps of each plugin with their durations, and
//! the request that failed.
//!
//! The verb does the same as without `explain`. `CNI_LOG=debug` makes the plugins write a log, to a
//! file that only this call uses. A plugin's steps are the lines that are added while it runs. Go's
//! plugins write no log, so only their durations are printed.

mod recorder;
mod steps;

use clap::{Args, Subcommand};
use cni::skel;
use serde_json::{Value, json};

use crate::call::{Call, Exit, Failure, Format, Shared, Streams, failed};
use crate::network;
use crate::report::{Colour, error_json, paint, write, write_json, write_raw};

use recorder::{Log, PluginError, PluginRun, Recorder};
use steps::Step;

/// The arguments of `explain`.
#[derive(Debug, Args)]
#[command(subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
pub(crate) struct Explain {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// What 'cnitool add' does, step by step
    Add(network::Attach),
    /// What 'cnitool check' does, step by step
    Check(network::Attach),
    /// What 'cnitool del' does, step by step
    Del(network::Detach),
    /// What 'cnitool gc' does, step by step
    Gc(network::Collect),
    /// What 'cnitool status' does, step by step
    Status(network::Named),
}

/// Runs the verb and prints the steps of its plugins, then the verb's result.
///
/// # Errors
/// - [`Failure::Usage`] if the verb's arguments are invalid.
/// - Code 5 if the log cannot be created or stdout cannot be written.
/// - The verb's error. With `--json` it is in the printed document instead, and [`Exit::Failed`] is
///   returned.
pub(crate) fn run(args: Explain, shared: Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let format = shared.format();
    let command = match args.verb {
        Verb::Add(args) => args.into_command(skel::Verb::Add, shared)?,
        Verb::Check(args) => args.into_command(skel::Verb::Check, shared)?,
        Verb::Del(args) => args.into_command(shared)?,
        Verb::Gc(args) => args.into_command(shared),
        Verb::Status(args) => args.into_command(skel::Verb::Status, shared),
    };
    let subject = format!("explain {}", command.subject());
    let log = Log::new().map_err(|error| failed(subject.as_str(), error, format))?;
    let recorder = Recorder::new(call.machine, &log);
    let recorded_call = Call {
        args: Vec::new(),
        environment: log.environment(&call.environment),
        folder: call.folder.clone(),
        machine: &recorder,
    };
    // The verb prints its result into a buffer, because the steps are printed before the result.
    let mut result = Vec::new();
    let mut buffered_streams = Streams {
        stdout: &mut result,
        notes: streams.notes.clone(),
        stdout_style: streams.stdout_style,
        stderr_style: streams.stderr_style,
    };
    let outcome = network::run(command, &recorded_call, &mut buffered_streams);
    let runs = recorder.into_runs();
    match format {
        Format::Text => {
            let text: String = runs.iter().map(|run| run_as_text(run, streams)).collect();
            let written = write(streams, &text).and_then(|()| write_raw(streams, &String::from_utf8_lossy(&result)));
            // If both failed, the verb's error is reported.
            let exit = outcome?;
            written.map_err(|error| failed(subject, error, format))?;
            Ok(exit)
        }
        Format::Json => {
            let (error, exit) = match outcome {
                Ok(exit) => (Value::Null, exit),
                Err(Failure::Failed { error, .. }) => (error_json(&error), Exit::Failed),
                Err(failure) => return Err(failure),
            };
            // `null` if the verb has printed nothing: it failed, or it has no result.
            let result: Value = serde_json::from_slice(&result).unwrap_or_default();
            let calls: Vec<Value> = runs.iter().map(run_as_json).collect();
            write_json(streams, &json!({"calls": calls, "result": result, "error": error}))
                .map_err(|error| failed(subject, error, format))?;
            Ok(exit)
        }
    }
}

/// The indentation of lines below a step, which puts them under its description.
const INDENT: &str = "               ";

/// Returns the text about a plugin: a line with its duration and outcome, then a line for each
/// step. Below the step that made the plugin fail are its stderr and its request.
fn run_as_text(run: &PluginRun, streams: &Streams<'_>) -> String {
    let style = streams.stdout_style;
    let steps = steps::steps_of(run);
    let outcome = match &run.error {
        None => "done".to_owned(),
        Some(PluginError { code: Some(code), .. }) => format!("failed with code {code}"),
        Some(PluginError { code: None, .. }) => "failed".to_owned(),
    };
    let head = format!("{} {}, {:.1} ms: {outcome}", run.plugin, run.verb, run.ms);
    let mut text = format!("{}\n", paint(style, Colour::Bold, &head));
    if steps.is_empty() {
        text += &format!("{INDENT}this program writes no log\n");
    }
    for step in &steps {
        let sign = if step.is_cause { '!' } else { ' ' };
        let ms = step.ms.map(|ms| format!("{ms:.3}")).unwrap_or_default();
        let delegate = if step.program == run.plugin { String::new() } else { format!("  {}: ", step.program) };
        let error = step.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
        let line = format!("{sign} {ms:>10}  {delegate}{}{error}", step.what);
        text += &if step.is_cause { paint(style, Colour::Red, &line) } else { line };
        text.push('\n');
        if step.is_cause {
            for (name, value) in [("said", &step.stderr), ("request", &step.request)] {
                let value = value.as_deref().unwrap_or_default();
                text.extend(value.lines().map(|line| format!("{INDENT}{name}: {line}\n")));
            }
        }
    }
    if run.error.is_some() && !steps.is_empty() && !steps.iter().any(|step| step.is_cause) {
        text += &format!("{INDENT}none of these steps made the plugin fail: the cause is in the plugin itself\n");
    }
    text
}

/// Returns a plugin's outcome and its steps for `--json`.
fn run_as_json(run: &PluginRun) -> Value {
    // `end` is the error, or the exit status of a program that failed. `failed` marks only the step
    // that made the plugin fail.
    let step_json = |step: &Step| {
        json!({
            "program": step.program,
            "step": step.what,
            "ms": step.ms,
            "end": step.error,
            "failed": step.is_cause,
            "said": step.stderr,
            "request": step.request,
        })
    };
    json!({
        "plugin": run.plugin,
        "verb": run.verb,
        "ms": run.ms,
        "error": run.error.as_ref().map(|PluginError { code, msg }| json!({"code": code, "msg": msg})),
        "steps": steps::steps_of(run).iter().map(step_json).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests;
