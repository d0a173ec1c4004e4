//! Encodes and decodes the userdata of a rule, chain or table: a comment, and these plugins' tags.
//!
//! The kernel stores up to 256 bytes without interpreting them: entries of type, length (one byte
//! each) and value. `nft` knows type 0, the comment, and skips unknown ones; tags have types from
//! 0x80 up, far from those that `nft` may add. Saving and loading the ruleset with `nft` loses
//! the tags.

/// The most bytes that the kernel stores with one object (`NFT_USERDATA_MAXLEN`).
pub const MAX: usize = 256;
/// `NFTNL_UDATA_RULE_COMMENT`, and the same number for chains and tables.
const COMMENT: u8 = 0;

/// Returns how many bytes a comment takes in the userdata.
pub const fn comment_len(comment: &str) -> usize {
    // type, length, NUL
    comment.len() + 3
}

/// Returns how many bytes a tag takes in the userdata.
pub const fn tag_len(value_len: usize) -> usize {
    // type, length
    value_len + 2
}

/// Returns a comment and tags (type, value) as the kernel stores them; `None` if they are too long.
pub(crate) fn encode(comment: Option<&str>, tags: &[(u8, Vec<u8>)]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(comment) = comment {
        // nft rejects the whole userdata if the comment's last byte is not NUL.
        bytes.extend([COMMENT, u8::try_from(comment.len() + 1).ok()?]);
        bytes.extend(comment.bytes().chain([0]));
    }
    for (kind, value) in tags {
        bytes.extend([*kind, u8::try_from(value.len()).ok()?]);
        bytes.extend(value);
    }
    (bytes.len() <= MAX).then_some(bytes)
}

/// Returns the comment and all other entries (type, value), up to the first truncated one. A second
/// comment, or one without its final NUL, counts as another entry.
pub(crate) fn decode(mut bytes: &[u8]) -> (Option<String>, Vec<(u8, Vec<u8>)>) {
    let (mut comment, mut tags) = (None, Vec::new());
    while let [kind, len, rest @ ..] = bytes
        && let Some((value, rest)) = rest.split_at_checked(usize::from(*len))
    {
        match (*kind, value) {
            (COMMENT, [text @ .., 0]) if comment.is_none() => {
                comment = Some(String::from_utf8_lossy(text).into_owned());
            }
            (kind, value) => tags.push((kind, value.to_vec())),
        }
        bytes = rest;
    }
    (comment, tags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comment_and_tags_survive() {
        let tags = vec![(0x80, b"cni:n/c/eth0".to_vec()), (0x81, Vec::new())];
        let bytes = encode(Some("macspoofchk-c-eth0"), &tags).unwrap();
        assert_eq!(bytes[..3], [0, 19, b'm']);
        assert_eq!(decode(&bytes), (Some("macspoofchk-c-eth0".into()), tags));
        assert_eq!(decode(&[]), (None, vec![]));
    }

    #[test]
    fn more_than_the_kernel_takes_is_refused() {
        let comment = "x".repeat(200);
        let free = MAX - comment_len(&comment) - tag_len(0);
        assert!(encode(Some(&comment), &[(0x80, vec![0; free])]).is_some());
        assert!(encode(Some(&comment), &[(0x80, vec![0; free + 1])]).is_none());
        assert!(encode(Some(&"x".repeat(255)), &[]).is_none());
    }
}
