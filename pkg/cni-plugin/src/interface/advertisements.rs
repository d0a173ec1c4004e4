//! The keys `acceptRa` and `enableSlaac`: whether the container's interface configures itself from
//! the advertisements of IPv6 routers.
//!
//! The sysctls are written before the interface comes up. The plugin `tuning` would write them
//! after the first advertisement may have arrived.

use cni::Result;
use cni::rollback::Rollback;
use cni_linux::{Netns, sysctl};

use super::{AttachmentContext, failed};

/// Whether the container's interface accepts advertisements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AcceptRa {
    /// As the namespace's defaults are.
    Default,
    /// It ignores advertisements.
    No,
    /// It accepts advertisements, even if the container forwards packets.
    Yes,
}

impl AcceptRa {
    /// Returns the sysctls of CNI_IFNAME, below `net/ipv6/conf/IFNAME`, with their values.
    fn sysctls(self) -> &'static [(&'static str, &'static str)] {
        match self {
            AcceptRa::Default => &[],
            AcceptRa::No => &[("accept_ra", "0"), ("autoconf", "0")],
            // With 1, the kernel ignores advertisements while the interface forwards packets.
            AcceptRa::Yes => &[("accept_ra", "2"), ("autoconf", "1")],
        }
    }

    /// Writes the sysctls of CNI_IFNAME, and registers undos for the changed ones.
    ///
    /// # Errors
    /// A sysctl cannot be written. A kernel without IPv6 is an error only for [`AcceptRa::Yes`].
    pub(super) fn apply<'a, C>(self, context: &AttachmentContext<'a, C>, rollback: &mut Rollback<'a>) -> Result<()> {
        for (name, value) in self.sysctls() {
            let path = format!("net/ipv6/conf/{}/{name}", context.call.ifname);
            let old = match context.netns.run(|| sysctl::ensure(&path, value))? {
                Err(error) if error.is_not_found() && self == AcceptRa::No => continue,
                result => result?,
            };
            let Some(old) = old else { continue };
            let netns = context.call.netns()?;
            rollback.push(format!("restore {path}"), move || -> Result<()> {
                Ok(Netns::open(netns)?.run(|| sysctl::write(&path, &old))??)
            });
        }
        Ok(())
    }

    /// Compares the sysctls of CNI_IFNAME with the configuration.
    ///
    /// # Errors
    /// Code 101 for the first difference.
    pub(super) fn check<C>(self, context: &AttachmentContext<'_, C>) -> Result<()> {
        for (name, value) in self.sysctls() {
            let path = format!("net/ipv6/conf/{}/{name}", context.call.ifname);
            let found = match context.netns.run(|| sysctl::read(&path))? {
                Err(error) if error.is_not_found() && self == AcceptRa::No => continue,
                result => result?,
            };
            if found != *value {
                return Err(failed(format!("sysctl {path} is {found}, expected {value}")));
            }
        }
        Ok(())
    }
}
