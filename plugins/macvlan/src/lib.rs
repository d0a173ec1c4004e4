//! The plugin `macvlan`: creates an interface in the container's network namespace on top of an
//! interface of the host, the master. The new interface has a hardware address of its own.
//!
//! This file reads the configuration and chooses the link. [`cni_plugin::interface`] does the rest.
//! The plugin changes nothing in the host's namespace.

use cni::args::CniArgs;
use cni::config::NetConf;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::{MacvlanMode, Stacked};
use cni_plugin::interface::stacked::{self, Choices};
use cni_plugin::interface::{AttachmentContext, Check, CreatedLink, HostEnd, Interface};
use cni_plugin::keys;
use serde::Deserialize;

/// The part of the plugin `macvlan` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct Macvlan;

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
    mode: String,
    mtu: i64,
    mac: String,
    link_in_container: bool,
    #[serde(rename = "bcqueuelen")]
    broadcast_queue: u32,
    runtime_config: keys::RuntimeConfig,
}

impl Interface for Macvlan {
    type Keys = Keys;
    type Conf = Conf;
    type Link = ();

    const NAME: &'static str = "macvlan";
    const KIND: &'static str = "macvlan";
    const HOST_END: HostEnd = HostEnd::None;

    fn parse(&self, conf: &NetConf, args: &str) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let args = CniArgs::parse(args)?;
        // IP and GATEWAY are for the IPAM plugin.
        args.check_known(&["MAC", "IP", "GATEWAY"])?;
        let sources = [keys.runtime_config.mac.as_str(), args.get("MAC").unwrap_or_default(), &keys.mac];
        let mode = match keys.mode.as_str() {
            "" => MacvlanMode::default(),
            name => {
                MacvlanMode::by_name(name).ok_or_else(|| Error::config(format!("unknown macvlan mode: {name:?}")))?
            }
        };
        Ok(Conf {
            link: Choices {
                stacked: Stacked::Macvlan(mode),
                master: keys::non_empty(keys.master),
                link_in_container: keys.link_in_container,
                mtu: keys.mtu,
                mac: keys::mac(sources).map_err(|reason| mac_error(sources, &reason))?,
                broadcast_queue: Some(keys.broadcast_queue).filter(|length| *length > 0),
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
        stacked::check(check, check.context.conf.link.stacked, "container macvlan mode")
    }

    fn ready(&self, _call: &Call<'_>, conf: &Conf) -> Result<()> {
        stacked::ready(&conf.link)
    }
}

/// Returns the error for an invalid hardware address. `sources` are the texts that may contain the
/// address: the first non-empty one is used. `reason` is the error of [`keys::mac`].
///
/// The two texts are those of Go's plugin: one for a malformed address, which its parser refuses,
/// and one for an address that the kernel refuses, such as a multicast address.
fn mac_error(sources: [&str; 3], reason: &str) -> Error {
    let text = sources.into_iter().find(|text| !text.is_empty()).unwrap_or_default();
    // `keys::mac` begins only its error about a malformed address with "address".
    let is_malformed = reason.starts_with("address");
    Error::config(if is_malformed {
        format!("invalid args {text} for MAC addr: {reason}")
    } else {
        format!("failed to create macvlan: {reason}")
    })
}
