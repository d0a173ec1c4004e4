//! The plugin `vlan`: creates an interface in the container's network namespace for one VLAN of an
//! interface of the host, the master.
//!
//! This file reads the configuration and chooses the link. [`cni_plugin::interface`] does the rest.
//! The plugin changes nothing in the host's namespace.

use cni::config::NetConf;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::Stacked;
use cni_plugin::interface::stacked::{self, Choices};
use cni_plugin::interface::{AttachmentContext, Check, CreatedLink, HostEnd, Interface};
use cni_plugin::keys;
use serde::Deserialize;

/// The part of the plugin `vlan` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct Vlan;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    /// The properties of the interface to create.
    link: Choices,
}

/// The keys of the configuration, unchecked.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    master: String,
    vlan_id: Option<i64>,
    mtu: i64,
    link_in_container: bool,
}

impl Interface for Vlan {
    type Keys = Keys;
    type Conf = Conf;
    type Link = ();

    const NAME: &'static str = "vlan";
    const KIND: &'static str = "vlan";
    const HOST_END: HostEnd = HostEnd::None;
    const LEASE_CONTEXT: Option<&'static str> = Some("failed to execute IPAM delegate");

    fn parse(&self, conf: &NetConf, _args: &str) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let missing = "\"master\" field is required. It specifies the host interface name to create the VLAN for";
        let master = keys::non_empty(keys.master).ok_or_else(|| Error::config(missing))?;
        keys::require_ipam(conf)?;
        Ok(Conf {
            link: Choices {
                stacked: Stacked::Vlan(check_vlan_id(keys.vlan_id)?),
                master: Some(master),
                link_in_container: keys.link_in_container,
                mtu: keys.mtu,
                mac: None,
                broadcast_queue: None,
            },
        })
    }

    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<()>> {
        stacked::create(context, &context.conf.link, rollback)
    }

    fn check(&self, check: &Check<'_, Conf>) -> Result<()> {
        stacked::check(check, check.context.conf.link.stacked, "Container VLAN ID")
    }

    fn ready(&self, _call: &Call<'_>, conf: &Conf) -> Result<()> {
        stacked::ready(&conf.link)
    }
}

/// Checks the key `vlanId`. Returns the VLAN ID, which is from 0 to 4094.
///
/// # Errors
/// Code 7 if the key is missing or out of range.
fn check_vlan_id(id: Option<i64>) -> Result<u16> {
    let Some(id) = id else {
        return Err(Error::config("\"vlanId\" field is required: an ID from 0 to 4094"));
    };
    // The text of Go's plugin says that 4095 is valid, but it is reserved.
    u16::try_from(id).ok().filter(|id| *id < 4095).ok_or_else(|| {
        Error::config(format!("invalid VLAN ID {id} (must be between 0 and 4095 inclusive)"))
            .with_details("VLAN 4095 is reserved")
    })
}
