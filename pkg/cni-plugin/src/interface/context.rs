//! Both sides of an attachment, and whose it is.

use std::rc::Rc;

use cni::AttachmentId;
use cni::Result;
use cni::result::{AddResult, Interface};
use cni::skel::Call;
use cni_linux::{Mac, Netlink, Netns};

/// Both sides of an attachment, for one ADD or CHECK.
#[derive(Debug)]
pub struct AttachmentContext<'a, C> {
    /// The call.
    pub call: &'a Call<'a>,
    /// The plugin's configuration.
    pub conf: C,
    /// The attachment's mark.
    pub mark: AttachmentId,
    /// The container's network namespace.
    pub netns: Netns,
    /// The connection to the host's links.
    pub host: Rc<Netlink>,
    /// The connection to the container's.
    pub container: Netlink,
    /// The result of an earlier plugin whose interface this one uses.
    pub earlier: Option<AddResult>,
}

impl<'a, C> AttachmentContext<'a, C> {
    pub(super) fn open(call: &'a Call<'_>, conf: C, earlier: Option<AddResult>) -> Result<AttachmentContext<'a, C>> {
        let netns = Netns::open(call.netns()?)?;
        let host = Rc::new(Netlink::open()?);
        let container = host.open_in(&netns)?;
        Ok(AttachmentContext { call, conf, mark: call.attachment(), netns, host, container, earlier })
    }

    /// CNI_IFNAME as a result lists it.
    pub fn container_interface(&self, mac: Mac) -> Interface {
        Interface { sandbox: self.call.sandbox().to_owned(), ..host_interface(&self.call.ifname, Some(mac)) }
    }
}

/// An interface of the host as a result lists it.
pub fn host_interface(name: &str, mac: Option<Mac>) -> Interface {
    Interface { name: name.to_owned(), mac: mac.map(|mac| mac.to_string()).unwrap_or_default(), ..Interface::default() }
}
