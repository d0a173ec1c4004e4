//! The plugin `slaac`: returns the IPv6 addresses that the container's interface makes of the
//! advertisements of routers (SLAAC, RFC 4862).
//!
//! An interface plugin runs it as its IPAM plugin, or a list contains it after the plugin that
//! created the interface; then it completes that plugin's result. In both cases the kernel adds the
//! addresses and routes, and renews them. ADD starts IPv6 on the interface again, so that the
//! kernel solicits an advertisement, and waits for the outcome. Everything is in the container's
//! namespace, so DEL and GC have nothing to do.

mod conf;
mod interface;
pub mod resolver;

use std::cmp::Reverse;

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::result::{AddResult, IpConfig, Route as ResultRoute};
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_linux::route::MAIN_TABLE;
use cni_linux::{Netns, sysctl};

use conf::{Conf, Usage};
use interface::{Advertised, Interface};

/// The metric that the kernel gives to IPv6 routes by default.
const DEFAULT_METRIC: u32 = 1024;

/// The plugin `slaac`.
#[derive(Clone, Copy, Debug)]
pub struct Slaac;

impl Plugin for Slaac {
    fn name(&self) -> &'static str {
        "slaac"
    }

    fn role(&self) -> Role {
        Role::IpamOrChained
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        Conf::read(conf).map(drop)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let conf = Conf::read(&call.conf)?;
        // Before anything else, so that the wait ends in time.
        let deadline = call.machine.now() + conf.limit;
        let mut result = match conf.usage {
            Usage::Ipam => AddResult::default(),
            Usage::Chained => call.conf.prev_result()?.ok_or_else(no_prev_result)?,
        };
        let mut rollback = call.rollback();
        let interface = Interface::open(call)?;
        let watch = interface.watch()?;
        interface.restart_ipv6(&conf, &call.attachment(), &mut rollback)?;
        let advertised = interface.wait(&watch, &conf, deadline)?;
        let position = match conf.usage {
            // The interface plugin knows it.
            Usage::Ipam => None,
            Usage::Chained => result.find_interface(&call.ifname, call.sandbox()),
        };
        complete(&mut result, &advertised, position, &call.ifname);
        Ok(Added { result, rollback })
    }

    /// Checks that the interface still accepts advertisements. The interface plugin compares the
    /// addresses and routes with `prevResult`.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        Conf::read(&call.conf)?;
        call.conf.prev_result()?.ok_or_else(no_prev_result)?;
        let netns = Netns::open(call.netns()?)?;
        for (name, expected) in interface::ACCEPTING {
            let path = format!("net/ipv6/conf/{}/{name}", call.ifname);
            let found = netns.run(|| sysctl::read(&path))??;
            if found != expected {
                let msg = format!("sysctl {path} is {found}, expected {expected}");
                return Err(Error::new(Code::CHECK_FAILED, msg));
            }
        }
        Ok(())
    }

    fn del(&self, _: &Call<'_>) -> Result<()> {
        Ok(())
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        self.examine(&call.conf)?;
        let has_ipv6 = sysctl::read("net/ipv6/conf/default/accept_ra").map(drop);
        has_ipv6.map_err(|error| Error::from(error).context("the kernel has no IPv6").with_code(Code::NOT_AVAILABLE))
    }
}

/// Adds what routers have advertised to `result`. `position` is that of CNI_IFNAME in the result's
/// interfaces.
fn complete(result: &mut AddResult, advertised: &Advertised, position: Option<usize>, ifname: &str) {
    // The one that the kernel uses, if all routers are reachable.
    let default_routes = advertised.routes.iter().filter(|route| route.dst.is_default_route());
    let default_route = default_routes.min_by_key(|route| (route.metric(), Reverse(route.preference)));
    let gateway = default_route.and_then(|route| route.gw);
    for address in &advertised.addresses {
        result.ips.push(IpConfig { interface: position, address: *address, gateway });
    }
    for route in &advertised.routes {
        result.routes.push(ResultRoute {
            mtu: route.mtu,
            advmss: route.advmss,
            priority: route.priority.filter(|metric| *metric != DEFAULT_METRIC),
            table: route.table.filter(|table| *table != MAIN_TABLE),
            ..ResultRoute::new(route.dst, route.gw)
        });
    }
    advertised.resolvers.add_to(&mut result.dns, ifname);
}

/// Returns the error for the chained plugin's configuration without `prevResult`.
fn no_prev_result() -> Error {
    Error::config("missing prevResult from earlier plugin")
}
