//! Reads and checks the configuration of the plugin `vrf`.

use cni::config::NetConf;
use cni::ident::check_new_interface_name;
use cni::{Error, Result};
use serde::Deserialize;

/// A checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conf {
    /// The name of the VRF in the container.
    pub(crate) name: String,
    /// The routing table of the VRF. `None` accepts the table of an existing VRF, and chooses an
    /// unused table for a new VRF.
    pub(crate) table: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Keys {
    vrfname: String,
    table: u32,
}

impl Conf {
    /// Reads the configuration. The table 0 counts as not configured, as in Go's plugin.
    ///
    /// # Errors
    /// - Code 6 if a key has the wrong type.
    /// - Code 7 if `vrfname` is missing or cannot be the name of an interface.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let invalid = |reason: Error| {
            Error::config("configuration is expected to have a valid vrf name").with_details(reason.msg().to_owned())
        };
        check_new_interface_name(&keys.vrfname).map_err(invalid)?;
        Ok(Conf { name: keys.vrfname, table: Some(keys.table).filter(|table| *table != 0) })
    }
}
