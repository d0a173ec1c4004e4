//! The keys `acceptRa` and `enableSlaac`: whether the container's interface configures itself from
//! the advertisements of IPv6 routers.
//!
//! The sysctls are written before the interface comes up. The plugin `tuning` would write them
//! after the first advertisement may have arrived.

use cni::config::NetConf;
use cni::rollback::Rollback;
use cni::{Error, Result};
use cni_linux::{Netns, sysctl};
use serde::Deserialize;

use super::{AttachmentContext, Gateway, Layer3Policy, failed};

/// The IPAM plugin whose addresses come from advertisements.
pub(super) const SLAAC: &str = "slaac";

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Keys {
    accept_ra: Option<String>,
    enable_slaac: Option<bool>,
}

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
    /// Reads the keys. `policy` is that of the plugin for the same configuration.
    ///
    /// # Errors
    /// - Code 6 for a wrong type.
    /// - Code 7 for an unknown value, for keys that contradict each other, and for the IPAM plugin
    ///   slaac on an interface that ignores advertisements or whose gateway is the host.
    pub(super) fn read(conf: &NetConf, policy: &Layer3Policy<'_>) -> Result<AcceptRa> {
        let keys: Keys = conf.decode()?;
        let accept_ra = match keys.accept_ra.as_deref() {
            None | Some("") => None,
            Some("default") => Some(AcceptRa::Default),
            Some("no") => Some(AcceptRa::No),
            Some("yes") => Some(AcceptRa::Yes),
            Some(other) => {
                let msg = format!("invalid acceptRa {other:?}: must be one of default, no and yes");
                return Err(Error::config(msg));
            }
        };
        let enable_slaac = keys.enable_slaac.map(|enabled| if enabled { AcceptRa::Yes } else { AcceptRa::No });
        if let (Some(_), Some(enabled)) = (accept_ra, keys.enable_slaac)
            && accept_ra != enable_slaac
        {
            let value = keys.accept_ra.unwrap_or_default();
            return Err(Error::config(format!("acceptRa {value:?} contradicts enableSlaac {enabled}")));
        }
        let chosen = accept_ra.or(enable_slaac).unwrap_or(AcceptRa::Default);
        if policy.ipam == Some(SLAAC) {
            if chosen == AcceptRa::No {
                return Err(Error::config("the IPAM plugin slaac needs an interface that accepts advertisements")
                    .with_details("acceptRa or enableSlaac forbids them"));
            }
            if policy.gateway != Gateway::None {
                return Err(Error::config("the IPAM plugin slaac needs a router on the network as the gateway")
                    .with_details("this configuration makes the host the gateway, which sends no advertisements"));
            }
        }
        Ok(chosen)
    }

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

/// Whether a path, in any case, is one of the keys that are read here.
pub(super) fn is_key(path: &str) -> bool {
    ["acceptRa", "enableSlaac"].iter().any(|key| key.eq_ignore_ascii_case(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(keys: &str, policy: &Layer3Policy<'_>) -> Result<AcceptRa> {
        AcceptRa::read(&NetConf::parse(format!(r#"{{"cniVersion":"1.0.0","name":"n","type":"x"{keys}}}"#))?, policy)
    }

    #[test]
    fn both_keys_name_the_same_sysctls() {
        for (keys, expected) in [
            ("", AcceptRa::Default),
            (r#","acceptRa":"","enableSlaac":null"#, AcceptRa::Default),
            (r#","acceptRa":"default""#, AcceptRa::Default),
            (r#","acceptRa":"no""#, AcceptRa::No),
            (r#","acceptRa":"no","enableSlaac":false"#, AcceptRa::No),
            (r#","acceptRa":"yes""#, AcceptRa::Yes),
            (r#","enableSlaac":true"#, AcceptRa::Yes),
        ] {
            assert_eq!(read(keys, &Layer3Policy::default()).unwrap(), expected, "{keys}");
        }
    }

    #[test]
    fn contradictions_and_unknown_values_are_refused() {
        let slaac = Layer3Policy { ipam: Some(SLAAC), ..Layer3Policy::default() };
        let gateway = Layer3Policy { gateway: Gateway::Address, ..slaac };
        for (keys, policy, msg) in [
            (r#","acceptRa":"maybe""#, slaac, r#"invalid acceptRa "maybe": must be one of default, no and yes"#),
            (r#","acceptRa":"no","enableSlaac":true"#, slaac, r#"acceptRa "no" contradicts enableSlaac true"#),
            (
                r#","acceptRa":"default","enableSlaac":true"#,
                slaac,
                r#"acceptRa "default" contradicts enableSlaac true"#,
            ),
            (r#","enableSlaac":false"#, slaac, "the IPAM plugin slaac needs an interface that accepts advertisements"),
            ("", gateway, "the IPAM plugin slaac needs a router on the network as the gateway"),
        ] {
            let error = read(keys, &policy).unwrap_err();
            assert_eq!((error.code(), error.msg()), (cni::Code::INVALID_CONFIG, msg));
        }
    }
}
