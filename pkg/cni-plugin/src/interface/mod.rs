//! Plugins that create an interface.
//!
//! bridge, ptp, dummy and similar plugins differ only in how they create their link. Each of them
//! implements [`Interface`] with the steps that are special to its link, and [`InterfacePlugin`]
//! turns that into a complete [`Plugin`]. The modules `add`, `check`, `del` and `gc`
//! implement the verbs and call the plugin's steps. `layer3` configures addresses and routes,
//! `masquerade` the rules for packets that leave the network. `veth` creates a pair with one end on
//! the host, `stacked` an interface on top of another one. `adopted` marks an interface that an
//! earlier plugin of the list created, `borrowed` records one of the host that the container gets
//! until DEL. `conf` reads the keys that all plugins have, `advertisements` writes the sysctls
//! about IPv6 routers.
//!
//! ADD calls the steps in this order: [`parse`](Interface::parse),
//! [`find_adopted`](Interface::find_adopted), [`create`](Interface::create), then the ADD of the
//! IPAM plugin, if there is one. If the interface gets addresses,
//! [`configure_host`](Interface::configure_host) follows. Once the interface is up,
//! [`wait_for_frames`](Interface::wait_for_frames) if the link has an end on the host. The last
//! step is [`finish`](Interface::finish).

mod add;
mod adopted;
mod advertisements;
mod borrowed;
mod check;
mod conf;
mod context;
mod del;
mod gc;
mod layer3;
mod masquerade;
pub mod stacked;
pub mod veth;

use std::net::IpAddr;

use cni::AttachmentId;
use cni::config::{NetConf, ValidAttachments};
use cni::delegate::Delegate;
use cni::json::{Json, UnknownKey};
use cni::result::{AddResult, IpConfig};
use cni::rollback::{Notes, Rollback};
use cni::skel::{Added, Call, Plugin, RestoreMode, Role, Verb};
use cni::{Cidr, Code, Error, Result};
use cni_linux::{Dad, Link, Mac, Netlink, Netns, Watch};
use serde::de::DeserializeOwned;

use crate::keys::MasqueradeScope;

use advertisements::AcceptRa;
use conf::CommonConf;

pub use adopted::{PortMark, give_back, purge_addresses, restore_alias};
pub use borrowed::{BorrowedLink, Return, ensure_free};
pub use check::{Check, check_forwarding, disabled_forwarding, failed};
pub use context::{AttachmentContext, host_interface};
pub use gc::gc_links;
pub use layer3::{Layer3, SCOPE_LINK, forwarding_sysctl, kernel_route, merge_conflicting};

/// The parts of an interface plugin that are special to its link.
pub trait Interface {
    /// The plugin's keys as the JSON has them. `cnitool validate` reports each key that this type
    /// does not have as unknown.
    type Keys: DeserializeOwned;
    /// The checked configuration: after [`parse`](Interface::parse) nothing is validated again.
    type Conf;
    /// The plugin's own data about its link between the steps of one ADD; `()` if it has none.
    type Link;

    /// The name of the binary.
    const NAME: &'static str;
    /// The kind of link that CNI_IFNAME is, as the kernel names it, for example `veth`.
    const KIND: &'static str;
    /// Whether the link has an end on the host.
    const HOST_END: HostEnd;
    /// The text that ADD puts before an error of the IPAM plugin, as Go's plugin of this name does.
    const LEASE_CONTEXT: Option<&'static str> = None;
    /// When DEL and a failed ADD give the addresses back to IPAM. Not used for the IPAM plugin
    /// dhcp, see [`Release::BeforeLink`].
    const RELEASE: Release = Release::AfterLink;

    /// Parses and checks the plugin's keys. `args` is CNI_ARGS. The caller reads the keys that all
    /// interface plugins have: `ipam.type`, `dns`, `runtimeConfig.dns`, `acceptRa`, `enableSlaac`.
    ///
    /// # Errors
    /// Code 4 for CNI_ARGS, 6 and 7 for the configuration, with the Go plugin's texts where it has
    /// them.
    fn parse(&self, conf: &NetConf, args: &str) -> Result<Self::Conf>;

    /// Returns the configuration's policy for addresses and routes.
    fn layer3<'c>(&self, _conf: &'c Self::Conf) -> Layer3Policy<'c> {
        Layer3Policy::default()
    }

    /// Whether the container gets a kernel interface. If not, a program drives the device itself
    /// (DPDK), and ADD configures nothing: it only reports IPAM's answer in the result.
    ///
    /// # Errors
    /// The device cannot be found.
    fn is_in_kernel(&self, _conf: &Self::Conf) -> Result<bool> {
        Ok(true)
    }

    /// Whether a link is of the kind that this plugin creates.
    fn is_kind(&self, link: &Link) -> bool {
        link.kind.to_string() == Self::KIND
    }

    /// Creates the link, down, under the name CNI_IFNAME in the container. The caller has checked
    /// that the name is free. With [`AttachmentContext::adopted`], uses the existing interface
    /// instead. An implementation registers an undo on `rollback` before each change, except to
    /// shared links such as a bridge. If it fails, it need not clean up: the caller runs the undos.
    ///
    /// # Errors
    /// Those of the plugin and of the kernel.
    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Self::Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<Self::Link>>;

    /// Configures the host for the container's addresses (routes, the gateway's address), before
    /// the container gets them.
    ///
    /// # Errors
    /// The kernel refuses a change.
    fn configure_host<'a>(
        &self,
        _context: &AttachmentContext<'a, Self::Conf>,
        _created: &mut CreatedLink<Self::Link>,
        _layer3: &Layer3,
        _rollback: &mut Rollback<'a>,
    ) -> Result<HostState> {
        Ok(HostState::default())
    }

    /// Waits until frames pass between host and container. Called after the container's interface
    /// was set up, if the link has an end on the host. `watch` receives the host's link events; it
    /// was opened before the interface was set up, so no event is missed.
    ///
    /// # Errors
    /// Those of the kernel; code 11 at the deadline.
    fn wait_for_frames(
        &self,
        _context: &AttachmentContext<'_, Self::Conf>,
        _created: &CreatedLink<Self::Link>,
        _watch: &Watch,
    ) -> Result<()> {
        Ok(())
    }

    /// Completes the result after everything is configured.
    ///
    /// # Errors
    /// Those of the kernel.
    fn finish(
        &self,
        _context: &AttachmentContext<'_, Self::Conf>,
        _created: &mut CreatedLink<Self::Link>,
    ) -> Result<()> {
        Ok(())
    }

    /// Returns the result of the earlier plugin whose interface this plugin uses instead of
    /// creating one. [`create`](Interface::create) then finds that result in
    /// [`AttachmentContext::adopted`]. Returns `None` if this plugin creates its own interface.
    ///
    /// # Errors
    /// `prevResult` names the interface, but cannot be decoded.
    fn find_adopted(&self, _call: &Call<'_>) -> Result<Option<AddResult>> {
        Ok(None)
    }

    /// CHECK: compares the attachment with `prevResult` and the configuration. The caller has
    /// checked the kind of CNI_IFNAME and has run the IPAM plugin's CHECK. A plugin that overrides
    /// this method must call those steps of the default that apply to its link.
    ///
    /// # Errors
    /// Code 101 for the first difference.
    fn check(&self, check: &Check<'_, Self::Conf>) -> Result<()> {
        check.compare_interface()?;
        check.compare_layer3()?;
        check.compare_masquerade(&check.layer3.ips)?;
        check.wait_for_dad(check.settle_deadline())
    }

    /// Whether DEL removes CNI_IFNAME although neither an alias nor `prevResult` names the
    /// attachment that it belongs to. CNI_IFNAME is of this plugin's kind; `outer` is its end on
    /// the host.
    ///
    /// The default is `true` if CNI_NETNS exists and is not the host's own namespace: interfaces of
    /// the Go plugins have no alias, and before specification 0.4.0 DEL gets no `prevResult`.
    ///
    /// # Errors
    /// Those of the kernel.
    fn owns_unmarked(&self, call: &Call<'_>, _host: &Netlink, _outer: Option<&Link>) -> Result<bool> {
        let Some(path) = call.netns.as_deref() else { return Ok(false) };
        // A path that cannot be examined is treated like the host's namespace: nothing is removed.
        let is_host_netns = call.machine.is_own_netns(path).unwrap_or(true);
        Ok(!is_host_netns)
    }

    /// DEL: returns whether `inner`, which is CNI_IFNAME, belongs to this attachment. `None` leaves
    /// the decision to the caller, which looks at the alias, the kind of `inner` and `prevResult`,
    /// and finally asks [`owns_unmarked`](Interface::owns_unmarked).
    fn claims(&self, _call: &Call<'_>, _prev: Option<&AddResult>, _inner: &Link) -> Option<bool> {
        None
    }

    /// DEL: removes the attachment's interface in `netns`, the container's namespace, if a record
    /// on the host identifies it. Returns whether there is such a record; without one, the caller
    /// looks for CNI_IFNAME.
    ///
    /// # Errors
    /// Those of the kernel, and of the record.
    fn remove_recorded(&self, _call: &Call<'_>, _container: &Netlink, _netns: &Netns) -> Result<bool> {
        Ok(false)
    }

    /// DEL: removes `inner`, which is CNI_IFNAME and belongs to this attachment.
    ///
    /// # Errors
    /// Those of the kernel.
    fn remove(&self, _call: &Call<'_>, container: &Netlink, inner: &Link) -> Result<()> {
        container.purge_link(inner.index)?;
        Ok(())
    }

    /// DEL: removes what the plugin created besides links and masquerade rules. Called after the
    /// links are removed and, with [`Release::AfterLink`], before IPAM releases the addresses.
    ///
    /// # Errors
    /// Something could not be removed.
    fn clean(&self, _call: &Call<'_>, _attachment: &AttachmentId) -> Result<()> {
        Ok(())
    }

    /// GC: removes what the plugin created, besides links and masquerade rules, for attachments
    /// that are not in `valid`.
    ///
    /// # Errors
    /// Something could not be removed.
    fn gc(&self, _call: &Call<'_>, _valid: &ValidAttachments) -> Result<()> {
        Ok(())
    }

    /// STATUS: checks that the next ADD can create its link.
    ///
    /// # Errors
    /// The kernel or the host lacks something that ADD needs.
    fn ready(&self, _call: &Call<'_>, _conf: &Self::Conf) -> Result<()> {
        Ok(())
    }

    /// Writes the attachment's missing packet filter rules again; see [`Plugin::restore_rules`].
    ///
    /// # Errors
    /// Those of [`Plugin::restore_rules`].
    fn restore_rules<'a>(&self, _call: &'a Call<'_>, _mode: RestoreMode<'_, 'a>) -> Result<Option<Vec<String>>> {
        Ok(None)
    }
}

/// The end of an interface plugin's link that is on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEnd {
    /// The whole link is in the container, and so is its alias, which names the
    /// [attachment](AttachmentId).
    None,
    /// One end of a veth pair is on the host, with the alias that names the attachment.
    Veth {
        /// The number of other interfaces of the host that the result lists before this end.
        listed_after: usize,
    },
}

/// When the addresses are given back to IPAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// After the link is removed, so that no interface has a released address.
    AfterLink,
    /// Before the link is removed, because the link may stay, or because the IPAM plugin (dhcp)
    /// sends its release over the link.
    BeforeLink,
}

impl Release {
    /// Returns when this call releases its addresses: [`BeforeLink`](Release::BeforeLink) with the
    /// IPAM plugin dhcp, else [`Interface::RELEASE`].
    fn order<I: Interface>(call: &Call<'_>) -> Release {
        if call.conf.ipam_type() == "dhcp" { Release::BeforeLink } else { I::RELEASE }
    }
}

/// A configuration's policy for addresses and routes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layer3Policy<'c> {
    /// The earlier plugin's result whose addresses and routes the interface gets if there is no
    /// IPAM plugin.
    pub inherited: Option<&'c AddResult>,
    /// The packets that get the host's address as their source, if any.
    pub masquerade: Option<&'c MasqueradeScope>,
    /// What ADD does with the gateways in IPAM's answer.
    pub gateway: Gateway,
    /// How the container reaches its own subnet.
    pub subnet: SubnetRoute,
    /// Whether duplicate address detection runs in the container.
    pub dad: Dad,
    /// The state in which ADD leaves an interface without addresses. With [`LinkState::Up`], CHECK
    /// expects every interface to be up.
    pub state: LinkState,
}

/// What ADD does with the gateways in IPAM's answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gateway {
    /// Uses them unchanged. An address may have no gateway.
    #[default]
    None,
    /// Gives an address without a gateway the first address of its network as the gateway.
    Address,
    /// As `Address`, and adds a default route through the gateway.
    DefaultRoute,
    /// Refuses an address without a gateway.
    Required,
}

/// How the container reaches its own subnet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SubnetRoute {
    /// Directly over the link, by the route that the kernel adds with the address.
    #[default]
    OnLink,
    /// Through the gateway, which is the only host on the link.
    ThroughGateway,
}

/// The state of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkState {
    /// The interface sends and receives frames.
    #[default]
    Up,
    /// The interface neither sends nor receives frames.
    Down,
}

/// A link that [`Interface::create`] has created.
#[derive(Debug)]
pub struct CreatedLink<L> {
    /// The index of CNI_IFNAME in the container; 0 if the kernel has no such link.
    pub index: u32,
    /// The hardware address of CNI_IFNAME; zero if it has no Ethernet address.
    pub mac: Mac,
    /// The result so far: the interfaces, and the content of an earlier plugin's result.
    pub result: AddResult,
    /// The position of CNI_IFNAME in `result.interfaces`.
    pub interface_position: usize,
    /// The plugin's own data about the link.
    pub link: L,
}

/// What [`Interface::configure_host`] has configured on the host.
#[derive(Debug, Default)]
pub struct HostState {
    /// The addresses that the host has for this container, for example the gateway's. ADD waits
    /// until they are usable, except with [`Dad::Normal`].
    pub added: Vec<IpAddr>,
    /// The index of the host's link whose neighbour entries for the container's addresses may still
    /// have the MAC of an earlier container; `None` if there is no such link.
    pub neighbours_on: Option<u32>,
}

/// Makes a [`Plugin`] of an [`Interface`].
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
        let parsed = self.0.parse(conf, "")?;
        CommonConf::read(conf, &self.0.layer3(&parsed), &Notes::silent())?;
        match conf.ipam_type() {
            "" => Ok(()),
            // The value is not used here: only an invalid `delegateTimeout` matters.
            _ => cni::delegate::timeout(conf).map(drop),
        }
    }

    /// Returns for each answer the error with which ADD would reject it, or `None` if ADD would
    /// accept it. `earlier` has the addresses that earlier plugins gave to the container.
    fn examine_answers(&self, conf: &NetConf, answers: &[AddResult], earlier: &[Cidr]) -> Result<Vec<Option<Error>>> {
        let mut earlier_ips = Vec::new();
        for address in earlier {
            earlier_ips.push(IpConfig { interface: None, address: *address, gateway: None });
        }
        let parsed = self.0.parse(conf, "")?;
        let policy = self.0.layer3(&parsed);
        // Whether an answer is accepted does not depend on the position of CNI_IFNAME.
        let position = 0;
        Ok(answers.iter().map(|answer| Layer3::new(answer, &policy, position, &earlier_ips).err()).collect())
    }

    /// Returns the keys that neither `I::Keys` nor the keys of all interface plugins have, except
    /// `delegateTimeout`, which [`cni::delegate`] reads, and the keys in `ipam` and `args`, which
    /// are for other programs.
    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        let mut unknown = conf::unknown_keys::<I::Keys>(json);
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
        del::del(&self.0, call)
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        gc::gc(&self.0, call, valid)
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        let conf = self.0.parse(&call.conf, &call.environment.args)?;
        self.0.ready(call, &conf)?;
        let policy = self.0.layer3(&conf);
        CommonConf::read(&call.conf, &policy, &call.notes)?;
        masquerade::status(call, policy.masquerade)?;
        match Delegate::find_ipam(call).map_err(|error| error.with_code(Code::NOT_AVAILABLE))? {
            Some(ipam) => ipam.call(Verb::Status),
            None => Ok(()),
        }
    }

    fn restore_rules<'a>(&self, call: &'a Call<'_>, mode: RestoreMode<'_, 'a>) -> Result<Option<Vec<String>>> {
        self.0.restore_rules(call, mode)
    }
}

/// Returns the error, code 102, of an ADD whose CNI_IFNAME exists already. For a veth, the text is
/// the Go plugin's.
pub fn name_taken<I: Interface>(attachment: &AttachmentId) -> Error {
    match I::HOST_END {
        HostEnd::Veth { .. } => veth::name_taken(&attachment.ifname, &attachment.host_name(0)),
        HostEnd::None => ifname_taken(&attachment.ifname),
    }
}

/// Returns the error, code 102, of an ADD whose CNI_IFNAME exists already, for a link that has no
/// end on the host.
fn ifname_taken(ifname: &str) -> Error {
    Error::new(Code::CONFLICT, format!("interface {ifname:?} already exists in the container")).with_details(UNTOUCHED)
}

/// The details of the error of an ADD whose CNI_IFNAME exists already.
const UNTOUCHED: &str = "the interface was left untouched";
