//! Ethernet addresses.
//!
//! The parser accepts the same three spellings of six bytes as Go's `net.ParseMAC`, because
//! existing configurations were written for it. It refuses one-digit bytes (`2:0:0:0:0:1`), which
//! `ip` accepts.

use std::fmt;
use std::io;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// A six byte hardware address. Displays in lower case with colons.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

/// The error for a text that is not a hardware address. Displays Go's message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("address {0}: invalid MAC address")]
pub struct ParseMacError(String);

/// The bit of the first byte that is set in a multicast address.
const MULTICAST: u8 = 0x01;

/// The bit of the first byte that is set in an address that its user chose, and clear in one that
/// the manufacturer assigned.
const LOCALLY_ADMINISTERED: u8 = 0x02;

impl Mac {
    /// The address that every Ethernet station receives.
    pub const BROADCAST: Mac = Mac([0xff; 6]);

    /// The address that no interface has.
    pub const ZERO: Mac = Mac([0; 6]);

    /// Returns a random address: unicast and locally administered, like those that the kernel
    /// generates.
    ///
    /// # Errors
    /// The kernel's random number generator could not be read.
    pub fn random() -> io::Result<Mac> {
        let mut bytes = [0; 6];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        bytes[0] = bytes[0] & !MULTICAST | LOCALLY_ADMINISTERED;
        Ok(Mac(bytes))
    }

    /// Whether this is a multicast address, which no interface can have.
    pub fn is_multicast(self) -> bool {
        self.0[0] & MULTICAST != 0
    }

    /// Whether all bytes are zero, an address that no interface can have.
    pub fn is_zero(self) -> bool {
        self == Mac::ZERO
    }

    /// Returns the IPv6 link-local address that the kernel derives from this address: fe80::/64,
    /// and the address with ff:fe in the middle and an inverted bit (RFC 4291, appendix A).
    pub fn link_local(self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.0;
        Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ LOCALLY_ADMINISTERED, b, c, 0xff, 0xfe, d, e, f])
    }

    /// Returns the address with these bytes; `None` if there are not six.
    pub(crate) fn from_slice(bytes: &[u8]) -> Option<Mac> {
        bytes.try_into().ok().map(Mac)
    }
}

impl FromStr for Mac {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Mac, ParseMacError> {
        parse(text.as_bytes()).ok_or_else(|| ParseMacError(text.to_owned()))
    }
}

/// Parses `aa:bb:cc:dd:ee:ff`, `aa-bb-cc-dd-ee-ff` or `aabb.ccdd.eeff`. Returns `None` for any
/// other text.
fn parse(text: &[u8]) -> Option<Mac> {
    let (separator, digits_per_group) = match (text.len(), text.get(2)?) {
        (17, b':') => (b':', 2),
        (17, b'-') => (b'-', 2),
        (14, _) => (b'.', 4),
        _ => return None,
    };
    // Every spelling has 12 digits, two for each byte.
    let mut mac = [0; 6];
    let mut digit_count = 0;
    for (position, &byte) in text.iter().enumerate() {
        if position % (digits_per_group + 1) == digits_per_group {
            if byte != separator {
                return None;
            }
            continue;
        }
        let value = u8::try_from(char::from(byte).to_digit(16)?).ok()?;
        mac[digit_count / 2] = mac[digit_count / 2] << 4 | value;
        digit_count += 1;
    }
    Some(Mac(mac))
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_spellings_of_go_are_the_same_address() {
        for text in ["02:00:5e:10:AB:ff", "02-00-5E-10-ab-ff", "0200.5e10.abff"] {
            assert_eq!(text.parse::<Mac>().unwrap().to_string(), "02:00:5e:10:ab:ff", "{text}");
        }
    }

    #[test]
    fn other_spellings_are_refused() {
        for text in [
            "",
            "zz",
            "02:00:5e:10:ab",
            "02:00:5e:10:ab:ff:",
            "02:00:5e:10:ab-ff",
            "02-00:5e:10:ab:ff",
            "2:0:5e:10:ab:ff",
            "02005e10abff",
            "0200.5e10:abff",
            "0200:5e10:abff",
            "02:00:5e:10:ab:fg",
            "02:00:5e:10:ab:ff:00:11",
            "é2:00:5e:10:ab:f",
            "+2:00:5e:10:ab:ff",
        ] {
            assert!(text.parse::<Mac>().is_err(), "{text:?} was accepted");
        }
        assert_eq!("zz".parse::<Mac>().unwrap_err().to_string(), "address zz: invalid MAC address");
    }

    #[test]
    fn random_addresses_are_unicast_and_local() {
        for _ in 0..64 {
            let mac = Mac::random().unwrap();
            assert!(!mac.is_multicast() && !mac.is_zero() && mac.0[0] & 2 == 2, "{mac}");
        }
        assert_ne!(Mac::random().unwrap(), Mac::random().unwrap());
        assert!(Mac::BROADCAST.is_multicast() && Mac([0; 6]).is_zero());
    }
}
