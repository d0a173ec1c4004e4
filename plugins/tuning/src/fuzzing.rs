//! For pkg/cni-fuzz alone: the readers of configuration, allow-list and backup, and what must hold
//! of all they accept.

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
/// What ADD would refuse it with.
pub fn read(call: &Call<'_>) -> Result<()> {
    let conf = Conf::new(call)?;
    conf.sysctls.iter().for_each(|sysctl| assert_below_net(&sysctl.key));
    assert!(conf.link.mac.is_none_or(|mac| !mac.is_multicast() && !mac.is_zero()));
    assert!(conf.link.mtu.is_none_or(|mtu| i32::try_from(mtu).is_ok()));
    read_place(call)
}

/// Reads what DEL and GC read.
///
/// # Errors
/// What they would refuse it with.
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
        // Nothing that `components` skips: no empty name, no `.`, no slash at the end.
        assert_eq!(path.components().count(), path.to_string_lossy().matches('/').count() + 1, "{path:?}");
        // The kernel layer opens the path that was checked here.
        assert_eq!(path, Path::new("/proc/sys").join(&reading.path));
    }
}

/// Returns the files that an allow-list permits for a key that is written for the interface
/// `ifname`. `None` if the list or the key is malformed; empty if the list forbids the key.
pub fn permitted(list: &[u8], key: &str, ifname: &str) -> Option<Vec<String>> {
    let list = AllowList::parse(Path::new("the list"), list).ok()?;
    let key = Key::new(key, "1", ifname).ok()?;
    assert_below_net(&key);
    let mut sysctls = [Sysctl { key, value: "1".to_owned() }];
    // Keeps only the readings that the list permits; an error if none is left.
    let outcome = list.filter(&mut sysctls);
    let [Sysctl { key, .. }] = sysctls;
    assert_eq!(outcome.is_err(), key.readings.is_empty());
    Some(key.readings.into_iter().map(|reading| reading.path).collect())
}

/// Reads a backup and writes it again.
pub fn rewritten_backup(bytes: &[u8]) -> Option<Vec<u8>> {
    let record = Record::parse(bytes).ok()?;
    let written = record.encode();
    assert_eq!(Record::parse(&written).as_ref(), Ok(&record), "a backup must be read as it was written");
    Some(written)
}
