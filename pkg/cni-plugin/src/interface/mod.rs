//! Plugins that create an interface.
//!
//! bridge, ptp, dummy and their like differ in how their link comes to be; everything around the
//! link is the same. A plugin implements [`Interface`], which says what is special about its link,
//! and [`InterfacePlugin`] makes a whole [`Plugin`] of it: `add`, `check`, `delete` (DEL) and
//! `collect` (GC) are the verbs, in each of which the plugin's own steps are called; `layer3`
//! configures addresses and routes, `masquerade` the rules for what leaves the network, `veth`
//! creates a pair with one end on the host, `stacked` an interface on top of another one, `adopted`
//! marks an interface that an earlier plugin of the list created.
//!
//! ADD calls the steps in this order: [`parse`](Interface::parse), [`create`](Interface::create),
//! then, if there is an IPAM plugin, its ADD and [`serve`](Interface::serve), and once the
//! interface is up [`wait_for_frames`](Interface::wait_for_frames) and
//! [`finish`](Interface::finish).

mod add;
mod adopted;
mod check;
mod collect;
mod context;
mod delete;
mod layer3;
mod masquerade;
pub mod stacked;
pub mod veth;

use std::net::IpAddr;

use cni::AttachmentId;
use cni::config::{NetConf, ValidAttachments};
use cni::delegate::Delegate;
use cni::json::{Json, UnknownKey};
use cni::result::{AddResult, Dns, IpConfig};
use cni::rollback::{Notes, Rollback};
use cni::skel::{Added, Call, Plugin, RestoreMode, Restored, Role};
use cni::{Cidr, Code, Error, Result};
use cni_linux::{Dad, Link, Mac, Netlink, Watch};
use serde::de::DeserializeOwned;

use crate::keys::Masquerading;

pub use adopted::{PortMark, give_back, purge_addresses, restore_alias};
pub use check::{Check, failed};
pub use collect::collect_links;
pub use context::{AttachmentContext, host_interface};
pub use layer3::{Layer3, forwarding};

/// The parts of an interface plugin that are special to its link.
pub trait Interface {
    /// The plugin's keys as they stand in the JSON. Keys that this type does not have are unknown
    /// to `cnitool validate`.
    type Keys: DeserializeOwned;
    /// The configuration, sound: after [`parse`](Interface::parse) nothing is validated again.
    type Conf;
    /// The plugin's own data about its link between the steps of one ADD; `()` if it has none.
    type Link;

    /// The name of the binary.
    const NAME: &'static str;
    /// The kind of CNI_IFNAME, as the kernel names it.
    const KIND: &'static str;
    /// The link's end on the host.
    const HOST_END: HostEnd;
    /// The text that ADD puts before an error of the IPAM plugin, as Go's plugin of this name does.
    const LEASE_CONTEXT: Option<&'static str> = None;
    /// When DEL gives the address back.
    const RELEASE: Release = Release::AfterLink;

    /// Reads the configuration. `args` is CNI_ARGS; what is ignored goes to `notes`.
    ///
    /// # Errors
    /// 4 for CNI_ARGS, 6 and 7 for the configuration, with Go's texts where it has them.
    fn parse(&self, conf: &NetConf, args: &str, notes: &Notes) -> Result<Self::Conf>;

    /// Returns the configuration's policy for addresses, routes and name resolution.
    fn layer3<'c>(&self, conf: &'c Self::Conf) -> Layer3Policy<'c>;

    /// Whether the container gets a link. Otherwise a program drives the device (DPDK): what IPAM
    /// answers is only reported.
    ///
    /// # Errors
    /// The device cannot be found.
    fn is_in_kernel(&self, _conf: &Self::Conf) -> Result<bool> {
        Ok(true)
    }

    /// Whether a link can be one of this plugin's.
    fn is_kind(&self, link: &Link) -> bool {
        link.kind.to_string() == Self::KIND
    }

    /// Creates the link, down, with CNI_IFNAME as its name in the container. The name is free.
    ///
    /// # Errors
    /// The plugin's and the kernel's. Each effect is behind its undo on `rollback`, so nothing
    /// needs cleaning here.
    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Self::Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<Self::Link>>;

    /// Sets up what the host does for the addresses, before the container gets them.
    ///
    /// # Errors
    /// The kernel's.
    fn serve<'a>(
        &self,
        _context: &AttachmentContext<'a, Self::Conf>,
        _created: &mut CreatedLink<Self::Link>,
        _layer3: &Layer3,
        _rollback: &mut Rollback<'a>,
    ) -> Result<HostState> {
        Ok(HostState::default())
    }

    /// Waits until frames pass between host and container, whose interface has just been set up.
    /// Called for a link with an end on the host. `watch` listens to the host, since before the
    /// interface was up.
    ///
    /// # Errors
    /// The kernel's; code 11 at the deadline.
    fn wait_for_frames(
        &self,
        _context: &AttachmentContext<'_, Self::Conf>,
        _created: &CreatedLink<Self::Link>,
        _watch: &Watch,
    ) -> Result<()> {
        Ok(())
    }

    /// Completes the result, once everything is configured.
    ///
    /// # Errors
    /// The kernel's.
    fn finish(
        &self,
        _context: &AttachmentContext<'_, Self::Conf>,
        _created: &mut CreatedLink<Self::Link>,
    ) -> Result<()> {
        Ok(())
    }

    /// Returns an earlier plugin's result, if this plugin is to use that one's interface instead of
    /// creating its own: then [`create`](Interface::create) finds it in
    /// [`AttachmentContext::earlier`].
    ///
    /// # Errors
    /// A `prevResult` that is meant and cannot be read.
    fn earlier(&self, _call: &Call<'_>) -> Result<Option<AddResult>> {
        Ok(None)
    }

    /// CHECK: compares the attachment with `prevResult` and the configuration. The kind of
    /// CNI_IFNAME and IPAM have been checked. An implementation replaces the steps of the default,
    /// so it calls those that apply to its link.
    ///
    /// # Errors
    /// Code 101 for what differs.
    fn check(&self, check: &Check<'_, Self::Conf>) -> Result<()> {
        check.interface()?;
        check.layer3()?;
        check.masquerade(&check.layer3.ips)?;
        check.wait_for_dad(check.dad_deadline())
    }

    /// Whether DEL removes CNI_IFNAME, a link of this plugin's kind that neither a mark nor
    /// `prevResult` identifies. `outer` is its end on the host.
    ///
    /// The default is yes in a namespace of the container's own: the Go plugins leave nothing but
    /// the name on an interface, and before specification 0.4.0 DEL gets no result.
    ///
    /// # Errors
    /// The kernel's.
    fn owns_unmarked(&self, call: &Call<'_>, _host: &Netlink, _outer: Option<&Link>) -> Result<bool> {
        Ok(call.netns.as_deref().is_some_and(|path| call.machine.is_own_netns(path).is_ok_and(|own| !own)))
    }

    /// DEL: says whose `inner`, which is CNI_IFNAME, is; `None` lets kind, mark and `prevResult`
    /// tell.
    fn claims(&self, _call: &Call<'_>, _prev: Option<&AddResult>, _inner: &Link) -> Option<Ownership> {
        None
    }

    /// DEL: removes CNI_IFNAME, which is this attachment's.
    ///
    /// # Errors
    /// The kernel's.
    fn remove(&self, _call: &Call<'_>, container: &Netlink, inner: &Link) -> Result<()> {
        container.purge_link(inner.index)?;
        Ok(())
    }

    /// DEL: removes what the plugin made besides links and masquerade rules. The links have been
    /// removed, the addresses have not been released yet.
    ///
    /// # Errors
    /// What could not be removed.
    fn clean(&self, _call: &Call<'_>, _mark: &AttachmentId) -> Result<()> {
        Ok(())
    }

    /// GC: removes what the plugin made besides links and masquerade rules for attachments that are
    /// not `valid`.
    ///
    /// # Errors
    /// What could not be removed.
    fn collect(&self, _call: &Call<'_>, _valid: &ValidAttachments) -> Result<()> {
        Ok(())
    }

    /// STATUS: whether the next ADD can create its link.
    ///
    /// # Errors
    /// What the kernel or the host lacks.
    fn ready(&self, _call: &Call<'_>, _conf: &Self::Conf) -> Result<()> {
        Ok(())
    }

    /// Writes the attachment's missing packet filter rules again, as [`Plugin::restore_rules`].
    ///
    /// # Errors
    /// As there.
    fn restore_rules<'a>(&self, _call: &'a Call<'_>, _mode: RestoreMode) -> Result<Option<Restored<'a>>> {
        Ok(None)
    }
}

/// The end of an interface plugin's link that is on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEnd {
    /// None: all of the link is in the container, and its [mark](AttachmentId) too.
    None,
    /// An end of a veth pair, with the mark. The result lists it after this many other interfaces
    /// of the host.
    Veth {
        /// How many.
        listed_after: usize,
    },
}

/// Whether an interface in the container belongs to an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// This attachment's.
    Ours,
    /// Not this attachment's: DEL leaves the interface.
    NotOurs,
}

/// When DEL gives the address back to IPAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Once no link has it any more.
    AfterLink,
    /// At first, because the link may have to stay, or is what the address is given back over.
    BeforeLink,
}

impl Release {
    /// Returns when an attachment's address is released. With dhcp, the release is a message that
    /// leaves over the link.
    fn order<I: Interface>(call: &Call<'_>) -> Release {
        if call.conf.ipam_type() == "dhcp" { Release::BeforeLink } else { I::RELEASE }
    }
}

/// A configuration's policy for addresses, routes and name resolution.
#[derive(Clone, Copy, Debug)]
pub struct Layer3Policy<'c> {
    /// The IPAM plugin; `None` is layer 2 alone.
    pub ipam: Option<&'c str>,
    /// The result of an earlier plugin. Without an IPAM plugin, the interface gets the addresses
    /// and routes of this result.
    pub earlier: Option<&'c AddResult>,
    /// Replaces IPAM's name resolution.
    pub dns: Option<&'c Dns>,
    /// Whether packets that leave the network get the host's address.
    pub masquerade: Masquerading,
    /// The treatment of the gateways in IPAM's answer.
    pub gateway: Gateway,
    /// How the container reaches its own subnet.
    pub subnet: SubnetRoute,
    /// Whether duplicate address detection runs in the container.
    pub dad: Dad,
    /// The state in which ADD leaves an interface without addresses, and CHECK expects any.
    pub state: LinkState,
}

impl Default for Layer3Policy<'_> {
    fn default() -> Self {
        Layer3Policy {
            ipam: None,
            earlier: None,
            dns: None,
            masquerade: Masquerading::Off,
            gateway: Gateway::None,
            subnet: SubnetRoute::OnLink,
            dad: Dad::Skip,
            state: LinkState::Up,
        }
    }
}

/// The treatment of the gateways in IPAM's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gateway {
    /// They stay as they are.
    None,
    /// An address without one gets the first address of its network.
    Address,
    /// And the container's default route goes there.
    DefaultRoute,
    /// An address without one is refused.
    Required,
}

/// How the container reaches its own subnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubnetRoute {
    /// Over the link, by the route that the kernel adds with the address.
    OnLink,
    /// Over the gateway, which alone is on the link.
    ThroughGateway,
}

/// The state of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// Up.
    Up,
    /// Down.
    Down,
}

/// A link that [`Interface::create`] has created.
#[derive(Debug)]
pub struct CreatedLink<L> {
    /// The index of CNI_IFNAME in the container; 0 if the kernel has no such link.
    pub index: u32,
    /// Its hardware address; zero if it has no Ethernet address.
    pub mac: Mac,
    /// The result so far: the interfaces, and what an earlier plugin's result says.
    pub result: AddResult,
    /// The place of CNI_IFNAME in `result.interfaces`.
    pub interface: usize,
    /// The plugin's own data about the link.
    pub link: L,
}

/// The host's part of a container's addresses.
#[derive(Debug, Default)]
pub struct HostState {
    /// The addresses that the host has got for it.
    pub added: Vec<IpAddr>,
    /// The host's link on which the container is a neighbour, if the host may know the addresses as
    /// another's.
    pub neighbours_on: Option<u32>,
}

/// The plugin of an [`Interface`].
#[derive(Clone, Copy, Debug)]
pub struct InterfacePlugin<I>(pub I);

impl<I: Interface> Plugin for InterfacePlugin<I> {
    fn name(&self) -> &'static str {
        I::NAME
    }

    fn role(&self) -> Role {
        Role::Interface
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        let parsed = self.0.parse(conf, "", &Notes::silent())?;
        match self.0.layer3(&parsed).ipam {
            Some(_) => cni::delegate::timeout(conf).map(drop),
            None => Ok(()),
        }
    }

    fn examine_answers(&self, conf: &NetConf, answers: &[AddResult], earlier: &[Cidr]) -> Result<Vec<Option<Error>>> {
        let address = |address: &Cidr| IpConfig { interface: None, address: *address, gateway: None };
        let earlier: Vec<IpConfig> = earlier.iter().map(address).collect();
        let parsed = self.0.parse(conf, "", &Notes::silent())?;
        let policy = self.0.layer3(&parsed);
        Ok(answers.iter().map(|answer| Layer3::new(answer, &policy, 0, &earlier).err()).collect())
    }

    /// The delegation's keys are read where the delegate is run, and the keys in `ipam` and `args`
    /// belong to others.
    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        let mut unknown = json.unknown_keys::<I::Keys>();
        unknown.retain(|key| {
            key.path != "delegateTimeout" && !key.path.starts_with("ipam.") && !key.path.starts_with("args.")
        });
        unknown
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        add::add(&self.0, call)
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        check::check(&self.0, call)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        delete::delete(&self.0, call)
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        collect::collect(&self.0, call, valid)
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = self.0.parse(&call.conf, &call.environment.args, &call.notes)?;
        self.0.ready(call, &conf)?;
        let policy = self.0.layer3(&conf);
        masquerade::status(call, policy.masquerade)?;
        match policy.ipam {
            Some(kind) => Delegate::find(call, kind).map_err(|error| error.with_code(Code::NOT_AVAILABLE))?.status(),
            None => Ok(()),
        }
    }

    fn restore_rules<'a>(&self, call: &'a Call<'_>, mode: RestoreMode) -> Result<Option<Restored<'a>>> {
        self.0.restore_rules(call, mode)
    }
}

/// Returns the error of an ADD whose CNI_IFNAME exists, with Go's text for a veth.
pub fn name_taken<I: Interface>(mark: &AttachmentId) -> Error {
    match I::HOST_END {
        HostEnd::Veth { .. } => veth::name_taken(&mark.ifname, &mark.host_name(0)),
        HostEnd::None => taken(&mark.ifname),
    }
}

/// The same for an interface without an end on the host.
fn taken(ifname: &str) -> Error {
    Error::new(Code::CONFLICT, format!("interface {ifname:?} already exists in the container")).with_details(UNTOUCHED)
}

/// A detail for the operator about an interface whose name was taken.
const UNTOUCHED: &str = "the interface was left untouched";
