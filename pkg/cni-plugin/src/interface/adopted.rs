//! An interface that an earlier plugin of the list created and this one uses.
//!
//! It gets a mark of its own kind, and DEL gives it back instead of deleting it.

use cni::AttachmentId;
use cni::Cidr;
use cni_linux::{Link, Netlink};

/// The alias of a host's end that another plugin made: `cni-port:<mark> <first>+<count> <alias it
/// had before>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortMark {
    /// The mark it would have if we had made it.
    pub mark: String,
    /// Which of the result's addresses are ours: the first one's place, and how many. The earlier
    /// plugin's stay.
    pub addresses: (usize, usize),
    /// The alias to put back.
    pub before: String,
}

impl PortMark {
    /// Reads an alias. `None` if it is not one of this kind.
    pub fn parse(alias: &str) -> Option<PortMark> {
        let mut parts = alias.strip_prefix("cni-port:")?.splitn(3, ' ');
        let (mark, addresses, before) = (parts.next()?, parts.next()?, parts.next()?);
        let (first, count) = addresses.split_once('+')?;
        let addresses = (first.parse().ok()?, count.parse().ok()?);
        Some(PortMark { mark: mark.to_owned(), addresses, before: before.to_owned() })
    }

    /// Reads a link's alias.
    pub fn of(link: &Link) -> Option<PortMark> {
        link.alias.as_deref().and_then(PortMark::parse)
    }

    /// The text.
    pub fn alias(&self) -> String {
        let (first, count) = self.addresses;
        format!("cni-port:{} {first}+{count} {}", self.mark, self.before)
    }

    /// Whether the port was given to the bridge by this attachment.
    pub fn belongs_to(&self, mark: &AttachmentId) -> bool {
        self.mark == mark.alias()
    }
}

/// Takes addresses off an interface. What is not there is fine.
///
/// # Errors
/// The first that the kernel refused, after all have been tried.
pub fn purge_addresses(netlink: &Netlink, index: u32, addresses: &[Cidr]) -> cni_linux::Result<()> {
    let mut first = Ok(());
    for address in addresses {
        match netlink.delete_address(index, *address) {
            Err(error) if !error.is_not_found() && first.is_ok() => first = Err(error),
            _ => {}
        }
    }
    first
}

/// Takes a marked link off its bridge and gives it its alias back.
///
/// # Errors
/// The kernel's.
pub fn give_back(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    if PortMark::of(link).is_none() {
        return Ok(());
    }
    take_off(host, link)?;
    restore_alias(host, link)
}

/// Gives a marked link its alias back.
///
/// # Errors
/// The kernel's.
pub fn restore_alias(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    match PortMark::of(link) {
        Some(port_mark) => host.set_alias(link.index, &port_mark.before),
        None => Ok(()),
    }
}

/// Takes a marked link off its bridge. It stays marked.
pub(super) fn take_off(host: &Netlink, link: &Link) -> cni_linux::Result<()> {
    if link.master.is_some() { host.unset_master(link.index) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_mark_keeps_the_alias_it_covers() {
        let mark = AttachmentId::new("net", "c1", "eth0");
        for before in ["", "cni:net/c1/eth0", "my uplink, with spaces"] {
            let port_mark = PortMark { mark: mark.alias(), addresses: (1, 2), before: before.to_owned() };
            assert_eq!(PortMark::parse(&port_mark.alias()), Some(port_mark.clone()));
            assert!(port_mark.belongs_to(&mark));
        }
        assert_eq!(PortMark::parse("cni:net/c1/eth0"), None);
        assert_eq!(
            AttachmentId::parse(&PortMark { mark: mark.alias(), addresses: (0, 0), before: String::new() }.alias()),
            None
        );
    }
}
