//! Only for pkg/cni-fuzz: reads configurations, and checks what every valid one must fulfil.

use cni::Result;
use cni::skel::Call;
use cni_firewall::Backend;
use cni_firewall::portmap::{Mapping, SetMark};

use crate::conf::{Conf, FORBIDDEN_KEYWORDS, check_nft};

/// Reads a configuration as ADD does, and checks the result.
///
/// # Errors
/// The error that ADD would return.
pub fn read(call: &Call<'_>) -> Result<()> {
    let conf = Conf::new(&call.conf)?;
    assert!(conf.mappings.iter().all(|mapping| mapping.host_port != 0 && mapping.container_port != 0));
    assert_eq!(Conf::valid_mappings(&call.conf), conf.mappings, "DEL must know what ADD has mapped");
    if matches!(conf.set_mark, SetMark::Chain(_)) {
        assert_ne!(conf.backend, Some(Backend::Nftables), "only iptables jumps to the configured chain");
    }
    Ok(())
}

/// Returns the mappings that DEL reads.
pub fn valid_mappings(call: &Call<'_>) -> Vec<Mapping> {
    Conf::valid_mappings(&call.conf)
}

/// Whether ADD accepts these conditions in nft's language.
pub fn accepts_for_nft(conditions: &[String]) -> bool {
    check_nft(conditions).is_ok()
}

/// Returns the keywords that are not allowed in a condition for nft outside a quoted name.
pub fn nft_keywords_refused() -> impl Iterator<Item = &'static str> {
    FORBIDDEN_KEYWORDS.split(' ')
}
