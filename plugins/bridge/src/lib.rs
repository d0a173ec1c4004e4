//! `bridge`: a container's network namespace gets a port on a Linux bridge, an address from an IPAM plugin, and, if
//! the bridge is to be the gateway, a way out.
//!
//! Rooms: `conf` reads the configuration; `device` finds or makes the bridge, `port` the veth pair, `layer3` the
//! addresses and routes, `gateway` the bridge's own addresses, `masquerade` the rules for what leaves the network; `attach` puts them together for ADD, `chained` for a use after another plugin; `check`,
//! `detach` (DEL) and `collect` (GC) are the other verbs.
//!
//! Easy to get wrong: the bridge is everybody's. It, its gateway addresses and the forwarding sysctls are never undone;
//! only what carries this attachment's mark is.

mod attach;
mod chained;
mod check;
mod collect;
mod conf;
mod detach;
mod device;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod gateway;
mod layer3;
mod masquerade;
mod port;
mod record;

use cni::config::{NetConf, ValidAttachments};
use cni::delegate::Delegate;
use cni::json::{Json, UnknownKey};
use cni::result::{AddResult, IpConfig};
use cni::rollback::Notes;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Cidr, Code, Error, Result};
use cni_firewall::spoof::SpoofCheck;
use cni_linux::{Mark, Netlink};

pub use conf::DEFAULT_BRIDGE;

use conf::Conf;
use layer3::Layer3;

/// The plugin.
#[derive(Clone, Copy, Debug)]
pub struct Bridge;

impl Plugin for Bridge {
    fn name(&self) -> &'static str {
        "bridge"
    }

    fn role(&self) -> Role {
        Role::Interface
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        let parsed = Conf::parse(conf, "", &Notes::silent())?;
        match parsed.ipam {
            Some(_) => cni::delegate::timeout(conf).map(drop),
            None => Ok(()),
        }
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn examine_answers(&self, conf: &NetConf, answers: &[AddResult], earlier: &[Cidr]) -> Result<Vec<Option<Error>>> {
        let address = |address: &Cidr| IpConfig { interface: None, address: *address, gateway: None };
        let earlier: Vec<IpConfig> = earlier.iter().map(address).collect();
        let conf = Conf::parse(conf, "", &Notes::silent())?;
        Ok(answers.iter().map(|answer| Layer3::new(answer, &conf, 2, &earlier).err()).collect())
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let conf = Conf::new(call)?;
        match chained::earlier(call)? {
            Some(prev) => chained::add(call, &conf, prev),
            None => attach::add(call, &conf),
        }
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(call)?;
        check::check(call, &conf)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        detach::del(call)
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        collect::gc(call, valid)
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(call)?;
        let not_ready = |error: Error| error.with_code(Code::NOT_AVAILABLE);
        let host = Netlink::open().map_err(|error| not_ready(error.into()))?;
        let mut filters_vlans = false;
        if let Some(link) = host.find_link(&conf.bridge).map_err(|error| not_ready(error.into()))? {
            let Some(bridge) = &link.bridge else {
                let msg = format!("{:?} already exists but is not a bridge", conf.bridge);
                return Err(Error::new(Code::NOT_AVAILABLE, msg));
            };
            filters_vlans = bridge.vlan_filtering;
            if conf.vlans.is_some() && !filters_vlans {
                device::check_foreign_ports(&host, &link).map_err(not_ready)?;
            }
        }
        // A bridge that filters proves that the kernel can, and costs nothing to look at.
        if !filters_vlans {
            device::check_vlan_filtering(call, &conf)?;
        }
        if conf.spoof_check {
            let probed = SpoofCheck::open().and_then(|mut spoof| spoof.probe());
            probed.map_err(|error| not_ready(Error::from(error).context("\"macspoofchk\": true")))?;
        }
        masquerade::status(call, &conf)?;
        match &conf.ipam {
            Some(kind) => Delegate::find(call, kind).map_err(not_ready)?.status(),
            None => Ok(()),
        }
    }
}

/// The mark of this call's attachment.
fn mark(call: &Call<'_>) -> Mark {
    Mark::new(call.conf.name(), &call.container_id, &call.ifname)
}
