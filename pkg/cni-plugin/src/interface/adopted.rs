//! An interface that an earlier plugin of the list created and that this plugin uses.
//!
//! While it is in use, its host end has a [`PortMark`] as its alias. DEL does not delete the
//! interface but gives it back: takes it off the bridge and restores the alias.

use cni::AttachmentId;
use cni::Cidr;
use cni_linux::{Link, Netlink};

/// The alias of a host end that another plugin created and that is now a port of our bridge:
/// `cni-port:<attachment> <first>+<count> <earlier alias>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortMark {
    /// The attachment that the port belongs to, in the form of [`AttachmentId::alias`].
    pub attachment_alias: String,
    /// Which of the result's addresses this plugin added, as the position of the first and their
    /// number. The others belong to the earlier plugin, and DEL leaves them.
    pub addresses: (usize, usize),
    /// The alias before this plugin's ADD, which DEL restores.
    pub before: String,
}

impl PortMark {
    /// Parses an alias. Returns `None` if it is not a `cni-port:` alias.
    pub fn parse(alias: &str) -> Option<PortMark> {
        let mut parts = alias.strip_prefix("cni-port:")?.splitn(3, ' ');
        let (attachment_alias, addresses, before) = (parts.next()?, parts.next()?, parts.next()?);
        let (first, count) = addresses.split_once('+')?;
        let addresses = (first.parse().ok()?, count.parse().ok()?);
        Some(PortMark { attachment_alias: attachment_alias.to_owned(), addresses, before: before.to_owned() })
    }

    /// Parses a link's alias. Returns `None` if the link has no `cni-port:` alias.
    pub fn of(link: &Link) -> Option<PortMark> {
        link.alias.as_deref().and_then(PortMark::parse)
    }

    /// Returns the alias for this mark.
    pub fn alias(&self) -> String {
        let (first, count) = self.addresses;
        format!("cni-port:{} {first}+{count} {}", self.attachment_alias, self.before)
    }

    /// Whether the port belongs to this attachment.
    pub fn belongs_to(&self, attachment: &AttachmentId) -> bool {
        self.attachment_alias == attachment.alias()
    }
}

/// Removes addresses from an interface. An address that the interface does not have is not an
/// error.
///
/// # Errors
/// The first refusal of the kernel, after all addresses have been tried.
pub fn purge_addresses(netlink: &Netlink, index: u32, addresses: &[Cidr]) -> cni_linux::Result<()> {
    let mut first_error = None;
    for address in addresses {
        match netlink.delete_address(index, *address) {
            Err(error) if !error.is_not_found() => {
                first_error.get_or_insert(error);
            }
            _ => {}
        }
    }
    first_error.map_or(Ok(()), Err)
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
        Some(port_mark) => host.set_alias(link.index, &port_mark.before),
        None => Ok(()),
    }
}

/// Takes a link off its bridge, if it is on one. The link keeps its port mark.
pub(super) fn take_off(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    if link.master.is_some() { host.unset_master(link.index) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_mark_keeps_the_alias_it_covers() {
        let attachment = AttachmentId::new("net", "c1", "eth0");
        for before in ["", "cni:net/c1/eth0", "my uplink, with spaces"] {
            let port_mark =
                PortMark { attachment_alias: attachment.alias(), addresses: (1, 2), before: before.to_owned() };
            assert_eq!(PortMark::parse(&port_mark.alias()), Some(port_mark.clone()));
            assert!(port_mark.belongs_to(&attachment));
        }
        assert_eq!(PortMark::parse("cni:net/c1/eth0"), None);
        assert_eq!(
            AttachmentId::parse(
                &PortMark { attachment_alias: attachment.alias(), addresses: (0, 0), before: String::new() }.alias()
            ),
            None
        );
    }
}
