//! An IP address with its prefix length, parsed as strictly as Go's `net.ParseCIDR`.
//!
//! The crate `ipnetwork` stores the value and does the arithmetic. Its parser is not used, because
//! it accepts an address without a length, a dotted mask and a signed length, which Go rejects.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnetwork::IpNetwork;
use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, Serializer};

/// An IP address and a prefix length, such as `10.1.2.3/24`. Host bits are kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr(IpNetwork);

/// The error of a text that is not an address with a prefix length. Displays as in Go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid CIDR address: {0}")]
pub struct ParseCidrError(String);

impl Cidr {
    /// Returns `address/prefix`, or `None` if the prefix is longer than the address.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Cidr> {
        IpNetwork::new(address, prefix).ok().map(Cidr)
    }

    /// Returns the network of only this address: `address/32` or `address/128`.
    pub fn host(address: IpAddr) -> Cidr {
        Cidr(IpNetwork::from(address))
    }

    /// Returns `0.0.0.0/0` or `::/0`, in the address family of `family_of`.
    pub fn default_route(family_of: IpAddr) -> Cidr {
        let unspecified = match family_of {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        // `new` does not return `None`: every address may have the prefix length 0.
        Cidr::new(unspecified, 0).unwrap_or(Cidr::host(unspecified))
    }

    /// Returns the address, with its host bits.
    pub fn address(&self) -> IpAddr {
        self.0.ip()
    }

    /// Returns the prefix length in bits.
    pub fn prefix(&self) -> u8 {
        self.0.prefix()
    }

    /// Returns the length of the address in bits: 32 or 128.
    pub fn bits(&self) -> u8 {
        if self.is_ipv4() { 32 } else { 128 }
    }

    /// Whether the address is an IPv4 address.
    pub fn is_ipv4(&self) -> bool {
        self.0.is_ipv4()
    }

    /// Whether this is `0.0.0.0/0` or `::/0`.
    pub fn is_default_route(&self) -> bool {
        self.prefix() == 0 && self.address().is_unspecified()
    }

    /// Returns the network: the same prefix length, with the host bits cleared.
    pub fn network(&self) -> Cidr {
        Cidr::new(self.0.network(), self.prefix()).unwrap_or(*self)
    }

    /// Whether all host bits are zero.
    pub fn is_network(&self) -> bool {
        self.0.network() == self.0.ip()
    }

    /// Whether `address` is in the network. An address of the other family is not.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(address)
    }

    /// Returns the address after the network's own address, with the same prefix length: the
    /// gateway that IPAM plugins use if the configuration has none. With a prefix length of 32
    /// (IPv4) or 128 (IPv6), the address is outside the network. Returns `None` if the network's
    /// address is the highest of its address family.
    pub fn first(&self) -> Option<Cidr> {
        let first = match self.network().address() {
            IpAddr::V4(v4) => IpAddr::V4(u32::from(v4).checked_add(1)?.into()),
            IpAddr::V6(v6) => IpAddr::V6(u128::from(v6).checked_add(1)?.into()),
        };
        Cidr::new(first, self.prefix())
    }

    /// Returns the highest address of the network, which is the broadcast address in IPv4.
    pub fn last(&self) -> IpAddr {
        self.0.broadcast()
    }
}

impl FromStr for Cidr {
    type Err = ParseCidrError;

    fn from_str(text: &str) -> Result<Cidr, ParseCidrError> {
        let error = || ParseCidrError(text.to_owned());
        let (address, prefix) = text.split_once('/').ok_or_else(error)?;
        // `u8::from_str` would accept a sign.
        if !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(error());
        }
        let address: IpAddr = address.parse().map_err(|_| error())?;
        let prefix: u8 = prefix.parse().map_err(|_| error())?;
        // As in Go, an IPv4-mapped address (::ffff:10.1.2.3/120) becomes an IPv4 address
        // (10.1.2.3/24).
        if let IpAddr::V6(v6) = address
            && let Some(v4) = v6.to_ipv4_mapped()
            && prefix >= 96
        {
            return Cidr::new(IpAddr::V4(v4), prefix - 96).ok_or_else(error);
        }
        Cidr::new(address, prefix).ok_or_else(error)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address(), self.prefix())
    }
}

/// Returns the bytes of an address in network byte order.
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Returns the address with these bytes, or `None` if there are neither 4 nor 16.
pub fn from_octets(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    }
}

impl fmt::Debug for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Cidr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Cidr, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_back_from_its_octets() {
        for text in ["10.1.2.3", "fd00::1", "::ffff:10.1.2.3"] {
            let address = text.parse().unwrap();
            assert_eq!(from_octets(&octets(address)), Some(address));
        }
        assert_eq!((octets([10, 1, 2, 3].into()), from_octets(&[1, 2, 3])), (vec![10, 1, 2, 3], None));
    }

    #[test]
    fn what_go_rejects_is_rejected() {
        for text in [
            "",
            "10.1.2.3",
            "10.1.2.3/",
            "/24",
            "10.1.2.3/255.255.255.0",
            "10.1.2.3/+24",
            "10.1.2.3/-1",
            "10.1.2.3/33",
            "010.1.2.3/24",
            "10.1.2/24",
            "fd00::/129",
            "fd00::1%eth0/64",
            "10.1.2.3/24/1",
            " 10.1.2.3/24",
            "10.1.2.3/ 4",
        ] {
            assert!(text.parse::<Cidr>().is_err(), "{text:?} was accepted");
        }
        let error = "10.1.2.3".parse::<Cidr>().unwrap_err();
        assert_eq!(error.to_string(), "invalid CIDR address: 10.1.2.3");
    }

    #[test]
    fn host_bits_are_kept_and_can_be_cleared() {
        let cidr: Cidr = "10.1.2.3/24".parse().unwrap();
        assert_eq!(cidr.to_string(), "10.1.2.3/24");
        assert_eq!(cidr.network().to_string(), "10.1.2.0/24");
        assert!(!cidr.is_network() && cidr.network().is_network());
        assert_eq!(cidr.last().to_string(), "10.1.2.255");
    }

    #[test]
    fn a_mapped_address_is_ipv4_as_in_go() {
        assert_eq!("::ffff:10.0.0.1/120".parse::<Cidr>().unwrap().to_string(), "10.0.0.1/24");
    }

    #[test]
    fn a_prefix_length_may_have_leading_zeros_as_in_go() {
        assert_eq!("10.1.2.3/00024".parse::<Cidr>().unwrap().to_string(), "10.1.2.3/24");
    }

    #[test]
    fn the_whole_internet_is_a_network() {
        let all: Cidr = "0.0.0.0/0".parse().unwrap();
        assert!(all.is_default_route() && all.contains("255.255.255.255".parse().unwrap()));
        assert_eq!(all, Cidr::default_route("1.2.3.4".parse().unwrap()));
    }
}
