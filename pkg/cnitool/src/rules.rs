//! rules: writes the packet filter rules of attachments again after another program has removed
//! them.
//!
//! Each plugin knows its rules ([`Plugin::restore_rules`](cni::skel::Plugin::restore_rules)). It
//! needs the network's configuration at the time of the ADD, and the result, which are in the
//! result cache.

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
enum Outcome {
    /// It is not in use, for this reason.
    Skipped(String),
    /// Its rules could not be compared.
    Failed(Error),
    /// The type of each plugin, and the outcome for its rules.
    Plugins(Vec<(String, Rule)>),
}

/// The outcome for the rules of one plugin.
enum Rule {
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

impl Rule {
    /// Returns the outcome as one word, and sentences with the reasons.
    fn describe(&self) -> (&'static str, Vec<String>) {
        match self {
            Rule::Complete => ("complete", Vec::new()),
            Rule::Missing(missing) => ("missing", missing.clone()),
            Rule::Restored(missing) => ("restored", missing.clone()),
            Rule::Failed(error) => ("failed", vec![error.to_string()]),
            Rule::NotExamined => ("not examined", vec!["a plugin of another project".into()]),
        }
    }
}

/// Runs `cnitool rules`.
pub(crate) fn run(args: &Rules, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let Verb::Restore(args) = &args.verb;
    restore(args, shared, call, streams).map_err(|error| failed("rules restore", error, shared.format()))
}

/// Restores the rules of all attachments in the result cache and prints the outcome of each.
fn restore(args: &Restore, shared: &Shared, call: &Call<'_>, streams: &mut Streams<'_>) -> Result<Exit> {
    let cache = shared.cache();
    let Listing { entries, problems } = match &args.network {
        Some(network) => cache.list(network)?,
        None => cache.list_all()?,
    };
    let mode = if args.dry_run { RestoreMode::Report } else { RestoreMode::Write };
    let attempt = |entry: Entry| {
        let outcome = restore_attachment(&entry, &cache, mode, call, &streams.notes).unwrap_or_else(Outcome::Failed);
        (entry, outcome)
    };
    let all: Vec<(Entry, Outcome)> = entries.into_iter().map(attempt).collect();
    let has_failed = |(_, outcome): &(Entry, Outcome)| match outcome {
        Outcome::Skipped(_) => false,
        Outcome::Failed(_) => true,
        Outcome::Plugins(rules) => rules.iter().any(|(_, rule)| matches!(rule, Rule::Failed(_) | Rule::Missing(_))),
    };
    let exit = if all.iter().any(has_failed) || !problems.is_empty() { Exit::Failed } else { Exit::Done };
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
fn restore_attachment(
    entry: &Entry,
    cache: &Cache,
    mode: RestoreMode,
    call: &Call<'_>,
    notes: &Notes,
) -> Result<Outcome> {
    if let Some(why) = absent(entry, call)? {
        return Ok(Outcome::Skipped(why));
    }
    let list = entry.list()?;
    let environment = environment(entry);
    let calls = list.plugins().iter().map(|plugin| {
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
    let calls = calls.collect::<Result<Vec<_>>>()?;
    let (mut rules, mut written) = (Vec::new(), Vec::new());
    for (plugin, call) in list.plugins().iter().zip(&calls) {
        let rule = match plugins::find(plugin.kind()).map(|plugin| plugin.restore_rules(call, mode)) {
            None => Rule::NotExamined,
            Some(Ok(None)) => continue,
            Some(Ok(Some(restored))) if restored.missing.is_empty() => Rule::Complete,
            Some(Ok(Some(restored))) if mode == RestoreMode::Write => {
                written.push(restored.rollback);
                Rule::Restored(restored.missing)
            }
            Some(Ok(Some(restored))) => Rule::Missing(restored.missing),
            Some(Err(error)) => Rule::Failed(error),
        };
        rules.push((plugin.kind().to_owned(), rule));
    }
    // If the attachment was deleted during the call, DEL may have run before the rules were
    // written. So dropping `written` removes them again.
    if !written.is_empty() && (cache.find(&entry.id())?.is_none() || absent(entry, call)?.is_some()) {
        return Ok(Outcome::Skipped("it was detached during the call; its rules have been removed again".to_owned()));
    }
    written.into_iter().for_each(Rollback::commit);
    Ok(Outcome::Plugins(rules))
}

/// Returns why the attachment is not in use, or `None` if it is. The rules of an attachment that is
/// not in use could match packets of another container. An interface with another MAC than in the
/// result was not created by the attachment's ADD.
///
/// # Errors
/// Those of the kernel; the result cannot be decoded.
fn absent(entry: &Entry, call: &Call<'_>) -> Result<Option<String>> {
    let (netns, ifname) = (&entry.attachment.netns, &entry.attachment.ifname);
    match NetnsPresence::of(netns, call.machine) {
        NetnsPresence::There => {}
        NetnsPresence::Gone(why) => return Ok(Some(format!("its namespace {netns} is gone: {why}"))),
        NetnsPresence::Other(why) | NetnsPresence::Unknown(why) => {
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

/// Returns the CNI variables of the attachment's ADD, with CHECK as the verb.
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
fn as_text(all: &[(Entry, Outcome)], streams: &Streams<'_>) -> String {
    let (mut text, mut lacking, mut skipped) = (String::new(), 0, 0);
    for (entry, outcome) in all {
        let key = entry.id();
        let name = format!("{} {} {}", key.network, key.container_id, key.ifname);
        text += &format!("{}\n", paint(streams.stdout_style, Colour::Bold, &name));
        let lines = match outcome {
            Outcome::Skipped(why) => {
                skipped += 1;
                vec![("", "skipped", vec![why.clone()])]
            }
            Outcome::Failed(error) => vec![("", "failed", vec![error.to_string()])],
            Outcome::Plugins(rules) => {
                lacking +=
                    usize::from(rules.iter().any(|(_, rule)| !matches!(rule, Rule::Complete | Rule::NotExamined)));
                let mut lines = Vec::new();
                for (plugin, rule) in rules {
                    let (word, sentences) = rule.describe();
                    lines.push((plugin.as_str(), word, sentences));
                }
                lines
            }
        };
        for (plugin, word, sentences) in lines {
            let has_failed = ["missing", "failed"].contains(&word);
            let end = if sentences.is_empty() { String::new() } else { format!(": {}", sentences.join("; ")) };
            let plugin = if plugin.is_empty() { String::new() } else { format!("{plugin:<12} ") };
            let line = format!("{} {plugin}{word}{end}", if has_failed { '!' } else { ' ' });
            text += &if has_failed { paint(streams.stdout_style, Colour::Red, &line) } else { line };
            text.push('\n');
        }
    }
    let plural = if all.len() == 1 { "attachment" } else { "attachments" };
    text + &format!("{} {plural}: {lacking} lacked rules, {skipped} skipped.\n", all.len())
}

/// Returns the report for `--json`.
fn as_json(all: &[(Entry, Outcome)], problems: &[String], mode: RestoreMode) -> Value {
    let rule = |(plugin, rule): &(String, Rule)| {
        let (outcome, why) = rule.describe();
        json!({"type": plugin, "outcome": outcome, "why": why})
    };
    let attachment = |(entry, outcome): &(Entry, Outcome)| {
        let key = entry.id();
        let mut value = json!({"network": key.network, "containerID": key.container_id, "ifname": key.ifname});
        match outcome {
            Outcome::Skipped(why) => value["skipped"] = why.as_str().into(),
            Outcome::Failed(error) => value["error"] = error_json(error),
            Outcome::Plugins(rules) => value["plugins"] = rules.iter().map(rule).collect(),
        }
        value
    };
    let attachments: Vec<Value> = all.iter().map(attachment).collect();
    json!({"changed": mode == RestoreMode::Write, "attachments": attachments, "problems": problems})
}
