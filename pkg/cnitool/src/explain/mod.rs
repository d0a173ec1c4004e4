//! explain: a verb of a network with the log of its steps: what each plugin did, how long it took,
//! and the very request that failed.
//!
//! The verb is run as without it, but that the plugins are asked for their log (`CNI_LOG=debug`)
//! into a file of this call's alone. What the log gained while a plugin ran is that plugin's. The
//! clock around a plugin is ours, so one that keeps no log, as Go's, is timed too.

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

/// Does what the arguments ask for; fails as the verb does.
pub(crate) fn run(args: Explain, shared: Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let format = shared.format();
    let command = match args.verb {
        Verb::Add(args) => args.command("add", shared)?,
        Verb::Check(args) => args.command("check", shared)?,
        Verb::Del(args) => args.command(shared)?,
        Verb::Gc(args) => args.command(shared),
        Verb::Status(args) => args.command("status", shared),
    };
    let doing = format!("explain {}", command.subject());
    let log = Log::new().map_err(|error| failed(doing.as_str(), error, format))?;
    let recorder = Recorder::new(call.machine, &log);
    let explained = Call {
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
        network::run(command, &explained, &mut Streams { stdout, notes, stdout_style, stderr_style })
    };
    let ran = recorder.into_ran();
    match format {
        Format::Text => {
            let text: String = ran.iter().map(|one| text(one, streams)).collect();
            let written = write(streams, &text).and_then(|()| write_raw(streams, &String::from_utf8_lossy(&result)));
            outcome?;
            written.map_err(|error| failed(doing, error, format))?;
            Ok(Exit::Done)
        }
        Format::Json => {
            let error = match &outcome {
                Ok(()) => Value::Null,
                Err(Failure::Failed { error, .. }) => error_json(error),
                Err(_) => return outcome.map(|()| Exit::Done),
            };
            let result: Value = serde_json::from_slice(&result).unwrap_or_default();
            let calls: Vec<Value> = ran.iter().map(as_json).collect();
            write_json(streams, &json!({"calls": calls, "result": result, "error": error}))
                .map_err(|error| failed(doing, error, format))?;
            Ok(if outcome.is_ok() { Exit::Done } else { Exit::Failed })
        }
    }
}

/// A plugin's call: a line that says how it went, one for each step, and after the one it failed by
/// the request itself.
fn text(ran: &PluginRun, streams: &Streams<'_>) -> String {
    let style = streams.stdout_style;
    let steps = steps::read(ran);
    let end = match &ran.error {
        None => "done".to_owned(),
        Some((Some(code), _)) => format!("failed with code {code}"),
        Some((None, _)) => "failed".to_owned(),
    };
    let head = format!("{} {}, {:.1} ms: {end}", ran.plugin, ran.verb, ran.ms);
    let mut text = format!("{}\n", paint(style, Colour::Bold, &head));
    if steps.is_empty() {
        text += "               it keeps no log\n";
    }
    for step in &steps {
        let sign = if step.failed { '!' } else { ' ' };
        let ms = step.ms.map(|ms| format!("{ms:.3}")).unwrap_or_default();
        let whose = if step.program == ran.plugin { String::new() } else { format!("  {}: ", step.program) };
        let end = step.end.as_ref().map(|end| format!(": {end}")).unwrap_or_default();
        let line = format!("{sign} {ms:>10}  {whose}{}{end}", step.what);
        text += &if step.failed { paint(style, Colour::Red, &line) } else { line };
        text.push('\n');
        if step.failed {
            for (name, value) in [("said", &step.said), ("request", &step.request)] {
                let value = value.as_deref().unwrap_or_default();
                text.extend(value.lines().map(|line| format!("               {name}: {line}\n")));
            }
        }
    }
    if ran.error.is_some() && !steps.is_empty() && !steps.iter().any(|step| step.failed) {
        text += "               none of these failed: the plugin itself refused\n";
    }
    text
}

fn as_json(ran: &PluginRun) -> Value {
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
        "plugin": ran.plugin,
        "verb": ran.verb,
        "ms": ran.ms,
        "error": ran.error.as_ref().map(|(code, msg)| json!({"code": code, "msg": msg})),
        "steps": steps::read(ran).iter().map(step).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests;
