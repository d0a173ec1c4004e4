//! An interface that an earlier plugin of the list created and that this plugin uses.
//!
//! While this plugin uses the interface, the host end has a [`PortMark`] as its alias. DEL gives
//! the interface back instead of deleting it: takes the host end off the bridge and restores the
//! alias.

use cni::AttachmentId;
use cni::Cidr;
use cni::result::{AddResult, IpConfig};
use cni_linux::{Link, Netlink};

/// The alias of a host end that another plugin created and that is now a port of this plugin's
/// bridge: `cni-port:<attachment> <position of the first address>+<address count> <earlier alias>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortMark {
    /// The attachment that the port belongs to, in the form of [`AttachmentId::alias`].
    pub attachment_alias: String,
    /// The position in the result of the first address that this plugin added. The addresses before
    /// it belong to the earlier plugin, and DEL leaves them.
    pub first_address: usize,
    /// The number of addresses that this plugin added.
    pub address_count: usize,
    /// The alias before this plugin's ADD, which DEL restores.
    pub earlier_alias: String,
}

impl PortMark {
    /// Parses an alias. Returns `None` if it is not a `cni-port:` alias.
    pub fn parse(alias: &str) -> Option<PortMark> {
        let mut parts = alias.strip_prefix("cni-port:")?.splitn(3, ' ');
        let (attachment_alias, addresses, earlier_alias) = (parts.next()?, parts.next()?, parts.next()?);
        let (first_address, address_count) = addresses.split_once('+')?;
        Some(PortMark {
            attachment_alias: attachment_alias.to_owned(),
            first_address: first_address.parse().ok()?,
            address_count: address_count.parse().ok()?,
            earlier_alias: earlier_alias.to_owned(),
        })
    }

    /// Parses a link's alias. Returns `None` if the link has no `cni-port:` alias.
    pub fn of(link: &Link) -> Option<PortMark> {
        link.alias.as_deref().and_then(PortMark::parse)
    }

    /// Returns the alias for this mark.
    pub fn alias(&self) -> String {
        let PortMark { attachment_alias, first_address, address_count, earlier_alias } = self;
        format!("cni-port:{attachment_alias} {first_address}+{address_count} {earlier_alias}")
    }

    /// Returns the addresses that this plugin added, from `prev`, the result of the whole list, by
    /// their position: they are wrong if a later plugin removed or inserted an address before them.
    pub fn added_ips<'r>(&self, prev: &'r AddResult) -> impl Iterator<Item = &'r IpConfig> + use<'r> {
        prev.ips.iter().skip(self.first_address).take(self.address_count)
    }

    /// Whether the port belongs to this attachment.
    pub fn belongs_to(&self, attachment: &AttachmentId) -> bool {
        self.attachment_alias == attachment.alias()
    }
}

/// Removes addresses from an interface. An address or an interface that does not exist is not an
/// error.
///
/// # Errors
/// The first refusal of the kernel, after all addresses have been tried.
pub fn purge_addresses(netlink: &Netlink, index: u32, addresses: &[Cidr]) -> cni_linux::Result<()> {
    addresses.iter().map(|address| netlink.purge_address(index, *address)).fold(Ok(()), cni_linux::Result::and)
}

/// Takes a link with a port mark off its bridge and restores its earlier alias. Does nothing to a
/// link without a port mark.
///
/// # Errors
/// The kernel refuses a change.
pub fn give_back(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    if PortMark::of(link).is_none() {
        return Ok(());
    }
    take_off(host, link)?;
    restore_alias(host, link)
}

/// Restores the earlier alias of a link with a port mark. Does nothing to a link without a port
/// mark.
///
/// # Errors
/// The kernel refuses the change.
pub fn restore_alias(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    match PortMark::of(link) {
        Some(port_mark) => host.set_alias(link.index, &port_mark.earlier_alias),
        None => Ok(()),
    }
}

/// Takes a link off its bridge if it is on one, but leaves its port mark.
pub(super) fn take_off(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    if link.master.is_some() { host.unset_master(link.index) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_mark_keeps_the_earlier_alias() {
        let attachment = AttachmentId::new("net", "c1", "eth0");
        for earlier_alias in ["", "cni:net/c1/eth0", "my uplink, with spaces"] {
            let port_mark = PortMark {
                attachment_alias: attachment.alias(),
                first_address: 1,
                address_count: 2,
                earlier_alias: earlier_alias.to_owned(),
            };
            assert_eq!(PortMark::parse(&port_mark.alias()), Some(port_mark.clone()));
            assert!(port_mark.belongs_to(&attachment));
        }
        assert_eq!(PortMark::parse("cni:net/c1/eth0"), None);
        let port_mark = PortMark {
            attachment_alias: attachment.alias(),
            first_address: 0,
            address_count: 0,
            earlier_alias: String::new(),
        };
        assert_eq!(AttachmentId::parse(&port_mark.alias()), None);
    }
}
