//! The bytes a rule, chain or table carries for user space: a comment, and tags of our own beside
//! it.
//!
//! The kernel keeps them unread, at most 256 bytes. Inside they are type, length and value, one
//! byte each for the first two. `nft` knows type 0, the comment, and skips what it does not know;
//! ours are from 0x80 up, so that `nft` will not reach them for a long time. `nft list ruleset |
//! nft -f` loses them.

/// The most bytes that the kernel stores with one object (`NFT_USERDATA_MAXLEN`).
pub const MAX: usize = 256;
/// `NFTNL_UDATA_RULE_COMMENT`, and the same number for chains and tables.
const COMMENT: u8 = 0;

/// How many bytes a comment takes.
pub const fn comment_len(comment: &str) -> usize {
    // type, length, NUL
    comment.len() + 3
}

/// A comment and tags as the kernel stores them; `None` if that does not fit.
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

/// The comment and all other entries, up to the first that does not fit.
pub(crate) fn decode(mut bytes: &[u8]) -> (Option<String>, Vec<(u8, Vec<u8>)>) {
    let (mut comment, mut tags) = (None, Vec::new());
    while let [kind, len, rest @ ..] = bytes {
        let Some((value, rest)) = rest.split_at_checked(usize::from(*len)) else { break };
        match (*kind, value) {
            (COMMENT, [text @ .., 0]) if comment.is_none() => {
                comment = Some(String::from_utf8_lossy(text).into_owned())
            }
            _ => tags.push((*kind, value.to_vec())),
        }
        bytes = rest;
    }
    (comment, tags)
}

/// The comment alone, without its NUL; empty if there is none.
pub(crate) fn comment(mut bytes: &[u8]) -> &[u8] {
    while let [kind, len, rest @ ..] = bytes {
        match (*kind, rest.split_at_checked(usize::from(*len))) {
            (COMMENT, Some(([text @ .., 0], _))) => return text,
            (_, Some((_, rest))) => bytes = rest,
            (_, None) => break,
        }
    }
    &[]
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
        let free = MAX - comment_len(&comment) - 2;
        assert!(encode(Some(&comment), &[(0x80, vec![0; free])]).is_some());
        assert!(encode(Some(&comment), &[(0x80, vec![0; free + 1])]).is_none());
        assert!(encode(Some(&"x".repeat(255)), &[]).is_none());
    }
}
