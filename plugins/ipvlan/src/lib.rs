//! The plugin `ipvlan`: creates an interface in the container's network namespace on top of an
//! interface of the host, the master. The new interface has the master's hardware address.
//!
//! The plugin may run after another plugin of the same list. It takes the master from that plugin's
//! result if none is configured, and the addresses and routes if there is no IPAM plugin.
//!
//! This file reads the configuration and chooses the link. [`cni_plugin::interface`] does the rest.
//! The plugin changes nothing in the host's namespace, apart from the master's mode.

use cni::config::NetConf;
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::{IpvlanMode, Stacked};
use cni_plugin::interface::stacked::{self, Choices};
use cni_plugin::interface::{AttachmentContext, Check, CreatedLink, HostEnd, Interface, Layer3Policy};
use cni_plugin::keys;
use serde::Deserialize;

/// The part of the plugin `ipvlan` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct Ipvlan;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    /// The properties of the interface to create.
    link: Choices,
    /// The result of the plugin before this one.
    earlier: Option<AddResult>,
}

/// The keys of the configuration, unchecked.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    master: String,
    mode: String,
    mtu: i64,
    link_in_container: bool,
}

impl Interface for Ipvlan {
    type Keys = Keys;
    type Conf = Conf;
    type Link = ();

    const NAME: &'static str = "ipvlan";
    const KIND: &'static str = "ipvlan";
    const HOST_END: HostEnd = HostEnd::None;

    fn parse(&self, conf: &NetConf, _args: &str) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let mode = match keys.mode.as_str() {
            "" => IpvlanMode::default(),
            name => IpvlanMode::by_name(name).ok_or_else(|| Error::config(format!("unknown ipvlan mode: {name:?}")))?,
        };
        Ok(Conf {
            link: Choices {
                stacked: Stacked::Ipvlan(mode),
                master: keys::non_empty(keys.master),
                link_in_container: keys.link_in_container,
                // Go's plugin ignores a negative MTU.
                mtu: keys.mtu.max(0),
                mac: None,
                broadcast_queue: None,
            },
            earlier: conf.prev_result()?,
        })
    }

    fn layer3<'c>(&self, conf: &'c Conf) -> Layer3Policy<'c> {
        let inherited = conf.earlier.as_ref().filter(|earlier| !earlier.ips.is_empty());
        Layer3Policy { inherited, ..Layer3Policy::default() }
    }

    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<()>> {
        let conf = &context.conf;
        let mut link = conf.link.clone();
        if let (None, Some(earlier)) = (&link.master, &conf.earlier) {
            link.master = Some(master_of_result(earlier)?);
        }
        if self.layer3(conf).inherited.is_none() {
            keys::require_ipam(&context.call.conf)?;
        }
        stacked::create(context, &link, rollback)
    }

    fn check(&self, check: &Check<'_, Conf>) -> Result<()> {
        stacked::check(check, check.context.conf.link.stacked, "Container IPVlan mode")
    }

    /// Checks the configured master. If none is configured, nothing is checked: an earlier plugin's
    /// result may name the master, and STATUS does not get that result.
    fn ready(&self, _call: &Call<'_>, conf: &Conf) -> Result<()> {
        if conf.link.master.is_some() { stacked::ready(&conf.link) } else { Ok(()) }
    }
}

/// Returns the master on the host and the mode that an ADD with this configuration gives it, or
/// `None` if the configuration does not name a master on the host.
///
/// `cnitool validate` warns about two networks with different modes for one master: the kernel has
/// one mode per master, and the last ADD sets it for all interfaces on the master.
pub fn mode_of_master(conf: &NetConf) -> Option<(String, Stacked)> {
    let Conf { link, .. } = Ipvlan.parse(conf, "").ok()?;
    // With neither a master nor an IPAM plugin, the plugin runs after another one, whose result
    // names the master.
    if link.master.is_none() && conf.ipam_type().is_empty() {
        return None;
    }
    Some((link.host_master()?, link.stacked))
}

/// Returns the master that an earlier plugin's result names: its only interface.
///
/// # Errors
/// Code 7, with the text of Go's plugin, if the result lists no interface, several, or one without
/// a name.
fn master_of_result(earlier: &AddResult) -> Result<String> {
    match &earlier.interfaces[..] {
        [only] if !only.name.is_empty() => Ok(only.name.clone()),
        _ => Err(Error::config("chained master failure. PrevResult lacks a single named interface")
            .with_details("name the interface in \"master\"")),
    }
}
