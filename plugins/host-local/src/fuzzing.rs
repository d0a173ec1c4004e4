//! For pkg/cni-fuzz alone: the readers of configuration and resolv.conf, and what must hold of all
//! they accept.

use cni::Result;
use cni::result::{AddResult, Dns};
use cni::rollback::Notes;
use cni::skel::Call;
use cni_ipam::{Range, RangeSet};

use crate::conf::{self, AddConf, StoreLocation};
use crate::resolv;

/// Reads a configuration as ADD does, and returns the result it would give were nothing of it to be
/// reserved.
///
/// # Errors
/// What ADD would refuse it with.
pub fn read(call: &Call<'_>) -> Result<AddResult> {
    let conf = AddConf::read(&call.conf, &call.args()?)?;
    let ranges: Vec<&Range> = conf.sets.sets().iter().flat_map(RangeSet::ranges).collect();
    assert!(!ranges.is_empty());
    for (position, range) in ranges.iter().enumerate() {
        assert!(range.contains(range.first()) && range.contains(range.last()), "{range}");
        assert!(range.subnet().contains(range.first()) && range.subnet().contains(range.last()), "{range}");
        assert!(ranges[..position].iter().all(|other| !other.contains(range.first())), "{range} overlaps");
    }
    assert!((1..=300).contains(&conf.place.lock_timeout.as_secs()));
    if let Ok(assigned) = conf.requested.assign(&conf.sets, &Notes::silent()) {
        for (set, address) in conf.sets.sets().iter().zip(assigned) {
            assert!(address.is_none_or(|address| set.find(address).is_some()));
        }
    }
    assert_eq!(StoreLocation::read(&call.conf, &Notes::silent())?, conf.place, "DEL must look where ADD has written");
    Ok(AddResult { routes: conf.routes, ..AddResult::default() })
}

/// Reads what DEL, GC and CHECK read.
///
/// # Errors
/// What they would refuse it with.
pub fn read_place(call: &Call<'_>) -> Result<()> {
    StoreLocation::read(&call.conf, &Notes::silent()).map(drop)
}

/// Reads what STATUS reads.
///
/// # Errors
/// What it would refuse it with.
pub fn read_ranges(call: &Call<'_>) -> Result<()> {
    conf::ranges(&call.conf).map(drop)
}

/// The text of a resolver's configuration as a result's `dns`.
pub fn resolv_conf(text: &str) -> Dns {
    resolv::parse(text)
}
