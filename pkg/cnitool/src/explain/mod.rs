//! explain: runs a verb of a network and prints the steps of each plugin, how long they took, and
//! the request that failed.
//!
//! The verb does the same as without `explain`, but `CNI_LOG=debug` makes the plugins write a log,
//! to a file that only this call uses. The lines that are added while a plugin runs are its steps.
//! Go's plugins write no log, so only their durations are printed.

mod recorder;
mod steps;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::cli::{Failure, Shared, failed};
use crate::network::NetworkVerb;
use crate::report::{Colour, Format, error_json, paint, write, write_json, write_raw};
use crate::{Call, Exit, Streams, network};

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

/// Runs the verb and prints its plugins, their steps and its result.
///
/// # Errors
/// - [`Failure::Usage`] if the verb's arguments are invalid.
/// - Code 5 if the log cannot be created or stdout cannot be written.
/// - The verb's error. With `--json` it is in the printed document instead, and [`Exit::Failed`] is
///   returned.
pub(crate) fn run(args: Explain, shared: Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let format = shared.format();
    let command = match args.verb {
        Verb::Add(args) => args.command(NetworkVerb::Add, shared)?,
        Verb::Check(args) => args.command(NetworkVerb::Check, shared)?,
        Verb::Del(args) => args.command(shared)?,
        Verb::Gc(args) => args.command(shared),
        Verb::Status(args) => args.command(NetworkVerb::Status, shared),
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
    // The verb's result follows the steps, so it is kept until they are printed.
    let mut result = Vec::new();
    let outcome = {
        let stdout = &mut result;
        let Streams { notes, stdout_style, stderr_style, .. } = &*streams;
        let (notes, stdout_style, stderr_style) = (notes.clone(), *stdout_style, *stderr_style);
        network::run(command, &recorded_call, &mut Streams { stdout, notes, stdout_style, stderr_style })
    };
    let runs = recorder.into_runs();
    match format {
        Format::Text => {
            let text: String = runs.iter().map(|run| run_as_text(run, streams)).collect();
            let written = write(streams, &text).and_then(|()| write_raw(streams, &String::from_utf8_lossy(&result)));
            // Of two errors, the verb's is reported.
            outcome?;
            written.map_err(|error| failed(subject, error, format))?;
            Ok(Exit::Done)
        }
        Format::Json => {
            let (error, exit) = match outcome {
                Ok(()) => (Value::Null, Exit::Done),
                Err(Failure::Failed { error, .. }) => (error_json(&error), Exit::Failed),
                Err(failure) => return Err(failure),
            };
            // A verb that failed, or one without a result, has printed nothing: `null`.
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

/// Returns the text about a plugin: a line with its duration and outcome, a line for each step, and
/// the request below the step that made it fail.
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
        text += &format!("{INDENT}none of these steps made the plugin fail: the error is its own\n");
    }
    text
}

/// Returns a plugin's outcome and its steps for `--json`.
fn run_as_json(run: &PluginRun) -> Value {
    let step = |step: &Step| {
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
        "steps": steps::steps_of(run).iter().map(step).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests;
