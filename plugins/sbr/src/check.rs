//! CHECK: does each address still lead to its table, and the table out of the interface?

use cni::result::IpConfig;
use cni::{Cidr, Result};
use cni_linux::{Family, Link, Netlink};

use crate::conf::Conf;

/// Returns a sentence for each missing rule and route. Ignores an address that the interface no
/// longer has: a later plugin has removed it.
pub(crate) fn missing(netlink: &Netlink, link: &Link, conf: &Conf, ips: &[IpConfig]) -> Result<Vec<String>> {
    let there = netlink.list_addresses(link.index)?;
    let mut missing = Vec::new();
    for ip in ips {
        let host = ip.address.address();
        if there.iter().all(|addr| addr.cidr.address() != host) {
            continue;
        }
        let family = Family::of(host);
        let mut rules = netlink.list_rules(family)?;
        rules.retain(|rule| rule.source == Some(Cidr::host(host)));
        if let Conf::Table(table) = conf {
            if rules.iter().all(|rule| rule.table != *table) {
                missing.push(format!("no rule leads packets from {host} to table {table}"));
            }
            continue;
        }
        let Some(rule) = rules.first() else {
            missing.push(format!("no rule leads packets from {host} to a table"));
            continue;
        };
        let routes = netlink.list_routes(family, Some(rule.table))?;
        let has_default = routes.iter().any(|route| route.dst.is_default_route() && route.oif == link.index);
        if !has_default && conf.gateway(family).or(ip.gateway).is_some() {
            missing.push(format!(
                "table {}, for packets from {host}, has no default route through {}",
                rule.table, link.name
            ));
        }
    }
    Ok(missing)
}
