//! Finds the gateways in host-local's configuration, for the plugin that adds them to its
//! interface.

use cni::Cidr;
use cni::config::NetConf;
use cni::json::Json;
use serde::Deserialize;

/// The keys of host-local that have gateways. host-local itself reports errors in them.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Keys {
    ipam: Ipam,
    #[serde(rename = "runtimeConfig")]
    runtime_config: Runtime,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Ipam {
    subnet: Option<Json>,
    gateway: Option<Json>,
    ranges: Option<Json>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Runtime {
    #[serde(rename = "ipRanges")]
    ip_ranges: Option<Json>,
}

/// Returns the gateways of host-local's ranges, each with the prefix length of its subnet. The
/// gateway of a range without `gateway` is the subnet's first host. Skips a range whose subnet or
/// gateway cannot be parsed.
pub fn configured_gateways(conf: &NetConf) -> Vec<Cidr> {
    let Keys { ipam, runtime_config } = conf.decode().unwrap_or_default();
    let mut gateways: Vec<Cidr> = gateway_of(ipam.subnet.as_ref(), ipam.gateway.as_ref()).into_iter().collect();
    for sets in [ipam.ranges.as_ref(), runtime_config.ip_ranges.as_ref()].into_iter().flatten() {
        let Json::Array(sets) = sets else { continue };
        for set in sets {
            let Json::Array(ranges) = set else { continue };
            gateways.extend(ranges.iter().filter_map(|range| gateway_of(range.get("subnet"), range.get("gateway"))));
        }
    }
    gateways
}

/// Returns the gateway of a range with these values of `subnet` and `gateway`: the subnet's first
/// host if `gateway` is missing or empty. Returns `None` if the subnet is missing, or if a text
/// cannot be parsed.
fn gateway_of(subnet: Option<&Json>, gateway: Option<&Json>) -> Option<Cidr> {
    let subnet: Cidr = subnet?.as_str()?.parse().ok()?;
    match gateway.and_then(Json::as_str).filter(|text| !text.is_empty()) {
        Some(text) => Cidr::new(text.parse().ok()?, subnet.prefix()),
        None => subnet.first(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateways_of_the_ranges_are_known() {
        let keys = r#","runtimeConfig":{"ipRanges":[[{"subnet":"10.3.0.0/24"}]]},"ipam":{"type":"host-local","subnet":"10.1.0.0/24","ranges":[[{"subnet":"10.2.0.0/16","gateway":"10.2.9.9"},{"Subnet":"fd00::/64","gateway":""}],5]}"#;
        let conf = NetConf::parse(format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"bridge"{keys}}}"#)).unwrap();
        let texts: Vec<String> = configured_gateways(&conf).iter().map(Cidr::to_string).collect();
        assert_eq!(texts, ["10.1.0.1/24", "10.2.9.9/16", "fd00::1/64", "10.3.0.1/24"]);
    }
}
