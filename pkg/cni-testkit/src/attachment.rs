//! The life of one attachment: the same network, container and interface through all verbs.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::{Container, Invocation, Node, Outcome};

/// A (network, container, interface) and how it is called. Cheap to clone and to change between
/// verbs.
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
    /// `eth0` of `container` in the network `config`.
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

    /// The same, with another interface name.
    #[must_use]
    pub fn ifname(mut self, name: &str) -> Self {
        self.ifname = name.to_owned();
        self
    }

    /// The same, with `CNI_ARGS`.
    #[must_use]
    pub fn args(mut self, args: &str) -> Self {
        self.args = Some(args.to_owned());
        self
    }

    /// The same, with another `CNI_NETNS`; an empty one is the variable set to nothing.
    #[must_use]
    pub fn netns(mut self, path: impl AsRef<Path>) -> Self {
        self.netns = path.as_ref().to_owned();
        self
    }

    /// The same attachment handled by the plugins of another folder.
    #[must_use]
    pub fn by(mut self, bin_dir: impl Into<PathBuf>) -> Self {
        self.bin_dir = bin_dir.into();
        self
    }

    /// The same attachment under a changed configuration.
    #[must_use]
    pub fn config(mut self, config: Value) -> Self {
        self.config = config;
        self
    }

    /// A call of `verb`, ready to run.
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

    /// ADD.
    #[track_caller]
    pub fn add(&self) -> Outcome {
        self.invocation("ADD", None).run()
    }

    /// ADD of a plugin that stands behind another one.
    #[track_caller]
    pub fn add_after(&self, prev: &Value) -> Outcome {
        self.invocation("ADD", Some(prev)).run()
    }

    /// CHECK with the result of the ADD.
    #[track_caller]
    pub fn check(&self, prev: &Value) -> Outcome {
        self.invocation("CHECK", Some(prev)).run()
    }

    /// DEL without a prevResult.
    #[track_caller]
    pub fn del(&self) -> Outcome {
        self.invocation("DEL", None).run()
    }

    /// DEL with the result of the ADD, as runtimes send it from 0.4.0 on.
    #[track_caller]
    pub fn del_with(&self, prev: &Value) -> Outcome {
        self.invocation("DEL", Some(prev)).run()
    }

    /// STATUS of the network.
    #[track_caller]
    pub fn status(&self) -> Outcome {
        self.network_call("STATUS", self.config.clone())
    }

    /// GC of the network; `valid` as (container ID, interface).
    #[track_caller]
    pub fn gc(&self, valid: &[(&str, &str)]) -> Outcome {
        let mut config = self.config.clone();
        let valid = valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname}));
        config["cni.dev/valid-attachments"] = valid.collect();
        self.network_call("GC", config)
    }

    #[track_caller]
    fn network_call(&self, verb: &str, config: Value) -> Outcome {
        let plugin = config["type"].as_str().expect("a configuration has a type").to_owned();
        let call = Invocation::new(self.node, self.bin_dir.join(plugin)).cni_path(&self.bin_dir);
        call.command(verb).config(&config).run()
    }
}
