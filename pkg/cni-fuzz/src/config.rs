//! A whole call of a plugin, with its environment and configuration: the common part of all plugins
//! (`cni::skel`), then only the plugin's reader of the configuration.
//!
//! An ADD, a VERSION and every failed call print one JSON document; no other call prints anything.
//! No call fails with code 999 (a defect of the program). For every verb except VERSION, which
//! reads only `cniVersion`, neither an unknown key nor the case of keys changes the outcome. An
//! IPAM plugin is only found as a file that is named exactly like its type, in the searched folder.
//!
//! The input: `plugin VERB`, then CNI_CONTAINERID, CNI_IFNAME, CNI_NETNS and CNI_ARGS, a line each;
//! the rest is stdin.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;

use cni::Result;
use cni::config::{NetConf, ValidAttachments};
use cni::delegate::find_plugin;
use cni::json::{Json, UnknownKey};
use cni::result::AddResult;
use cni::rollback::Notes;
use cni::skel::{Added, Call, Environment, Plugin, Role, Streams, dispatch};
use cni::version::Version;
use cni_plugin::Interface;

use crate::input::Input;
use crate::machine::NoMachine;

/// A plugin that reads its configuration as the real plugin does for the same verb, and does
/// nothing else.
#[derive(Clone, Copy)]
struct Reader(&'static dyn Plugin);

/// Reads the configuration of a plugin that creates an interface, and CNI_ARGS.
fn parse_interface<I: Interface>(plugin: &I, call: &Call<'_>) -> Result<()> {
    plugin.parse(&call.conf, &call.environment.args).map(drop)
}

impl Reader {
    /// Reads the whole configuration, as ADD does. Also checks that a search for the IPAM plugin
    /// finds only a program with exactly that name. Returns a result only for host-local: that of
    /// an ADD, without addresses.
    fn read(self, call: &Call<'_>) -> Result<Option<AddResult>> {
        check_found_program(call.conf.ipam_type());
        match self.name() {
            "bridge" => plugin_bridge::fuzzing::read(call)?,
            "firewall" => plugin_firewall::fuzzing::read(call)?,
            "host-local" => return plugin_host_local::fuzzing::read(call).map(Some),
            "macvlan" => parse_interface(&plugin_macvlan::Macvlan, call)?,
            "portmap" => plugin_portmap::fuzzing::read(call)?,
            "tap" => parse_interface(&plugin_tap::TapPlugin, call)?,
            "tuning" => plugin_tuning::fuzzing::read(call)?,
            _ => self.0.examine(&call.conf)?,
        }
        Ok(None)
    }

    /// Reads the keys that DEL and GC need to find what they clean up.
    fn read_location(self, call: &Call<'_>) -> Result<()> {
        check_found_program(call.conf.ipam_type());
        match self.name() {
            "host-local" => plugin_host_local::fuzzing::read_location(call)?,
            "portmap" => drop(plugin_portmap::fuzzing::valid_mappings(call)),
            "tuning" => plugin_tuning::fuzzing::read_place(call)?,
            _ => {}
        }
        Ok(())
    }
}

impl Plugin for Reader {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn role(&self) -> Role {
        self.0.role()
    }

    fn examine(&self, _: &NetConf) -> Result<()> {
        Ok(())
    }

    fn unknown_keys(&self, _: &Json) -> Vec<UnknownKey> {
        Vec::new()
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let result = self.read(call)?;
        let prev_result = call.conf.prev_result()?;
        Ok(Added { result: result.or(prev_result).unwrap_or_default(), rollback: call.rollback() })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        self.read(call)?;
        call.conf.prev_result().map(drop)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        self.read_location(call)
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        assert!(valid.iter().all(|(id, ifname)| !id.is_empty() && !ifname.is_empty()), "empty name in {valid:?}");
        self.read_location(call)
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        if self.name() == "host-local" {
            return plugin_host_local::fuzzing::read_ranges(call);
        }
        self.read(call).map(drop)
    }
}

/// Checks that a plugin of this type, if it is found in `/bin`, is a file with exactly that name.
/// Runs no program.
fn check_found_program(kind: &str) {
    let folder = Path::new("/bin");
    if let Ok(program) = find_plugin(kind, &[folder.to_owned()]) {
        assert_eq!(
            (program.parent(), program.file_name()),
            (Some(folder), Some(OsStr::new(kind))),
            "found for {kind:?}"
        );
    }
}

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let first_line = input.line_text();
    let (plugin, verb) = first_line.split_once(' ').unwrap_or(("bridge", &first_line));
    let known = cni_multicall::find(plugin).or_else(|| cni_multicall::find("bridge"));
    let plugin = Reader(known.expect("bridge is a plugin"));
    let names = ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS", "CNI_ARGS"];
    let mut variables: Vec<(OsString, OsString)> =
        names.map(|name| (name.into(), OsString::from_vec(input.line().to_vec()))).into();
    variables.push(("CNI_COMMAND".into(), verb.into()));
    variables.push(("CNI_PATH".into(), "/nonexistent".into()));
    let environment = Environment::new(variables);
    let stdin = input.rest();

    let outcome = run_call(plugin, &environment, stdin);
    if verb == "VERSION" {
        return;
    }
    let Ok(json @ Json::Object(_)) = Json::parse(stdin) else { return };
    let keep_key = |_: usize, key: &str| key.to_owned();
    let again = to_text(&json, keep_key);
    // serde_json may read a float back with a different last bit. Such documents are skipped,
    // because no plugin reads floats.
    if Json::parse(&again).as_ref() != Ok(&json) {
        return;
    }
    assert_eq!(run_call(plugin, &environment, &again), outcome, "{verb} differs after the document was written again");
    // A key that no plugin knows.
    let Json::Object(mut members) = json else { return };
    let unknown = Json::Array(vec![Json::Null, Json::Object(vec![("type".to_owned(), Json::Bool(true))])]);
    members.insert(members.len() / 2, ("zz/unknown".to_owned(), unknown));
    let json = Json::Object(members);
    assert_eq!(
        run_call(plugin, &environment, &to_text(&json, keep_key)),
        outcome,
        "{verb} differs with an unknown key"
    );
    // Only the top-level keys are changed: deeper ones may be names in a map, where case matters.
    let upper_case = to_text(&json, |depth, key| if depth == 0 { key.to_ascii_uppercase() } else { key.to_owned() });
    assert_eq!(run_call(plugin, &environment, &upper_case), outcome, "{verb} differs with keys in upper case");
}

/// Runs a call with the configuration `stdin` and checks its output. Returns whether the call
/// succeeded, and its output.
fn run_call(plugin: Reader, environment: &Environment, mut stdin: &[u8]) -> (bool, Vec<u8>) {
    let mut stdout = Vec::new();
    let config = stdin;
    let streams = Streams { stdin: Some(&mut stdin), stdout: &mut stdout, notes: Notes::silent() };
    let succeeded = dispatch(&plugin, &NoMachine, environment, streams).is_ok();
    check_output(&environment.command, config, succeeded, &stdout);
    (succeeded, stdout)
}

/// Checks the output of a call with the configuration `config`.
fn check_output(verb: &str, config: &[u8], succeeded: bool, stdout: &[u8]) {
    let shown = String::from_utf8_lossy(stdout);
    assert!(verb != "VERSION" || succeeded, "VERSION failed: {shown}");
    let has_output = !succeeded || matches!(verb, "ADD" | "VERSION");
    assert_eq!(has_output, !stdout.is_empty(), "whether {verb} (succeeded: {succeeded}) has an output: {shown:?}");
    if !has_output {
        return;
    }
    let json = Json::parse(stdout)
        .unwrap_or_else(|error| panic!("the output of {verb} is not one JSON document: {error}: {shown}"));
    let Some(version) = json.get("cniVersion").and_then(Json::as_str).and_then(Version::find) else {
        panic!("the output of {verb} has no supported cniVersion: {shown}")
    };
    if succeeded && verb == "ADD" {
        let result = AddResult::decode_as(&json, version).unwrap_or_else(|error| {
            panic!("the output of {verb} is not a result of version {version}: {error}: {shown}")
        });
        crate::result::check_versions(&result);
        assert!(Json::parse(config).is_ok(), "ADD accepted a configuration that is not JSON");
    } else if !succeeded {
        let Some(Json::Number(code)) = json.get("code") else { panic!("the error of {verb} has no code: {shown}") };
        // The specification and these plugins use codes below 200; 999 reports a defect.
        let is_expected = code.as_u64().is_some_and(|code| (1..200).contains(&code));
        assert!(is_expected, "the error of {verb} has an unexpected code: {shown}");
        let has_message = json.get("msg").and_then(Json::as_str).is_some_and(|msg| !msg.is_empty());
        assert!(has_message, "the error of {verb} has no message: {shown}");
    }
}

/// Returns the document as text. `spelling` gets the depth of a key, 0 at the top level, and the
/// key, and returns the key to write.
fn to_text(json: &Json, spelling: impl Fn(usize, &str) -> String + Copy) -> Vec<u8> {
    let mut text = String::new();
    write(json, 0, spelling, &mut text);
    text.into_bytes()
}

/// Appends a part of the document at `depth` to `text`.
fn write(json: &Json, depth: usize, spelling: impl Fn(usize, &str) -> String + Copy, text: &mut String) {
    let quoted = |string: &str| serde_json::to_string(string).expect("any string is JSON");
    match json {
        Json::Null => text.push_str("null"),
        Json::Bool(value) => text.push_str(&value.to_string()),
        Json::Number(number) => text.push_str(&number.to_string()),
        Json::String(string) => text.push_str(&quoted(string)),
        Json::Array(items) => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                text.push_str(if index == 0 { "" } else { "," });
                write(item, depth + 1, spelling, text);
            }
            text.push(']');
        }
        Json::Object(members) => {
            text.push('{');
            for (index, (key, value)) in members.iter().enumerate() {
                text.push_str(if index == 0 { "" } else { "," });
                text.push_str(&quoted(&spelling(depth, key)));
                text.push(':');
                write(value, depth + 1, spelling, text);
            }
            text.push('}');
        }
    }
}
