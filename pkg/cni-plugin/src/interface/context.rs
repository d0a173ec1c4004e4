//! The attachment that a verb works on: the call, the configuration, both namespaces.

use std::rc::Rc;

use cni::AttachmentId;
use cni::Result;
use cni::result::{AddResult, Interface};
use cni::skel::Call;
use cni_linux::{Mac, Netlink, Netns};

/// What one ADD or CHECK needs to know about its attachment.
#[derive(Debug)]
pub struct AttachmentContext<'a, C> {
    /// The call.
    pub call: &'a Call<'a>,
    /// The plugin's configuration.
    pub conf: C,
    /// The attachment, whose links carry it as their alias.
    pub attachment: AttachmentId,
    /// The container's network namespace.
    pub netns: Netns,
    /// The netlink socket in the host's namespace.
    pub host: Rc<Netlink>,
    /// The netlink socket in the container's namespace.
    pub container: Netlink,
    /// The result of the earlier plugin whose interface this plugin uses, or `None` if this plugin
    /// creates the interface. See [`Interface::find_adopted`](super::Interface::find_adopted).
    pub adopted: Option<AddResult>,
}

impl<'a, C> AttachmentContext<'a, C> {
    /// Opens the namespace CNI_NETNS, and a netlink socket in each of the two namespaces: the
    /// host's and the container's.
    ///
    /// # Errors
    /// - Code 4 without CNI_NETNS.
    /// - The errors of opening the namespace and the sockets.
    pub(super) fn open(call: &'a Call<'_>, conf: C, adopted: Option<AddResult>) -> Result<AttachmentContext<'a, C>> {
        let netns = Netns::open(call.netns()?)?;
        let host = Rc::new(Netlink::open()?);
        let container = host.open_in(&netns)?;
        Ok(AttachmentContext { call, conf, attachment: call.attachment(), netns, host, container, adopted })
    }

    /// Returns CNI_IFNAME, with the hardware address `mac`, as an entry of the result's
    /// `interfaces`.
    pub fn container_interface(&self, mac: Mac) -> Interface {
        Interface { sandbox: self.call.sandbox().to_owned(), ..host_interface(&self.call.ifname, Some(mac)) }
    }
}

/// Returns an interface of the host as an entry of the result's `interfaces`.
pub fn host_interface(name: &str, mac: Option<Mac>) -> Interface {
    Interface { name: name.to_owned(), mac: mac.map(|mac| mac.to_string()).unwrap_or_default(), ..Interface::default() }
}
