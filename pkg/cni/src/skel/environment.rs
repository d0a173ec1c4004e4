//! Reads the `CNI_*` variables and checks which ones each verb needs and which values they may
//! have.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use crate::{Code, Error, Result, ident};

/// The verb in CNI_COMMAND.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Attach a container.
    Add,
    /// Check that the attachment is as ADD left it.
    Check,
    /// Detach a container.
    Del,
    /// Remove everything that belongs to no valid attachment.
    Gc,
    /// Report whether an ADD can succeed.
    Status,
    /// Report the supported specification versions.
    Version,
}

impl Verb {
    /// Returns the value of CNI_COMMAND for this verb.
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

    /// Parses a value of CNI_COMMAND. Returns `None` for an unknown one.
    fn parse(text: &str) -> Option<Verb> {
        let all = [Verb::Add, Verb::Check, Verb::Del, Verb::Gc, Verb::Status, Verb::Version];
        all.into_iter().find(|verb| verb.as_str() == text)
    }

    /// Whether a call of this verb is about one attachment, which CNI_CONTAINERID and CNI_IFNAME
    /// name.
    pub(super) fn has_attachment(self) -> bool {
        matches!(self, Verb::Add | Verb::Check | Verb::Del)
    }
}

/// The environment of a call: the `CNI_*` variables as text, and all variables for delegates.
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
    /// CNI_NETNS_OVERRIDE: CNI_NETNS may be the plugin's own namespace.
    pub netns_override: bool,
    /// All variables, with duplicates.
    all: Vec<(OsString, OsString)>,
    /// The names of the `CNI_*` variables whose values are not UTF-8.
    not_utf8: Vec<String>,
}

impl Environment {
    /// Returns an environment of these variables. If a name occurs more than once, its last value
    /// is used.
    pub fn new(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Environment {
        let all: Vec<(OsString, OsString)> = variables.into_iter().collect();
        let mut not_utf8 = Vec::new();
        let mut value_of = |name: &str| {
            let Some((_, value)) = all.iter().rev().find(|(key, _)| key == name) else { return String::new() };
            match value.to_str() {
                Some(text) => text.to_owned(),
                None => {
                    not_utf8.push(name.to_owned());
                    String::new()
                }
            }
        };
        let netns_override = value_of("CNI_NETNS_OVERRIDE");
        Environment {
            command: value_of("CNI_COMMAND"),
            container_id: value_of("CNI_CONTAINERID"),
            netns: value_of("CNI_NETNS"),
            ifname: value_of("CNI_IFNAME"),
            args: value_of("CNI_ARGS"),
            path: value_of("CNI_PATH"),
            netns_override: netns_override == "1" || netns_override.eq_ignore_ascii_case("true"),
            all,
            not_utf8,
        }
    }

    /// Returns the verb in CNI_COMMAND, or `None` if CNI_COMMAND is empty or not set, as when a
    /// person starts the plugin. `plugin` is the plugin's name, for the error.
    ///
    /// # Errors
    /// Code 4 if CNI_COMMAND is not a verb, or is not UTF-8.
    pub(super) fn verb(&self, plugin: &str) -> Result<Option<Verb>> {
        if self.not_utf8.iter().any(|name| name == "CNI_COMMAND") {
            return Err(invalid_utf8("CNI_COMMAND"));
        }
        if self.command.is_empty() {
            return Ok(None);
        }
        match Verb::parse(&self.command) {
            Some(verb) => Ok(Some(verb)),
            None => Err(Error::new(Code::INVALID_ENVIRONMENT, format!("unknown CNI_COMMAND: {}", self.command))
                .with_details(format!("{plugin} knows ADD, CHECK, DEL, GC, STATUS and VERSION, in upper case"))),
        }
    }

    /// Checks that the variables that the verb needs are set and valid. As in Go, an invalid value
    /// is reported before missing variables.
    ///
    /// # Errors
    /// Code 4 if a value is invalid, if the value of any field is not UTF-8, even if the verb does
    /// not need it, or if variables are missing, which the error lists.
    pub(super) fn check(&self, verb: Verb) -> Result<()> {
        if let Some(name) = self.not_utf8.first() {
            return Err(invalid_utf8(name));
        }
        let has_attachment = verb.has_attachment();
        if has_attachment && !self.container_id.is_empty() {
            ident::check_container_id(&self.container_id)?;
        }
        if has_attachment && !self.ifname.is_empty() {
            match verb {
                Verb::Add => ident::check_new_interface_name(&self.ifname)?,
                // Less strict than for ADD: an earlier release or a Go plugin may have created the
                // interface.
                _ => ident::check_interface_name(&self.ifname)?,
            }
        }
        let variables = [
            ("CNI_CONTAINERID", &self.container_id, has_attachment),
            ("CNI_NETNS", &self.netns, matches!(verb, Verb::Add | Verb::Check)),
            ("CNI_IFNAME", &self.ifname, has_attachment),
            ("CNI_PATH", &self.path, verb != Verb::Version),
        ];
        let mut missing_names = Vec::new();
        for (name, value, is_needed) in variables {
            if is_needed && value.is_empty() {
                missing_names.push(name);
            }
        }
        if missing_names.is_empty() { Ok(()) } else { Err(missing_variables(&missing_names)) }
    }

    /// Returns the environment of a delegate: all variables of this call, with `verb` as
    /// CNI_COMMAND.
    pub fn for_delegate(&self, verb: Verb) -> Vec<(OsString, OsString)> {
        let others = self.all.iter().filter(|(key, _)| key != OsStr::new("CNI_COMMAND")).cloned();
        others.chain([(OsString::from("CNI_COMMAND"), OsString::from(verb.as_str()))]).collect()
    }

    /// Returns the folders of CNI_PATH, which are searched for plugins.
    pub fn plugin_folders(&self) -> Vec<PathBuf> {
        std::env::split_paths(&self.path).filter(|folder| !folder.as_os_str().is_empty()).collect()
    }
}

/// Returns the error, code 4, of a variable whose value is not UTF-8.
fn invalid_utf8(name: &str) -> Error {
    Error::new(Code::INVALID_ENVIRONMENT, format!("environment variable {name} is not valid UTF-8"))
}

/// Returns the error, code 4, that names all missing variables.
pub(super) fn missing_variables(names: &[&str]) -> Error {
    Error::new(Code::INVALID_ENVIRONMENT, format!("required env variables [{}] missing", names.join(",")))
}
