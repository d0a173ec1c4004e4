//! The plugin `dummy`: creates a dummy interface, which discards every frame, in the container's
//! network namespace, with addresses from an IPAM plugin.
//!
//! This file reads the configuration and creates the link. [`cni_plugin::interface`] does the rest:
//! IPAM, addresses, routes, CHECK, DEL, GC. The plugin changes nothing in the host's namespace.

use std::rc::Rc;

use cni::config::{self, ConfDns, NetConf};
use cni::result::{AddResult, Dns};
use cni::rollback::{Notes, Rollback};
use cni::{Error, Result};
use cni_plugin::interface::veth::{made_up_mac, undo_creation};
use cni_plugin::interface::{AttachmentContext, CreatedLink, HostEnd, Interface, Layer3Policy};
use cni_plugin::keys;
use serde::Deserialize;

/// The part of the plugin `dummy` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct Dummy;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    /// The IPAM plugin.
    ipam: String,
    /// The DNS settings that replace those of the IPAM plugin.
    dns: Option<Dns>,
}

/// The keys of the configuration, unchecked.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    dns: ConfDns,
    runtime_config: keys::RuntimeDnsConfig,
}

impl Interface for Dummy {
    type Keys = Keys;
    type Conf = Conf;
    type Link = ();

    const NAME: &'static str = "dummy";
    const KIND: &'static str = "dummy";
    const HOST_END: HostEnd = HostEnd::None;

    fn parse(&self, conf: &NetConf, _args: &str, notes: &Notes) -> Result<Conf> {
        let keys: Keys = conf.decode()?;
        let ipam = keys::ipam_type(conf);
        Ok(Conf {
            ipam: ipam.ok_or_else(|| Error::config("dummy interface requires an IPAM configuration"))?,
            dns: config::dns_override(keys.runtime_config.dns.as_ref(), keys.dns, notes),
        })
    }

    fn layer3<'c>(&self, conf: &'c Conf) -> Layer3Policy<'c> {
        Layer3Policy { ipam: Some(&conf.ipam), dns: conf.dns.as_ref(), ..Layer3Policy::default() }
    }

    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<()>> {
        let (container, name) = (Rc::new(context.container.clone()), &context.call.ifname);
        let mac = made_up_mac()?;
        let created_index = undo_creation(&container, name, move |link| link.mac == Some(mac), rollback);
        let link = container.create_dummy(name, mac)?;
        created_index.set(Some(link.index));
        container.set_alias(link.index, &context.attachment.alias())?;
        let result = AddResult { interfaces: vec![context.container_interface(mac)], ..AddResult::default() };
        Ok(CreatedLink { index: link.index, mac, result, interface_position: 0, link: () })
    }
}
