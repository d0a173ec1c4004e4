//! The IPAM plugin `static`: returns the addresses, routes and name servers of the configuration,
//! or the addresses that the runtime requests.
//!
//! It does not record which addresses it has returned, so two containers may get the same one, and
//! DEL and GC have nothing to do. It does not check that routes and gateways fit to the addresses:
//! the interface plugin does, since only that plugin knows how it uses them.

mod conf;

use std::net::IpAddr;

use cni::args::CniArgs;
use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
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

    /// Fails with code 101 if prevResult has one of the addresses with another gateway. The
    /// interface plugin checks the addresses themselves.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let expected = conf::result_of_add(&call.conf, &call.args()?)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("Required prevResult missing"))?;
        for ip in expected.ips.iter().filter(|ip| ip.gateway.is_some()) {
            let address = ip.address.address();
            let Some(differing) =
                prev.ips.iter().find(|prev| prev.address.address() == address && prev.gateway != ip.gateway)
            else {
                continue;
            };
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

    fn gc(&self, _: &Call<'_>, _: &ValidAttachments) -> Result<()> {
        Ok(())
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        self.examine(&call.conf)
    }
}
