//! Runs several verbs for one attachment: the same network, container and interface.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::{Container, Invocation, Node, Outcome};

/// An attachment and the plugins that are called for it. It can be changed between two verbs.
#[derive(Clone, Debug)]
pub struct Attachment<'n> {
    node: &'n Node,
    bin_dir: PathBuf,
    /// The network configuration; its `type` names the plugin.
    pub config: Value,
    /// `CNI_CONTAINERID`.
    pub id: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// `CNI_NETNS`.
    pub netns: PathBuf,
    /// `CNI_ARGS`, if any.
    pub args: Option<String>,
}

impl<'n> Attachment<'n> {
    /// Returns the attachment of `eth0` of `container` to the network with the configuration
    /// `config`.
    pub fn new(node: &'n Node, container: &Container, config: Value) -> Attachment<'n> {
        Attachment {
            node,
            bin_dir: crate::bin_dir(),
            config,
            id: container.id.clone(),
            ifname: "eth0".to_owned(),
            netns: container.netns().to_owned(),
            args: None,
        }
    }

    /// Sets another interface name.
    #[must_use]
    pub fn ifname(mut self, name: &str) -> Self {
        self.ifname = name.to_owned();
        self
    }

    /// Sets `CNI_ARGS`.
    #[must_use]
    pub fn args(mut self, args: &str) -> Self {
        self.args = Some(args.to_owned());
        self
    }

    /// Sets another `CNI_NETNS`. With an empty path the variable is set and empty.
    #[must_use]
    pub fn netns(mut self, path: impl AsRef<Path>) -> Self {
        self.netns = path.as_ref().to_owned();
        self
    }

    /// Uses the plugins of another folder.
    #[must_use]
    pub fn by(mut self, bin_dir: impl Into<PathBuf>) -> Self {
        self.bin_dir = bin_dir.into();
        self
    }

    /// Sets another configuration.
    #[must_use]
    pub fn config(mut self, config: Value) -> Self {
        self.config = config;
        self
    }

    /// Returns a call of `verb` that can be run. `prev` becomes `prevResult`.
    #[track_caller]
    pub fn invocation(&self, verb: &str, prev: Option<&Value>) -> Invocation<'n> {
        let mut config = self.config.clone();
        if let Some(prev) = prev {
            config["prevResult"] = prev.clone();
        }
        let plugin = config["type"].as_str().expect("a configuration has a type").to_owned();
        let call = Invocation::new(self.node, self.bin_dir.join(plugin)).cni_path(&self.bin_dir);
        let call = call.command(verb).id(&self.id).netns(&self.netns).ifname(&self.ifname).config(&config);
        match &self.args {
            Some(args) => call.cni_args(args),
            None => call,
        }
    }

    /// Runs ADD.
    #[track_caller]
    pub fn add(&self) -> Outcome {
        self.invocation("ADD", None).run()
    }

    /// Runs ADD of a plugin behind another one, whose result is `prev`.
    #[track_caller]
    pub fn add_after(&self, prev: &Value) -> Outcome {
        self.invocation("ADD", Some(prev)).run()
    }

    /// Runs CHECK with the result of the ADD.
    #[track_caller]
    pub fn check(&self, prev: &Value) -> Outcome {
        self.invocation("CHECK", Some(prev)).run()
    }

    /// Runs DEL without `prevResult`.
    #[track_caller]
    pub fn del(&self) -> Outcome {
        self.invocation("DEL", None).run()
    }

    /// Runs DEL with the result of the ADD, as runtimes do from version 0.4.0 on.
    #[track_caller]
    pub fn del_with(&self, prev: &Value) -> Outcome {
        self.invocation("DEL", Some(prev)).run()
    }

    /// Runs STATUS of the network.
    #[track_caller]
    pub fn status(&self) -> Outcome {
        self.network_call("STATUS", self.config.clone())
    }

    /// Runs GC of the network. `valid` has the container ID and the interface of each valid
    /// attachment.
    #[track_caller]
    pub fn gc(&self, valid: &[(&str, &str)]) -> Outcome {
        let mut config = self.config.clone();
        let valid = valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname}));
        config["cni.dev/valid-attachments"] = valid.collect();
        self.network_call("GC", config)
    }

    /// Runs a verb that is about the network, not the attachment.
    #[track_caller]
    fn network_call(&self, verb: &str, config: Value) -> Outcome {
        let plugin = config["type"].as_str().expect("a configuration has a type").to_owned();
        let call = Invocation::new(self.node, self.bin_dir.join(plugin)).cni_path(&self.bin_dir);
        call.command(verb).config(&config).run()
    }
}
