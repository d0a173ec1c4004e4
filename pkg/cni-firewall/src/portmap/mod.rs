//! Host ports: connections to a port of the host go to a port of a container.
//!
//! [`Forwarding`] is what one attachment wants; [`nft`] and [`iptables`] put it in force in the
//! shapes of the Go plugin. What both have in common is here: who collides with whom, and whose a
//! rule is (`identity`). [`conflict`] judges who may be displaced, [`conditions`] reads the extra
//! matches.
//!
//! Everything works in the network namespace of the calling thread, which must be the host's. A
//! mapping without a host address is wanted in both families, one with 0.0.0.0 in IPv4 alone.

use std::net::{IpAddr, SocketAddr};

use cni::Cidr;

use cni::AttachmentId;
use cni_linux::error::Result;
use cni_linux::route::Family;

pub mod conditions;
pub mod conflict;
pub(super) mod identity;
pub mod iptables;
pub mod nft;

pub use cni_linux::conntrack::{ClaimedPort, Protocol};
pub use conflict::{ConflictAction, Conflicts, Holder, Policy};

/// One mapping that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The protocol.
    pub protocol: Protocol,
    /// The host's address; `None` is every address of both families, an unspecified one every
    /// address of its family.
    pub host_ip: Option<IpAddr>,
    /// The host's port.
    pub host_port: u16,
    /// The container's port.
    pub container_port: u16,
}

impl Mapping {
    /// Whether some packet is claimed by both, were there a container of each family behind each.
    pub fn overlaps(&self, other: &Mapping) -> bool {
        [IpAddr::from([127, 0, 0, 1]), IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])].into_iter().any(|container| {
            let claims = self.claim(container).zip(other.claim(container));
            claims.is_some_and(|(one, other)| one.overlaps(&other))
        })
    }

    /// Returns the claim of this mapping for a container with this address; `None` if its host
    /// address is of the other family.
    pub fn claim(&self, container: IpAddr) -> Option<ClaimedPort> {
        let wanted = Family::of(container);
        if self.host_ip.is_some_and(|host_ip| Family::of(host_ip) != wanted) {
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

/// Which of the connections to a host port get the host's address as their source, so that answers
/// come back through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Snat {
    /// None: the container cannot reach itself, the host not its loopback address.
    No,
    /// The connections that could not work otherwise: from the container itself (iptables: from its
    /// whole subnet) and, in IPv4, from 127.0.0.1.
    Hairpin,
    /// All.
    All,
}

/// How iptables rules mark a connection for [`Snat`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetMark {
    /// With this bit, in a chain of our own.
    Bit(u8),
    /// Another program's chain, which masquerades the packets that get its mark.
    Chain(String),
}

/// The port mappings that one attachment wants.
#[derive(Clone, Debug)]
pub struct Forwarding {
    /// The attachment.
    pub attachment: AttachmentId,
    /// The container's addresses: at most one of each family, IPv4 first.
    pub containers: Vec<Cidr>,
    /// The mappings, in the order in which they were asked for.
    pub mappings: Vec<Mapping>,
    /// The connections whose source is replaced.
    pub snat: Snat,
    /// How that is marked with iptables.
    pub set_mark: SetMark,
    /// Extra matches in IPv4, in the backend's own words.
    pub conditions_v4: Vec<String>,
    /// Extra matches in IPv6.
    pub conditions_v6: Vec<String>,
    /// The reaction to a port that is taken.
    pub policy: Policy,
    /// Returns the names of the attachment's interfaces on the host.
    pub links: Vec<String>,
}

impl Forwarding {
    /// The extra matches of one family.
    pub fn conditions(&self, family: Family) -> &[String] {
        match family {
            Family::V4 => &self.conditions_v4,
            Family::V6 => &self.conditions_v6,
        }
    }

    /// The families in which something is wanted, each with the container's address there and all
    /// claims.
    pub fn families(&self) -> impl Iterator<Item = (Cidr, Vec<ClaimedPort>)> {
        self.every_family().filter(|(_, claims)| !claims.is_empty())
    }

    /// Returns the families in which the container has an address, each with that address and all
    /// claims, perhaps none.
    pub(crate) fn every_family(&self) -> impl Iterator<Item = (Cidr, Vec<ClaimedPort>)> {
        self.containers.iter().map(|container| (*container, self.claims(*container)))
    }

    /// Every claim of both families.
    pub fn all_claims(&self) -> Vec<ClaimedPort> {
        self.families().flat_map(|(_, claims)| claims).collect()
    }

    fn claims(&self, container: Cidr) -> Vec<ClaimedPort> {
        self.mappings.iter().filter_map(|mapping| mapping.claim(container.address())).collect()
    }

    /// The container's addresses.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.containers.iter().map(|container| container.address()).collect()
    }

    /// Whether this is one of the container's addresses.
    pub fn is_container(&self, address: IpAddr) -> bool {
        self.containers.iter().any(|container| container.address() == address)
    }
}

/// Remarks on a mapping of the same container to another address, which Go's plugin left.
fn older_mapping(there: &ClaimedPort) -> String {
    let to = there.container;
    format!(
        "{there} is mapped to {to} by older rules of this container's, which may go first as long as they are there"
    )
}

/// The outcome of a removal, in all families and variants of a backend.
#[derive(Debug)]
pub struct Removal {
    /// The claims of all rules that were found, also if a removal failed: removed rules cannot be
    /// found again.
    pub claims: Vec<ClaimedPort>,
    /// A sentence for each thing that could not be removed because a program is missing.
    pub remarks: Vec<String>,
    /// The error that kept it from removing all.
    pub outcome: Result<()>,
}

/// The outcome of a request to have a [`Forwarding`] in force.
#[derive(Clone, Debug)]
pub enum EnsureOutcome<PreviousRules> {
    /// It is.
    Done {
        /// If anything had to be changed for it: what the attachment had before, for `put_back`.
        previous: Option<PreviousRules>,
        /// Remarks for the operator, one sentence each.
        remarks: Vec<String>,
    },
    /// It is not, and nothing was changed: a container that lives has the port.
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
