//! The configuration of `vrf`: JSON in, impossible states out.

use cni::config::NetConf;
use cni::ident::check_new_interface_name;
use cni::json::{Json, UnknownKey};
use cni::{Error, Result};
use serde::Deserialize;

/// A sound configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conf {
    /// The name of the VRF in the container.
    pub(crate) name: String,
    /// Its routing table; `None` leaves the choice to the plugin, and accepts that of a VRF that is
    /// there.
    pub(crate) table: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Raw {
    vrfname: String,
    table: u32,
}

impl Conf {
    /// Reads the configuration.
    ///
    /// # Errors
    /// 6 and 7, with Go's text where it has one.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let raw: Raw = conf.decode()?;
        let invalid = |why: Error| {
            Error::config("configuration is expected to have a valid vrf name").with_details(why.msg().to_owned())
        };
        check_new_interface_name(&raw.vrfname).map_err(invalid)?;
        Ok(Conf { name: raw.vrfname, table: Some(raw.table).filter(|table| *table != 0) })
    }
}

/// Returns the keys that this plugin does not read.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    json.unknown_keys::<Raw>()
}
