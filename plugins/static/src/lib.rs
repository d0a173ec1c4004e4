//! The IPAM plugin `static`: returns the addresses, routes and name servers of the configuration,
//! or the addresses that the runtime requests.
//!
//! It does not record which addresses it has returned, so two containers may get the same address,
//! and DEL and GC have nothing to do. The interface plugin checks whether routes and gateways match
//! the addresses, because only that plugin knows how it uses them.

mod conf;

use std::net::IpAddr;

use cni::args::CniArgs;
use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::result::IpConfig;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};

/// The plugin `static`.
#[derive(Clone, Copy, Debug)]
pub struct Static;

impl Plugin for Static {
    fn name(&self) -> &'static str {
        "static"
    }

    fn role(&self) -> Role {
        Role::Ipam
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        conf::result_of_add(conf, &CniArgs::default()).map(drop)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        Ok(Added { result: conf::result_of_add(&call.conf, &call.args()?)?, rollback: call.rollback() })
    }

    /// Fails with code 101 if prevResult has a different gateway for one of the configured
    /// addresses. Addresses without a configured gateway are not compared. The interface plugin
    /// checks the addresses themselves.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let expected = conf::result_of_add(&call.conf, &call.args()?)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("Required prevResult missing"))?;
        for ip in expected.ips.iter().filter(|ip| ip.gateway.is_some()) {
            let address = ip.address.address();
            let has_other_gateway =
                |found: &&IpConfig| found.address.address() == address && found.gateway != ip.gateway;
            let Some(differing) = prev.ips.iter().find(has_other_gateway) else { continue };
            let gateway_or_none =
                |gateway: Option<IpAddr>| gateway.map_or("none".to_owned(), |gateway| gateway.to_string());
            let msg = format!("static: Failed to match addr {address} on interface {}", call.ifname);
            let (expected, found) = (gateway_or_none(ip.gateway), gateway_or_none(differing.gateway));
            let details = format!("the gateway is {expected}, prevResult has {found}");
            return Err(Error::new(Code::CHECK_FAILED, msg).with_details(details));
        }
        Ok(())
    }

    fn del(&self, _: &Call<'_>) -> Result<()> {
        Ok(())
    }
}
