//! rules: writes the packet filter rules of attachments again after another program has removed
//! them.
//!
//! Each plugin writes its own rules ([`Plugin::restore_rules`](cni::skel::Plugin::restore_rules)).
//! For that it gets the configuration and the result of the attachment's ADD from the result cache.

use std::path::Path;

use clap::{Args, Subcommand};
use cni::config::NetConf;
use cni::rollback::{Notes, Rollback};
use cni::skel::{Environment, RestoreMode};
use cni::{Error, Result};
use cni_linux::{Netlink, Netns};
use libcni::Cache;
use libcni::cache::{Entry, Listing};
use serde_json::{Value, json};

use crate::cli::{Failure, Shared, failed};
use crate::report::{Colour, Format, error_json, paint, write, write_json};
use crate::target::NetnsPresence;
use crate::{Call, Exit, Streams, help, plugins};

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
    /// It is not certain that the attachment is in use, for this reason.
    Skipped(String),
    /// Its rules could not be compared.
    Failed(Error),
    /// The type of each plugin, and the outcome for its rules. Plugins that have no rules are left
    /// out.
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
    /// It is not a plugin of this project.
    NotExamined,
}

impl PluginOutcome {
    /// Returns the outcome for reports, and the rules or the reason that belong to it.
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

/// Runs `cnitool rules`.
pub(crate) fn run(args: &Rules, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let Verb::Restore(args) = &args.verb;
    restore(args, shared, call, streams).map_err(|error| failed("rules restore", error, shared.format()))
}

/// Restores the rules of each attachment that the result cache has, or only of those of the network
/// in the arguments, and prints the outcomes. Returns [`Exit::Failed`] if an attachment failed, if
/// a file of the cache cannot be read, or if rules are missing in a dry run.
///
/// # Errors
/// Code 5 if the result cache cannot be read or stdout cannot be written.
fn restore(args: &Restore, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit> {
    let cache = shared.cache();
    let Listing { entries, problems } = match &args.network {
        Some(network) => cache.list(network)?,
        None => cache.list_all()?,
    };
    let mode = if args.dry_run { RestoreMode::Report } else { RestoreMode::Write };
    let attempt = |entry: Entry| {
        let outcome =
            restore_attachment(&entry, &cache, mode, call, &streams.notes).unwrap_or_else(AttachmentOutcome::Failed);
        (entry, outcome)
    };
    let all: Vec<(Entry, AttachmentOutcome)> = entries.into_iter().map(attempt).collect();
    let is_incomplete = |(_, outcome): &(Entry, AttachmentOutcome)| match outcome {
        AttachmentOutcome::Skipped(_) => false,
        AttachmentOutcome::Failed(_) => true,
        AttachmentOutcome::Plugins(plugins) => {
            plugins.iter().any(|(_, plugin)| matches!(plugin, PluginOutcome::Failed(_) | PluginOutcome::Missing(_)))
        }
    };
    let exit = if all.iter().any(is_incomplete) || !problems.is_empty() { Exit::Failed } else { Exit::Done };
    match shared.format() {
        Format::Json => write_json(streams, &as_json(&all, &problems, mode))?,
        Format::Text => {
            problems.iter().for_each(|problem| streams.notes.note(format_args!("ignored: {problem}")));
            let text = as_text(&all, streams);
            write(streams, &text)?;
        }
    }
    Ok(exit)
}

/// Restores, or with `RestoreMode::Report` only examines, the rules of one attachment.
///
/// # Errors
/// - As [`why_skipped`].
/// - The configuration or the result in `entry` is invalid.
/// - The result cache cannot be read after rules were written. They are removed again then.
fn restore_attachment(
    entry: &Entry,
    cache: &Cache,
    mode: RestoreMode,
    call: &Call<'_>,
    notes: &Notes,
) -> Result<AttachmentOutcome> {
    if let Some(why) = why_skipped(entry, call)? {
        return Ok(AttachmentOutcome::Skipped(why));
    }
    let list = entry.list()?;
    let environment = environment(entry);
    let plugin_calls = list.plugins().iter().map(|plugin| {
        let conf = entry.request(&list, plugin).and_then(NetConf::parse)?;
        Ok(cni::skel::Call {
            container_id: entry.attachment.container_id.clone(),
            netns: Some(entry.attachment.netns.clone().into()),
            ifname: entry.attachment.ifname.clone(),
            conf,
            environment: &environment,
            machine: call.machine,
            notes: notes.clone(),
        })
    });
    let plugin_calls = plugin_calls.collect::<Result<Vec<_>>>()?;
    // Each rollback removes the rules of one plugin again, unless it is committed.
    let (mut outcomes, mut rollbacks) = (Vec::new(), Vec::new());
    for (plugin, plugin_call) in list.plugins().iter().zip(&plugin_calls) {
        let outcome = match plugins::find(plugin.kind()).map(|found| found.restore_rules(plugin_call, mode)) {
            None => PluginOutcome::NotExamined,
            // The plugin has no rules.
            Some(Ok(None)) => continue,
            Some(Ok(Some(restored))) if restored.missing.is_empty() => PluginOutcome::Complete,
            Some(Ok(Some(restored))) if mode == RestoreMode::Write => {
                rollbacks.push(restored.rollback);
                PluginOutcome::Restored(restored.missing)
            }
            Some(Ok(Some(restored))) => PluginOutcome::Missing(restored.missing),
            Some(Err(error)) => PluginOutcome::Failed(error),
        };
        outcomes.push((plugin.kind().to_owned(), outcome));
    }
    // If the attachment was deleted during the call, DEL may have run before the rules were
    // written. So they are removed again, by the return without a commit.
    if !rollbacks.is_empty() && (cache.find(&entry.id())?.is_none() || why_skipped(entry, call)?.is_some()) {
        let why = "it was detached during the call; its rules have been removed again".to_owned();
        return Ok(AttachmentOutcome::Skipped(why));
    }
    rollbacks.into_iter().for_each(Rollback::commit);
    Ok(AttachmentOutcome::Plugins(outcomes))
}

/// Returns why the attachment is skipped, or `None` if it is certainly in use: its namespace has
/// its interface, with the MAC in the result if that has one. Otherwise its rules could match
/// packets of another container. An interface with another MAC was not created by the attachment's
/// ADD.
///
/// # Errors
/// The kernel's error if the namespace or its links cannot be read; code 6 if the result cannot be
/// decoded.
fn why_skipped(entry: &Entry, call: &Call<'_>) -> Result<Option<String>> {
    let (netns, ifname) = (&entry.attachment.netns, &entry.attachment.ifname);
    match NetnsPresence::at(netns, call.machine) {
        NetnsPresence::Exists => {}
        NetnsPresence::Gone(why) => return Ok(Some(format!("its namespace {netns} is gone: {why}"))),
        NetnsPresence::OtherFile(why) | NetnsPresence::Unknown(why) => {
            return Ok(Some(format!("its namespace {netns} cannot be entered: {why}")));
        }
    }
    let link = Netlink::open()?.open_in(&Netns::open(Path::new(netns))?)?.find_link(ifname)?;
    let Some(link) = link else { return Ok(Some(format!("its namespace {netns} has no interface {ifname}"))) };
    let expected = entry.container_interface()?.map(|interface| interface.mac).unwrap_or_default();
    let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
    let is_other = !expected.is_empty() && !expected.eq_ignore_ascii_case(&mac);
    if !is_other {
        return Ok(None);
    }
    Ok(Some(format!("{ifname} in its namespace {netns} has the MAC {mac}, but the result has {expected}")))
}

/// Returns the CNI variables of the attachment's ADD, but with the verb CHECK, because the plugins
/// compare the rules as CHECK does.
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
fn as_text(all: &[(Entry, AttachmentOutcome)], streams: &Streams<'_>) -> String {
    let (mut text, mut lacking, mut skipped) = (String::new(), 0, 0);
    for (entry, outcome) in all {
        let key = entry.id();
        let name = format!("{} {} {}", key.network, key.container_id, key.ifname);
        text += &format!("{}\n", paint(streams.stdout_style, Colour::Bold, &name));
        let lines = match outcome {
            AttachmentOutcome::Skipped(why) => {
                skipped += 1;
                vec![("", "skipped", vec![why.clone()])]
            }
            AttachmentOutcome::Failed(error) => vec![("", "failed", vec![error.to_string()])],
            AttachmentOutcome::Plugins(outcomes) => {
                let is_whole =
                    |outcome: &PluginOutcome| matches!(outcome, PluginOutcome::Complete | PluginOutcome::NotExamined);
                lacking += usize::from(!outcomes.iter().all(|(_, outcome)| is_whole(outcome)));
                let mut lines = Vec::new();
                for (plugin, outcome) in outcomes {
                    let (word, sentences) = outcome.describe();
                    lines.push((plugin.as_str(), word, sentences));
                }
                lines
            }
        };
        // `plugin` is empty in a line about the whole attachment.
        for (plugin, word, sentences) in lines {
            let is_problem = ["missing", "failed"].contains(&word);
            let end = if sentences.is_empty() { String::new() } else { format!(": {}", sentences.join("; ")) };
            let plugin = if plugin.is_empty() { String::new() } else { format!("{plugin:<12} ") };
            let line = format!("{} {plugin}{word}{end}", if is_problem { '!' } else { ' ' });
            text += &if is_problem { paint(streams.stdout_style, Colour::Red, &line) } else { line };
            text.push('\n');
        }
    }
    let plural = if all.len() == 1 { "attachment" } else { "attachments" };
    text + &format!("{} {plural}: {lacking} lacked rules, {skipped} skipped.\n", all.len())
}

/// Returns the report for `--json`.
fn as_json(all: &[(Entry, AttachmentOutcome)], problems: &[String], mode: RestoreMode) -> Value {
    let plugin_json = |(kind, outcome): &(String, PluginOutcome)| {
        let (word, why) = outcome.describe();
        json!({"type": kind, "outcome": word, "why": why})
    };
    let attachment = |(entry, outcome): &(Entry, AttachmentOutcome)| {
        let key = entry.id();
        let mut value = json!({"network": key.network, "containerID": key.container_id, "ifname": key.ifname});
        match outcome {
            AttachmentOutcome::Skipped(why) => value["skipped"] = why.as_str().into(),
            AttachmentOutcome::Failed(error) => value["error"] = error_json(error),
            AttachmentOutcome::Plugins(outcomes) => value["plugins"] = outcomes.iter().map(plugin_json).collect(),
        }
        value
    };
    let attachments: Vec<Value> = all.iter().map(attachment).collect();
    json!({"changed": mode == RestoreMode::Write, "attachments": attachments, "problems": problems})
}
