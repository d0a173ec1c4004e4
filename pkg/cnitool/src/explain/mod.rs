//! explain: runs a verb of a network and prints the steps of each plugin with their durations, and
//! the request that failed.
//!
//! The verb does the same as without `explain`. `CNI_LOG=debug` makes the plugins write a log, to a
//! file that only this call uses. A plugin's steps are the lines that are added while it runs. Go's
//! plugins write no log, so only their durations are printed.

mod recorder;
mod steps;

use clap::Args;
use clap::builder::Resettable;
use serde_json::{Value, json};

use crate::call::{Call, Context, Exit, Failure, Format, Streams, failed};
use crate::network::{self, Command};
use crate::report::{Colour, Report, error_json, write_raw};

use recorder::{Log, PluginError, PluginRun, Recorder};

/// The arguments of `explain`.
#[derive(Debug, Args)]
#[command(subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
pub(crate) struct Explain {
    #[command(subcommand)]
    verb: network::Verb,
}

/// Returns the parser of a verb below `explain`, whose help only refers to the verb.
pub(crate) fn describe(verb: clap::Command) -> clap::Command {
    let about = format!("What 'cnitool {}' does, step by step", verb.get_name());
    verb.about(about).long_about(Resettable::Reset).after_help(Resettable::Reset)
}

/// Runs the verb and prints the steps of its plugins, then the verb's result.
///
/// # Errors
/// - [`Failure::Usage`] if the verb's arguments are invalid, or the verb is repeated.
/// - Code 5 if the log cannot be created or stdout cannot be written.
/// - The verb's error. With `--json` it is in the printed document instead, and [`Exit::Failed`] is
///   returned.
pub(crate) fn run(args: Explain, context: Context<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let command = Command::new(args.verb)?;
    if command.is_repeated() {
        let msg = "--every is not possible with explain, which prints the steps when the verb has ended".to_owned();
        return Err(Failure::Usage { verb: "explain gc".to_owned(), msg });
    }
    let (call, format) = (context.call, context.format());
    let subject = format!("explain {}", command.subject());
    let log = Log::new().map_err(|error| failed(subject.as_str(), error, format))?;
    let recorder = Recorder { machine: call.machine, log: &log, runs: std::cell::RefCell::default() };
    let (environment, folder) = (log.environment(&call.environment), call.folder.clone());
    let recorded_call = Call { args: Vec::new(), environment, folder, machine: &recorder };
    // The verb prints its result into a buffer, because the steps are printed before the result.
    let mut result = Vec::new();
    let mut buffered_streams = Streams { stdout: &mut result, notes: streams.notes.clone(), ..*streams };
    let recorded = Context { shared: context.shared, call: &recorded_call, notes: context.notes };
    let outcome = network::run(&command, &recorded, &mut buffered_streams);
    let calls = recorder.runs.into_inner();
    let mut report = Report::new(streams);
    calls.iter().for_each(|call| call.add_to(&mut report));
    let to_failure = |error| failed(subject, error, format);
    if format == Format::Text {
        let written = report.write(streams, format, &Value::Null);
        let written = written.and_then(|()| write_raw(streams, &String::from_utf8_lossy(&result)));
        // If both failed, the verb's error is reported.
        let exit = outcome?;
        return written.map(|()| exit).map_err(to_failure);
    }
    let (error, exit) = match outcome {
        Ok(exit) => (None, exit),
        Err(Failure::Failed { error, .. }) => (Some(error_json(&error)), Exit::Failed),
        Err(failure) => return Err(failure),
    };
    // `null` if the verb has printed nothing: it failed, or it has no result.
    let result: Value = serde_json::from_slice(&result).unwrap_or_default();
    let document = json!({"calls": calls, "result": result, "error": error});
    report.write(streams, format, &document).map(|()| exit).map_err(to_failure)
}

impl PluginRun {
    /// Adds a line with the duration and outcome, then a line for each step. Below the step that
    /// made the plugin fail are its stderr and its request.
    fn add_to(&self, report: &mut Report) {
        let PluginRun { plugin, verb, ms, error, steps, .. } = self;
        let outcome = match error {
            None => "done".to_owned(),
            Some(PluginError { code: Some(code), .. }) => format!("failed with code {code}"),
            Some(PluginError { code: None, .. }) => "failed".to_owned(),
        };
        report.painted(Colour::Bold, &format!("{plugin} {verb}, {ms:.1} ms: {outcome}"));
        if steps.is_empty() {
            report.line(format_args!("{INDENT}this program writes no log"));
        }
        for step in steps {
            let (sign, colour) = if step.is_cause { ('!', Some(Colour::Red)) } else { (' ', None) };
            let ms = step.ms.map(|ms| format!("{ms:.3}")).unwrap_or_default();
            let delegate = if step.program == *plugin { String::new() } else { format!("  {}: ", step.program) };
            let error = step.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
            report.painted(colour, &format!("{sign} {ms:>10}  {delegate}{}{error}", step.what));
            let reasons = [("said", &step.stderr), ("request", &step.request)];
            for (name, value) in reasons.into_iter().filter(|_| step.is_cause) {
                let lines = value.as_deref().unwrap_or_default().lines();
                lines.for_each(|line| report.line(format_args!("{INDENT}{name}: {line}")));
            }
        }
        if error.is_some() && !steps.is_empty() && !steps.iter().any(|step| step.is_cause) {
            report.line(format_args!(
                "{INDENT}none of these steps made the plugin fail: the cause is in the plugin itself"
            ));
        }
    }
}

/// The indentation of lines below a step, which puts them under its description.
const INDENT: &str = "               ";

#[cfg(test)]
mod tests;
