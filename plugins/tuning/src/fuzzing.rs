//! For pkg/cni-fuzz: reads configurations, allow-lists and backups, and asserts what must be true
//! of each that is accepted.

use std::path::{Component, Path};

use cni::Result;
use cni::skel::Call;

use crate::allowlist::AllowList;
use crate::backup::Record;
use crate::conf::{Conf, Sysctl, data_dir};
use crate::key::Key;

/// Reads a configuration as ADD does.
///
/// # Errors
/// Those of ADD.
pub fn read(call: &Call<'_>) -> Result<()> {
    let conf = Conf::new(call)?;
    conf.sysctls.iter().for_each(|sysctl| assert_below_net(&sysctl.key));
    assert!(conf.link.mac.is_none_or(|mac| !mac.is_multicast() && !mac.is_zero()));
    assert!(conf.link.mtu.is_none_or(|mtu| i32::try_from(mtu).is_ok()));
    read_place(call)
}

/// Reads a configuration as DEL and GC do.
///
/// # Errors
/// Those of DEL and GC.
pub fn read_place(call: &Call<'_>) -> Result<()> {
    data_dir(&call.conf).map(drop)
}

/// Asserts that each path that a key may mean is a normal path below /proc/sys/net.
fn assert_below_net(key: &Key) {
    assert!(!key.readings.is_empty());
    for reading in &key.readings {
        let path = cni_linux::sysctl::path(&reading.path);
        let Ok(path) = path else { panic!("{:?} of {:?} is a path that is refused", reading.path, key.written) };
        assert!(path.starts_with("/proc/sys/net") && path.as_os_str().len() > "/proc/sys/net/".len());
        assert!(!path.components().any(|part| part == Component::ParentDir), "{path:?}");
        // `components` skips empty names, `.` and a slash at the end. The path must have none.
        assert_eq!(path.components().count(), path.to_string_lossy().matches('/').count() + 1, "{path:?}");
        // The checked path must be the one that is opened later.
        assert_eq!(path, Path::new("/proc/sys").join(&reading.path));
    }
}

/// Returns the paths that an allow-list permits for a key and the interface `ifname`. Returns
/// `None` if the list or the key is invalid, and no path if the list forbids the key.
pub fn permitted(list: &[u8], key: &str, ifname: &str) -> Option<Vec<String>> {
    let list = AllowList::parse(Path::new("the list"), list).ok()?;
    let key = Key::new(key, "1", ifname).ok()?;
    assert_below_net(&key);
    let mut sysctls = [Sysctl { key, value: "1".to_owned() }];
    let outcome = list.filter(&mut sysctls);
    let [Sysctl { key, .. }] = sysctls;
    assert_eq!(outcome.is_err(), key.readings.is_empty());
    Some(key.readings.into_iter().map(|reading| reading.path).collect())
}

/// Decodes a backup and encodes it again. Returns `None` if it cannot be decoded.
pub fn rewritten_backup(bytes: &[u8]) -> Option<Vec<u8>> {
    let record = Record::parse(bytes).ok()?;
    let written = record.encode();
    assert_eq!(Record::parse(&written).as_ref(), Ok(&record), "a backup must be read as it was written");
    Some(written)
}
