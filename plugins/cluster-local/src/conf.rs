//! Reads the keys that `cluster-local` has besides host-local's.

use std::path::PathBuf;

use cni::config::NetConf;
use cni::json::Json;
use cni::{Error, Result};
use cni_cluster::{conf, pool};
use serde::Deserialize;

/// The names of the keys in `ipam`.
pub(crate) const NAMES: [&str; 3] = ["ipam.blockSize", "ipam.layer2", "ipam.clusterConf"];

/// The keys that `cluster-local` has besides host-local's.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    /// The addresses of a block, or `None` for the size of the pool's blocks.
    pub block_size: Option<u32>,
    /// The layer 2 network, or empty.
    pub layer2: String,
    /// The path of the node's file.
    pub cluster_conf: PathBuf,
}

impl Default for Keys {
    fn default() -> Keys {
        Keys { block_size: None, layer2: String::new(), cluster_conf: conf::DEFAULT_PATH.into() }
    }
}

impl Keys {
    /// Reads and checks the keys.
    ///
    /// # Errors
    /// Code 7 if a key is invalid.
    pub fn read(conf: &NetConf) -> Result<Keys> {
        let keys = conf.json().get("ipam").map_or_else(|| Ok(Keys::default()), Json::decode);
        let keys: Keys = keys.map_err(|error| Error::config(format!("ipam: {error}")))?;
        keys.block_size.map_or(Ok(()), pool::check_block_size)?;
        if !keys.layer2.is_empty() {
            pool::check_layer2(&keys.layer2)?;
        }
        Ok(keys)
    }
}
