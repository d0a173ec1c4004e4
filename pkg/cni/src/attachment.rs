//! Which attachment: one interface of one container in one network.
//!
//! The links that these plugins create on the host have an alias that names the attachment, and a
//! name that is derived from it. The alias is the proof. The name makes the link findable without
//! listing all links, and stands in for the alias between the link's creation and the request that
//! sets the alias: the kernel (6.18) ignores `IFLA_IFALIAS` in the request that creates a link. It
//! accepts `IFLA_GROUP` there, so a link without its alias has its network's
//! [group](AttachmentId::group), by which GC finds it.

use crate::hash::{sha512, sha512_hex};

/// The kernel keeps 255 bytes of an alias (IFALIASZ less the terminator).
const ALIAS_MAX: usize = 255;

/// One interface of one container in one network.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttachmentId {
    /// The network's name.
    pub network: String,
    /// CNI_CONTAINERID; never contains a slash.
    pub container_id: String,
    /// CNI_IFNAME.
    pub ifname: String,
}

/// The attachment that an alias names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marked {
    /// The network's name.
    pub network: String,
    /// The container's ID, or `None` where it was too long and only its hash is there.
    pub container_id: Option<String>,
    /// CNI_IFNAME.
    pub ifname: String,
}

impl AttachmentId {
    /// Returns the attachment of those three.
    pub fn new(network: impl Into<String>, container_id: impl Into<String>, ifname: impl Into<String>) -> Self {
        AttachmentId { network: network.into(), container_id: container_id.into(), ifname: ifname.into() }
    }

    /// Returns `cni:<network>/<containerID>/<ifname>`. Beyond 255 bytes, `#` and 128 bits of the
    /// container ID's SHA-512, in hex, replace the container ID. Fits for every network name that
    /// ADD accepts (up to 200 bytes).
    pub fn alias(&self) -> String {
        let AttachmentId { network, container_id, ifname } = self;
        let full = format!("cni:{network}/{container_id}/{ifname}");
        if full.len() <= ALIAS_MAX {
            return full;
        }
        // An ID starts with a letter or a digit, so `#` cannot be mistaken for one.
        format!("cni:{network}/#{}/{ifname}", sha512_hex(&[container_id.as_bytes()], 32))
    }

    /// Whether `alias` names this attachment.
    pub fn is_on(&self, alias: Option<&str>) -> bool {
        alias.is_some_and(|alias| alias == self.alias())
    }

    /// Returns what the alias of every link of `network` begins with, hashed or not. Without the
    /// final slash it would also match networks whose name is longer.
    pub fn network_prefix(network: &str) -> String {
        format!("cni:{network}/")
    }

    /// Returns the group of each link of `network` from its creation until its alias is set.
    ///
    /// 31 bits, because iproute2 refuses more; above 255, because small numbers are the
    /// administrator's.
    pub fn group(network: &str) -> u32 {
        let number =
            sha512(&[network.as_bytes()]).iter().take(4).fold(0, |number, byte| number << 8 | u32::from(*byte))
                & 0x7fff_ffff;
        if number > 255 { number } else { number | 0x100 }
    }

    /// Reads an alias. `None` if these plugins did not set it.
    pub fn parse(alias: &str) -> Option<Marked> {
        let mut parts = alias.strip_prefix("cni:")?.split('/');
        let (network, container, ifname) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() || network.is_empty() || container.is_empty() || ifname.is_empty() {
            return None;
        }
        let container_id = (!container.starts_with('#')).then(|| container.to_owned());
        Some(Marked { network: network.to_owned(), container_id, ifname: ifname.to_owned() })
    }

    /// Returns the name of the link on the host: `veth` and 8 hex digits like Go's, but derived
    /// from the attachment alone. `attempt` counts from 0; the next one is tried only if another
    /// link has the name.
    pub fn host_name(&self, attempt: u32) -> String {
        let AttachmentId { network, container_id, ifname } = self;
        // None of the three contains a slash, so no two marks have the same text.
        let text = format!("{network}/{container_id}/{ifname}/");
        format!("veth{}", sha512_hex(&[text.as_bytes(), &attempt.to_be_bytes()], 8))
    }

    /// Whether a name has the form of [`host_name`](AttachmentId::host_name).
    pub fn is_host_name(name: &str) -> bool {
        is_hash(name, "veth", 8)
    }

    /// Returns the name of the ifb for what the container sends. It is Go's, which ignores the
    /// interface.
    pub fn ifb_name(&self) -> String {
        format!("{IFB}{}", sha512_hex(&[self.network.as_bytes(), self.container_id.as_bytes()], 12))
    }

    /// Returns the ifb's name for the case that another interface of the container has
    /// [`ifb_name`](AttachmentId::ifb_name).
    pub fn own_ifb_name(&self) -> String {
        let AttachmentId { network, container_id, ifname } = self;
        format!("{IFB}{}", sha512_hex(&[format!("{network}/{container_id}/{ifname}").as_bytes()], 12))
    }

    /// Whether a name has the form of an ifb's.
    pub fn is_ifb_name(name: &str) -> bool {
        is_hash(name, IFB, 12)
    }
}

/// The beginning of an ifb's name.
const IFB: &str = "bwp";

/// Whether a name is `prefix` and so many hex digits.
fn is_hash(name: &str, prefix: &str, digits: usize) -> bool {
    let hash = name.strip_prefix(prefix).unwrap_or_default();
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
    fn what_is_not_ours_is_not_read() {
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
    fn an_ifb_has_the_name_that_go_gives_it() {
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
