//! Results and errors on their way out: for people, or as JSON.
//!
//! As JSON every outcome of a network verb is one document on stdout, an error in the shape the
//! plugins give it. For people results go to stdout and errors to stderr: a line that says what
//! failed and why, then what helps.

use cni::version::Version;
use cni::{Code, Error};
use serde_json::{Value, json};

use crate::cli::Failure;
use crate::{ColorMode, Exit, Streams};

/// The action needs a more explicit request from the operator; cnitool's own code.
pub(crate) const REFUSED: Code = Code(103);

/// How results and errors are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// Writes lines for people to stdout, in one piece. What would move a terminal's cursor or change
/// its state is shown instead, because a container names its interfaces as it likes.
pub(crate) fn write(streams: &mut Streams<'_>, text: &str) -> Result<(), Error> {
    let text = harmless(text, streams.stdout_style);
    write_raw(streams, &text)
}

/// The text with its control characters, and those that turn its direction, as escapes; but for the
/// ends of lines, and the colours of [`paint`] where there are any.
fn harmless(text: &str, style: ColorMode) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let colour = COLOURS.iter().find(|colour| style == ColorMode::Coloured && rest.starts_with(**colour));
        let taken = colour.map_or(next.len_utf8(), |colour| colour.len());
        let (now, later) = rest.split_at(taken);
        let turns = matches!(next, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if colour.is_none() && next != '\n' && (next.is_control() || turns) {
            shown.extend(next.escape_default());
        } else {
            shown.push_str(now);
        }
        rest = later;
    }
    shown
}

/// Writes a document or a script to stdout as it is.
pub(crate) fn write_raw(streams: &mut Streams<'_>, text: &str) -> Result<(), Error> {
    streams
        .stdout
        .write_all(text.as_bytes())
        .and_then(|()| streams.stdout.flush())
        .map_err(|error| Error::caused(Code::IO, "failed to write to stdout", error))
}

/// Writes a document to stdout.
pub(crate) fn write_json(streams: &mut Streams<'_>, value: &Value) -> Result<(), Error> {
    write_raw(streams, &format!("{value:#}\n"))
}

/// The kind of a line of a report, which has its own colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    /// Something is wrong.
    Red,
    /// Something may be wrong.
    Yellow,
    /// A heading.
    Bold,
}

/// The escape sequences of [`paint`].
const COLOURS: [&str; 4] = ["\x1b[31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"];

/// A text in a colour, where the stream has any.
pub(crate) fn paint(style: ColorMode, colour: Colour, text: &str) -> String {
    let code = match colour {
        Colour::Red => 31,
        Colour::Yellow => 33,
        Colour::Bold => 1,
    };
    match style {
        ColorMode::Plain => text.to_owned(),
        ColorMode::Coloured => format!("\x1b[{code}m{text}\x1b[0m"),
    }
}

/// The rows as lines with their columns one below the other. The first row is the header.
pub(crate) fn table(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}", width = *width));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Reports why a call did not succeed.
pub(crate) fn failure(failure: &Failure, streams: &mut Streams<'_>) -> Exit {
    match failure {
        Failure::Parser(error) => parser(error, streams),
        Failure::Usage { verb, msg } => {
            streams.notes.note(format_args!("error: {msg}\n\nFor more information, try 'cnitool {verb} --help'."));
            Exit::Usage
        }
        Failure::Failed { error, format: Format::Json, .. } => {
            if let Err(unwritten) = write_json(streams, &error_json(error)) {
                streams.notes.note(format_args!("cnitool: {error} ({unwritten})"));
            }
            Exit::Failed
        }
        Failure::Failed { doing, error, format: Format::Text } => {
            let shown = |text: &str| harmless(text, ColorMode::Plain);
            streams.notes.note(format_args!("cnitool: {doing}: {}", shown(&error.to_string())));
            error.details().lines().for_each(|line| streams.notes.note(format_args!("    {}", shown(line))));
            streams.notes.note(format_args!("    CNI error code {}: {}", error.code(), meaning(error.code())));
            Exit::Failed
        }
    }
}

/// The parser's own words: help is a result, anything else a usage error.
fn parser(error: &clap::Error, streams: &mut Streams<'_>) -> Exit {
    let rendered = error.render();
    let text = |style| if style == ColorMode::Coloured { rendered.ansi().to_string() } else { rendered.to_string() };
    if error.use_stderr() {
        streams.notes.note(text(streams.stderr_style).trim_end());
        return Exit::Usage;
    }
    match write_raw(streams, &text(streams.stdout_style)) {
        Ok(()) => Exit::Done,
        Err(error) => {
            streams.notes.note(format_args!("cnitool: help: {error}"));
            Exit::Failed
        }
    }
}

/// An error as plugins write it.
pub(crate) fn error_json(error: &Error) -> Value {
    let mut json = json!({"cniVersion": Version::NEWEST.as_str(), "code": error.code().0, "msg": error.msg()});
    if !error.details().is_empty() {
        json["details"] = error.details().into();
    }
    json
}

/// The specification's words for a code.
fn meaning(code: Code) -> &'static str {
    match code {
        Code::INCOMPATIBLE_VERSION => "incompatible CNI version",
        Code::UNSUPPORTED_FIELD => "unsupported field in the network configuration",
        Code::UNKNOWN_CONTAINER => "the container is unknown or does not exist",
        Code::INVALID_ENVIRONMENT => "invalid environment variables",
        Code::IO => "I/O failure",
        Code::DECODE => "failed to decode content",
        Code::INVALID_CONFIG => "invalid network configuration",
        Code::INVALID_NETNS => "the namespace is the plugin's own",
        Code::TRY_AGAIN => "try again later",
        Code::NOT_AVAILABLE => "the plugin cannot handle an ADD",
        Code::LIMITED_CONNECTIVITY => "the plugin cannot handle an ADD, and containers may have limited connectivity",
        Code::INTERNAL => "internal error",
        REFUSED => "refused by cnitool",
        Code::KERNEL => "a plugin's own; from these plugins: the kernel or a program refused",
        Code::CHECK_FAILED => "a plugin's own; from these plugins: something is not as it should be",
        Code::CONFLICT => "a plugin's own; from these plugins: something else already holds it",
        Code(100..) => "a plugin's own",
        _ => "unknown to the specification",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_reach_the_terminal_is_shown_instead() {
        let text = "\x1b]0;t\x07\r\u{9b}2J\u{202e}é\n";
        assert_eq!(harmless(text, ColorMode::Coloured), "\\u{1b}]0;t\\u{7}\\r\\u{9b}2J\\u{202e}é\n");
        let painted = paint(ColorMode::Coloured, Colour::Red, "eth0 \x1b[2J");
        assert_eq!(harmless(&painted, ColorMode::Coloured), "\x1b[31meth0 \\u{1b}[2J\x1b[0m");
        assert_eq!(harmless("\x1b[31m", ColorMode::Plain), "\\u{1b}[31m");
    }
}
