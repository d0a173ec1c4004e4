//! Running one plugin of a list for one verb.

use std::ffi::OsString;

use super::list::PluginConf;
use super::{Attachment, Runtime};
use cni::delegate::{find_plugin, interpret};
use cni::machine::{Child, OnSigterm, Output};
use cni::skel::Verb;
use cni::{Error, Result};

/// The variables of a call.
#[derive(Debug, Default)]
pub(super) struct Variables {
    pub(super) container_id: String,
    pub(super) netns: String,
    pub(super) ifname: String,
    pub(super) args: String,
    /// CNI_PATH where it is not the runtime's own.
    pub(super) path: Option<OsString>,
}

impl From<&Attachment> for Variables {
    fn from(attachment: &Attachment) -> Variables {
        let args: Vec<String> = attachment.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
        Variables {
            container_id: attachment.container_id.clone(),
            netns: attachment.netns.clone(),
            ifname: attachment.ifname.clone(),
            args: args.join(";"),
            path: None,
        }
    }
}

impl Runtime<'_> {
    /// Runs the plugin `kind` to its end and returns its stdout.
    ///
    /// # Errors
    /// The plugin's own with its code; code 4 if there is no such plugin, 11 if it ran out of time.
    pub(super) fn run(&self, kind: &str, verb: Verb, variables: Variables, request: &[u8]) -> Result<Vec<u8>> {
        let program = find_plugin(kind, &self.plugin_folders)?;
        let child = Child {
            program: program.clone(),
            args: Vec::new(),
            env: Some(self.environment(verb, variables)),
            stdin: request,
            timeout: self.timeout,
            // After the SIGTERM that ends an ADD its plugins are still to be detached.
            on_sigterm: if verb == Verb::Del { OnSigterm::Finish } else { OnSigterm::Kill },
        };
        let output = self.machine.run(&child);
        let said = match &output {
            Ok(Output { stderr, .. }) => String::from_utf8_lossy(stderr).trim_end().to_owned(),
            Err(_) => String::new(),
        };
        let outcome = interpret(&program, verb, output).map_err(Error::from);
        // For a plugin that dies without an answer, this is the error.
        let is_the_error = outcome.as_ref().is_err_and(|error| error.msg().contains(&format!("{said:?}")));
        if !said.is_empty() && !is_the_error {
            self.notes.note(format_args!("{kind}: {said}"));
        }
        outcome
    }

    /// All six variables are always set, empty ones too: what this process inherited must not show
    /// through.
    fn environment(&self, verb: Verb, variables: Variables) -> Vec<(OsString, OsString)> {
        let path = variables.path.unwrap_or_else(|| {
            let folders: Vec<_> = self.plugin_folders.iter().map(|folder| folder.as_os_str()).collect();
            folders.join(":".as_ref())
        });
        let own: [(&str, OsString); 6] = [
            ("CNI_COMMAND", verb.as_str().into()),
            ("CNI_CONTAINERID", variables.container_id.into()),
            ("CNI_NETNS", variables.netns.into()),
            ("CNI_IFNAME", variables.ifname.into()),
            ("CNI_ARGS", variables.args.into()),
            ("CNI_PATH", path),
        ];
        let inherited = self.environment.iter().filter(|(key, _)| !own.iter().any(|(name, _)| key == name)).cloned();
        let inherited: Vec<_> = inherited.collect();
        inherited.into_iter().chain(own.into_iter().map(|(name, value)| (name.into(), value))).collect()
    }
}

/// Says which plugin failed at what, as Go's libcni does; other programs search for these words.
pub(super) fn blame(plugin: &PluginConf, doing: &str, error: Error) -> Error {
    error.context(format_args!("plugin {} failed ({doing})", plugin.description()))
}
