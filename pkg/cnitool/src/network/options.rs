//! The arguments of the network verbs.

use std::ffi::OsString;

use lexopt::{Parser, ValueExt as _};

use crate::cli::{Failure, Parsed, Shared, Token, next};

/// The verbs of this group.
pub(crate) const VERBS: [&str; 6] = ["add", "check", "del", "gc", "status", "version"];

/// A verb with its arguments.
#[derive(Debug)]
pub(crate) struct Command {
    pub(super) verb: &'static str,
    pub(super) network: String,
    pub(super) netns: Option<OsString>,
    pub(super) ifname: Option<String>,
    pub(super) container_id: Option<String>,
    /// del: go on after an error.
    pub(super) keep_going: bool,
    /// gc: (container ID, interface name) that are valid whatever became of their namespace.
    pub(super) keep: Vec<(String, String)>,
    /// gc: even if nothing is valid.
    pub(super) all: bool,
    /// gc: only tell.
    pub(super) dry_run: bool,
    pub(super) shared: Shared,
}

/// Reads what follows the verb.
pub(crate) fn parse(verb: &'static str, shared: Shared, mut parser: Parser) -> Result<Parsed, Failure> {
    let mut command = Command {
        verb,
        network: String::new(),
        netns: None,
        ifname: None,
        container_id: None,
        keep_going: false,
        keep: Vec::new(),
        all: false,
        dry_run: false,
        shared,
    };
    let mut values = Vec::new();
    command.read(&mut parser, &mut values).map_err(|error| Failure::usage(verb, error.to_string()))?;
    if command.shared.help() {
        return Ok(Parsed::Help(verb));
    }
    command.place(values).map_err(|msg| Failure::usage(verb, msg))?;
    Ok(Parsed::Network(command))
}

impl Command {
    fn read(&mut self, parser: &mut Parser, values: &mut Vec<OsString>) -> Result<(), lexopt::Error> {
        let attaches = self.needs_attachment();
        while let Some(token) = next(parser)? {
            let name = match token {
                Token::Value(value) => {
                    values.push(value);
                    continue;
                }
                Token::Option(name) => name,
            };
            match name.as_str() {
                "-i" | "--ifname" if attaches => self.ifname = Some(parser.value()?.string()?),
                "--container-id" if attaches => self.container_id = Some(parser.value()?.string()?),
                "--keep-going" if self.verb == "del" => self.keep_going = true,
                "--keep" if self.verb == "gc" => self.keep.push(parser.value()?.parse_with(attachment)?),
                "--all" if self.verb == "gc" => self.all = true,
                "--dry-run" if self.verb == "gc" => self.dry_run = true,
                _ if self.shared.take(&name, parser)? => {}
                _ => return Err(format!("unknown option {name}").into()),
            }
        }
        Ok(())
    }

    /// Gives the values their places.
    fn place(&mut self, values: Vec<OsString>) -> Result<(), String> {
        let mut values = values.into_iter();
        let Some(network) = values.next() else { return Err("the name of a network is expected".to_owned()) };
        self.network = network.into_string().map_err(|name| format!("no name of a network: {}", name.display()))?;
        self.netns = values.next().filter(|path| !path.is_empty());
        if let Some(extra) = values.next() {
            return Err(format!("unexpected argument {:?}", extra.display()));
        }
        match (self.verb, &self.netns, &self.container_id) {
            ("add" | "check", None, _) => Err("the path of a network namespace is expected".to_owned()),
            ("del", None, None) => Err("the path of the network namespace or --container-id is expected".to_owned()),
            _ => Ok(()),
        }
    }

    fn needs_attachment(&self) -> bool {
        matches!(self.verb, "add" | "check" | "del")
    }
}

fn attachment(text: &str) -> Result<(String, String), &'static str> {
    match text.split_once('/') {
        Some((id, ifname)) if !id.is_empty() && !ifname.is_empty() => Ok((id.to_owned(), ifname.to_owned())),
        _ => Err("CONTAINER-ID/IFNAME is expected"),
    }
}
