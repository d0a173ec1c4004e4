//! Defines claimed ports: ports of the host that are mapped to containers.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::route::Family;

/// A transport protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// SCTP.
    Sctp,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// All protocols, ordered by name.
    pub const ALL: [Protocol; 3] = [Protocol::Sctp, Protocol::Tcp, Protocol::Udp];

    /// Returns the name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Sctp => "sctp",
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        }
    }

    /// Returns the protocol of this name, in upper or lower case; `None` for any other name.
    pub fn by_name(name: &str) -> Option<Protocol> {
        Protocol::ALL.into_iter().find(|protocol| protocol.name().eq_ignore_ascii_case(name))
    }

    /// Returns the number of the protocol in an IP header (`IPPROTO_*`).
    pub fn number(self) -> u8 {
        match self {
            Protocol::Sctp => 132,
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
        }
    }

    /// Returns the protocol with this `IPPROTO_*` number; `None` for any other number.
    pub fn by_number(number: u8) -> Option<Protocol> {
        Protocol::ALL.into_iter().find(|protocol| protocol.number() == number)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A port of the host, for one address family, that is mapped to a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimedPort {
    /// The protocol.
    pub protocol: Protocol,
    /// The host's address; `None` for every address of the host.
    pub host_ip: Option<IpAddr>,
    /// The host's port.
    pub host_port: u16,
    /// The container's address and port.
    pub container: SocketAddr,
}

impl ClaimedPort {
    /// Whether a packet can match both claims: protocol, host port and family are equal, and the
    /// host addresses are equal or at least one claim has none.
    pub fn overlaps(&self, other: &ClaimedPort) -> bool {
        (self.protocol, self.host_port) == (other.protocol, other.host_port)
            && Family::of(self.container.ip()) == Family::of(other.container.ip())
            && match (self.host_ip, other.host_ip) {
                (Some(one), Some(other)) => one == other,
                _ => true,
            }
    }
}

impl fmt::Display for ClaimedPort {
    /// Writes `tcp port 80 of 192.0.2.1`, or without an address `tcp port 80`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host_ip {
            Some(host_ip) => write!(f, "{} port {} of {host_ip}", self.protocol, self.host_port),
            None => write!(f, "{} port {}", self.protocol, self.host_port),
        }
    }
}
