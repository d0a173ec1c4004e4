//! The verbs of a list of plugins, as a runtime runs them: forwards with the result handed on, DEL
//! backwards.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::call::Call;
use crate::error::Result;

/// A network as one side is to serve it.
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
    /// Its place among those that are attached at the same time; each has host ports of its own.
    pub(crate) number: usize,
}

impl Chain {
    /// A call of the plugin at `place`; `prev` becomes its prevResult unless the configuration
    /// brings its own.
    pub(crate) fn call(&self, verb: &'static str, place: usize, at: &Attachment, prev: Option<&Value>) -> Call {
        let mut conf = self.plugins.get(place).cloned().unwrap_or_default();
        if let Some(prev) = prev {
            conf["prevResult"] = prev.clone();
        }
        let mappings = conf.pointer_mut("/runtimeConfig/portMappings").and_then(Value::as_array_mut);
        for mapping in mappings.into_iter().flatten() {
            let port = mapping["hostPort"].as_u64().unwrap_or_default() + 100 * at.number as u64;
            mapping["hostPort"] = port.into();
        }
        if matches!(verb, "STATUS" | "GC") {
            conf["cniVersion"] = "1.1.0".into();
            conf["cni.dev/valid-attachments"] = Value::Array(Vec::new());
        }
        let program = Path::new(&self.dir).join(conf["type"].as_str().unwrap_or_default());
        Call { program, verb, container: at.container.clone(), netns: at.netns.clone(), conf }
    }

    /// Runs `verb` of all plugins by `run`; the result, of ADD, is the last one's.
    pub(crate) fn run(
        &self,
        verb: &'static str,
        at: &Attachment,
        prev: Option<&Value>,
        mut run: impl FnMut(&Call) -> Result<Value>,
    ) -> Result<Value> {
        let mut result = prev.cloned();
        let places: Vec<usize> = match verb {
            "DEL" => (0..self.plugins.len()).rev().collect(),
            _ => (0..self.plugins.len()).collect(),
        };
        for place in places {
            let said = run(&self.call(verb, place, at, result.as_ref()))?;
            if verb == "ADD" {
                result = Some(said);
            }
        }
        Ok(result.unwrap_or_default())
    }
}
