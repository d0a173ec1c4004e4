//! Reads a configuration, and asserts what holds for every accepted one, for pkg/cni-fuzz.

use cni::skel::Call;
use cni::{Result, ident};

use crate::conf::{Conf, Mtu};

/// Reads a configuration as ADD does.
///
/// # Errors
/// The error that ADD would return.
///
/// # Panics
/// If ADD would accept a configuration that it must refuse.
pub fn read(call: &Call<'_>) -> Result<()> {
    let conf = Conf::new(&call.conf, &call.environment.args)?;
    assert!(ident::check_host_link_name("bridge", &conf.bridge).is_ok(), "{:?} is not a bridge's name", conf.bridge);
    assert!(conf.mtu.is_none_or(|mtu| match mtu {
        Mtu::Fixed(bytes) => (68..=65535).contains(&bytes),
        Mtu::Uplink => true,
    }));
    assert!(conf.settings.group_fwd_mask.is_none_or(|mask| mask & 7 == 0));
    assert!(!(conf.hairpin && conf.promiscuous));
    assert!(conf.mac.is_none_or(|mac| !mac.is_multicast() && !mac.is_zero()));
    assert!(!(conf.container_down && conf.has_ipam));
    if let Some(vlans) = &conf.vlans {
        assert!(vlans.access.iter().chain(&vlans.trunk).all(|id| (1..=4094).contains(id)));
        assert!(vlans.trunk.is_sorted_by(|one, next| one < next));
    }
    Ok(())
}
