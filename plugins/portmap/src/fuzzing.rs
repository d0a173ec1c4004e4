//! For pkg/cni-fuzz alone: the configuration's reader, and what must hold of all it accepts.

use cni::Result;
use cni::skel::Call;
use cni_firewall::portmap::Mapping;

use crate::conf::{Conf, ORDERS, check_nft};
use cni_firewall::Backend;

/// Reads a configuration as ADD does.
///
/// # Errors
/// What ADD would refuse it with.
pub fn read(call: &Call<'_>) -> Result<()> {
    let conf = Conf::new(&call.conf)?;
    assert!(conf.mappings.iter().all(|mapping| mapping.host_port != 0 && mapping.container_port != 0));
    assert_eq!(Conf::sound_mappings(&call.conf), conf.mappings, "DEL must know what ADD has mapped");
    assert!(
        conf.backend != Some(Backend::Nftables) || !matches!(conf.set_mark, cni_firewall::portmap::SetMark::Chain(_))
    );
    Ok(())
}

/// The mappings that DEL can make out.
pub fn sound_mappings(call: &Call<'_>) -> Vec<Mapping> {
    Conf::sound_mappings(&call.conf)
}

/// Whether ADD lets these words of a user's stand in a rule for `nft`.
pub fn accepts_for_nft(conditions: &[String]) -> bool {
    check_nft(conditions).is_ok()
}

/// The words that no such condition may hold outside a name in quotes.
pub fn nft_keywords_refused() -> &'static [&'static str] {
    &ORDERS
}
