//! For pkg/cni-fuzz alone: the configuration's reader.

use cni::Result;
use cni::skel::Call;

use crate::conf::Conf;

/// Reads a configuration as ADD does.
///
/// # Errors
/// What ADD would refuse it with.
pub fn read(call: &Call<'_>) -> Result<()> {
    let conf = Conf::new(&call.conf)?;
    assert!(!conf.admin.is_empty() && !conf.admin.contains(char::is_whitespace));
    Ok(())
}
