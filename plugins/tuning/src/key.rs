//! The names of sysctls in configurations, and the paths below /proc/sys/net that they may mean.
//!
//! Two spellings are in use, `net.ipv4.conf.all.arp_filter` and `net/ipv4/conf/all/arp_filter`. For
//! Go every dot is a separator. For sysctl(8) the first separator decides, and the other character
//! is part of a name, such as `eth0.100`. So a key with both characters may mean two paths, its
//! *readings*. Go's comes first. The first reading whose file exists in the container is used.
//!
//! `IFNAME` is replaced by the name of the interface after the separators have been found, so that
//! dots in that name are not separators. The allow-list checks each reading separately, so that a
//! pattern for the path of one file does not permit the other. A pattern that matches the key as it
//! is written permits both.

use cni::{Error, Result};
use cni_linux::sysctl::swap_separators;

/// The placeholder for CNI_IFNAME.
const PLACEHOLDER: &str = "IFNAME";

/// A key with its readings, of which there is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// The text in the configuration.
    pub(crate) written: String,
    /// The readings in the order in which they are tried.
    pub(crate) readings: Vec<Reading>,
}

/// A file that a key may mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// The path below /proc/sys, with `IFNAME` if the key has it.
    template: String,
    /// The path below /proc/sys, with the name of the interface.
    pub(crate) path: String,
}

impl Key {
    /// Parses a key for the interface `ifname`. If `ifname` is empty, `IFNAME` is not replaced.
    /// `value` is for errors.
    ///
    /// # Errors
    /// Code 7 with Go's text if no reading is below `net`, or if the key has `IFNAME` and the
    /// interface is called `all` or `default`.
    pub(crate) fn new(written: &str, value: &str, ifname: &str) -> Result<Key> {
        let invalid = |why: &str| {
            let (key, written, value) = (shown(&as_go_reports(written, ifname)), shown(written), shown(value));
            let details = format!("sysctl {written}, value {value}: {why}");
            Err(Error::config(format!("invalid net sysctl key: {key}")).with_details(details))
        };
        let readings: Vec<Reading> = templates(written).filter_map(|template| Reading::new(template, ifname)).collect();
        if readings.is_empty() {
            return invalid("only names of values below net can be set");
        }
        // In /proc/sys/net, the folder `all` is for all interfaces, `default` for interfaces that
        // will be created.
        if ["all", "default"].contains(&ifname) && written.contains(PLACEHOLDER) {
            return invalid(&format!("{PLACEHOLDER} would be {ifname:?}, which means more than one interface"));
        }
        Ok(Key { written: written.to_owned(), readings })
    }
}

impl Reading {
    /// Returns the reading for the interface `ifname`, or `None` if its path is not a normal path
    /// below `net`.
    fn new(template: String, ifname: &str) -> Option<Reading> {
        let path = match ifname {
            "" => template.clone(),
            ifname => template.replacen(PLACEHOLDER, ifname, 1),
        };
        let mut parts = path.split('/');
        // The length excludes `net` alone, which is a folder.
        let is_below_net = parts.next() == Some("net")
            && path.len() > "net/".len()
            && !path.contains('\0')
            && parts.all(|part| !matches!(part, "" | "." | ".."));
        if is_below_net { Some(Reading { template, path }) } else { None }
    }

    /// Whether the allow-list permits this reading of the key `written`. `matches_a_pattern`
    /// returns whether a text matches a pattern of the list.
    ///
    /// A pattern must match the key or, in either spelling, the template. Both have `IFNAME`, so
    /// one pattern permits a sysctl of the container's interface, whatever the interface is called.
    /// If [the name could select another sysctl](Reading::could_ifname_select_another_sysctl), a
    /// pattern must match the path too.
    pub(crate) fn is_permitted(&self, written: &str, matches_a_pattern: impl Fn(&str) -> bool) -> bool {
        let matches = |path: &str| matches_a_pattern(path) || matches_a_pattern(&swap_separators(path));
        if !matches_a_pattern(written) && !matches(&self.template) {
            return false;
        }
        !self.could_ifname_select_another_sysctl() || matches(&self.path)
    }

    /// Whether some interface name would turn the template into a sysctl that does not belong to
    /// the interface, such as `net/IFNAME/ip_forward` with an interface `ipv4`. This is impossible
    /// if the template has no `IFNAME`, or has it as a whole name directly below `conf` or `neigh`,
    /// where the kernel has a folder for each interface.
    fn could_ifname_select_another_sysctl(&self) -> bool {
        let parts: Vec<&str> = self.template.split('/').collect();
        let Some(index) = parts.iter().position(|part| part.contains(PLACEHOLDER)) else { return false };
        let is_folder_of_interface =
            parts[index] == PLACEHOLDER && matches!(parts[..index].last(), Some(&"conf" | &"neigh"));
        !is_folder_of_interface
    }
}

/// Returns the templates of a key's readings: Go's, and that of sysctl(8) if it differs.
fn templates(written: &str) -> impl Iterator<Item = String> {
    let go = written.replace('.', "/");
    let first_separator = written.find(['.', '/']).map(|index| written.as_bytes()[index]);
    // If dots are the separators, a slash stands for a dot within a name.
    let sysctl8 = match first_separator {
        Some(b'.') => swap_separators(written),
        _ => written.to_owned(),
    };
    let sysctl8 = Some(sysctl8).filter(|path| *path != go);
    std::iter::once(go).chain(sysctl8)
}

/// Returns the key as in the errors of Go's plugins since 1.9: with slashes and the interface's
/// name.
fn as_go_reports(written: &str, ifname: &str) -> String {
    let key = written.replace('.', "/");
    if ifname.is_empty() { key } else { key.replacen(PLACEHOLDER, ifname, 1) }
}

/// Returns a key or a value for a message: quoted, and a long one shortened as by [`cut`].
pub(crate) fn shown(text: &str) -> String {
    let cut = cut(text);
    if cut.len() == text.len() { format!("{text:?}") } else { format!("{cut:?}... ({} bytes)", text.len()) }
}

/// Returns a text of up to 200 bytes unchanged, and at most the first 60 bytes of a longer one.
pub(crate) fn cut(text: &str) -> &str {
    if text.len() <= 200 { text } else { cni::text::cut(text, 60) }
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
    fn the_interface_name_keeps_its_dots() {
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
    fn no_key_names_a_file_outside_net() {
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
        // The skeleton refuses such a CNI_IFNAME. `Key` does not rely on that.
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
