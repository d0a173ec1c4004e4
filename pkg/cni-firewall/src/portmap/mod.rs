//! Maps host ports: connections to a port of the host go to a port of a container.
//!
//! A [`Forwarding`] has the port mappings of one attachment. The backends [`nft`] and [`iptables`]
//! write them as rules of the form that the Go plugin uses. For both, [`conflict`] decides which
//! rules of other containers are removed. For nftables, `identity` names the attachment in rules,
//! and [`conditions`] compiles extra matches.
//!
//! A *claim* ([`ClaimedPort`]) is a mapping in one family: a host port, and the container's address
//! and port.
//!
//! Everything works in the network namespace of the calling thread, which must be the host's. A
//! mapping without a host address applies in both families, one with 0.0.0.0 only in IPv4.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use cni::{AttachmentId, Cidr};
use cni_linux::error::Result;
use cni_linux::route::Family;

pub mod conditions;
pub mod conflict;
pub(super) mod identity;
pub mod iptables;
pub mod nft;

pub use cni_linux::conntrack::{ClaimedPort, Protocol};
pub use conflict::{Conflicts, Holder, Policy};

/// One port mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The protocol.
    pub protocol: Protocol,
    /// The host's address. `None` means every address of both families, 0.0.0.0 or `::` every
    /// address of its family.
    pub host_ip: Option<IpAddr>,
    /// The host's port.
    pub host_port: u16,
    /// The container's port.
    pub container_port: u16,
}

impl Mapping {
    /// Whether one packet could match both this mapping and `other`, if the container has an
    /// address in both families.
    pub fn overlaps(&self, other: &Mapping) -> bool {
        // Only the family of the container's address matters here, so any address will do.
        for container in [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)] {
            if let (Some(own_claim), Some(other_claim)) = (self.claim(container), other.claim(container))
                && own_claim.overlaps(&other_claim)
            {
                return true;
            }
        }
        false
    }

    /// Returns the claim of this mapping for a container with this address; `None` if the mapping's
    /// host address is of the other family.
    pub fn claim(&self, container: IpAddr) -> Option<ClaimedPort> {
        if let Some(host_ip) = self.host_ip
            && Family::of(host_ip) != Family::of(container)
        {
            return None;
        }
        Some(ClaimedPort {
            protocol: self.protocol,
            host_ip: self.host_ip.filter(|host_ip| !host_ip.is_unspecified()),
            host_port: self.host_port,
            container: SocketAddr::new(container, self.container_port),
        })
    }
}

/// Which connections to a host port get the host's address as their source, so that the container's
/// answers come back through the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Snat {
    /// None. Then the container cannot reach its own host port, and the host cannot reach that port
    /// at 127.0.0.1.
    No,
    /// The connections that could not work otherwise: those from the container itself (iptables:
    /// from its whole subnet) and, in IPv4, those from 127.0.0.1.
    Hairpin,
    /// All connections.
    All,
}

/// How iptables rules mark a connection for [`Snat`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetMark {
    /// With this bit of the packet mark, in a chain of these plugins.
    Bit(u8),
    /// With a jump to this chain of another program, which marks and later masquerades the packets.
    Chain(String),
}

/// The port mappings that one attachment wants.
#[derive(Clone, Debug)]
pub struct Forwarding {
    /// The attachment.
    pub attachment: AttachmentId,
    /// The container's addresses: at most one of each family, IPv4 first.
    pub containers: Vec<Cidr>,
    /// The mappings, in the order of the configuration.
    pub mappings: Vec<Mapping>,
    /// The connections whose source address is replaced.
    pub snat: Snat,
    /// How iptables rules mark these connections.
    pub set_mark: SetMark,
    /// Extra matches in IPv4, in the syntax of iptables or nft.
    pub conditions_v4: Vec<String>,
    /// Extra matches in IPv6.
    pub conditions_v6: Vec<String>,
    /// The reaction to a port that another container has.
    pub policy: Policy,
    /// The names of the attachment's interfaces on the host.
    pub links: Vec<String>,
}

impl Forwarding {
    /// Returns the extra matches of one family.
    pub fn conditions(&self, family: Family) -> &[String] {
        match family {
            Family::V4 => &self.conditions_v4,
            Family::V6 => &self.conditions_v6,
        }
    }

    /// Returns, for each family in which a port is mapped, the container's address and its claims.
    pub fn families(&self) -> impl Iterator<Item = (Cidr, Vec<ClaimedPort>)> {
        self.families_with_address().filter(|(_, claims)| !claims.is_empty())
    }

    /// Returns, for each family in which the container has an address, this address and its claims;
    /// no claims if no port is mapped in the family.
    pub(crate) fn families_with_address(&self) -> impl Iterator<Item = (Cidr, Vec<ClaimedPort>)> {
        self.containers.iter().map(|container| (*container, self.claims(*container)))
    }

    /// Returns the claims of both families.
    pub fn all_claims(&self) -> Vec<ClaimedPort> {
        self.families().flat_map(|(_, claims)| claims).collect()
    }

    /// Returns the claims for one of the container's addresses.
    fn claims(&self, container: Cidr) -> Vec<ClaimedPort> {
        self.mappings.iter().filter_map(|mapping| mapping.claim(container.address())).collect()
    }

    /// Returns the container's addresses without their prefix lengths.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.containers.iter().map(|container| container.address()).collect()
    }

    /// Whether this is one of the container's addresses.
    pub fn is_container(&self, address: IpAddr) -> bool {
        self.containers.iter().any(|container| container.address() == address)
    }
}

/// Returns the remark about `older`, an existing mapping of this container to another address. The
/// ADD keeps the mapping, because its rule does not name an attachment.
fn older_mapping_remark(older: &ClaimedPort) -> String {
    let address = older.container;
    format!(
        "{older} is mapped to {address} by older rules of this container, which may take precedence until they are \
         removed"
    )
}

/// The outcome of a removal, in all families and variants of a backend.
#[derive(Debug)]
pub struct Removal {
    /// The claims of all rules that were found, even if a removal failed. The caller must delete
    /// their tracked connections now: a repeated removal does not find removed rules again.
    pub claims: Vec<ClaimedPort>,
    /// A sentence for each rule that was kept and each table that was skipped without an error.
    pub remarks: Vec<String>,
    /// Fails with the errors of all removals that failed.
    pub outcome: Result<()>,
}

/// The outcome of writing the rules of a [`Forwarding`].
#[derive(Clone, Debug)]
pub enum EnsureOutcome {
    /// All rules are in place.
    Done {
        /// Remarks for the operator, one sentence each.
        remarks: Vec<String>,
    },
    /// The rules are not in place, because this living container has one of the ports.
    Held(Holder),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(host_ip: &str) -> Mapping {
        let host_ip = host_ip.parse().ok();
        Mapping { protocol: Protocol::Tcp, host_ip, host_port: 8080, container_port: 80 }
    }

    #[test]
    fn a_host_address_decides_the_family() {
        let (v4, v6): (IpAddr, IpAddr) = ("10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap());
        for (host_ip, in_v4, in_v6) in [
            ("", true, true),
            ("0.0.0.0", true, false),
            ("::", false, true),
            ("192.0.2.1", true, false),
            ("fd00::1", false, true),
        ] {
            let mapping = mapping(host_ip);
            assert_eq!((mapping.claim(v4).is_some(), mapping.claim(v6).is_some()), (in_v4, in_v6), "{host_ip:?}");
        }
        assert_eq!(mapping("0.0.0.0").claim(v4), mapping("").claim(v4));
    }

    #[test]
    fn claims_overlap_where_a_packet_could_be_both_s() {
        let claim = |host_ip: &str, port, protocol| {
            let mapping = Mapping { host_port: port, protocol, ..mapping(host_ip) };
            mapping.claim(if host_ip.contains(':') { "fd00::2" } else { "10.0.0.2" }.parse().unwrap()).unwrap()
        };
        let one = claim("192.0.2.1", 80, Protocol::Tcp);
        for (other, overlaps) in [
            (claim("192.0.2.1", 80, Protocol::Tcp), true),
            (claim("", 80, Protocol::Tcp), true),
            (claim("0.0.0.0", 80, Protocol::Tcp), true),
            (claim("192.0.2.2", 80, Protocol::Tcp), false),
            (claim("", 81, Protocol::Tcp), false),
            (claim("", 80, Protocol::Udp), false),
            (claim("::", 80, Protocol::Tcp), false),
        ] {
            assert_eq!((one.overlaps(&other), other.overlaps(&one)), (overlaps, overlaps), "{other}");
        }
    }

    #[test]
    fn a_protocol_is_known_in_any_case() {
        assert_eq!(Protocol::by_name("SCTP"), Some(Protocol::Sctp));
        assert_eq!(Protocol::by_name("icmp"), None);
        assert_eq!(Protocol::ALL.map(Protocol::number).map(Protocol::by_number), Protocol::ALL.map(Some));
    }
}
