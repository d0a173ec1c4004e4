//! The owners of addresses: which attachment an address belongs to, and which bridge is isolated on
//! its behalf.
//!
//! Neither backend's rules for an address can name an attachment: those of iptables are Go's, byte
//! for byte, and those of nftables are elements of a set. So both backends have a chain to which
//! nothing leads, with one rule without a verdict for each address and attachment. Packets never
//! see these rules.
//!
//! A name is at most 128 bytes long: `nft` cannot read back a longer comment that it has listed
//! itself.

use std::net::IpAddr;

use cni::AttachmentId;
use cni::hash::sha512_hex;

/// The longest comment that `nft` accepts.
const NAME_MAX: usize = 128;
const DIGITS: usize = 32;

/// Which other containers may open connections to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ingress {
    /// All that the host forwards.
    #[default]
    Open,
    /// Containers on this bridge; those on another bridge that is isolated too are refused.
    SameBridge(String),
    /// None on this bridge, and none on another bridge that is isolated too.
    Isolated(String),
}

impl Ingress {
    /// The bridge that is isolated.
    pub fn bridge(&self) -> Option<&str> {
        match self {
            Ingress::Open => None,
            Ingress::SameBridge(bridge) | Ingress::Isolated(bridge) => Some(bridge),
        }
    }

    /// Its name in configurations.
    pub fn name(&self) -> &'static str {
        match self {
            Ingress::Open => "open",
            Ingress::SameBridge(_) => "same-bridge",
            Ingress::Isolated(_) => "isolated",
        }
    }
}

/// One address of one attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owned {
    pub(crate) owner: String,
    pub(crate) address: IpAddr,
    pub(crate) ingress: Ingress,
}

fn hashed(text: &str) -> String {
    format!("#{}", sha512_hex(&[text.as_bytes()], DIGITS))
}

/// The attachment's name: its mark, or, where that is too long, its interface after hashes of
/// network and container.
pub(crate) fn name(mark: &AttachmentId) -> String {
    let alias = mark.alias();
    if alias.len() <= NAME_MAX {
        return alias;
    }
    format!("cni:{}/{}/{}", hashed(&mark.network), hashed(&mark.container_id), mark.ifname)
}

/// The beginnings of the names of all attachments of a network: a name has one of these.
pub(super) fn prefixes(network: &str) -> [String; 2] {
    [AttachmentId::network_prefix(network), AttachmentId::network_prefix(&hashed(network))]
}

/// Whether a comment is a name.
pub(super) fn is_name(comment: &str) -> bool {
    AttachmentId::parse(comment).is_some()
}

/// An address as rules contain it.
pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_is_hashed_and_keeps_its_network() {
        let short = AttachmentId::new("net", "c".repeat(64), "eth0");
        assert_eq!(name(&short), short.alias());
        for (network, container) in [("n".repeat(200), "c"), ("net".to_owned(), &*"c".repeat(128))] {
            let long = name(&AttachmentId::new(&network, container, "eth0"));
            assert!(long.len() <= NAME_MAX && is_name(&long), "{long}");
            assert!(prefixes(&network).iter().any(|prefix| long.starts_with(prefix)), "{long}");
            assert!(!prefixes("other").iter().any(|prefix| long.starts_with(prefix)), "{long}");
        }
    }
}
