//! rules: writes the packet filter rules of attachments again after another program has removed
//! them.
//!
//! Each plugin writes its own rules ([`Plugin::restore_rules`](cni::skel::Plugin::restore_rules)),
//! from the configuration and the result that the result cache has of the attachment's ADD.

use std::path::Path;

use clap::{Args, Subcommand};
use cni::config::NetConf;
use cni::rollback::{Notes, Rollback};
use cni::skel::{Environment, RestoreMode};
use cni::{Error, Result};
use cni_linux::{Netlink, Netns};
use libcni::cache::{Entry, Listing};
use libcni::{Cache, NetworkList};
use serde_json::{Value, json};

use crate::call::{Call, ColorMode, Exit, Format, Shared, Streams};
use crate::node::attachments::find_host_end;
use crate::node::{plugins_of_type, result_of};
use crate::report::{Colour, error_json, paint, write_report};
use crate::target::NetnsPresence;
use crate::{help, plugins};

/// Write packet filter rules again that another program has removed
#[derive(Debug, Args)]
#[command(after_help = help::AFTER_RULES, subcommand_value_name = "VERB", subcommand_help_heading = "Verbs")]
pub(crate) struct Rules {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Write the missing rules of every attachment
    #[command(before_help = help::RULES_RESTORE, after_help = help::AFTER_RULES_RESTORE)]
    Restore(Restore),
}

/// The arguments of `restore`.
#[derive(Debug, Args)]
struct Restore {
    /// Only this network
    network: Option<String>,
    /// Print what is missing, and change nothing
    #[arg(long)]
    dry_run: bool,
}

/// The outcome for one attachment.
enum AttachmentOutcome {
    /// The attachment is gone, for this reason.
    Skipped(String),
    /// It could not be proved that the attachment is in use, for this reason.
    Unproven(String),
    /// Its rules could not be compared.
    Failed(Error),
    /// The type of each plugin that has rules or is of another project, and the outcome for its
    /// rules.
    Plugins(Vec<(String, PluginOutcome)>),
}

/// The outcome for the rules of one plugin.
enum PluginOutcome {
    /// No rule was missing.
    Complete,
    /// These rules are missing.
    Missing(Vec<String>),
    /// These rules were missing and have been written.
    Restored(Vec<String>),
    /// The rules could not be compared or written.
    Failed(Error),
    /// It is a plugin of another project, which cannot be asked for its rules.
    NotExamined,
}

impl AttachmentOutcome {
    /// Returns the words by which reports count the attachment, or `None` if it lacked nothing.
    fn state(&self) -> Option<&'static str> {
        match self {
            AttachmentOutcome::Skipped(_) => Some("skipped"),
            AttachmentOutcome::Unproven(_) => Some("not restored"),
            AttachmentOutcome::Failed(_) => Some("failed"),
            AttachmentOutcome::Plugins(plugins) => {
                let has = |word| plugins.iter().any(|(_, plugin)| plugin.describe().0 == word);
                let lacked_rules = || (has("missing") || has("restored")).then_some("lacked rules");
                if has("failed") { Some("failed") } else { lacked_rules() }
            }
        }
    }

    /// Returns the lines for people.
    fn lines(&self, style: ColorMode) -> String {
        let of_attachment = |why: &str| line("", self.state().unwrap_or_default(), &[why.to_owned()], style);
        match self {
            AttachmentOutcome::Skipped(why) | AttachmentOutcome::Unproven(why) => of_attachment(why),
            AttachmentOutcome::Failed(error) => of_attachment(&error.to_string()),
            AttachmentOutcome::Plugins(plugins) => {
                let of_plugin = |(kind, plugin): &(String, PluginOutcome)| {
                    let (word, sentences) = plugin.describe();
                    line(&format!("{kind:<12} "), word, &sentences, style)
                };
                plugins.iter().map(of_plugin).collect()
            }
        }
    }
}

impl PluginOutcome {
    /// Returns the outcome's word for reports, and a sentence about each rule or the reason.
    fn describe(&self) -> (&'static str, Vec<String>) {
        match self {
            PluginOutcome::Complete => ("complete", Vec::new()),
            PluginOutcome::Missing(missing) => ("missing", missing.clone()),
            PluginOutcome::Restored(missing) => ("restored", missing.clone()),
            PluginOutcome::Failed(error) => ("failed", vec![error.to_string()]),
            PluginOutcome::NotExamined => ("not examined", vec!["a plugin of another project".into()]),
        }
    }
}

/// Runs `cnitool rules restore`: restores the rules of each attachment in the result cache, or of
/// each attachment to the network in the arguments, and prints the outcomes. Returns
/// [`Exit::Failed`] if an attachment or a plugin failed, if an attachment may be in use and was not
/// examined, if a file of the cache cannot be read, or if rules are missing in a dry run.
///
/// # Errors
/// Code 5 if the result cache cannot be read or stdout cannot be written.
pub(crate) fn run(args: &Rules, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit> {
    let Verb::Restore(args) = &args.verb;
    let cache = shared.cache();
    let Listing { entries, problems } = match &args.network {
        Some(network) => cache.list(network)?,
        None => cache.list_all()?,
    };
    let mut outcomes: Vec<(Entry, AttachmentOutcome)> = Vec::new();
    for entry in entries {
        let outcome = restore_attachment(&entry, &cache, args.dry_run, call, &streams.notes);
        outcomes.push((entry, outcome.unwrap_or_else(AttachmentOutcome::Failed)));
    }
    let is_incomplete = |(_, outcome): &(Entry, AttachmentOutcome)| match outcome {
        AttachmentOutcome::Skipped(_) => false,
        AttachmentOutcome::Unproven(_) | AttachmentOutcome::Failed(_) => true,
        AttachmentOutcome::Plugins(plugins) => {
            plugins.iter().any(|(_, plugin)| matches!(plugin, PluginOutcome::Failed(_) | PluginOutcome::Missing(_)))
        }
    };
    let exit = if outcomes.iter().any(is_incomplete) || !problems.is_empty() { Exit::Failed } else { Exit::Done };
    if shared.format() == Format::Text {
        problems.iter().for_each(|problem| streams.notes.note(format_args!("ignored: {problem}")));
    }
    let json = || as_json(&outcomes, &problems, args.dry_run);
    write_report(streams, shared.format(), json, |style| as_text(&outcomes, style))?;
    Ok(exit)
}

/// Restores the rules of one attachment or, in a dry run, only compares them. An
/// error of a plugin is part of the outcome. Written rules stay, even on an error, unless the
/// attachment was detached during the call.
///
/// # Errors
/// - As [`outcome_if_unused`].
/// - The configuration or the result in `entry` is invalid.
/// - The result cache cannot be read after rules were written.
fn restore_attachment(
    entry: &Entry,
    cache: &Cache,
    dry_run: bool,
    call: &Call<'_>,
    notes: &Notes,
) -> Result<AttachmentOutcome> {
    if let Some(outcome) = outcome_if_unused(entry, call)? {
        return Ok(outcome);
    }
    let list = entry.list()?;
    let environment = environment(entry);
    let plugin_calls = plugin_calls(entry, &list, &environment, call, notes)?;
    let (mut outcomes, mut rollback) = (Vec::new(), Rollback::new(notes.clone()));
    for (plugin, plugin_call) in list.plugins().iter().zip(&plugin_calls) {
        let kind = plugin.kind().to_owned();
        let Some(found) = plugins::find(&kind) else {
            outcomes.push((kind, PluginOutcome::NotExamined));
            continue;
        };
        let mode = if dry_run { RestoreMode::Report } else { RestoreMode::Write(&mut rollback) };
        let outcome = match found.restore_rules(plugin_call, mode) {
            // The plugin has no rules.
            Ok(None) => continue,
            Ok(Some(missing)) if missing.is_empty() => PluginOutcome::Complete,
            Ok(Some(missing)) if dry_run => PluginOutcome::Missing(missing),
            Ok(Some(missing)) => PluginOutcome::Restored(missing),
            Err(error) => PluginOutcome::Failed(error),
        };
        outcomes.push((kind, outcome));
    }
    // If DEL ran during the call, it may have ended before the rules were written.
    let is_detached =
        || -> Result<bool> { Ok(cache.find(&entry.id())?.is_none() || outcome_if_unused(entry, call)?.is_some()) };
    let detached = if rollback.is_empty() { Ok(false) } else { is_detached() };
    if let Ok(true) = detached {
        drop(rollback);
        let why = "it was detached during the call; its rules have been removed again".to_owned();
        return Ok(AttachmentOutcome::Skipped(why));
    }
    // The rules of an attachment that may be in use stay.
    rollback.commit();
    detached?;
    Ok(AttachmentOutcome::Plugins(outcomes))
}

/// Returns a sentence for each rule of the plugins of the type `kind` that the attachment lacks, as
/// their CHECK finds them. Changes nothing.
///
/// # Errors
/// The configuration or the result in `entry` is invalid, or the rules cannot be read.
pub(crate) fn missing_rules(entry: &Entry, kind: &str, call: &Call<'_>) -> Result<Vec<String>> {
    let list = entry.list()?;
    let environment = environment(entry);
    let plugin_calls = plugin_calls(entry, &list, &environment, call, &Notes::silent())?;
    let mut missing = Vec::new();
    for (plugin, plugin_call) in list.plugins().iter().zip(&plugin_calls) {
        let found = plugins::find(plugin.kind()).filter(|found| found.name() == kind);
        if let Some(found) = found
            && let Some(missing_here) = found.restore_rules(plugin_call, RestoreMode::Report)?
        {
            missing.extend(missing_here);
        }
    }
    Ok(missing)
}

/// Returns the call of each plugin in `list`, the attachment's list.
///
/// # Errors
/// The configuration or the result in `entry` is invalid.
fn plugin_calls<'c>(
    entry: &Entry,
    list: &NetworkList,
    environment: &'c Environment,
    call: &Call<'c>,
    notes: &Notes,
) -> Result<Vec<cni::skel::Call<'c>>> {
    let plugin_call = |plugin| {
        let conf = entry.request(list, plugin).and_then(NetConf::parse)?;
        Ok(cni::skel::Call {
            container_id: entry.attachment.container_id.clone(),
            netns: Some(entry.attachment.netns.clone().into()),
            ifname: entry.attachment.ifname.clone(),
            conf,
            environment,
            machine: call.machine,
            notes: notes.clone(),
        })
    };
    list.plugins().iter().map(plugin_call).collect()
}

/// Returns `None` if the attachment is in use, otherwise the outcome [`AttachmentOutcome::Skipped`]
/// or [`AttachmentOutcome::Unproven`]: its rules could match packets of another container.
///
/// The attachments of bridge and ptp have an end on the host, which disappears together with the
/// container's. What the container changes in its namespace, such as the name or the MAC of its
/// interface, has no influence: a container whose MAC is forged needs its spoof rules most.
///
/// Other attachments have nothing on the host. They are in use if their namespace has their
/// interface with the MAC in the result (if the result has one).
///
/// # Errors
/// The kernel's error if the links of the host, the namespace or its links cannot be read; code 6
/// if the result cannot be decoded.
fn outcome_if_unused(entry: &Entry, call: &Call<'_>) -> Result<Option<AttachmentOutcome>> {
    let skipped = |why| Ok(Some(AttachmentOutcome::Skipped(why)));
    let unproven = |why| Ok(Some(AttachmentOutcome::Unproven(why)));
    let (netns, ifname) = (&entry.attachment.netns, &entry.attachment.ifname);
    let host = Netlink::open()?;
    let container_interface = entry.container_interface()?;
    let result = result_of(entry).unwrap_or_default();
    let presence = NetnsPresence::at(netns, call.machine);
    if let NetnsPresence::Gone(why) = presence {
        return skipped(format!("its namespace {netns} is gone: {why}"));
    }
    if find_host_end(&host.list_links()?, &entry.id(), &result).is_some() {
        return Ok(None);
    }
    // Results below version 0.3.0 have no interfaces.
    if has_host_end(entry) && !result.interfaces.is_empty() {
        return skipped("the host has no interface of it any more".to_owned());
    }
    if let NetnsPresence::OtherFile(why) | NetnsPresence::Unknown(why) = presence {
        return unproven(format!("its namespace {netns} cannot be entered: {why}"));
    }
    let link = host.open_in(&Netns::open(Path::new(netns))?)?.find_link(ifname)?;
    let Some(link) = link else {
        return unproven(format!("its namespace {netns} has no interface {ifname}"));
    };
    let expected = container_interface.map(|interface| interface.mac).unwrap_or_default();
    let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
    if expected.is_empty() || expected.eq_ignore_ascii_case(&mac) {
        return Ok(None);
    }
    unproven(format!("{ifname} in its namespace {netns} has the MAC {mac}, but the result has {expected}"))
}

/// Whether a plugin of the attachment's list gives it an end on the host.
fn has_host_end(entry: &Entry) -> bool {
    ["bridge", "ptp"].into_iter().any(|kind| !plugins_of_type(&entry.config, kind).is_empty())
}

/// Returns the CNI variables of the attachment's ADD, but with the verb CHECK: the plugins compare
/// the rules as in CHECK.
fn environment(entry: &Entry) -> Environment {
    let attachment = &entry.attachment;
    let args: Vec<String> = attachment.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
    Environment::new(
        [
            ("CNI_COMMAND", "CHECK"),
            ("CNI_CONTAINERID", &attachment.container_id),
            ("CNI_NETNS", &attachment.netns),
            ("CNI_IFNAME", &attachment.ifname),
            ("CNI_ARGS", &args.join(";")),
        ]
        .map(|(name, value)| (name.into(), value.into())),
    )
}

/// Returns the report for people.
fn as_text(outcomes: &[(Entry, AttachmentOutcome)], style: ColorMode) -> String {
    let mut text = String::new();
    for (entry, outcome) in outcomes {
        let key = entry.id();
        let name = format!("{} {} {}", key.network, key.container_id, key.ifname);
        text += &format!("{}\n{}", paint(style, Colour::Bold, &name), outcome.lines(style));
    }
    let count = |state| outcomes.iter().filter(|(_, outcome)| outcome.state() == Some(state)).count();
    let plural = if outcomes.len() == 1 { "attachment" } else { "attachments" };
    let (lacking, skipped) = (count("lacked rules"), count("skipped"));
    text += &format!("{} {plural}: {lacking} lacked rules, {skipped} skipped", outcomes.len());
    for state in ["not restored", "failed"].into_iter().filter(|state| count(state) > 0) {
        text += &format!(", {} {state}", count(state));
    }
    text + ".\n"
}

/// Returns the line about a plugin or, without `prefix`, about the whole attachment.
fn line(prefix: &str, word: &str, sentences: &[String], style: ColorMode) -> String {
    let is_problem = ["missing", "not restored", "failed"].contains(&word);
    let sign = if is_problem { '!' } else { ' ' };
    let details = if sentences.is_empty() { String::new() } else { format!(": {}", sentences.join("; ")) };
    let line = format!("{sign} {prefix}{word}{details}");
    let painted = if is_problem { paint(style, Colour::Red, &line) } else { line };
    painted + "\n"
}

/// Returns the report for `--json`.
fn as_json(outcomes: &[(Entry, AttachmentOutcome)], problems: &[String], dry_run: bool) -> Value {
    // `why` has the missing or restored rules, or the error.
    let plugin_json = |(kind, outcome): &(String, PluginOutcome)| {
        let (word, why) = outcome.describe();
        json!({"type": kind, "outcome": word, "why": why})
    };
    let attachment_json = |(entry, outcome): &(Entry, AttachmentOutcome)| {
        let key = entry.id();
        let mut value = json!({"network": key.network, "containerID": key.container_id, "ifname": key.ifname});
        match outcome {
            AttachmentOutcome::Skipped(why) => value["skipped"] = why.as_str().into(),
            AttachmentOutcome::Unproven(why) => value["notRestored"] = why.as_str().into(),
            AttachmentOutcome::Failed(error) => value["error"] = error_json(error),
            AttachmentOutcome::Plugins(plugins) => value["plugins"] = plugins.iter().map(plugin_json).collect(),
        }
        value
    };
    let attachments: Vec<Value> = outcomes.iter().map(attachment_json).collect();
    // `changed` is true without `--dry-run`, even if no rule was missing.
    json!({"changed": !dry_run, "attachments": attachments, "problems": problems})
}
