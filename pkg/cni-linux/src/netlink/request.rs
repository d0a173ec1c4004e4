//! Describes requests for the log, in the words of ip(8).
//!
//! `Debug` is not used: the texts for all types of messages would make each binary half a megabyte
//! larger. Attributes that are not described here are only in the bytes, which the log has for a
//! change that failed.

use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage};
use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use netlink_packet_route::rule::{RuleAttribute, RuleMessage};

use super::Body;
use crate::mac::Mac;
use crate::route;

/// Describes an interface. A request has only its index, not its name.
fn dev(index: u32) -> String {
    format!("dev index {index}")
}

impl Body for AddressMessage {
    /// Describes an address: `10.1.2.3/24 dev index 5 broadcast 10.1.2.255`.
    fn describe(&self) -> Vec<String> {
        let address = self;
        let mut words = vec![dev(address.header.index)];
        for attribute in &address.attributes {
            match attribute {
                AddressAttribute::Local(ip) => words.insert(0, format!("{ip}/{}", address.header.prefix_len)),
                AddressAttribute::Broadcast(ip) => words.push(format!("broadcast {ip}")),
                _ => {}
            }
        }
        words
    }
}

impl Body for RouteMessage {
    /// Describes a route: `10.1.0.0/16 via 10.1.2.1 dev index 5`.
    fn describe(&self) -> Vec<String> {
        let route = self;
        let (mut to, mut words) = ("default".to_owned(), Vec::new());
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Destination(address) => {
                    let ip = route::to_ip(address).map(|ip| ip.to_string()).unwrap_or_default();
                    to = format!("{ip}/{}", route.header.destination_prefix_length);
                }
                RouteAttribute::Gateway(address) => words.extend(route::to_ip(address).map(|ip| format!("via {ip}"))),
                RouteAttribute::Oif(oif) => words.push(dev(*oif)),
                RouteAttribute::Priority(metric) => words.push(format!("metric {metric}")),
                RouteAttribute::Table(table) => words.push(format!("table {table}")),
                RouteAttribute::Metrics(_) => words.push("with metrics".to_owned()),
                RouteAttribute::MultiPath(paths) => words.push(format!("over {} paths", paths.len())),
                _ => {}
            }
        }
        words.insert(0, to);
        words
    }
}

impl Body for RuleMessage {
    /// Describes a rule: `from 10.1.2.3/32 lookup 100`.
    fn describe(&self) -> Vec<String> {
        let rule = self;
        let mut words = Vec::new();
        for attribute in &rule.attributes {
            match attribute {
                RuleAttribute::Source(ip) => words.insert(0, format!("from {ip}/{}", rule.header.src_len)),
                RuleAttribute::Table(table) => words.push(format!("lookup {table}")),
                RuleAttribute::Priority(priority) => words.push(format!("priority {priority}")),
                _ => {}
            }
        }
        words
    }
}

impl Body for NeighbourMessage {
    /// Describes a neighbour entry: `10.1.2.3 dev index 5 lladdr 02:00:00:00:00:01`.
    fn describe(&self) -> Vec<String> {
        let neighbour = self;
        let mut words = vec![dev(neighbour.header.ifindex)];
        for attribute in &neighbour.attributes {
            match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => words.insert(0, ip.to_string()),
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => words.insert(0, ip.to_string()),
                NeighbourAttribute::LinkLayerAddress(bytes) => {
                    words.extend(Mac::from_slice(bytes).map(|mac| format!("lladdr {mac}")));
                }
                _ => {}
            }
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, Request};
    use crate::Mac;
    use crate::link::LinkRequest;
    use netlink_packet_core::NLM_F_DUMP;

    #[test]
    fn a_request_is_named_with_its_arguments() {
        let link = LinkRequest::without_index().kind("bridge", &[]).name("br0").mtu(1400).mac(Mac([2, 0, 0, 0, 0, 7]));
        let new = Request { kind: Kind::NewLink, body: &link };
        assert_eq!(new.name(0), "netlink NewLink br0 type bridge mtu 1400 address 02:00:00:00:00:07");
        assert!(new.bytes().starts_with("type 16: 00") && new.bytes().contains("62723000"), "{}", new.bytes());
        assert_eq!(Request { kind: Kind::GetLink, body: &link }.name(NLM_F_DUMP), "netlink GetLink (all)");
    }
}
