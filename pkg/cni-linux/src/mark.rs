//! How an interface on the host says whose it is.
//!
//! Every host end we make bears an alias that names network, container and interface, and a name that is derived
//! from the same three. The alias is the proof; the name only makes the link findable without listing all links, and
//! bridges the instant between the link's creation and the setting of its alias: the kernel (6.18) ignores
//! `IFLA_IFALIAS` in the request that creates a link. It accepts `IFLA_GROUP` there, so a link without its alias has its
//! network's [group](Mark::group), by which GC finds it.
//!
//! The newcomer's mistake: taking a prefix of the alias for a network's name without the final slash.

use cni::hash::{sha512, sha512_hex};

/// The kernel keeps 255 bytes of an alias (IFALIASZ less the terminator).
const ALIAS_MAX: usize = 255;

/// Whose a link is: one attachment of one container to one network.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mark {
    /// The network's name.
    pub network: String,
    /// The container's ID; never contains a slash.
    pub container: String,
    /// CNI_IFNAME.
    pub ifname: String,
}

/// What an alias says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marked {
    /// The network's name.
    pub network: String,
    /// The container's ID, or `None` where it was too long and only its hash is there.
    pub container: Option<String>,
    /// CNI_IFNAME.
    pub ifname: String,
}

impl Mark {
    /// The mark of one attachment.
    pub fn new(network: impl Into<String>, container: impl Into<String>, ifname: impl Into<String>) -> Mark {
        Mark { network: network.into(), container: container.into(), ifname: ifname.into() }
    }

    /// `cni:<network>/<containerID>/<ifname>`; beyond 255 bytes the container's ID is replaced by `#` and 128 bits of
    /// its SHA-512, in hex. Fits for every network name that ADD accepts (up to 200 bytes).
    pub fn alias(&self) -> String {
        let Mark { network, container, ifname } = self;
        let full = format!("cni:{network}/{container}/{ifname}");
        if full.len() <= ALIAS_MAX {
            return full;
        }
        // An ID starts with a letter or a digit, so `#` cannot be mistaken for one.
        format!("cni:{network}/#{}/{ifname}", sha512_hex(&[container.as_bytes()], 32))
    }

    /// Whether `alias` is this mark.
    pub fn is_on(&self, alias: Option<&str>) -> bool {
        alias.is_some_and(|alias| alias == self.alias())
    }

    /// What the alias of every link of `network` begins with, hashed or not.
    pub fn network_prefix(network: &str) -> String {
        format!("cni:{network}/")
    }

    /// The group of each link of `network` from its creation until its alias is set.
    ///
    /// 31 bits, because iproute2 refuses more; above 255, because small numbers are the administrator's.
    pub fn group(network: &str) -> u32 {
        let number =
            sha512(&[network.as_bytes()]).iter().take(4).fold(0, |number, byte| number << 8 | u32::from(*byte))
                & 0x7fff_ffff;
        if number > 255 { number } else { number | 0x100 }
    }

    /// Reads an alias. `None` if it is not one of ours.
    pub fn parse(alias: &str) -> Option<Marked> {
        let mut parts = alias.strip_prefix("cni:")?.split('/');
        let (network, container, ifname) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() || network.is_empty() || container.is_empty() || ifname.is_empty() {
            return None;
        }
        let container = (!container.starts_with('#')).then(|| container.to_owned());
        Some(Marked { network: network.to_owned(), container, ifname: ifname.to_owned() })
    }

    /// The name of the host's end: `veth` and 8 hex digits, as Go's look, but found again from the attachment alone.
    /// `attempt` counts from 0; another one is tried only when a name is taken by somebody else.
    pub fn host_name(&self, attempt: u32) -> String {
        let Mark { network, container, ifname } = self;
        // None of the three contains a slash, so no two marks have the same text.
        let text = format!("{network}/{container}/{ifname}/");
        format!("veth{}", sha512_hex(&[text.as_bytes(), &attempt.to_be_bytes()], 8))
    }

    /// Whether a name looks like that of a host's end.
    pub fn is_host_name(name: &str) -> bool {
        is_hash(name, "veth", 8)
    }

    /// The name of the ifb for what the container sends: Go's, in which the interface does not count.
    pub fn ifb_name(&self) -> String {
        format!("{IFB}{}", sha512_hex(&[self.network.as_bytes(), self.container.as_bytes()], 12))
    }

    /// The ifb's name where another interface of the container has the one by [`ifb_name`](Mark::ifb_name).
    pub fn own_ifb_name(&self) -> String {
        let Mark { network, container, ifname } = self;
        format!("{IFB}{}", sha512_hex(&[format!("{network}/{container}/{ifname}").as_bytes()], 12))
    }

    /// Whether a name looks like that of an ifb.
    pub fn is_ifb_name(name: &str) -> bool {
        is_hash(name, IFB, 12)
    }
}

/// What the name of an ifb begins with.
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
        let mark = Mark::new("net", "c0ffee", "eth0");
        assert_eq!(mark.alias(), "cni:net/c0ffee/eth0");
        let marked = Mark::parse(&mark.alias()).unwrap();
        assert_eq!(marked, Marked { network: "net".into(), container: Some("c0ffee".into()), ifname: "eth0".into() });
        assert!(mark.is_on(Some("cni:net/c0ffee/eth0")) && !mark.is_on(Some("cni:net/c0ffee/eth01")));
        assert!(!mark.is_on(None));
    }

    #[test]
    fn a_long_container_id_is_hashed_and_everything_still_fits() {
        let network = "n".repeat(200);
        let long = Mark::new(&network, "c".repeat(300), "fifteen-bytes-x");
        let alias = long.alias();
        assert!(alias.len() <= ALIAS_MAX, "{} bytes", alias.len());
        assert!(alias.starts_with(&Mark::network_prefix(&network)));
        let marked = Mark::parse(&alias).unwrap();
        assert_eq!((marked.container, marked.ifname.as_str()), (None, "fifteen-bytes-x"));
        let other = Mark::new(&network, format!("{}d", "c".repeat(299)), "fifteen-bytes-x");
        assert_ne!(other.alias(), alias);
    }

    #[test]
    fn the_border_lies_at_255_bytes() {
        for (length, hashed) in [(255, false), (256, true)] {
            let mark = Mark::new("net", "c".repeat(length - "cni:net//eth0".len()), "eth0");
            assert_eq!(mark.alias().contains('#'), hashed, "{length}");
        }
    }

    #[test]
    fn what_is_not_ours_is_not_read() {
        for alias in ["", "cni", "cni:", "cni:net", "cni:net/c", "cni:net/c/eth0/x", "cni://", "my uplink", "CNI:a/b/c"]
        {
            assert_eq!(Mark::parse(alias), None, "{alias:?}");
        }
        assert!(!"cni:network/c/eth0".starts_with(&Mark::network_prefix("net")));
    }

    #[test]
    fn a_host_name_is_stable_and_depends_on_every_part() {
        let name = Mark::new("net", "c1", "eth0").host_name(0);
        assert_eq!(name, Mark::new("net", "c1", "eth0").host_name(0));
        assert!(name.len() == 12 && name.starts_with("veth"), "{name}");
        for other in [
            Mark::new("net2", "c1", "eth0").host_name(0),
            Mark::new("net", "c2", "eth0").host_name(0),
            Mark::new("net", "c1", "eth1").host_name(0),
            Mark::new("net", "c1", "eth0").host_name(1),
        ] {
            assert_ne!(name, other);
        }
    }

    #[test]
    fn host_names_never_change_between_releases() {
        // A DEL by a newer release must find what an older one made. Computed with `sha512sum`.
        assert_eq!(Mark::new("net", "c1", "eth0").host_name(0), "vethfecdf07f");
    }

    #[test]
    fn an_ifb_has_the_name_that_go_gives_it() {
        let mark = Mark::new("cni-plugin-bandwidth-test", "dummy", "eth0");
        assert_eq!(mark.ifb_name(), "bwpa8eda89404b7");
        assert_eq!(Mark { ifname: "eth1".to_owned(), ..mark.clone() }.ifb_name(), mark.ifb_name());
        assert_ne!(Mark { ifname: "eth1".to_owned(), ..mark.clone() }.own_ifb_name(), mark.own_ifb_name());
        // As the host's names; computed with `sha512sum`.
        assert_eq!(Mark::new("net", "c1", "eth0").own_ifb_name(), "bwpdd6ccc806f76");
        assert!(Mark::is_ifb_name(&mark.ifb_name()) && Mark::is_ifb_name(&mark.own_ifb_name()));
        assert!(!Mark::is_ifb_name("bwp0") && !Mark::is_ifb_name("vetha8eda89404b7"));
    }

    #[test]
    fn groups_never_change_between_releases() {
        // As the host's names. The hash begins with a4861f4a.
        assert_eq!(Mark::group("net"), 0x2486_1f4a);
        assert_ne!(Mark::group("net2"), Mark::group("net"));
    }

    #[test]
    fn only_our_names_are_host_names() {
        assert!(Mark::is_host_name(&Mark::new("net", "c1", "eth0").host_name(3)));
        for name in ["", "veth", "eth0", "veth0", "vethABCDEF01", "veth012345678", "veth0123456g", "xeth01234567"] {
            assert!(!Mark::is_host_name(name), "{name}");
        }
    }
}
