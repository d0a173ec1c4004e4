//! Runs a verb for a list of plugins as a runtime does: in order, each with the previous result;
//! DEL in reverse order.

use std::path::PathBuf;

use serde_json::Value;

use crate::call::Call;
use crate::error::Result;

/// A list of plugins of one side: their folder and their configurations.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    pub(crate) dir: PathBuf,
    pub(crate) plugins: Vec<Value>,
}

/// One container's interface.
#[derive(Clone, Debug)]
pub(crate) struct Attachment {
    pub(crate) container: String,
    pub(crate) netns: PathBuf,
    /// The number among the attachments that exist at the same time. It determines the host ports.
    pub(crate) number: usize,
}

impl Chain {
    /// Returns the call of the plugin at `place` in the list. `prev`, if there is one, replaces the
    /// configuration's prevResult.
    pub(crate) fn call(&self, verb: &'static str, place: usize, attachment: &Attachment, prev: Option<&Value>) -> Call {
        let mut conf = self.plugins.get(place).cloned().unwrap_or_default();
        if let Some(prev) = prev {
            conf["prevResult"] = prev.clone();
        }
        let mappings = conf.pointer_mut("/runtimeConfig/portMappings").and_then(Value::as_array_mut);
        // No case has more than 100 mappings, so the ports of two attachments do not overlap.
        for mapping in mappings.into_iter().flatten() {
            let port = mapping["hostPort"].as_u64().unwrap_or_default() + 100 * attachment.number as u64;
            mapping["hostPort"] = port.into();
        }
        // STATUS and GC need version 1.1.0. With an empty list, GC keeps no attachment.
        if matches!(verb, "STATUS" | "GC") {
            conf["cniVersion"] = "1.1.0".into();
            conf["cni.dev/valid-attachments"] = Value::Array(Vec::new());
        }
        let program = self.dir.join(conf["type"].as_str().unwrap_or_default());
        Call { program, verb, container: attachment.container.clone(), netns: attachment.netns.clone(), conf }
    }

    /// Runs `verb` for all plugins; `run_call` runs each call and returns its output. Returns the
    /// result of the last plugin for ADD, and `prev`, or null, for other verbs. Stops at the first
    /// failure.
    pub(crate) fn run(
        &self,
        verb: &'static str,
        attachment: &Attachment,
        prev: Option<&Value>,
        mut run_call: impl FnMut(&Call) -> Result<Value>,
    ) -> Result<Value> {
        let mut result = prev.cloned();
        let places: Vec<usize> = match verb {
            "DEL" => (0..self.plugins.len()).rev().collect(),
            _ => (0..self.plugins.len()).collect(),
        };
        for place in places {
            let output = run_call(&self.call(verb, place, attachment, result.as_ref()))?;
            if verb == "ADD" {
                result = Some(output);
            }
        }
        Ok(result.unwrap_or_default())
    }
}
