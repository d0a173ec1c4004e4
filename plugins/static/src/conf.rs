//! The configuration of `static`: JSON and CNI_ARGS in, the result of an ADD out.
//!
//! There are four sources of addresses. The addresses of CNI_ARGS follow those of `ipam.addresses`.
//! `args.cni.ips` replaces both, and `runtimeConfig.ips` replaces all others. A replaced source is
//! not checked, CNI_ARGS excepted.

use std::net::IpAddr;

use cni::args::CniArgs;
use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::result::{AddResult, Dns, IpConfig, Route};
use cni::version::Version;
use cni::{Cidr, Code, Error, Result};
use cni_ipam::ranges::{parse_ip, require_one_per_family};
use serde::Deserialize;

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Keys {
    ipam: Option<Ipam>,
    runtime_config: Ips,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Ipam {
    addresses: Vec<Address>,
    routes: Vec<Route>,
    dns: Dns,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Address {
    address: String,
    gateway: String,
}

/// `runtimeConfig` and `args.cni`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Ips {
    ips: Vec<String>,
}

/// Reads the configuration and CNI_ARGS.
///
/// # Errors
/// 4 for CNI_ARGS, 6 and 7 for the configuration, with Go's texts where it has them.
pub(crate) fn read(conf: &NetConf, args: &CniArgs) -> Result<AddResult> {
    let keys: Keys = conf.decode()?;
    let ipam = keys.ipam.ok_or_else(|| Error::config("IPAM config missing 'ipam' key"))?;
    let gateways = ipam.addresses.iter().map(|entry| gateway(&entry.gateway)).collect::<Result<Vec<_>>>()?;
    let of_args = in_args(args)?;
    // Go reads this source even where the runtime's replaces it, and first.
    let of_conventions = requested(&in_conventions(conf)?)?;
    let mut ips = requested(&keys.runtime_config)?;
    if ips.is_empty() {
        ips = of_conventions;
    }
    if ips.is_empty() {
        for (entry, gateway) in ipam.addresses.iter().zip(gateways) {
            let address = cidr(&entry.address, "the 'address' field is expected to be in CIDR notation")?;
            ips.push(IpConfig { interface: None, address, gateway });
        }
        ips.extend(of_args);
    }
    if conf.version() < Version::V0_3_0 {
        require_one_per_family(conf.version().as_str(), ips.iter().map(|ip| ip.address.is_ipv4()))?;
    }
    Ok(AddResult { ips, routes: ipam.routes, dns: ipam.dns, ..AddResult::default() })
}

/// Returns the keys of `ipam` and `runtimeConfig` that this plugin does not read. Other keys may
/// belong to the plugin that delegates.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    let mut unknown = json.unknown_keys::<Keys>();
    unknown.retain(|key| match key.path.split_once('.') {
        Some(("ipam", rest)) => !rest.eq_ignore_ascii_case("type"),
        Some((place, _)) => place == "runtimeConfig",
        None => false,
    });
    unknown
}

/// Reads `IP` and `GATEWAY`, lists with commas. A gateway is that of each address whose network it
/// is in.
fn in_args(args: &CniArgs) -> Result<Vec<IpConfig>> {
    args.check_known(&["IP", "GATEWAY"])?;
    let list = |key| args.get(key).filter(|list| !list.is_empty()).into_iter().flat_map(|list| list.split(','));
    let refused = |error: Error| error.with_code(Code::INVALID_ENVIRONMENT);
    let mut ips = Vec::new();
    for text in list("IP").map(str::trim) {
        let address = cidr(text, "the 'ip' field is expected to be in CIDR notation").map_err(refused)?;
        ips.push(IpConfig { interface: None, address, gateway: None });
    }
    for text in list("GATEWAY").map(str::trim) {
        let gateway =
            parse_ip(text).ok_or_else(|| refused(Error::config(format!("invalid gateway address: {text}"))))?;
        ips.iter_mut().filter(|ip| ip.address.contains(gateway)).for_each(|ip| ip.gateway = Some(gateway));
    }
    Ok(ips)
}

/// Reads `args.cni`. Values of other types belong to other programs.
fn in_conventions(conf: &NetConf) -> Result<Ips> {
    match conf.json().get("args").and_then(|args| args.get("cni")) {
        Some(cni @ Json::Object(_)) => {
            cni.decode().map_err(|why| Error::caused(Code::DECODE, "failed to load netconf: args.cni", why))
        }
        _ => Ok(Ips::default()),
    }
}

fn requested(source: &Ips) -> Result<Vec<IpConfig>> {
    let ip = |text: &String| {
        let address = cidr(text, "an entry in the 'ips' field is NOT in CIDR notation")?;
        Ok(IpConfig { interface: None, address, gateway: None })
    };
    source.ips.iter().map(ip).collect()
}

fn cidr(text: &str, expected: &str) -> Result<Cidr> {
    text.parse().map_err(|_| Error::config(format!("{expected}, got: '{text}'")))
}

fn gateway(text: &str) -> Result<Option<IpAddr>> {
    match text {
        "" => Ok(None),
        text => parse_ip(text).map(Some).ok_or_else(|| Error::config(format!("invalid IP address: {text}"))),
    }
}
