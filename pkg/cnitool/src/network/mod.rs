//! The verbs of a network: add, check, del, gc, status, version.
//!
//! cnitool itself decides which container ID a namespace gets, and which attachments are valid for
//! `gc`. If CNI_ARGS or CAP_ARGS is not set, CHECK and DEL use the ADD's value from the result
//! cache: a DEL with fewer arguments than its ADD could leave objects behind.

mod gc;
mod options;
mod sweep;
mod valid_list;
mod versions;

use std::path::Path;
use std::time::Duration;

use cni::file::clean;
use cni::{Code, Error, skel};
use cni_linux::{Netlink, Netns};
use libcni::cache::Entry;
use libcni::{Attachment, Members, NetworkList, OnError, Runtime};
use serde_json::json;

use crate::call::{Context, Exit, Failure, Streams, failed};
use crate::report::{Report, did_you_mean, print_failure, write_raw};
use crate::target::{NetnsPresence, container_id};

pub(crate) use options::{Command, Named, Verb};

/// The input of one verb.
struct VerbRun<'a> {
    command: &'a Command,
    context: &'a Context<'a>,
    runtime: Runtime<'a>,
}

/// Runs the verb of `command`.
///
/// # Errors
/// - [`Failure::Usage`] for several result caches, unless the verb is a gc that uses all of them.
/// - [`Failure::Failed`] with the verb's error.
pub(crate) fn run(command: &Command, context: &Context<'_>, streams: &mut Streams<'_>) -> Result<Exit, Failure> {
    let takes_several_caches = command.verb == skel::Verb::Gc && command.sweeps();
    if !takes_several_caches && context.shared.cache_dir.len() > 1 {
        let msg = format!("{} takes one --cache-dir", command.verb_name());
        return Err(Failure::Usage { verb: command.verb_name(), msg });
    }
    let verb_run = VerbRun { command, context, runtime: context.runtime() };
    let outcome = match command.verb {
        skel::Verb::Add => verb_run.add(streams).map(|()| Exit::Done),
        skel::Verb::Check => verb_run.check(streams).map(|()| Exit::Done),
        skel::Verb::Del => verb_run.del(streams).map(|()| Exit::Done),
        skel::Verb::Gc => verb_run.repeat_gc(streams).map(|()| Exit::Done),
        skel::Verb::Status => verb_run.status(streams),
        skel::Verb::Version => verb_run.version(streams),
    };
    outcome.map_err(|error| failed(command.subject(), error, context.format()))
}

impl VerbRun<'_> {
    /// Runs gc once or, with `--every`, again and again until a signal arrives. Each run prints its
    /// own decisions and its own error.
    ///
    /// # Errors
    /// Without `--every`, as [`sweep`](VerbRun::sweep) or [`gc`](VerbRun::gc).
    fn repeat_gc(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let run =
            |streams: &mut Streams<'_>| if self.command.sweeps() { self.sweep(streams) } else { self.gc(streams) };
        let Some(seconds) = self.command.gc.every else { return run(streams) };
        loop {
            if let Err(error) = run(streams) {
                print_failure(&failed(self.command.subject(), error, self.context.format()), streams);
            }
            if self.context.call.wait(Duration::from_secs(seconds)) {
                return Ok(());
            }
        }
    }

    /// Attaches a namespace and prints the result.
    ///
    /// # Errors
    /// - As [`configuration`](VerbRun::configuration).
    /// - Code 4 if the namespace does not exist, or a variable is malformed.
    /// - Code 102 if the namespace has an interface CNI_IFNAME, unless all plugins are loopback.
    /// - The error of ADD.
    /// - Code 5 if the result cannot be printed. The namespace remains attached then.
    fn add(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let list = self.configuration()?;
        let mut attachment = self.attachment()?;
        self.refuse_absent_netns(&attachment)?;
        // loopback creates no interface and ignores CNI_IFNAME.
        if list.plugins().iter().any(|plugin| plugin.kind() != "loopback") {
            self.refuse_taken_ifname(&attachment)?;
        }
        // An ADD takes no values from the cache entry of an earlier ADD.
        self.fill_in(&mut attachment, None)?;
        let result = self.runtime.add(&list, &attachment)?;
        write_raw(streams, &format!("{}\n", result.get()))
            .map_err(|error| error.with_details("the ADD itself succeeded: 'cnitool del' detaches the container"))
    }

    /// Runs CHECK of the plugins for the attachment.
    ///
    /// # Errors
    /// - As [`configuration`](VerbRun::configuration).
    /// - Code 4 if a variable is malformed.
    /// - The error of CHECK.
    fn check(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let list = self.configuration()?;
        let mut attachment = self.attachment()?;
        let entry = self.runtime.cache.find(&attachment.id(&self.command.network));
        let is_entry_absent = matches!(entry, Ok(None));
        // If the entry cannot be read, the CHECK below reports the error.
        let cached = entry.ok().flatten();
        self.fill_in(&mut attachment, cached.as_ref())?;
        self.runtime.check(&list, &attachment).map_err(|error| {
            let lacks_check = error.code() == Code::INCOMPATIBLE_VERSION;
            let details = "the result cache has no ADD of this attachment: it is not attached, or its runtime uses another cache (--cache-dir)";
            let is_unexplained = is_entry_absent && !lacks_check && error.details().is_empty();
            if is_unexplained { error.with_details(details) } else { error }
        })?;
        self.print_success(streams)
    }

    /// Detaches a namespace, even if it does not exist any more.
    ///
    /// # Errors
    /// - Code 4 if a variable is malformed.
    /// - As [`configuration`](VerbRun::configuration), if the cache entry has no configuration of
    ///   the network either.
    /// - The error of DEL.
    fn del(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let mut attachment = self.attachment()?;
        // An unreadable cache entry must not make DEL fail. If the CNI version is at least 0.4.0,
        // the DEL below writes a note about the entry.
        let cached = self.runtime.cache.find(&attachment.id(&self.command.network)).ok().flatten();
        self.fill_in(&mut attachment, cached.as_ref())?;
        let list = self.configuration().or_else(|error| self.cached_configuration(cached.as_ref(), error))?;
        let on_error = if self.command.keep_going { OnError::GoOn } else { OnError::Stop };
        self.runtime.del(&list, &attachment, on_error)?;
        self.print_success(streams)
    }

    /// Prints that a verb without a result has succeeded: nothing as text, or a JSON document.
    fn print_success(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let document = json!({"verb": self.command.verb_name(), "network": self.command.network, "ok": true});
        Report::new(streams).write(streams, self.context.format(), &document)
    }

    /// Returns the network's configuration from the networks' folder.
    ///
    /// # Errors
    /// Code 7 if the network is not configured; the error of its file if the file is invalid.
    fn configuration(&self) -> Result<NetworkList, Error> {
        let name = &self.command.network;
        self.context.conf_folder().find(name, &self.runtime.notes).map_err(|error| {
            let lists = self.context.networks().unwrap_or_default();
            let hint = did_you_mean(name, lists.iter().map(NetworkList::name));
            let details = format!("'cnitool validate' lists the configured networks{hint}");
            if error.details().is_empty() { error.with_details(details) } else { error }
        })
    }

    /// Returns the configuration that the ADD stored in the cache entry, to be used because
    /// [`configuration`](VerbRun::configuration) failed with `error`.
    ///
    /// # Errors
    /// `error` if there is no entry with a valid configuration of this network.
    fn cached_configuration(&self, entry: Option<&Entry>, error: Error) -> Result<NetworkList, Error> {
        match entry.map(|entry| NetworkList::parse(&entry.config)) {
            Some(Ok(list)) if list.name() == self.command.network => {
                self.runtime.notes.note(format_args!("{error}: the configuration at the time of ADD is used"));
                Ok(list)
            }
            _ => Err(error),
        }
    }

    /// Returns the attachment that the arguments select, without CNI_ARGS and CAP_ARGS.
    ///
    /// # Errors
    /// Code 4 if the path of the namespace or CNI_IFNAME is not valid UTF-8.
    fn attachment(&self) -> Result<Attachment, Error> {
        // A del with `--container-id` needs no path: `fill_in` takes it from the cache entry.
        // Absolute and simplified lexically, as by Go: symbolic links are not followed.
        let path = self.command.netns.as_ref().map(|path| self.context.call.folder.join(path).into_os_string());
        let netns = path.map(|path| path.into_string().map(|path| clean(&path).display().to_string()));
        let netns = netns.transpose().map_err(|path| {
            let msg = format!("the path of the namespace is not valid UTF-8: {}", path.display());
            Error::new(Code::INVALID_ENVIRONMENT, msg)
        })?;
        let netns = netns.unwrap_or_default();
        let ifname = match &self.command.interface.ifname {
            Some(name) => name.clone(),
            None => self.context.call.find("CNI_IFNAME")?.unwrap_or_else(|| "eth0".to_owned()),
        };
        let container_id = self.command.interface.container_id.clone().unwrap_or_else(|| container_id(&netns));
        Ok(Attachment { container_id, netns, ifname, ..Attachment::default() })
    }

    /// Sets CNI_ARGS and CAP_ARGS of the attachment: each from the environment, or from the cache
    /// entry if the variable is not set. Sets the namespace from the entry if the attachment has
    /// none.
    ///
    /// # Errors
    /// Code 4 if a variable is malformed.
    fn fill_in(&self, attachment: &mut Attachment, cached: Option<&Entry>) -> Result<(), Error> {
        let cached = cached.map(|entry| entry.attachment.clone()).unwrap_or_default();
        let args = self.context.call.find("CNI_ARGS")?;
        attachment.args = args.map_or(Ok(cached.args), |text| parse_cni_args(&text))?;
        let cap_args = self.context.call.find("CAP_ARGS")?;
        attachment.capability_args = cap_args
            .map_or(Ok(cached.capability_args), |text| Members::parse(&text))
            .map_err(|error| error.with_code(Code::INVALID_ENVIRONMENT).context("failed to read CAP_ARGS"))?;
        if attachment.netns.is_empty() {
            attachment.netns = cached.netns;
        }
        Ok(())
    }

    /// Refuses an attachment whose path is certainly not a namespace. For the common mistake
    /// `cnitool add net blue`, the error suggests /run/netns/blue.
    ///
    /// # Errors
    /// Code 4 if the path does not exist or is not a namespace.
    fn refuse_absent_netns(&self, attachment: &Attachment) -> Result<(), Error> {
        let why = match NetnsPresence::at(&attachment.netns, self.context.call.machine) {
            NetnsPresence::Gone(why) | NetnsPresence::OtherFile(why) => why,
            NetnsPresence::Exists | NetnsPresence::Unknown(_) => return Ok(()),
        };
        let msg = format!("{} is not a network namespace: {why} (CNI_NETNS)", attachment.netns);
        let error = Error::new(Code::INVALID_ENVIRONMENT, msg);
        let argument = self.command.netns.as_deref().unwrap_or_default().to_string_lossy();
        let suggestion = format!("/run/netns/{argument}");
        if !argument.contains('/') && NetnsPresence::at(&suggestion, self.context.call.machine) == NetnsPresence::Exists
        {
            return Err(error.with_details(format!("a path is expected; did you mean {suggestion}?")));
        }
        Err(error.with_details("'ip netns add NAME' creates one at /run/netns/NAME"))
    }

    /// Refuses an attachment whose interface exists. A plugin would refuse it too, but then all
    /// plugins get a DEL, which could remove the interface of a running container.
    ///
    /// # Errors
    /// Code 102 if the namespace has an interface CNI_IFNAME and the cache does not have the
    /// attachment; if it has, ADD names the entry.
    fn refuse_taken_ifname(&self, attachment: &Attachment) -> Result<(), Error> {
        let Attachment { netns, ifname, .. } = attachment;
        let is_cached = matches!(self.runtime.cache.find(&attachment.id(&self.command.network)), Ok(Some(_)));
        let find = || Netns::open(Path::new(netns))?.run(Netlink::open)??.find_link(ifname);
        // An error is left to the plugins.
        if is_cached || matches!(find(), Ok(None) | Err(_)) {
            return Ok(());
        }
        Err(Error::new(Code::CONFLICT, format!("{netns} already has an interface {ifname}"))
            .with_details("nothing was changed; --ifname attaches another interface"))
    }
}

/// Parses CNI_ARGS, `K=V;K=V`. Skips empty pairs, so a `;` at the end is allowed.
///
/// # Errors
/// Code 4 if a pair has no `=`, or its key or value is empty.
fn parse_cni_args(text: &str) -> Result<Vec<(String, String)>, Error> {
    let pair = |piece: &str| match piece.split_once('=') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(Error::new(Code::INVALID_ENVIRONMENT, format!("invalid CNI_ARGS pair {piece:?}"))),
    };
    text.split(';').filter(|piece| !piece.is_empty()).map(pair).collect()
}

#[cfg(test)]
mod tests;
