//! tuning's names of sysctls, allow-list and backup. No key leads out of `/proc/sys/net`; what a
//! list permits, the key alone permits too; one pattern more never permits less, a list of comments
//! nothing; a backup is read as it was written.
//!
//! The input: the key, the interface, then the list, or a backup if the first line is `backup`.

use plugin_tuning::fuzzing::{permitted, rewritten_backup};

use crate::input::Input;

/// The target.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let key = input.line_text();
    if key == "backup" {
        let Some(written) = rewritten_backup(input.rest()) else { return };
        assert_eq!(rewritten_backup(&written), Some(written));
        return;
    }
    let ifname = input.line_text();
    let list = input.rest();
    let Some(all) = permitted(b".", &key, &ifname).or_else(|| permitted(b"^", &key, &ifname)) else { return };
    assert!(!all.is_empty());
    let commented: Vec<u8> = [b"# ", list].concat();
    let commented: Vec<u8> = commented
        .iter()
        .flat_map(|byte| if *byte == b'\n' { &b"\n#"[..] } else { std::slice::from_ref(byte) })
        .copied()
        .collect();
    assert!(permitted(&commented, &key, &ifname).is_none_or(|files| files.is_empty()));
    let Some(files) = permitted(list, &key, &ifname) else { return };
    assert!(files.iter().all(|file| all.contains(file)));
    let more = permitted(&[list, b"\n^net[./]core"].concat(), &key, &ifname).unwrap_or_default();
    assert!(files.iter().all(|file| more.contains(file)), "{files:?} {more:?}");
    // Where the interface's name is not in it, it says nothing.
    if !key.contains("IFNAME") {
        assert_eq!(permitted(list, &key, "another0"), Some(files));
    }
}
