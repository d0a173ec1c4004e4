//! Creates bonds: interfaces that send and receive over several others, their ports.

use crate::error::{Error, Result};
use crate::link::{Link, LinkRequest};
use crate::netlink::Netlink;
use crate::netlink::wire::{attribute, new_attribute};

const IFLA_BOND_MODE: u16 = 1;
const IFLA_BOND_MIIMON: u16 = 3;
const IFLA_BOND_FAIL_OVER_MAC: u16 = 13;
const IFLA_BOND_XMIT_HASH_POLICY: u16 = 14;
const IFLA_BOND_ALL_SLAVES_ACTIVE: u16 = 17;
const IFLA_BOND_TLB_DYNAMIC_LB: u16 = 27;

/// The names of the modes; the position is the kernel's number.
const MODES: [&str; 7] =
    ["balance-rr", "active-backup", "balance-xor", "broadcast", "802.3ad", "balance-tlb", "balance-alb"];

/// The names of the policies by which a port is chosen for a packet; the position is the kernel's
/// number.
const HASH_POLICIES: [&str; 6] = ["layer2", "layer3+4", "layer2+3", "encap2+3", "encap3+4", "vlan+srcmac"];

/// How a bond uses its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BondMode(u8);

/// By which fields of a packet a bond chooses the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashPolicy(u8);

impl BondMode {
    /// Returns the mode with this name, as the kernel's documentation writes it; `None` for an
    /// unknown name.
    pub fn by_name(name: &str) -> Option<BondMode> {
        position(&MODES, name).map(BondMode)
    }

    /// Returns the name; "unknown" for a mode that is newer than this program.
    pub fn name(self) -> &'static str {
        MODES.get(usize::from(self.0)).copied().unwrap_or("unknown")
    }

    /// Decodes the mode from the options of a bond.
    pub(crate) fn decode(options: &[u8]) -> Option<BondMode> {
        attribute(options, IFLA_BOND_MODE)?.first().copied().map(BondMode)
    }
}

impl HashPolicy {
    /// Returns the policy with this name, as the kernel's documentation writes it; `None` for an
    /// unknown name.
    pub fn by_name(name: &str) -> Option<HashPolicy> {
        position(&HASH_POLICIES, name).map(HashPolicy)
    }
}

/// Returns the position of `name` in `names`.
fn position(names: &[&str], name: &str) -> Option<u8> {
    names.iter().position(|known| *known == name).and_then(|position| u8::try_from(position).ok())
}

/// The options of a bond. `None` stands for the kernel's default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BondOptions {
    /// How it uses its ports.
    pub mode: BondMode,
    /// How often the carrier of the ports is checked, in milliseconds; 0 for never.
    pub miimon: u32,
    /// Whose hardware address the ports have: 0 for that of the bond, 1 for their own, 2 for that
    /// of the bond on the active port only.
    pub fail_over_mac: Option<u8>,
    /// Whether frames that arrive on an inactive port are received (1) or dropped (0).
    pub all_slaves_active: Option<u8>,
    /// Whether the mode `balance-tlb` distributes connections by load (1) or by hash (0).
    pub tlb_dynamic_lb: Option<u8>,
    /// By which fields of a packet the port is chosen.
    pub hash_policy: Option<HashPolicy>,
}

impl BondOptions {
    /// Returns the encoded options.
    fn encode(&self) -> Vec<u8> {
        let mut options = new_attribute(IFLA_BOND_MODE, &[self.mode.0]);
        options.extend(new_attribute(IFLA_BOND_MIIMON, &self.miimon.to_ne_bytes()));
        for (kind, value) in [
            (IFLA_BOND_FAIL_OVER_MAC, self.fail_over_mac),
            (IFLA_BOND_XMIT_HASH_POLICY, self.hash_policy.map(|policy| policy.0)),
            (IFLA_BOND_ALL_SLAVES_ACTIVE, self.all_slaves_active),
            (IFLA_BOND_TLB_DYNAMIC_LB, self.tlb_dynamic_lb),
        ] {
            if let Some(value) = value {
                options.extend(new_attribute(kind, &[value]));
            }
        }
        options
    }
}

impl Netlink {
    /// Creates a bond without ports, down, in this connection's namespace. `mtu` is in bytes;
    /// `None` stands for 1500.
    ///
    /// # Errors
    /// [`Error::is_exists`] if any interface has this name; [`Error::is_unsupported`] if the kernel
    /// does not support bonds; another error if the kernel refuses an option in this mode.
    pub fn create_bond(&self, name: &str, options: &BondOptions, mtu: Option<u32>) -> Result<Link> {
        let request = LinkRequest::without_index().name(name).optional(mtu, LinkRequest::mtu);
        self.create_link(&request.kind("bond", &options.encode()), name)
            .map_err(|cause| Error::new(format_args!("failed to create bond {name}"), cause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_encoded_by_the_kernels_numbers() {
        let mode = BondMode::by_name("active-backup").unwrap();
        let hash_policy = HashPolicy::by_name("layer2+3");
        let options = BondOptions {
            mode,
            miimon: 100,
            fail_over_mac: Some(1),
            all_slaves_active: None,
            tlb_dynamic_lb: Some(0),
            hash_policy,
        };
        let encoded = options.encode();
        let byte = |kind| attribute(&encoded, kind).and_then(|value| value.first().copied());
        assert_eq!((byte(1), byte(3), byte(13), byte(14)), (Some(1), Some(100), Some(1), Some(2)));
        assert_eq!((byte(17), byte(27)), (None, Some(0)));
        assert_eq!((BondMode::decode(&encoded), mode.name()), (Some(mode), "active-backup"));
        assert_eq!((BondMode::by_name("x"), HashPolicy::by_name(""), BondMode(9).name()), (None, None, "unknown"));
    }
}
