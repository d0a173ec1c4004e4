//! The `CNI_*` variables, read once: which are needed for which verb, and what they may hold.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use crate::{Code, Error, Result, ident};

/// The verb in CNI_COMMAND.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Attach a container.
    Add,
    /// Is the attachment as it should be?
    Check,
    /// Detach it.
    Del,
    /// Remove what belongs to no valid attachment.
    Gc,
    /// Could an ADD be served?
    Status,
    /// Which versions are spoken?
    Version,
}

impl Verb {
    /// As it stands in CNI_COMMAND.
    pub fn as_str(self) -> &'static str {
        match self {
            Verb::Add => "ADD",
            Verb::Check => "CHECK",
            Verb::Del => "DEL",
            Verb::Gc => "GC",
            Verb::Status => "STATUS",
            Verb::Version => "VERSION",
        }
    }

    fn find(text: &str) -> Option<Verb> {
        let all = [Verb::Add, Verb::Check, Verb::Del, Verb::Gc, Verb::Status, Verb::Version];
        all.into_iter().find(|verb| verb.as_str() == text)
    }
}

/// The environment of a call: the `CNI_*` variables as text, and everything, for the children.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// CNI_COMMAND
    pub command: String,
    /// CNI_CONTAINERID
    pub container_id: String,
    /// CNI_NETNS
    pub netns: String,
    /// CNI_IFNAME
    pub ifname: String,
    /// CNI_ARGS
    pub args: String,
    /// CNI_PATH
    pub path: String,
    /// CNI_NETNS_OVERRIDE: the container's namespace may be the plugin's own.
    pub netns_override: bool,
    all: Vec<(OsString, OsString)>,
    not_text: Vec<String>,
}

impl Environment {
    /// This process's.
    pub fn from_process() -> Environment {
        Environment::new(std::env::vars_os())
    }

    /// Makes an environment of pairs; of duplicates the last one counts.
    pub fn new(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Environment {
        let mut environment = Environment { all: variables.into_iter().collect(), ..Environment::default() };
        let mut not_text = Vec::new();
        let all = &environment.all;
        let mut text = |name: &str| match all.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.to_str())
        {
            Some(Some(value)) => value.to_owned(),
            Some(None) => {
                not_text.push(name.to_owned());
                String::new()
            }
            None => String::new(),
        };
        environment.command = text("CNI_COMMAND");
        environment.container_id = text("CNI_CONTAINERID");
        environment.netns = text("CNI_NETNS");
        environment.ifname = text("CNI_IFNAME");
        environment.args = text("CNI_ARGS");
        environment.path = text("CNI_PATH");
        let switch = text("CNI_NETNS_OVERRIDE");
        environment.netns_override = switch == "1" || switch.eq_ignore_ascii_case("true");
        environment.not_text = not_text;
        environment
    }

    /// Which verb is asked for; `None` if none is, which is a person at a terminal.
    pub(super) fn verb(&self, plugin: &str) -> Result<Option<Verb>> {
        let bad_command = self.not_text.iter().any(|name| name == "CNI_COMMAND");
        if bad_command {
            return Err(not_text("CNI_COMMAND"));
        }
        if self.command.is_empty() {
            return Ok(None);
        }
        match Verb::find(&self.command) {
            Some(verb) => Ok(Some(verb)),
            None => Err(Error::new(Code::INVALID_ENVIRONMENT, format!("unknown CNI_COMMAND: {}", self.command))
                .with_details(format!("{plugin} knows ADD, CHECK, DEL, GC, STATUS and VERSION, in upper case"))),
        }
    }

    /// Checks that the variables that the verb needs are there and valid. An invalid value is
    /// reported before a missing later one, as in Go.
    pub(super) fn check(&self, verb: Verb) -> Result<()> {
        if let Some(name) = self.not_text.first() {
            return Err(not_text(name));
        }
        type Rule<'a> = (&'static str, &'a str, bool, fn(&str) -> Result<()>);
        let attachment = matches!(verb, Verb::Add | Verb::Check | Verb::Del);
        // DEL must find and remove an interface of any name.
        let ifname = if verb == Verb::Add { ident::check_new_interface_name } else { ident::check_interface_name };
        let rules: [Rule<'_>; 4] = [
            ("CNI_CONTAINERID", &self.container_id, attachment, ident::check_container_id),
            ("CNI_NETNS", &self.netns, attachment && verb != Verb::Del, |_| Ok(())),
            ("CNI_IFNAME", &self.ifname, attachment, ifname),
            ("CNI_PATH", &self.path, verb != Verb::Version, |_| Ok(())),
        ];
        let mut absent = Vec::new();
        for (name, value, needed, check) in rules {
            match value {
                _ if !needed => {}
                "" => absent.push(name),
                value => check(value)?,
            }
        }
        if absent.is_empty() { Ok(()) } else { Err(missing(&absent)) }
    }

    /// The environment of a delegate: the same, with another CNI_COMMAND.
    pub fn for_delegate(&self, verb: Verb) -> Vec<(OsString, OsString)> {
        let kept = self.all.iter().filter(|(key, _)| key != OsStr::new("CNI_COMMAND")).cloned();
        kept.chain([(OsString::from("CNI_COMMAND"), OsString::from(verb.as_str()))]).collect()
    }

    /// The folders of CNI_PATH.
    pub fn plugin_folders(&self) -> Vec<PathBuf> {
        std::env::split_paths(&self.path).filter(|folder| !folder.as_os_str().is_empty()).collect()
    }
}

fn not_text(name: &str) -> Error {
    Error::new(Code::INVALID_ENVIRONMENT, format!("environment variable {name} is not valid UTF-8"))
}

/// Code 4 for variables that are not there, all of them at once.
pub(super) fn missing(names: &[&str]) -> Error {
    Error::new(Code::INVALID_ENVIRONMENT, format!("required env variables [{}] missing", names.join(",")))
}
