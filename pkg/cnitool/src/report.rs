//! Prints results and errors, for people or as JSON.
//!
//! With `--json`, a verb prints one document on stdout: its result, or an error in the form of the
//! plugins' errors. Without `--json`, results go to stdout and errors to stderr: a line with what
//! failed and why, then the details. Invalid arguments are always reported on stderr as text.

use std::fmt::Display;

use cni::version::Version;
use cni::{Code, Error};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::call::{ColorMode, Exit, Failure, Format, Streams, own_uid};

/// Escapes control characters, because a container can give its interfaces names that change the
/// terminal's state. Also escapes the invisible characters that change the writing direction or end
/// a line or paragraph. Keeps newlines.
fn escape_control(text: &str) -> String {
    let is_invisible = |c| matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_escaped = |c: char| c != '\n' && (c.is_control() || is_invisible(c));
    text.chars().map(|c| if is_escaped(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// Writes a text to stdout without escaping it.
///
/// # Errors
/// Code 5 if stdout cannot be written.
pub(crate) fn write_raw(streams: &mut Streams<'_>, text: &str) -> Result<(), Error> {
    streams
        .stdout
        .write_all(text.as_bytes())
        .and_then(|()| streams.stdout.flush())
        .map_err(|error| Error::caused(Code::IO, "failed to write to stdout", error))
}

/// The text of a verb's report, for people. With `--json`, a document with the same data is printed
/// instead, for which the documentation has a JSON Schema.
pub(crate) struct Report {
    text: String,
    style: ColorMode,
}

impl Report {
    /// Returns an empty report for these streams.
    pub(crate) fn new(streams: &Streams<'_>) -> Report {
        Report { text: String::new(), style: streams.stdout_style }
    }

    /// Writes the text or `document` to stdout.
    ///
    /// # Errors
    /// Code 5 if stdout cannot be written.
    pub(crate) fn write(&self, streams: &mut Streams<'_>, format: Format, document: &Value) -> Result<(), Error> {
        match format {
            Format::Json => write_json(streams, document),
            Format::Text => write_raw(streams, &self.text),
        }
    }

    /// Adds a line.
    pub(crate) fn line(&mut self, text: impl Display) {
        self.painted(None, &text.to_string());
    }

    /// Adds a line in a colour.
    pub(crate) fn painted(&mut self, colour: impl Into<Option<Colour>>, text: &str) {
        self.parts(&[(colour.into(), text)]);
    }

    /// Adds a line of parts with a space between them, each in its colour.
    pub(crate) fn parts(&mut self, parts: &[(Option<Colour>, &str)]) {
        let painted = parts.iter().map(|(colour, text)| match (self.style, colour) {
            (ColorMode::Coloured, Some(colour)) => format!("\x1b[{}m{}\x1b[0m", *colour as u8, escape_control(text)),
            (ColorMode::Plain, _) | (_, None) => escape_control(text),
        });
        self.text += &painted.collect::<Vec<_>>().join(" ");
        self.text.push('\n');
    }

    /// Adds a line about an object or a check. A problem is red and begins with a `!`.
    pub(crate) fn fact(&mut self, is_problem: bool, label: &str, text: &str) {
        let (sign, colour) = if is_problem { ('!', Some(Colour::Red)) } else { (' ', None) };
        self.painted(colour, format!("{sign} {label:<12} {text}").trim_end());
    }

    /// Adds a table with one row for each object, or the line `none` without objects. `columns` are
    /// the names of the table's fields, with spaces between them, and `colour` returns the
    /// highlighting of an object. A column without a value is left out.
    pub(crate) fn table(
        &mut self,
        columns: &str,
        objects: &[Value],
        colour: impl Fn(&Value) -> Option<Colour>,
        none: &str,
    ) {
        if objects.is_empty() {
            return self.line(none);
        }
        let longest = |column: &str| objects.iter().map(|object| cell(column, &object[column]).chars().count()).max();
        let columns: Vec<&str> = columns.split(' ').filter(|column| longest(column) != Some(0)).collect();
        let header: Vec<String> =
            columns.iter().map(|column| words(column.trim_end_matches("Seconds")).to_uppercase()).collect();
        let cells = |object: &Value| columns.iter().map(|column| cell(column, &object[*column])).collect();
        let mut rows = vec![(header, None)];
        rows.extend(objects.iter().map(|object| (cells(object), colour(object))));
        let width = |index: usize| rows.iter().filter_map(|(row, _)| Some(row.get(index)?.chars().count())).max();
        let widths: Vec<usize> = (0..columns.len()).filter_map(width).collect();
        for (row, colour) in rows {
            let padded = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}", width = *width));
            self.painted(colour, padded.collect::<Vec<_>>().join("  ").trim_end());
        }
    }
}

/// The properties of an object, each with its name in JSON. The first one identifies the object.
pub(crate) type Fields = Vec<(&'static str, Value)>;

/// An object of an attachment, and whether it is as expected: whether it agrees with the
/// attachment's result and configuration, or there is nothing to compare it with.
#[derive(Clone)]
pub(crate) struct Fact {
    /// The kind of object, which is the first column: `address`, `route`, …
    pub(crate) kind: &'static str,
    pub(crate) fields: Fields,
    /// What is not as expected.
    pub(crate) problem: Option<String>,
}

impl Fact {
    /// Returns a fact that is as expected.
    pub(crate) fn fine(kind: &'static str, fields: impl Into<Fields>) -> Fact {
        Fact { kind, fields: fields.into(), problem: None }
    }

    /// Returns a fact that is not as expected.
    pub(crate) fn differs(kind: &'static str, fields: impl Into<Fields>, problem: impl Into<String>) -> Fact {
        Fact { kind, fields: fields.into(), problem: Some(problem.into()) }
    }

    /// Returns the properties and the problem for people: `eth0, type veth, mtu 1500`.
    pub(crate) fn text(&self) -> String {
        let (mut texts, mut place) = (Vec::new(), String::new());
        for (position, (key, value)) in self.fields.iter().enumerate() {
            let name = words(key.trim_end_matches("Seconds"));
            match value {
                Value::Null | Value::Bool(false) => {}
                Value::Bool(true) => texts.push(name),
                _ if position == 0 => texts.push(cell(key, value)),
                _ if ["place", "folder", "file", "socket"].contains(key) => place = format!("  [{}]", cell(key, value)),
                _ => texts.push(format!("{name} {}", cell(key, value))),
            }
        }
        let separator = if texts.is_empty() || self.problem.is_none() { "" } else { ": " };
        format!("{}{place}{separator}{}", texts.join(", "), self.problem.as_deref().unwrap_or_default())
    }
}

impl Serialize for Fact {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let verdict =
            [("kind", json!(self.kind)), ("ok", json!(self.problem.is_none())), ("problem", json!(self.problem))];
        serializer.collect_map(verdict.into_iter().chain(self.fields.iter().cloned()))
    }
}

/// Returns the words of a field's name: `vlan filtering` for `vlanFiltering`.
pub(crate) fn words(name: &str) -> String {
    let spaced = name.replace("ID", "Id").chars().fold(String::new(), |text, c| match c.is_uppercase() {
        true => format!("{text} {}", c.to_ascii_lowercase()),
        false => format!("{text}{c}"),
    });
    spaced.trim_start().to_owned()
}

/// Returns the text of a field's value in a table.
fn cell(column: &str, value: &Value) -> String {
    match value {
        Value::Null | Value::Bool(false) => String::new(),
        Value::Bool(true) => "yes".to_owned(),
        Value::String(text) => text.replace('\n', "\\n"),
        Value::Array(items) => items.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(","),
        Value::Number(seconds) if column.ends_with("Seconds") => seconds.as_u64().map_or_else(String::new, age_text),
        other => other.to_string(),
    }
}

/// Returns seconds as text, such as `3 d`, in the largest unit that gives at least 2.
fn age_text(seconds: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(86_400, "d"), (3_600, "h"), (60, "min")];
    let unit = UNITS.iter().find(|(unit, _)| seconds >= 2 * unit);
    unit.map_or_else(|| format!("{seconds} s"), |(unit, name)| format!("{} {name}", seconds / unit))
}

/// Returns a number and the noun in the singular or with an `s`: `1 error`, `2 errors`.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Writes a JSON document to stdout.
///
/// # Errors
/// Code 5 if stdout cannot be written.
pub(crate) fn write_json(streams: &mut Streams<'_>, value: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::caused(Code::INTERNAL, "failed to encode the result", error))?;
    write_raw(streams, &format!("{text}\n"))
}

/// The highlighting of a line, with the number that a terminal expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    /// A heading.
    Bold = 1,
    /// Something is wrong.
    Red = 31,
    /// Something may be wrong.
    Yellow = 33,
}

/// Returns `; did you mean "mtu"?` with the most similar known name, or an empty text if its
/// distance from `name` is greater than 1 plus a quarter of the length of `name`.
pub(crate) fn did_you_mean<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> String {
    let lower = name.to_ascii_lowercase();
    let distance = |other: &'k str| (strsim::osa_distance(&lower, &other.to_ascii_lowercase()), other);
    let closest = known.into_iter().map(distance).min();
    let similar = closest.filter(|(distance, _)| *distance <= 1 + name.len() / 4);
    similar.map(|(_, other)| format!("; did you mean {other:?}?")).unwrap_or_default()
}

/// Prints the error, or the help that was requested. Returns the exit code.
pub(crate) fn print_failure(failure: &Failure, streams: &mut Streams<'_>) -> Exit {
    match failure {
        Failure::Parser(error) => print_parser_error(error, streams),
        Failure::Usage { verb, msg } => {
            streams.notes.note(format_args!("error: {msg}\n\nFor more information, try 'cnitool {verb} --help'."));
            Exit::Usage
        }
        Failure::Failed { error, format: Format::Json, .. } => {
            if let Err(write_error) = write_json(streams, &error_json(error)) {
                streams.notes.note(format_args!("cnitool: {error} ({write_error})"));
            }
            Exit::Failed
        }
        Failure::Failed { subject, error, format: Format::Text } => {
            streams.notes.note(format_args!("cnitool: {subject}: {}", escape_control(&error.to_string())));
            error.details().lines().for_each(|line| streams.notes.note(format_args!("    {}", escape_control(line))));
            streams.notes.note(format_args!("    CNI error code {}: {}", error.code(), meaning(error.code())));
            // The texts of EPERM and EACCES.
            let is_denied = ["(os error 1)", "(os error 13)"].iter().any(|text| error.to_string().contains(text));
            if is_denied && own_uid() != 0 {
                streams.notes.note("    run this as root");
            }
            Exit::Failed
        }
    }
}

/// Prints the help to stdout, or a usage error to stderr, and returns the exit code. clap returns
/// both as an error.
fn print_parser_error(error: &clap::Error, streams: &mut Streams<'_>) -> Exit {
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

/// Returns an error in the form of the plugins' errors.
pub(crate) fn error_json(error: &Error) -> Value {
    let mut json = json!({"cniVersion": Version::NEWEST.as_str(), "code": error.code().0, "msg": error.msg()});
    if !error.details().is_empty() {
        json["details"] = error.details().into();
    }
    json
}

/// Returns the meaning of an error code.
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
        Code::REFUSED => "refused",
        Code::KERNEL => "specific to the plugin; from these plugins: the kernel or a program refused the operation",
        Code::CHECK_FAILED => "specific to the plugin; from these plugins: the attachment differs from its ADD",
        Code::CONFLICT => "specific to the plugin; from these plugins: the name, address or port is already in use",
        Code(100..) => "specific to the plugin",
        _ => "not defined by the specification",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_reach_the_terminal_is_shown_instead() {
        let text = "\x1b]0;t\x07\r\u{9b}2J\u{202e}é\n";
        assert_eq!(escape_control(text), "\\u{1b}]0;t\\u{7}\\r\\u{9b}2J\\u{202e}é\n");
        let mut report = Report { text: String::new(), style: ColorMode::Coloured };
        report.painted(Colour::Red, "eth0 \x1b[31m");
        report.parts(&[(Some(Colour::Bold), "a"), (None, "\x1b[0m")]);
        assert_eq!(report.text, "\x1b[31meth0 \\u{1b}[31m\x1b[0m\n\x1b[1ma\x1b[0m \\u{1b}[0m\n");
    }
}
