//! Functions for pkg/cni-fuzz only: they read a configuration or a resolv.conf file, and check
//! properties that every accepted configuration must have.

use cni::Result;
use cni::result::{AddResult, Dns};
use cni::rollback::Notes;
use cni::skel::Call;
use cni_ipam::{Range, RangeSet};

use crate::conf::{self, AddConf, StoreLocation};
use crate::resolv;

/// Reads a configuration as ADD does, and checks it. Returns the result of the ADD without
/// addresses, because nothing is reserved.
///
/// # Errors
/// The error of the ADD.
///
/// # Panics
/// The accepted configuration does not have a required property.
pub fn read(call: &Call<'_>) -> Result<AddResult> {
    let conf = AddConf::read(&call.conf, &call.args()?)?;
    let ranges: Vec<&Range> = conf.sets.sets().iter().flat_map(RangeSet::ranges).collect();
    assert!(!ranges.is_empty());
    for (position, range) in ranges.iter().enumerate() {
        assert!(range.contains(range.first()) && range.contains(range.last()), "{range}");
        assert!(range.subnet().contains(range.first()) && range.subnet().contains(range.last()), "{range}");
        assert!(ranges[..position].iter().all(|other| !other.contains(range.first())), "{range} overlaps");
    }
    assert!((1..=300).contains(&conf.location.lock_timeout.as_secs()));
    if let Ok(assigned) = conf.requested.assign(&conf.sets, &Notes::silent()) {
        for (set, address) in conf.sets.sets().iter().zip(assigned) {
            assert!(address.is_none_or(|address| set.find(address).is_some()));
        }
    }
    // DEL does not read `reuse`.
    let read_by_del = StoreLocation::read(&call.conf, &Notes::silent())?;
    let expected = StoreLocation { on_repeat: read_by_del.on_repeat, ..conf.location };
    assert_eq!(read_by_del, expected, "DEL must use the store of ADD");
    Ok(AddResult { routes: conf.routes, ..AddResult::default() })
}

/// Reads the keys that DEL, GC and CHECK read.
///
/// # Errors
/// The error of those verbs.
pub fn read_location(call: &Call<'_>) -> Result<()> {
    StoreLocation::read(&call.conf, &Notes::silent()).map(drop)
}

/// Reads the ranges as STATUS does.
///
/// # Errors
/// The error of the STATUS.
pub fn read_ranges(call: &Call<'_>) -> Result<()> {
    conf::range_sets(&call.conf).map(drop)
}

/// Returns the DNS settings in the content of a resolv.conf file.
pub fn resolv_conf(text: &str) -> Dns {
    resolv::parse(text)
}
