//! Reads the configuration of the plugin `static` and CNI_ARGS, which determine the result of ADD.
//!
//! There are four sources of addresses. The result has the addresses of `runtimeConfig.ips` or, if
//! that is empty, those of `args.cni.ips` or, if both are empty, those of `ipam.addresses` followed
//! by those of CNI_ARGS. All sources are checked, except that the addresses in `ipam.addresses` are
//! checked only if they are used. Their gateways are always checked.

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
    runtime_config: RequestedIps,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Ipam {
    addresses: Vec<Address>,
    routes: Vec<Route>,
    dns: Dns,
}

/// An entry of `ipam.addresses`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Address {
    address: String,
    gateway: String,
}

/// The addresses that the runtime requests, in `runtimeConfig` or in `args.cni`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RequestedIps {
    ips: Vec<String>,
}

/// Returns the result of an ADD with this configuration and these CNI_ARGS.
///
/// # Errors
/// - Code 4 if CNI_ARGS is invalid.
/// - Code 6 if a key has the wrong type.
/// - Code 7 if the value of a key is invalid.
pub(crate) fn result_of_add(conf: &NetConf, args: &CniArgs) -> Result<AddResult> {
    let mut json = conf.json().clone();
    remove_marshalled_addresses(&mut json);
    let keys: Keys = json.decode().map_err(|error| Error::caused(Code::DECODE, "failed to load netconf", error))?;
    let mut ipam = keys.ipam.ok_or_else(|| Error::config("IPAM config missing 'ipam' key"))?;
    ipam.routes.iter_mut().try_for_each(Route::settle_gateways)?;
    let gateways = ipam.addresses.iter().map(|entry| parse_gateway(&entry.gateway)).collect::<Result<Vec<_>>>()?;
    let args_ips = ips_of_cni_args(args)?;
    // `args.cni` is read before `runtimeConfig.ips`, even if it is not used, so that the first
    // error is the one that Go's plugin reports.
    let args_cni_ips = parse_ips(&read_args_cni(conf)?)?;
    let mut ips = parse_ips(&keys.runtime_config)?;
    if ips.is_empty() {
        ips = args_cni_ips;
    }
    if ips.is_empty() {
        for (entry, gateway) in ipam.addresses.iter().zip(gateways) {
            let address = parse_cidr(&entry.address, "the 'address' field is expected to be in CIDR notation")?;
            ips.push(IpConfig { interface: None, address, gateway });
        }
        ips.extend(args_ips);
    }
    // A result of these versions has at most one address of each family.
    if conf.version() < Version::V0_3_0 {
        require_one_per_family(conf.version().as_str(), ips.iter().map(|ip| ip.address.is_ipv4()))?;
    }
    Ok(AddResult { ips, routes: ipam.routes, dns: ipam.dns, ..AddResult::default() })
}

/// Removes the objects under the key `Address`, in exactly this spelling, from `ipam.addresses`. A
/// Go program that encodes the type of Go's plugin writes them in addition to the text under
/// `address`.
fn remove_marshalled_addresses(conf: &mut Json) {
    for ipam in members_of(conf, "ipam") {
        for addresses in members_of(ipam, "addresses") {
            let Json::Array(entries) = addresses else { continue };
            for entry in entries {
                if let Json::Object(members) = entry {
                    members.retain(|(key, value)| key != "Address" || !matches!(value, Json::Object(_)));
                }
            }
        }
    }
}

/// Returns all values of an object's key `name`, which matches in any case.
fn members_of<'j>(json: &'j mut Json, name: &'static str) -> impl Iterator<Item = &'j mut Json> {
    let members = match json {
        Json::Object(members) => members.as_mut_slice(),
        _ => &mut [],
    };
    members.iter_mut().filter(move |(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
}

/// Returns the keys of `ipam` and `runtimeConfig` that this plugin does not read. `ipam.type` and
/// all keys outside these two are for the interface plugin that runs this one.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    let mut unknown = json.unknown_keys::<Keys>();
    unknown.retain(|key| match key.path.split_once('.') {
        Some(("ipam", key)) => !key.eq_ignore_ascii_case("type"),
        Some((parent, _)) => parent == "runtimeConfig",
        None => false,
    });
    unknown
}

/// Returns the addresses in `IP` of CNI_ARGS, each with the last gateway in `GATEWAY` that is in
/// the address's network. Both values are comma-separated lists.
///
/// # Errors
/// Code 4 if a value cannot be parsed, or if CNI_ARGS has an unknown key.
fn ips_of_cni_args(args: &CniArgs) -> Result<Vec<IpConfig>> {
    args.check_known(&["IP", "GATEWAY"])?;
    let items_of = |key| args.get(key).filter(|list| !list.is_empty()).into_iter().flat_map(|list| list.split(','));
    let with_args_code = |error: Error| error.with_code(Code::INVALID_ENVIRONMENT);
    let mut ips = Vec::new();
    for text in items_of("IP").map(str::trim) {
        let address = parse_cidr(text, "the 'ip' field is expected to be in CIDR notation").map_err(with_args_code)?;
        ips.push(IpConfig { interface: None, address, gateway: None });
    }
    for text in items_of("GATEWAY").map(str::trim) {
        let invalid = || Error::new(Code::INVALID_ENVIRONMENT, format!("invalid gateway address: {text}"));
        let gateway = parse_ip(text).ok_or_else(invalid)?;
        for ip in ips.iter_mut().filter(|ip| ip.address.contains(gateway)) {
            ip.gateway = Some(gateway);
        }
    }
    Ok(ips)
}

/// Reads `args.cni`. Ignores a value that is not an object, because other programs use `args` too.
///
/// # Errors
/// Code 6 if `args.cni.ips` is not a list of strings.
fn read_args_cni(conf: &NetConf) -> Result<RequestedIps> {
    match conf.json().get("args").and_then(|args| args.get("cni")) {
        Some(cni @ Json::Object(_)) => {
            cni.decode().map_err(|error| Error::caused(Code::DECODE, "failed to load netconf: args.cni", error))
        }
        _ => Ok(RequestedIps::default()),
    }
}

/// Parses the requested addresses, which have no gateways.
///
/// # Errors
/// Code 7 for the first text that is not an address with a prefix length.
fn parse_ips(requested: &RequestedIps) -> Result<Vec<IpConfig>> {
    let parse = |text: &String| {
        let address = parse_cidr(text, "an entry in the 'ips' field is NOT in CIDR notation")?;
        Ok(IpConfig { interface: None, address, gateway: None })
    };
    requested.ips.iter().map(parse).collect()
}

/// Parses an address with a prefix length.
///
/// # Errors
/// Code 7 if the text is not in this format. The message begins with `expected`.
fn parse_cidr(text: &str, expected: &str) -> Result<Cidr> {
    text.parse().map_err(|_| Error::config(format!("{expected}, got: '{text}'")))
}

/// Parses a gateway. Returns `None` if the text is empty.
///
/// # Errors
/// Code 7 if the text is not an address.
fn parse_gateway(text: &str) -> Result<Option<IpAddr>> {
    match text {
        "" => Ok(None),
        text => parse_ip(text).map(Some).ok_or_else(|| {
            Error::config(format!("invalid IP address: {text}")).with_details("it is a gateway in ipam.addresses")
        }),
    }
}
