//! Reads and sets the features of an interface, such as checksum offload, by the kernel's names.
//!
//! The kernel's interface is an ioctl of any socket of the namespace. A socket keeps its namespace,
//! so the calling thread may be in another one.

use std::os::fd::OwnedFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::error::{Error, Result};
use crate::sys::{self, EthtoolRequest};

/// The number of bytes of each name.
const NAME_LENGTH: usize = 32;

/// A feature of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// The kernel's name, such as `tx-checksum-ip-generic`.
    pub name: String,
    /// Whether the feature can be changed.
    pub is_changeable: bool,
    /// Whether the feature was asked for. The kernel turns a feature off although it was asked for
    /// if another one, which it needs, is off.
    pub is_requested: bool,
    /// Whether the feature is on.
    pub is_active: bool,
    /// The position of the feature's bit.
    bit: usize,
}

/// The features of one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features {
    all: Vec<Feature>,
    /// The number of words of 32 bits that the kernel has for them.
    words: usize,
}

impl Features {
    /// Returns the feature with this name, or `None` if the kernel does not know it.
    pub fn find(&self, name: &str) -> Option<&Feature> {
        self.all.iter().find(|feature| feature.name == name)
    }
}

/// Access to the features of the interfaces of one namespace.
#[derive(Debug)]
pub struct Ethtool {
    socket: OwnedFd,
}

impl Ethtool {
    /// Opens a socket in the calling thread's namespace.
    ///
    /// # Errors
    /// The kernel's error if it refuses the socket.
    pub fn open() -> Result<Ethtool> {
        match socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None) {
            Ok(socket) => Ok(Ethtool { socket }),
            Err(errno) => Err(Error::new("failed to open a socket for ethtool", std::io::Error::from(errno))),
        }
    }

    /// Returns the features of the interface that the kernel knows.
    ///
    /// # Errors
    /// The kernel's error, for example if the interface does not exist.
    pub fn features(&self, ifname: &str) -> Result<Features> {
        let call = |request| {
            sys::ethtool(&self.socket, ifname, request)
                .map_err(|error| Error::new(format_args!("failed to read the features of {ifname}"), error))
        };
        // The third word is the number of names.
        let strings = call(EthtoolRequest::FeatureNames)?;
        let count = strings[2] as usize;
        let names: Vec<u8> = strings[3..].iter().flat_map(|word| word.to_ne_bytes()).collect();
        let bits = call(EthtoolRequest::Features)?;
        let feature = |(bit, name): (usize, &[u8])| {
            let end = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_LENGTH);
            // The columns are: available, requested, active, never changed.
            let is_set = |column: usize| bits[2 + bit / 32 * 4 + column] >> (bit % 32) & 1 == 1;
            Feature {
                name: String::from_utf8_lossy(&name[..end]).into_owned(),
                is_changeable: is_set(0) && !is_set(3),
                is_requested: is_set(1),
                is_active: is_set(2),
                bit,
            }
        };
        let all = names.chunks_exact(NAME_LENGTH).take(count).enumerate().map(feature);
        // A bit without a name is unused.
        let all = all.filter(|feature| !feature.name.is_empty()).collect();
        Ok(Features { all, words: bits[1] as usize })
    }

    /// Asks for features of the interface, of which `known` are all, to be on or off. Names that
    /// are not in `known` are ignored. The kernel does not always follow: see
    /// [`Feature::is_requested`].
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_features(&self, ifname: &str, known: &Features, wanted: &[(&str, bool)]) -> Result<()> {
        let mut blocks = vec![0; known.words * 2];
        for (feature, is_on) in wanted.iter().filter_map(|(name, is_on)| Some((known.find(name)?, *is_on))) {
            // The columns are: valid, requested.
            let (word, bit) = (feature.bit / 32 * 2, feature.bit % 32);
            blocks[word] |= 1 << bit;
            blocks[word + 1] |= u32::from(is_on) << bit;
        }
        sys::ethtool(&self.socket, ifname, EthtoolRequest::SetFeatures(&blocks)).map(drop).map_err(|error| {
            let names: Vec<&str> = wanted.iter().map(|(name, _)| *name).collect();
            Error::new(format_args!("failed to set {} of {ifname}", names.join(", ")), error)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, output};

    #[test]
    fn features_are_read_and_set_by_name() {
        in_new_netns(|| {
            output("ip link add eth0 type veth peer name eth1");
            let ethtool = Ethtool::open().unwrap();
            let before = ethtool.features("eth0").unwrap();
            let name = "tx-checksum-ip-generic";
            let checksum = before.find(name).unwrap();
            assert!(checksum.is_active && checksum.is_requested && checksum.is_changeable, "{checksum:?}");
            assert!(!before.find("netns-local").is_some_and(|feature| feature.is_changeable));
            assert_eq!(before.find("tx-checksum-nothing"), None);
            ethtool.set_features("eth0", &before, &[(name, false)]).unwrap();
            let after = ethtool.features("eth0").unwrap();
            assert!(!after.find(name).unwrap().is_active && !after.find(name).unwrap().is_requested);
            // It needs the checksum.
            let segmentation = after.find("tx-tcp-segmentation").unwrap();
            assert!(!segmentation.is_active && segmentation.is_requested, "{segmentation:?}");
            ethtool.set_features("eth0", &after, &[(name, true)]).unwrap();
            assert_eq!(ethtool.features("eth0").unwrap(), before);
            let error = ethtool.features("eth7").unwrap_err();
            assert_eq!(error.errno(), Some(nix::libc::ENODEV), "{error}");
        });
    }
}
