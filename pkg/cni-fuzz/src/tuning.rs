//! The names of sysctls, the allow-list and the backup of the plugin tuning. No key leads to a file
//! outside `/proc/sys/net`. A list permits only what a list that matches all keys permits. A
//! further pattern never permits less, and a list of comments permits nothing. A backup is read as
//! it was written.
//!
//! The input: the key, the interface, then the list, or a backup if the first line is `backup`.

use plugin_tuning::fuzzing::{permitted, rewritten_backup};

use crate::input::Input;

/// Runs the target with one input.
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
    let Some(all) = permitted(b".", &key, &ifname) else { return };
    assert!(!all.is_empty());
    // Each line of the list as a comment.
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
    // The interface matters only for keys with its name.
    if !key.contains("IFNAME") {
        assert_eq!(permitted(list, &key, "another0"), Some(files));
    }
}
