//! Runs one plugin of a list for one verb.

use std::ffi::OsString;

use super::list::PluginConf;
use super::{Attachment, Runtime};
use cni::delegate::{find_plugin, interpret};
use cni::machine::{Child, OnSigterm};
use cni::skel::Verb;
use cni::{Error, Result};

impl Runtime<'_> {
    /// Runs the plugin `kind`, waits until it has ended, and returns its stdout. Its stderr becomes
    /// a note, unless the returned error quotes it.
    ///
    /// # Errors
    /// - Code 4 if the plugin does not exist.
    /// - Those of [`interpret`], such as the error that the plugin printed, with its code.
    pub(super) fn run(&self, kind: &str, verb: Verb, attachment: &Attachment, request: &[u8]) -> Result<Vec<u8>> {
        let program = find_plugin(kind, &self.plugin_folders)?;
        let child = Child {
            program: program.clone(),
            args: Vec::new(),
            env: Some(self.environment(verb, attachment)),
            stdin: request,
            timeout: self.timeout,
            // A SIGTERM during an ADD kills its plugin. The clean-up by DEL must not be
            // interrupted.
            on_sigterm: if verb == Verb::Del { OnSigterm::Finish } else { OnSigterm::Kill },
        };
        let output = self.machine.run(&child);
        let stderr = output.as_ref().map(|output| String::from_utf8_lossy(&output.stderr).trim_end().to_owned());
        let stderr = stderr.unwrap_or_default();
        let outcome = interpret(&program, verb, output).map_err(Error::from);
        // The error about a plugin that ended without an answer quotes its stderr.
        let is_quoted = outcome.as_ref().is_err_and(|error| error.msg().contains(&format!("{stderr:?}")));
        if !stderr.is_empty() && !is_quoted {
            self.notes.note(format_args!("{kind}: {stderr}"));
        }
        outcome
    }

    /// Returns the environment of a plugin: the runtime's variables and the six of the protocol.
    /// These are set even to empty values, to replace those of this process.
    fn environment(&self, verb: Verb, attachment: &Attachment) -> Vec<(OsString, OsString)> {
        let folders: Vec<_> = self.plugin_folders.iter().map(|folder| folder.as_os_str()).collect();
        // As in Go, a plugin does not get the folders if it is only asked for its versions.
        let path = if verb == Verb::Version { "dummy".into() } else { folders.join(":".as_ref()) };
        let mut protocol_variables = attachment.variables(verb);
        protocol_variables.push(("CNI_PATH".into(), path));
        let mut all = self.environment.clone();
        all.retain(|(key, _)| !protocol_variables.iter().any(|(name, _)| name == key));
        all.extend(protocol_variables);
        all
    }
}

/// Adds to an error which plugin failed, and in which verb. The text is that of Go's libcni,
/// because other programs search for it.
pub(super) fn name_plugin(plugin: &PluginConf, verb: &str, error: Error) -> Error {
    error.context(format_args!("plugin {} failed ({verb})", plugin.description()))
}
