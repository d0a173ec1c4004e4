//! The identity of an attachment, and the names and aliases that are derived from it.
//!
//! A link that these plugins create on the host has an alias that names the attachment, and a name
//! that is derived from the attachment. The alias identifies the link. The name allows finding the
//! link without listing all links, and before its alias is set.
//!
//! The kernel (6.18) ignores `IFLA_IFALIAS` in the request that creates a link, so a second request
//! sets the alias. If ADD is killed between the two requests, GC finds the link by its
//! [group](AttachmentId::group), which the first request sets.

use serde::{Deserialize, Serialize};

use crate::hash::{sha512, sha512_hex};

/// The longest alias that the kernel accepts, in bytes (IFALIASZ without the terminating zero).
const ALIAS_MAX: usize = 255;

/// The beginning of the names of links on the host.
const HOST_PREFIX: &str = "veth";

/// The number of hex digits in the name of a link on the host.
const HOST_DIGITS: usize = 8;

/// The beginning of the names of ifb devices.
const IFB_PREFIX: &str = "bwp";

/// The number of hex digits in the name of an ifb device.
const IFB_DIGITS: usize = 12;

/// The identity of an attachment: one interface of one container in one network.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AttachmentId {
    /// The network's name.
    pub network: String,
    /// CNI_CONTAINERID.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// CNI_IFNAME.
    pub ifname: String,
}

/// The attachment that a link's alias names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marked {
    /// The network's name.
    pub network: String,
    /// CNI_CONTAINERID, or `None` if the alias has its hash instead, see [`AttachmentId::alias`].
    pub container_id: Option<String>,
    /// CNI_IFNAME.
    pub ifname: String,
}

impl AttachmentId {
    /// Returns the identity that consists of these three names.
    pub fn new(network: impl Into<String>, container_id: impl Into<String>, ifname: impl Into<String>) -> Self {
        AttachmentId { network: network.into(), container_id: container_id.into(), ifname: ifname.into() }
    }

    /// Returns the alias of this attachment's links: `cni:<network>/<containerID>/<ifname>`. If
    /// that is longer than 255 bytes, the alias has `#` and the first 32 hex digits of the SHA-512
    /// of the container ID instead of the ID. With the hash, the alias is short enough for every
    /// network name that ADD accepts (up to 200 bytes).
    pub fn alias(&self) -> String {
        let AttachmentId { network, container_id, ifname } = self;
        let full = format!("cni:{network}/{container_id}/{ifname}");
        if full.len() <= ALIAS_MAX {
            return full;
        }
        // A container ID begins with a letter or a digit, so no alias with an ID looks like this.
        format!("cni:{network}/#{}/{ifname}", sha512_hex(&[container_id.as_bytes()], 32))
    }

    /// Whether the alias of a link names this attachment. `None` is a link without an alias.
    pub fn is_on(&self, alias: Option<&str>) -> bool {
        alias.is_some_and(|alias| alias == self.alias())
    }

    /// Returns the beginning of the aliases of all links of `network`. It ends with a slash, so
    /// that it does not match networks whose names begin with this one.
    pub fn network_prefix(network: &str) -> String {
        format!("cni:{network}/")
    }

    /// Returns the link group (`IFLA_GROUP`) that each link of `network` has from its creation
    /// until its alias is set. The group is derived from the network's name.
    ///
    /// The group has 31 bits, because iproute2 refuses more, and is above 255, because
    /// administrators use small numbers.
    pub fn group(network: &str) -> u32 {
        let [first, second, third, fourth, ..] = sha512(&[network.as_bytes()]);
        let group = u32::from_be_bytes([first, second, third, fourth]) & 0x7fff_ffff;
        if group > 255 { group } else { group | 0x100 }
    }

    /// Parses a link's alias. Returns `None` if it is not in the format of
    /// [`alias`](AttachmentId::alias).
    pub fn parse(alias: &str) -> Option<Marked> {
        let mut parts = alias.strip_prefix("cni:")?.split('/');
        let (network, container, ifname) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() || network.is_empty() || container.is_empty() || ifname.is_empty() {
            return None;
        }
        let container_id = if container.starts_with('#') { None } else { Some(container.to_owned()) };
        Some(Marked { network: network.to_owned(), container_id, ifname: ifname.to_owned() })
    }

    /// Returns the name of the attachment's link on the host: `veth` and 8 hex digits. The digits
    /// are derived from the attachment and `attempt`; the Go plugins choose them at random. The
    /// caller begins with attempt 0 and increments it if another link already has the name.
    pub fn host_name(&self, attempt: u32) -> String {
        let AttachmentId { network, container_id, ifname } = self;
        // None of the three contains a slash, so different attachments have different texts.
        let text = format!("{network}/{container_id}/{ifname}/");
        format!("{HOST_PREFIX}{}", sha512_hex(&[text.as_bytes(), &attempt.to_be_bytes()], HOST_DIGITS))
    }

    /// Whether a name has the form of [`host_name`](AttachmentId::host_name).
    pub fn is_host_name(name: &str) -> bool {
        is_derived_name(name, HOST_PREFIX, HOST_DIGITS)
    }

    /// Returns the name of the ifb device on which the plugin bandwidth limits the container's
    /// egress. As in the Go plugin, the name does not depend on CNI_IFNAME.
    pub fn ifb_name(&self) -> String {
        format!("{IFB_PREFIX}{}", sha512_hex(&[self.network.as_bytes(), self.container_id.as_bytes()], IFB_DIGITS))
    }

    /// Returns the name of the ifb device for the case that another interface of the container
    /// already uses [`ifb_name`](AttachmentId::ifb_name).
    pub fn own_ifb_name(&self) -> String {
        let AttachmentId { network, container_id, ifname } = self;
        let text = format!("{network}/{container_id}/{ifname}");
        format!("{IFB_PREFIX}{}", sha512_hex(&[text.as_bytes()], IFB_DIGITS))
    }

    /// Whether a name has the form that [`ifb_name`](AttachmentId::ifb_name) and
    /// [`own_ifb_name`](AttachmentId::own_ifb_name) share.
    pub fn is_ifb_name(name: &str) -> bool {
        is_derived_name(name, IFB_PREFIX, IFB_DIGITS)
    }
}

/// Whether a name consists of `prefix` and exactly `digits` lower-case hex digits.
fn is_derived_name(name: &str, prefix: &str, digits: usize) -> bool {
    let Some(hash) = name.strip_prefix(prefix) else { return false };
    hash.len() == digits && hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_is_readable_and_read_back() {
        let mark = AttachmentId::new("net", "c0ffee", "eth0");
        assert_eq!(mark.alias(), "cni:net/c0ffee/eth0");
        let marked = AttachmentId::parse(&mark.alias()).unwrap();
        assert_eq!(
            marked,
            Marked { network: "net".into(), container_id: Some("c0ffee".into()), ifname: "eth0".into() }
        );
        assert!(mark.is_on(Some("cni:net/c0ffee/eth0")) && !mark.is_on(Some("cni:net/c0ffee/eth01")));
        assert!(!mark.is_on(None));
    }

    #[test]
    fn a_long_container_id_is_hashed_and_everything_still_fits() {
        let network = "n".repeat(200);
        let long = AttachmentId::new(&network, "c".repeat(300), "fifteen-bytes-x");
        let alias = long.alias();
        assert!(alias.len() <= ALIAS_MAX, "{} bytes", alias.len());
        assert!(alias.starts_with(&AttachmentId::network_prefix(&network)));
        let marked = AttachmentId::parse(&alias).unwrap();
        assert_eq!((marked.container_id, marked.ifname.as_str()), (None, "fifteen-bytes-x"));
        let other = AttachmentId::new(&network, format!("{}d", "c".repeat(299)), "fifteen-bytes-x");
        assert_ne!(other.alias(), alias);
    }

    #[test]
    fn the_border_lies_at_255_bytes() {
        for (length, hashed) in [(255, false), (256, true)] {
            let mark = AttachmentId::new("net", "c".repeat(length - "cni:net//eth0".len()), "eth0");
            assert_eq!(mark.alias().contains('#'), hashed, "{length}");
        }
    }

    #[test]
    fn foreign_aliases_are_not_parsed() {
        for alias in ["", "cni", "cni:", "cni:net", "cni:net/c", "cni:net/c/eth0/x", "cni://", "my uplink", "CNI:a/b/c"]
        {
            assert_eq!(AttachmentId::parse(alias), None, "{alias:?}");
        }
        assert!(!"cni:network/c/eth0".starts_with(&AttachmentId::network_prefix("net")));
    }

    #[test]
    fn a_host_name_is_stable_and_depends_on_every_part() {
        let name = AttachmentId::new("net", "c1", "eth0").host_name(0);
        assert_eq!(name, AttachmentId::new("net", "c1", "eth0").host_name(0));
        assert!(name.len() == 12 && name.starts_with("veth"), "{name}");
        for other in [
            AttachmentId::new("net2", "c1", "eth0").host_name(0),
            AttachmentId::new("net", "c2", "eth0").host_name(0),
            AttachmentId::new("net", "c1", "eth1").host_name(0),
            AttachmentId::new("net", "c1", "eth0").host_name(1),
        ] {
            assert_ne!(name, other);
        }
    }

    #[test]
    fn host_names_never_change_between_releases() {
        // A DEL by a newer release must find what an older one made. Computed with `sha512sum`.
        assert_eq!(AttachmentId::new("net", "c1", "eth0").host_name(0), "vethfecdf07f");
    }

    #[test]
    fn an_ifb_has_gos_name() {
        let mark = AttachmentId::new("cni-plugin-bandwidth-test", "dummy", "eth0");
        assert_eq!(mark.ifb_name(), "bwpa8eda89404b7");
        assert_eq!(AttachmentId { ifname: "eth1".to_owned(), ..mark.clone() }.ifb_name(), mark.ifb_name());
        assert_ne!(AttachmentId { ifname: "eth1".to_owned(), ..mark.clone() }.own_ifb_name(), mark.own_ifb_name());
        // As the host's names; computed with `sha512sum`.
        assert_eq!(AttachmentId::new("net", "c1", "eth0").own_ifb_name(), "bwpdd6ccc806f76");
        assert!(AttachmentId::is_ifb_name(&mark.ifb_name()) && AttachmentId::is_ifb_name(&mark.own_ifb_name()));
        assert!(!AttachmentId::is_ifb_name("bwp0") && !AttachmentId::is_ifb_name("vetha8eda89404b7"));
    }

    #[test]
    fn groups_never_change_between_releases() {
        // As the host's names. The hash begins with a4861f4a.
        assert_eq!(AttachmentId::group("net"), 0x2486_1f4a);
        assert_ne!(AttachmentId::group("net2"), AttachmentId::group("net"));
    }

    #[test]
    fn only_our_names_are_host_names() {
        assert!(AttachmentId::is_host_name(&AttachmentId::new("net", "c1", "eth0").host_name(3)));
        for name in ["", "veth", "eth0", "veth0", "vethABCDEF01", "veth012345678", "veth0123456g", "xeth01234567"] {
            assert!(!AttachmentId::is_host_name(name), "{name}");
        }
    }
}
