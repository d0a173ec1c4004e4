//! The command `explain`: runs a verb of a network and prints what each plugin did, how long it
//! took, and the request that failed.
//!
//! The verb does the same as without `explain`, but `CNI_LOG=debug` makes the plugins write a log,
//! to a file that only this call uses. The lines that are added while a plugin runs are its steps.
//! Go's plugins write no log, so only their durations are printed.

mod recorder;
mod steps;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::cli::{Failure, Shared, failed};
use crate::report::{Colour, Format, error_json, paint, write, write_json, write_raw};
use crate::{Call, Exit, Streams, network};

use recorder::{Log, PluginRun, Recorder};
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
/// The error of the verb; the log cannot be created; stdout cannot be written.
pub(crate) fn run(args: Explain, shared: Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let format = shared.format();
    let command = match args.verb {
        Verb::Add(args) => args.command("add", shared)?,
        Verb::Check(args) => args.command("check", shared)?,
        Verb::Del(args) => args.command(shared)?,
        Verb::Gc(args) => args.command(shared),
        Verb::Status(args) => args.command("status", shared),
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
            outcome?;
            written.map_err(|error| failed(subject, error, format))?;
            Ok(Exit::Done)
        }
        Format::Json => {
            let error = match &outcome {
                Ok(()) => Value::Null,
                Err(Failure::Failed { error, .. }) => error_json(error),
                Err(_) => return outcome.map(|()| Exit::Done),
            };
            let result: Value = serde_json::from_slice(&result).unwrap_or_default();
            let calls: Vec<Value> = runs.iter().map(run_as_json).collect();
            write_json(streams, &json!({"calls": calls, "result": result, "error": error}))
                .map_err(|error| failed(subject, error, format))?;
            Ok(if outcome.is_ok() { Exit::Done } else { Exit::Failed })
        }
    }
}

/// Returns the text about a plugin: a line with its duration and outcome, a line for each step, and
/// the request below the step that made it fail.
fn run_as_text(run: &PluginRun, streams: &Streams<'_>) -> String {
    let style = streams.stdout_style;
    let steps = steps::read(run);
    let outcome = match &run.error {
        None => "done".to_owned(),
        Some((Some(code), _)) => format!("failed with code {code}"),
        Some((None, _)) => "failed".to_owned(),
    };
    let head = format!("{} {}, {:.1} ms: {outcome}", run.plugin, run.verb, run.ms);
    let mut text = format!("{}\n", paint(style, Colour::Bold, &head));
    if steps.is_empty() {
        text += "               this program writes no log\n";
    }
    for step in &steps {
        let sign = if step.failed { '!' } else { ' ' };
        let ms = step.ms.map(|ms| format!("{ms:.3}")).unwrap_or_default();
        let delegate = if step.program == run.plugin { String::new() } else { format!("  {}: ", step.program) };
        let end = step.end.as_ref().map(|end| format!(": {end}")).unwrap_or_default();
        let line = format!("{sign} {ms:>10}  {delegate}{}{end}", step.what);
        text += &if step.failed { paint(style, Colour::Red, &line) } else { line };
        text.push('\n');
        if step.failed {
            for (name, value) in [("said", &step.said), ("request", &step.request)] {
                let value = value.as_deref().unwrap_or_default();
                text.extend(value.lines().map(|line| format!("               {name}: {line}\n")));
            }
        }
    }
    if run.error.is_some() && !steps.is_empty() && !steps.iter().any(|step| step.failed) {
        text += "               none of these steps failed: the plugin itself returned the error\n";
    }
    text
}

/// Returns the same as JSON.
fn run_as_json(run: &PluginRun) -> Value {
    let step = |step: &Step| {
        json!({
            "program": step.program,
            "step": step.what,
            "ms": step.ms,
            "end": step.end,
            "failed": step.failed,
            "said": step.said,
            "request": step.request,
        })
    };
    json!({
        "plugin": run.plugin,
        "verb": run.verb,
        "ms": run.ms,
        "error": run.error.as_ref().map(|(code, msg)| json!({"code": code, "msg": msg})),
        "steps": steps::read(run).iter().map(step).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests;
