//! Implements CHECK: each address still has a rule that leads to its table. If ADD has chosen the
//! table, the table still has its default route.

use cni::result::IpConfig;
use cni::{Cidr, Result};
use cni_linux::{Family, Link, Netlink};

use crate::conf::Conf;

/// Returns a text for each rule and default route that is missing. With the key `table`, only rules
/// are checked, because another program fills the table. Ignores addresses in `ips` that the
/// interface does not have: a later plugin may have removed them.
pub(crate) fn find_missing(netlink: &Netlink, link: &Link, conf: &Conf, ips: &[IpConfig]) -> Result<Vec<String>> {
    let present = netlink.list_addresses(link.index)?;
    let mut missing = Vec::new();
    for ip in ips {
        let address = ip.address.address();
        if !present.iter().any(|addr| addr.cidr.address() == address) {
            continue;
        }
        let family = Family::of(address);
        let mut rules = netlink.list_rules(family)?;
        rules.retain(|rule| rule.source == Some(Cidr::host(address)));
        if let Conf::Table(table) = conf {
            if !rules.iter().any(|rule| rule.table == *table) {
                missing.push(format!("no routing rule sends packets from {address} to table {table}"));
            }
            continue;
        }
        // There is only one rule, unless another program has added some: ADD refuses an address
        // that has a rule.
        let Some(rule) = rules.first() else {
            missing.push(format!("no routing rule sends packets from {address} to a table"));
            continue;
        };
        let routes = netlink.list_routes(family, Some(rule.table))?;
        let has_default = routes.iter().any(|route| route.dst.is_default_route() && route.oif == link.index);
        // Without a gateway, ADD has copied a default route only if the main table had one. Whether
        // it had one is not known here.
        if !has_default && conf.gateway(family).or(ip.gateway).is_some() {
            missing.push(format!(
                "table {}, for packets from {address}, has no default route through {}",
                rule.table, link.name
            ));
        }
    }
    Ok(missing)
}
