//! The entries of an index, as bytes: for each rule of a chain its handle (8 bytes), the number of
//! its keys (1) and the keys (4 each).

/// A hash of something by which rules are searched. Two keys can have the same hash: a search can
/// return rules that do not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key([u8; 4]);

impl Key {
    /// Returns the key of a rule's comment.
    pub(crate) fn comment(comment: &str) -> Key {
        Key::new(b'c', comment.as_bytes())
    }

    /// Returns the key of a host port.
    pub(crate) fn port(port: u16) -> Key {
        Key::new(b'p', &port.to_be_bytes())
    }

    /// Returns the key of a container's address.
    pub(crate) fn address(address: std::net::IpAddr) -> Key {
        Key::new(b'a', &cni::cidr::octets(address))
    }

    /// Returns the key of the chain that a rule jumps to.
    pub(crate) fn target(chain: &str) -> Key {
        Key::new(b't', chain.as_bytes())
    }

    /// Hashes by FNV-1a.
    fn new(kind: u8, bytes: &[u8]) -> Key {
        let step = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        Key(bytes.iter().fold(step(0x811c_9dc5, &kind), step).to_ne_bytes())
    }
}

/// An entry of an index: one rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry<'i> {
    pub(super) handle: u64,
    pub(super) keys: &'i [[u8; 4]],
    /// The whole entry.
    pub(super) bytes: &'i [u8],
}

impl Entry<'_> {
    /// Whether the rule has this key.
    pub(super) fn has(&self, Key(key): &Key) -> bool {
        self.keys.contains(key)
    }
}

/// Appends an entry to the entries of an index.
pub(super) fn write_entry(handle: u64, keys: &[Key], entries: &mut Vec<u8>) {
    // More keys than a byte counts: every search returns the rule.
    let keys = if keys.len() > usize::from(u8::MAX) { &[] } else { keys };
    entries.extend(handle.to_ne_bytes());
    entries.push(u8::try_from(keys.len()).unwrap_or(0));
    keys.iter().for_each(|Key(key)| entries.extend(key));
}

/// Returns the entries of an index in the order of the chain, up to the first that is cut.
pub(super) fn entries(mut bytes: &[u8]) -> impl Iterator<Item = Entry<'_>> {
    std::iter::from_fn(move || {
        // 8 bytes of the handle, 1 byte with the number of the keys, 4 bytes of each key.
        let key_count = usize::from(*bytes.get(8)?);
        let (entry, rest) = bytes.split_at_checked(9 + 4 * key_count)?;
        bytes = rest;
        let (handle, count_and_keys) = entry.split_first_chunk()?;
        Some(Entry { handle: u64::from_ne_bytes(*handle), keys: count_and_keys.get(1..)?.as_chunks().0, bytes: entry })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_as_written_up_to_a_cut() {
        let keys = [Key::port(80), Key::comment("c"), Key::target("t")];
        let mut bytes = Vec::new();
        write_entry(7, &keys, &mut bytes);
        write_entry(8, &[], &mut bytes);
        write_entry(9, &[Key::port(80); 256], &mut bytes);
        let read: Vec<Entry<'_>> = entries(&bytes).collect();
        assert_eq!(
            read.iter().map(|entry| (entry.handle, entry.keys.len())).collect::<Vec<_>>(),
            [(7, 3), (8, 0), (9, 0)]
        );
        assert!(keys.iter().all(|key| read[0].has(key)) && !read[0].has(&Key::port(81)));
        assert_eq!(read.iter().flat_map(|entry| entry.bytes).copied().collect::<Vec<_>>(), bytes);
        for len in 0..bytes.len() {
            assert!(entries(&bytes[..len]).count() < 3);
        }
    }
}
