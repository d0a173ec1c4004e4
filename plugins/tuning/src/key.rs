//! The names of sysctls as configurations write them: text in, files below `net` out.
//!
//! Two spellings are in use, `net.ipv4.conf.all.arp_filter` and `net/ipv4/conf/all/arp_filter`. Go
//! takes every dot for a separator. In sysctl(8) the first separator decides, and the other
//! character then belongs to a name, which is how `eth0.100` can be written at all. A key that has
//! both characters is read both ways, Go's first; which reading names a file that exists is found
//! out in the container.
//!
//! `IFNAME` is replaced after the separators have been found, so that the dots
//! of an interface's name stay what they are; and the allow-list judges each reading by its own
//! spellings, else a key could be permitted as one file and open another.

use cni::{Error, Result};

/// The placeholder for CNI_IFNAME.
const PLACEHOLDER: &str = "IFNAME";

/// A key, and the files it may mean. There is always at least one reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// As the configuration has it.
    pub(crate) written: String,
    /// In the order in which they are tried.
    pub(crate) readings: Vec<Reading>,
}

/// One way to understand a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Below /proc/sys, with slashes, `IFNAME` as written.
    named: String,
    /// The same with the interface's name.
    pub(crate) path: String,
}

impl Key {
    /// Reads a key for the interface `ifname`; an empty one leaves `IFNAME` as it is.
    ///
    /// # Errors
    /// Code 7, Go's text, and as details the key as written and the value, for a name that is not
    /// below `net`, and for an `IFNAME` that would be `all` or `default`.
    pub(crate) fn new(written: &str, value: &str, ifname: &str) -> Result<Key> {
        let invalid = |why: &str| {
            let (key, written, value) = (shown(&as_go_reports(written, ifname)), shown(written), shown(value));
            let details = format!("sysctl {written}, value {value}: {why}");
            Err(Error::config(format!("invalid net sysctl key: {key}")).with_details(details))
        };
        let readings: Vec<Reading> = spellings(written).filter_map(|named| Reading::new(named, ifname)).collect();
        if readings.is_empty() {
            return invalid("only names of values below net can be set");
        }
        // No interface can be called "all" or "default", but net/ has directories of these names:
        // the settings of all interfaces, and of those to come.
        if ["all", "default"].contains(&ifname) && written.contains(PLACEHOLDER) {
            return invalid(&format!("{PLACEHOLDER} would be {ifname:?}, which means more than one interface"));
        }
        Ok(Key { written: written.to_owned(), readings })
    }
}

impl Reading {
    fn new(named: String, ifname: &str) -> Option<Reading> {
        let path = match ifname {
            "" => named.clone(),
            ifname => named.replacen(PLACEHOLDER, ifname, 1),
        };
        let mut parts = path.split('/');
        let sound = parts.next() == Some("net")
            && path.len() > "net/".len()
            && !path.contains('\0')
            && parts.all(|part| !matches!(part, "" | "." | ".."));
        sound.then_some(Reading { named, path })
    }

    /// Whether the allow-list permits this file under this key; `matches` is whether a text matches
    /// some pattern.
    ///
    /// A pattern may be written for either spelling. Where an interface's name belongs, `IFNAME`
    /// stands for itself, so that a pattern can speak of the container's interface whatever its
    /// name; anywhere else the name could lead a harmless pattern to another value, so there what
    /// comes out must match too.
    pub(crate) fn is_permitted(&self, written: &str, matches: impl Fn(&str) -> bool) -> bool {
        let either = |path: &str| matches(path) || matches(&swapped(path));
        (matches(written) || either(&self.named)) && (self.placeholder_is_in_its_place() || either(&self.path))
    }

    fn placeholder_is_in_its_place(&self) -> bool {
        let parts: Vec<&str> = self.named.split('/').collect();
        match parts.iter().position(|part| part.contains(PLACEHOLDER)) {
            None => true,
            Some(at) => parts[at] == PLACEHOLDER && ["conf", "neigh"].contains(&parts[at.saturating_sub(1)]),
        }
    }
}

/// The key with slashes between its parts: Go's reading, and sysctl(8)'s if that is another one.
fn spellings(written: &str) -> impl Iterator<Item = String> {
    let go = written.replace('.', "/");
    let first = written.find(['.', '/']).map(|at| written.as_bytes()[at]);
    let other = match first {
        Some(b'.') => swapped(written),
        _ => written.to_owned(),
    };
    let other = Some(other).filter(|other| *other != go);
    std::iter::once(go).chain(other)
}

/// Returns the key as Go's error has it since 1.9: with slashes and the interface's name.
fn as_go_reports(written: &str, ifname: &str) -> String {
    let key = written.replace('.', "/");
    if ifname.is_empty() { key } else { key.replacen(PLACEHOLDER, ifname, 1) }
}

/// The other spelling of the same name.
fn swapped(name: &str) -> String {
    let swap = |letter| match letter {
        '.' => '/',
        '/' => '.',
        other => other,
    };
    name.chars().map(swap).collect()
}

/// A key or a value for a message: quoted, and cut where it would drown the rest.
pub(crate) fn shown(text: &str) -> String {
    let cut = cut(text);
    match cut.len() == text.len() {
        true => format!("{text:?}"),
        false => format!("{cut:?}... ({} bytes)", text.len()),
    }
}

/// The beginning of a long text, a short one whole.
pub(crate) fn cut(text: &str) -> &str {
    if text.len() <= 200 {
        return text;
    }
    let end = (0..=60).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(written: &str, ifname: &str) -> Vec<String> {
        Key::new(written, "1", ifname).unwrap().readings.into_iter().map(|reading| reading.path).collect()
    }

    #[test]
    fn both_spellings_name_the_same_file() {
        for written in ["net.ipv4.ip_forward", "net/ipv4/ip_forward", "net/ipv4.ip_forward", "net.ipv4/ip_forward"] {
            assert_eq!(paths(written, "eth0")[0], "net/ipv4/ip_forward", "{written}");
        }
    }

    #[test]
    fn the_interface_s_name_keeps_its_dots() {
        for written in ["net.ipv4.conf.IFNAME.arp_filter", "net/ipv4/conf/IFNAME/arp_filter"] {
            assert_eq!(paths(written, "eth0.100"), ["net/ipv4/conf/eth0.100/arp_filter"], "{written}");
        }
        assert_eq!(paths("net.ipv4.conf.IFNAME.IFNAME", "eth0"), ["net/ipv4/conf/eth0/IFNAME"]);
        assert_eq!(paths("net.ipv4.conf.IFNAME.x", ""), ["net/ipv4/conf/IFNAME/x"]);
    }

    #[test]
    fn a_vlan_interface_can_be_named_in_both_spellings() {
        for written in ["net.ipv4.conf.eth0/100.arp_filter", "net/ipv4/conf/eth0.100/arp_filter"] {
            let both = ["net/ipv4/conf/eth0/100/arp_filter", "net/ipv4/conf/eth0.100/arp_filter"];
            assert_eq!(paths(written, "eth0"), both, "{written}");
        }
    }

    #[test]
    fn no_key_leaves_the_tree_below_net() {
        let long = "net/".repeat(16 << 10);
        let hostile = [
            "",
            ".",
            "net",
            "net.",
            "net/",
            "/",
            "//net",
            "/net/ipv4/ip_forward",
            "/proc/sys/net/ipv4/ip_forward",
            "/etc/passwd",
            "kernel.hostname",
            "network.x",
            "NET.ipv4.ip_forward",
            "net/../kernel/hostname",
            "net.ipv4/../../kernel.hostname",
            "net/ipv4/../../kernel/hostname",
            "net.//.//.kernel.hostname",
            "net/./ipv4",
            "net..ipv4",
            "net/ipv4//ip_forward",
            "net/ipv4/ip_forward/",
            "net.ipv4.\0",
            "IFNAME.ipv4.ip_forward",
            long.as_str(),
        ];
        for written in hostile {
            let error = Key::new(written, "the value", "eth0").unwrap_err();
            assert_eq!(error.code(), cni::Code::INVALID_CONFIG, "{}", shown(written));
            let text = format!("invalid net sysctl key: {}", shown(&as_go_reports(written, "eth0")));
            assert_eq!(error.msg(), text);
            for part in [&shown(written), "the value"] {
                assert!(error.details().contains(part), "{}", error.details());
            }
            assert!(error.msg().len() < 300 && error.details().len() < 400);
        }
        // The skeleton lets no such CNI_IFNAME pass; this room does not rely on it.
        for ifname in ["..", ".", "a/../../../x", "\0"] {
            assert!(Key::new("net.ipv4.conf.IFNAME.x", "1", ifname).is_err(), "{ifname:?}");
        }
    }

    #[test]
    fn ifname_never_means_more_than_one_interface() {
        for ifname in ["all", "default"] {
            let error = Key::new("net.ipv4.conf.IFNAME.rp_filter", "0", ifname).unwrap_err();
            assert!(error.details().contains(ifname), "{}", error.details());
            assert!(Key::new("net.ipv4.conf.all.rp_filter", "0", ifname).is_ok());
        }
    }
}
