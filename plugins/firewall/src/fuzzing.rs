//! Only for pkg/cni-fuzz: reads a configuration.

use cni::Result;
use cni::skel::Call;

use crate::conf::Conf;

/// Reads a configuration as ADD does, and asserts that the name of its chain for iptables is one
/// word.
///
/// # Errors
/// The error that ADD would return.
pub fn read(call: &Call<'_>) -> Result<()> {
    let conf = Conf::new(&call.conf)?;
    let chain = &conf.iptables_admin_chain;
    assert!(!chain.is_empty() && !chain.contains(char::is_whitespace));
    Ok(())
}
