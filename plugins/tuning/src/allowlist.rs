//! The node's allow-list: which sysctls a configuration may set.
//!
//! Each line is a regular expression that permits the keys in which it matches anywhere, as in Go.
//! To match the whole key it needs `^` and `$`. Empty lines and lines that begin with `#` are
//! ignored. A list without a pattern permits nothing.
//!
//! A list that exists but cannot be read is an error.

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

use cni::{Code, Error, Result};
use regex_lite::Regex;

use crate::conf::Sysctl;
use crate::key::{cut, shown};

/// The patterns of the allow-list.
#[derive(Debug)]
pub(crate) struct AllowList {
    path: PathBuf,
    /// Each line, and the regular expression in it.
    patterns: Vec<(String, Regex)>,
}

impl AllowList {
    /// Reads the list, or returns `None` if the file does not exist.
    ///
    /// # Errors
    /// Code 5 if it cannot be read, 7 if a line is not a regular expression.
    pub(crate) fn read(path: &Path) -> Result<Option<AllowList>> {
        match cni::file::read(path) {
            Ok(bytes) => AllowList::parse(path, &bytes).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => {
                Err(Error::caused(Code::IO, format_args!("failed to read the allow-list {}", path.display()), error))
            }
        }
    }

    /// Parses the content of the list. `path` is for errors.
    ///
    /// # Errors
    /// Code 7 if a line is not a regular expression.
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<AllowList> {
        let mut patterns = Vec::new();
        for (index, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
            let line_number = || format!("line {} of {}", index + 1, path.display());
            let Ok(line) = std::str::from_utf8(line) else {
                return Err(Error::config(format!("error parsing regexp: invalid UTF-8 in {}", line_number())));
            };
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let pattern = Regex::new(&escape_quoted(line))
                .map_err(|why| Error::config(format!("error parsing regexp: {why}: `{line}` in {}", line_number())))?;
            patterns.push((line.to_owned(), pattern));
        }
        Ok(AllowList { path: path.to_owned(), patterns })
    }

    /// Removes from each key the readings that the list does not permit (see [`crate::key`]).
    ///
    /// # Errors
    /// Code 7 with Go's text for the first key of which no reading is permitted.
    pub(crate) fn filter(&self, sysctls: &mut [Sysctl]) -> Result<()> {
        let matches_a_pattern = |text: &str| self.patterns.iter().any(|(_, pattern)| pattern.is_match(text));
        for Sysctl { key, value } in sysctls {
            key.readings.retain(|reading| reading.is_permitted(&key.written, matches_a_pattern));
            if key.readings.is_empty() {
                let patterns: Vec<&str> = self.patterns.iter().map(|(written, _)| written.as_str()).collect();
                let (written, allowed) = (cut(&key.written), patterns.join(" "));
                let msg =
                    format!("Sysctl {written} is not allowed. Only the following sysctls are allowed: [{allowed}]");
                let details = format!("value {}; allow-list {}", shown(value), self.path.display());
                return Err(Error::config(msg).with_details(details));
            }
        }
        Ok(())
    }
}

/// Escapes the literal text between `\Q` and `\E`, or between `\Q` and the end of the line, and
/// removes both markers: Go's regular expressions have this quoting, the crate regex-lite does not.
fn escape_quoted(pattern: &str) -> Cow<'_, str> {
    if !pattern.contains(r"\Q") {
        return pattern.into();
    }
    let (mut result, mut rest) = (String::new(), pattern);
    while let Some((before, after)) = rest.split_once('\\') {
        result += before;
        if let Some(quoted) = after.strip_prefix('Q') {
            let (text, after) = quoted.split_once(r"\E").unwrap_or((quoted, ""));
            result += &regex_lite::escape(text);
            rest = after;
        } else {
            // An escaped character, which may be a backslash, stays unchanged.
            let escaped_length = after.chars().next().map_or(0, char::len_utf8);
            let (escaped, after) = after.split_at(escaped_length);
            result.push('\\');
            result += escaped;
            rest = after;
        }
    }
    (result + rest).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;

    fn list(text: &str) -> Result<AllowList> {
        AllowList::parse(Path::new("/the/list"), text.as_bytes())
    }

    /// Returns the paths of the key's readings that the list permits.
    fn permitted_paths(text: &str, written: &str, ifname: &str) -> Vec<String> {
        let mut sysctls = [Sysctl { key: Key::new(written, "1", ifname).unwrap(), value: "1".into() }];
        match list(text).unwrap().filter(&mut sysctls) {
            Ok(()) => sysctls[0].key.readings.iter().map(|reading| reading.path.clone()).collect(),
            Err(_) => Vec::new(),
        }
    }

    #[test]
    fn a_key_is_permitted_if_a_pattern_matches() {
        let anchored = r"^net\.ipv4\.conf\.IFNAME\.[a-z_]+$";
        for (text, written, ifname, permitted) in [
            // A match anywhere is enough, as in Go.
            ("ipv4", "net.ipv4.ip_forward", "eth0", true),
            ("ipv6", "net.ipv4.ip_forward", "eth0", false),
            ("^ipv4", "net.ipv4.ip_forward", "eth0", false),
            (r"^net\.ipv4\.ip_forward$", "net.ipv4.ip_forward", "eth0", true),
            (r"^net\.ipv4\.ip_forward$", "net.ipv4.ip_forward_x", "eth0", false),
            // A pattern of either spelling permits keys of both.
            (anchored, "net.ipv4.conf.IFNAME.arp_filter", "eth0", true),
            (anchored, "net/ipv4/conf/IFNAME/arp_filter", "eth0", true),
            (anchored, "net.ipv4/conf.IFNAME/arp_filter", "eth0", true),
            ("^net/ipv4/conf/IFNAME/arp_filter$", "net.ipv4.conf.IFNAME.arp_filter", "eth0", true),
            // A pattern with IFNAME does not permit the interface's name in a key, nor the reverse.
            (anchored, "net.ipv4.conf.eth0.arp_filter", "eth0", false),
            (r"^net\.ipv4\.conf\.eth0\.", "net.ipv4.conf.IFNAME.arp_filter", "eth0", false),
            (anchored, "net.ipv4.conf.IFNAME.arp_filter", "eth0.100", true),
            // An interface's name must not turn a permitted key into another sysctl.
            (r"^net\.[A-Z]+\.ip_forward$", "net.IFNAME.ip_forward", "ipv4", false),
            (r"^net\.(ipv4|[A-Z]+)\.ip_forward$", "net.IFNAME.ip_forward", "ipv4", true),
            (r"\.[A-Z]+$", "net.ipv4.IFNAME", "ip_forward", false),
            (r"^net\.ipv4\.conf\.a[A-Z]+\.", "net.ipv4.conf.aIFNAME.rp_filter", "ll", false),
            // A VLAN interface's name in the key, with either spelling of the pattern.
            (r"^net\.ipv4\.conf\.eth0/100\.", "net.ipv4.conf.eth0/100.arp_filter", "eth0", true),
            (r"^net/ipv4/conf/eth0\.100/", "net.ipv4.conf.eth0/100.arp_filter", "eth0", true),
            // Quoted text.
            (r"^\Qnet.ipv4.ip_forward\E$", "net.ipv4.ip_forward", "eth0", true),
            (r"^\Qnet.ipv4.ip_\Ef[a-z]+$", "net.ipv4.ip_forward", "eth0", true),
            (r"\Qnet.ipv4.ip_forward", "net.ipv4.ip_forward", "eth0", true),
            (r"\Qip.forward", "net.ipv4.ip_forward", "eth0", false),
            (r"\\Qnet|nothing", "net.ipv4.ip_forward", "eth0", false),
            // Comments and empty lines, and lists without a pattern.
            ("# ipv4\n\n  ipv6  \r\n", "net.ipv4.ip_forward", "eth0", false),
            ("# ipv4\n\n  ipv6  \r\n", "net.ipv6.conf.all.forwarding", "eth0", true),
            ("", "net.ipv4.ip_forward", "eth0", false),
            ("# all\n", "net.ipv4.ip_forward", "eth0", false),
        ] {
            assert_eq!(
                !permitted_paths(text, written, ifname).is_empty(),
                permitted,
                "{written} ({ifname}) by {text:?}"
            );
        }
    }

    #[test]
    fn a_pattern_for_one_reading_permits_no_other() {
        // As dots this reads like a value of eth0, but the file is one of eth0.100.
        let only_eth0 = r"^net\.ipv4\.conf\.eth0\.[^/]*$";
        assert_eq!(
            permitted_paths(only_eth0, "net/ipv4/conf/eth0.100/arp_filter", "eth0"),
            ["net/ipv4/conf/eth0/100/arp_filter"]
        );
        let only_vlan = r"^net/ipv4/conf/eth0\.100/";
        assert!(
            permitted_paths(only_vlan, "net/ipv4/conf/eth0.100/arp_filter", "eth0")
                .contains(&"net/ipv4/conf/eth0.100/arp_filter".to_owned())
        );
    }

    #[test]
    fn the_refusal_has_gos_text() {
        let mut sysctls = [Sysctl { key: Key::new("net.ipv4.ip_forward", "1", "eth0").unwrap(), value: "1".into() }];
        let error = list("^a\n# no\n\\Qb").unwrap().filter(&mut sysctls).unwrap_err();
        assert_eq!(
            error.msg(),
            "Sysctl net.ipv4.ip_forward is not allowed. Only the following sysctls are allowed: [^a \\Qb]"
        );
        assert_eq!(error.code(), Code::INVALID_CONFIG);
    }

    #[test]
    fn a_bad_list_names_its_line() {
        for (text, line) in [("(", "line 1 "), ("ok\n\n# (\n*x\n", "line 4 "), ("ok\n[", "line 2 ")] {
            let error = list(text).unwrap_err();
            assert!(error.msg().starts_with("error parsing regexp") && error.msg().contains(line), "{}", error.msg());
            assert!(error.msg().contains("/the/list"));
        }
        let error = AllowList::parse(Path::new("/x"), b"ok\n\xff\n").unwrap_err();
        assert!(error.msg().contains("line 2 "), "{}", error.msg());
        // An expression whose compiled form would be too large is refused.
        assert!(list("(((a{100}){100}){100}){100}").is_err());
    }

    #[test]
    fn a_list_that_cannot_be_read_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(AllowList::read(&folder.path().join("absent")).unwrap().is_none());
        for path in [folder.path(), Path::new("/dev/zero")] {
            let error = AllowList::read(path).unwrap_err();
            assert_eq!(error.code(), Code::IO);
            let why = format!("failed to read the allow-list {}: it is not a regular file", path.display());
            assert_eq!(error.msg(), why);
        }
    }
}
