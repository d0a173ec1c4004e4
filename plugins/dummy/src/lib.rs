//! The plugin `dummy`: creates a dummy interface, which discards every frame, in the container's
//! network namespace, with addresses from an IPAM plugin.
//!
//! This file reads the configuration and creates the link. [`cni_plugin::interface`] does the rest:
//! IPAM, addresses, routes, CHECK, DEL, GC. The plugin changes nothing in the host's namespace.

use std::rc::Rc;

use cni::config::NetConf;
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::{Error, Result};
use cni_plugin::interface::veth::{made_up_mac, undo_creation};
use cni_plugin::interface::{AttachmentContext, CreatedLink, HostEnd, Interface};
use serde::Deserialize;

/// The part of the plugin `dummy` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct Dummy;

/// The plugin's own keys: none.
#[derive(Debug, Deserialize)]
pub struct Keys {}

impl Interface for Dummy {
    type Keys = Keys;
    type Conf = ();
    type Link = ();

    const NAME: &'static str = "dummy";
    const KIND: &'static str = "dummy";
    const HOST_END: HostEnd = HostEnd::None;

    fn parse(&self, conf: &NetConf, _args: &str) -> Result<()> {
        match conf.ipam_type() {
            "" => Err(Error::config("dummy interface requires an IPAM configuration")),
            _ => Ok(()),
        }
    }

    fn create<'a>(&self, context: &AttachmentContext<'a, ()>, rollback: &mut Rollback<'a>) -> Result<CreatedLink<()>> {
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
