//! `macvlan`: a container's network namespace gets an interface with a hardware address of its own
//! on top of an interface of the host, the master.
//!
//! Everything around the link is [`cni_plugin::interface`]'s. Nothing of this plugin is on the
//! host.

use cni::args::CniArgs;
use cni::config::{self, NetConf};
use cni::result::Dns;
use cni::rollback::{Notes, Rollback};
use cni::skel::Call;
use cni::{Error, Result};
use cni_linux::{MacvlanMode, Stacked};
use cni_plugin::interface::stacked::{self, Choices, MasterNamespace};
use cni_plugin::interface::{AttachmentContext, Check, CreatedLink, HostEnd, Interface, Layer3Policy};
use cni_plugin::keys;
use serde::Deserialize;

/// The plugin's part that is not every interface plugin's.
#[derive(Clone, Copy, Debug)]
pub struct Macvlan;

/// A sound configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    link: Choices,
    ipam: Option<String>,
    dns: Option<Dns>,
}

/// The keys, as they stand in the JSON.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    master: String,
    mode: String,
    mtu: i64,
    mac: String,
    link_in_container: MasterNamespace,
    #[serde(rename = "bcqueuelen")]
    broadcast_queue: u32,
    dns: Dns,
    runtime_config: keys::RuntimeConfig,
}

impl Interface for Macvlan {
    type Keys = Keys;
    type Conf = Conf;
    type Link = ();

    const NAME: &'static str = "macvlan";
    const KIND: &'static str = "macvlan";
    const HOST_END: HostEnd = HostEnd::None;

    fn parse(&self, conf: &NetConf, args: &str, notes: &Notes) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let args = CniArgs::parse(args)?;
        // The last two are the IPAM plugin's.
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
                master: keys::name(&keys.master),
                master_namespace: keys.link_in_container,
                mtu: keys.mtu,
                mac: keys::mac(sources).map_err(|why| mac_error(sources, &why))?,
                broadcast_queue: Some(keys.broadcast_queue).filter(|length| *length > 0),
            },
            ipam: keys::ipam(conf),
            dns: config::dns_override(keys.runtime_config.dns.as_ref(), keys.dns, notes),
        })
    }

    fn layer3<'c>(&self, conf: &'c Conf) -> Layer3Policy<'c> {
        Layer3Policy { ipam: conf.ipam.as_deref(), dns: conf.dns.as_ref(), ..Layer3Policy::default() }
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

/// Returns Go's texts: Go's parser refuses malformed addresses, the kernel refuses addresses that
/// no interface can have.
fn mac_error(sources: [&str; 3], why: &str) -> Error {
    let text = sources.into_iter().find(|text| !text.is_empty()).unwrap_or_default();
    Error::config(match why.starts_with("address") {
        true => format!("invalid args {text} for MAC addr: {why}"),
        false => format!("failed to create macvlan: {why}"),
    })
}
