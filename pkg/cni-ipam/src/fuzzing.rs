//! Gives cni-fuzz access to the internals of the store: the texts of reservations and of releases,
//! and valid and forged links.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use crate::content::{self, Content};
use crate::links::{Link, Links};
use crate::store::cooldown::Released;

/// Returns the address whose reservation has this file name; `None` for other names.
pub fn address_of_name(name: &[u8]) -> Option<IpAddr> {
    content::address_of_name(name)
}

/// Returns the trimmed text of a reservation's file; `None` if the file is blank or not a
/// reservation.
pub fn reservation_text(bytes: &[u8]) -> Option<Vec<u8>> {
    match content::classify(bytes) {
        Content::Text(text) => Some(text),
        Content::Absent | Content::Blank | Content::Foreign => None,
    }
}

/// Reads the file of released addresses at the time `now`, in milliseconds, and returns its text as
/// written again.
///
/// # Panics
/// The text is read differently after it was written, or has a time after `now`.
pub fn rewritten_releases(text: &[u8], now: u64) -> String {
    let written = Released::parse(text, now).to_text();
    let again = Released::parse(written.as_bytes(), now);
    assert!(again.damaged == 0 && !again.is_from_future, "{written:?}");
    assert_eq!(again.to_text(), written);
    written
}

/// Parses the name of a link. Returns `false` if the name is refused.
///
/// # Panics
/// The link has another name.
pub fn read_link(name: &str) -> bool {
    // Only the path has the bucket.
    let Some(link) = Link::parse(0, name) else { return false };
    let path = Links::of(Path::new("")).path(&link);
    assert_eq!(path, Path::new("links/00").join(name));
    true
}

/// Creates forged links: files whose names say that an owner has an address. The next
/// [`Locked`](crate::Locked) trusts them, because both folders have the same stamp.
///
/// # Errors
/// The links cannot be created, or the folders cannot be stamped.
pub fn plant(data_dir: &Path, network: &str, forged: &[(&str, IpAddr)]) -> io::Result<()> {
    let links = Links::of(&data_dir.join(".cni").join(network));
    links.prepare()?;
    for (content, address) in forged {
        links.create(&Link::new(content.as_bytes(), *address, None), content)?;
    }
    links.stamp(&File::open(data_dir.join(network))?)
}
