//! The sysctl keys, the allow-list and the backup of the plugin tuning. A key may mean several
//! files, all in `/proc/sys/net`. The list `.`, which matches every key, permits all of them; any
//! other list permits some of them or none. An additional pattern never forbids a file that the
//! list permits, and a list of comments permits none. A backup is read as it was written.
//!
//! The input: the key and the interface, a line each; the rest is the list. If the first line is
//! `backup`, the rest is a backup.

use plugin_tuning::fuzzing::{permitted, rewritten_backup};

use crate::input::Input;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let key = input.line_text();
    if key == "backup" {
        let Some(written) = rewritten_backup(input.rest()) else { return };
        assert_eq!(rewritten_backup(&written), Some(written));
        return;
    }
    let ifname = input.line_text();
    let list = input.rest();
    let Some(all_files) = permitted(b".", &key, &ifname) else { return };
    assert!(!all_files.is_empty(), "{key:?} means no file");
    let comments: Vec<Vec<u8>> = list.split(|byte| *byte == b'\n').map(|line| [b"#", line].concat()).collect();
    let by_comments = permitted(&comments.join(&b'\n'), &key, &ifname).unwrap_or_default();
    assert!(by_comments.is_empty(), "comments permit {by_comments:?}");
    let Some(files) = permitted(list, &key, &ifname) else { return };
    assert!(files.iter().all(|file| all_files.contains(file)), "{files:?} are not among {all_files:?}");
    let more = permitted(&[list, b"\n^net[./]core"].concat(), &key, &ifname).unwrap_or_default();
    assert!(files.iter().all(|file| more.contains(file)), "an additional pattern reduces {files:?} to {more:?}");
    // The interface matters only if the key has the placeholder IFNAME.
    if !key.contains("IFNAME") {
        assert_eq!(permitted(list, &key, "another0"), Some(files), "for another interface");
    }
}
