//! Reads the file that `resolvConf` names, in the format of resolv.conf(5), for the `dns` of the
//! result.
//!
//! The file is read as Go's plugin reads it: the values of all `search` lines and of all `options`
//! lines are combined, only the last `domain` line is used, only the first value of a `nameserver`
//! line is read, and unknown lines are skipped.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use cni::result::Dns;
use cni::{Code, Error, Result};

/// The largest size of the file in bytes. The limit is for device files, which are endless.
const MAX_SIZE: u64 = 1 << 20;

/// Reads the DNS settings in the file.
///
/// # Errors
/// Code 5 if it cannot be read or is longer than 1 MiB.
pub(crate) fn read(path: &Path) -> Result<Dns> {
    let read_error = |error| Error::caused(Code::IO, format_args!("failed to read {}", path.display()), error);
    let mut bytes = Vec::new();
    // Opening a FIFO without a writer would block without O_NONBLOCK.
    let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path).map_err(read_error)?;
    file.take(MAX_SIZE + 1).read_to_end(&mut bytes).map_err(read_error)?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(read_error(std::io::Error::other("it is longer than 1 MiB")));
    }
    Ok(parse(&String::from_utf8_lossy(&bytes)))
}

/// Parses the content of a resolv.conf file. Every text is valid.
pub(crate) fn parse(text: &str) -> Dns {
    let mut dns = Dns::default();
    for line in text.lines().map(str::trim) {
        if line.starts_with(['#', ';']) {
            continue;
        }
        let mut fields = line.split_whitespace();
        let (Some(key), Some(value)) = (fields.next(), fields.next()) else { continue };
        match key {
            "nameserver" => dns.nameservers.push(value.to_owned()),
            "domain" => dns.domain = value.to_owned(),
            "search" => dns.search.extend([value].into_iter().chain(fields).map(str::to_owned)),
            "options" => dns.options.extend([value].into_iter().chain(fields).map(str::to_owned)),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_keys_add_or_replace_as_in_go() {
        let dns = parse(
            "# comment\n; comment\n\n  nameserver 192.0.2.1 ignored\nnameserver 192.0.2.2\nnameserver\n\
             domain a.example\ndomain b.example c.example\nsearch one two\nsearch three\n\
             options ndots:1\noptions rotate edns0\nsortlist 1.2.3.4\nNameserver 9.9.9.9\n",
        );
        assert_eq!(dns.nameservers, ["192.0.2.1", "192.0.2.2"]);
        assert_eq!(dns.domain, "b.example");
        assert_eq!(dns.search, ["one", "two", "three"]);
        assert_eq!(dns.options, ["ndots:1", "rotate", "edns0"]);
    }

    #[test]
    fn a_missing_file_or_an_endless_one_is_an_error_that_names_it() {
        for path in ["/nonexistent/resolv.conf", "/dev/zero"] {
            let error = read(Path::new(path)).unwrap_err();
            assert_eq!(error.code(), Code::IO);
            assert!(error.msg().starts_with(&format!("failed to read {path}: ")), "{error}");
        }
    }
}
