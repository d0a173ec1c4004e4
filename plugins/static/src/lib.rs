//! `static`: answers with the addresses, routes and name servers of the configuration, or with the
//! addresses that the runtime asks for.
//!
//! It keeps no record of what it hands out, so two containers may get the same address: DEL and GC
//! have nothing to do. The plugin that delegates checks routes and gateways against each other,
//! since only it knows what they are for.

mod conf;

use cni::args::CniArgs;
use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::result::AddResult;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};

/// The plugin.
#[derive(Clone, Copy, Debug)]
pub struct Static;

/// Returns the result of an ADD of this configuration without a wish of the runtime's.
///
/// # Errors
/// ADD's.
pub fn answer(conf: &NetConf) -> Result<AddResult> {
    conf::read(conf, &CniArgs::default())
}

impl Plugin for Static {
    fn name(&self) -> &'static str {
        "static"
    }

    fn role(&self) -> Role {
        Role::Ipam
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        answer(conf).map(drop)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        Ok(Added { result: conf::read(&call.conf, &call.args()?)?, rollback: call.rollback() })
    }

    /// Compares gateways alone: a later plugin may have removed an address, and the interface
    /// plugin checks those.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        let wanted = conf::read(&call.conf, &call.args()?)?;
        let prev = call.conf.prev_result()?.ok_or_else(|| Error::config("Required prevResult missing"))?;
        for ip in wanted.ips.iter().filter(|ip| ip.gateway.is_some()) {
            let address = ip.address.address();
            let Some(other) =
                prev.ips.iter().find(|prev| prev.address.address() == address && prev.gateway != ip.gateway)
            else {
                continue;
            };
            let text =
                |gateway: Option<std::net::IpAddr>| gateway.map_or("none".to_owned(), |gateway| gateway.to_string());
            let msg = format!("static: Failed to match addr {address} on interface {}", call.ifname);
            let details = format!("the gateway is {}, prevResult has {}", text(ip.gateway), text(other.gateway));
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
