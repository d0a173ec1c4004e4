//! What all verbs share: finding the verb, the options that are everybody's, variables of the environment.
//!
//! Options may stand anywhere. A verb refuses options that are not its own, rather than ignoring what somebody meant.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use cni::libcni::cache::DEFAULT_DIR;
use cni::libcni::{Cache, ConfFolder, DEFAULT_TIMEOUT, Runtime};
use cni::rollback::Notes;
use cni::skel::MachineRef;
use cni::{Code, Error};
use lexopt::{Arg, Parser, ValueExt as _};

use crate::report::Format;
use crate::{Call, Streams, help, network, report};

/// Where the networks are unless told otherwise.
pub(crate) const DEFAULT_CONF_DIR: &str = "/etc/cni/net.d";

/// Where the plugins are unless told otherwise.
pub(crate) const DEFAULT_PLUGIN_DIR: &str = "/opt/cni/bin";

/// Why a call did not succeed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It makes no sense; which verb's help to read, if that is known.
    Usage { verb: Option<&'static str>, msg: String },
    /// It failed while doing this.
    Failed { doing: String, error: Error, format: Format },
}

impl Failure {
    pub(crate) fn usage(verb: &'static str, msg: impl Into<String>) -> Failure {
        Failure::Usage { verb: Some(verb), msg: msg.into() }
    }
}

/// The options of every verb.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    conf_dir: Option<PathBuf>,
    cache_dir: Option<PathBuf>,
    timeout: Option<Duration>,
    pub(crate) format: Format,
    help: bool,
}

/// One argument, owned: lexopt's own borrows the parser, which is needed for the option's value.
pub(crate) enum Token {
    Option(String),
    Value(OsString),
}

type Parse = fn(&'static str, Shared, Parser) -> Result<Parsed, Failure>;

/// What the arguments ask for.
pub(crate) enum Parsed {
    /// The help of a verb.
    Help(&'static str),
    /// A verb of the group `network`.
    Network(network::Command),
}

/// Every verb, and who reads the rest of its arguments.
const GROUPS: [(&[&str], Parse); 1] = [(&network::VERBS, network::parse)];

/// Reads the arguments and does what they ask for.
pub(crate) fn run(call: &Call<'_>, streams: &mut Streams<'_>) -> Result<(), Failure> {
    let mut parser = Parser::from_args(call.args.iter().cloned());
    let mut shared = Shared::default();
    let nameless = |msg: String| Failure::Usage { verb: None, msg };
    let print = |text: &str, streams: &mut Streams<'_>| {
        report::write(streams, text).map_err(|error| failed("help", error, Format::Text))
    };
    let verb = loop {
        match next(&mut parser).map_err(|error| nameless(error.to_string()))? {
            None if shared.help => return print(help::OVERVIEW, streams),
            None => return Err(nameless("no verb given".to_owned())),
            Some(Token::Value(verb)) => break verb.to_string_lossy().into_owned(),
            Some(Token::Option(name)) if name == "--version" || name == "-V" => {
                return print(concat!("cnitool ", env!("CARGO_PKG_VERSION"), "\n"), streams);
            }
            Some(Token::Option(name)) => {
                if !shared.take(&name, &mut parser).map_err(|error| nameless(error.to_string()))? {
                    return Err(nameless(format!("unknown option {name}")));
                }
            }
        }
    };
    // `cnitool help` and `cnitool help add` say what `--help` says.
    let verb = if verb == "help" {
        shared.help = true;
        match next(&mut parser).map_err(|error| nameless(error.to_string()))? {
            Some(Token::Value(verb)) => verb.to_string_lossy().into_owned(),
            _ => return print(help::OVERVIEW, streams),
        }
    } else {
        verb
    };
    let known = |verbs: &[&'static str]| verbs.iter().find(|name| **name == verb).copied();
    let Some((verb, parse)) = GROUPS.iter().find_map(|(verbs, parse)| Some((known(verbs)?, parse))) else {
        return Err(nameless(format!("unknown verb {verb:?}")));
    };
    match parse(verb, shared, parser)? {
        Parsed::Help(verb) => print(help::of(verb), streams),
        Parsed::Network(command) => network::run(command, call, streams),
    }
}

pub(crate) fn failed(doing: impl Into<String>, error: Error, format: Format) -> Failure {
    Failure::Failed { doing: doing.into(), error, format }
}

/// The next argument.
pub(crate) fn next(parser: &mut Parser) -> Result<Option<Token>, lexopt::Error> {
    Ok(match parser.next()? {
        None => None,
        Some(Arg::Short(name)) => Some(Token::Option(format!("-{name}"))),
        Some(Arg::Long(name)) => Some(Token::Option(format!("--{name}"))),
        Some(Arg::Value(value)) => Some(Token::Value(value)),
    })
}

impl Shared {
    /// Takes one of its own options; `false` if it is none.
    pub(crate) fn take(&mut self, name: &str, parser: &mut Parser) -> Result<bool, lexopt::Error> {
        match name {
            "-h" | "--help" => self.help = true,
            "--json" => self.format = Format::Json,
            "--conf-dir" => self.conf_dir = Some(parser.value()?.into()),
            "--cache-dir" => self.cache_dir = Some(parser.value()?.into()),
            "--timeout" => {
                let seconds = parser.value()?.parse_with(|text| match text.parse::<u64>() {
                    Ok(seconds @ 1..=86_400) => Ok(seconds),
                    _ => Err("a number of seconds from 1 to 86400 is expected"),
                })?;
                self.timeout = Some(Duration::from_secs(seconds));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Whether help was asked for.
    pub(crate) fn help(&self) -> bool {
        self.help
    }

    /// Where the networks are: the option, NETCONFPATH, the default.
    pub(crate) fn conf_folder(&self, variables: &Variables<'_>) -> ConfFolder {
        let dir = self.conf_dir.clone().or_else(|| variables.find_os("NETCONFPATH").map(PathBuf::from));
        ConfFolder::new(dir.unwrap_or_else(|| DEFAULT_CONF_DIR.into()))
    }

    /// The runtime these options and variables describe.
    pub(crate) fn runtime<'m>(&self, call: &Call<'m>, notes: &Notes) -> Runtime<'m> {
        let path = Variables(&call.environment).find_os("CNI_PATH").unwrap_or_else(|| DEFAULT_PLUGIN_DIR.into());
        Runtime {
            machine: MachineRef(call.machine.0),
            plugin_folders: std::env::split_paths(&path).filter(|folder| !folder.as_os_str().is_empty()).collect(),
            environment: call.environment.clone(),
            cache: Cache::new(self.cache_dir.as_deref().unwrap_or(DEFAULT_DIR.as_ref())),
            timeout: self.timeout.unwrap_or(DEFAULT_TIMEOUT),
            notes: notes.clone(),
        }
    }
}

/// The environment; an empty variable is an absent one.
#[derive(Clone, Copy)]
pub(crate) struct Variables<'a>(pub(crate) &'a [(OsString, OsString)]);

impl Variables<'_> {
    pub(crate) fn find_os(&self, name: &str) -> Option<OsString> {
        let found = self.0.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        found.filter(|value| !value.is_empty())
    }

    /// # Errors
    /// Code 4 for what is no text.
    pub(crate) fn find(&self, name: &str) -> Result<Option<String>, Error> {
        let text = |value: OsString| {
            value.into_string().map_err(|_| {
                let msg = format!("environment variable {name} is not valid UTF-8");
                Error::new(Code::INVALID_ENVIRONMENT, msg)
            })
        };
        self.find_os(name).map(text).transpose()
    }
}
