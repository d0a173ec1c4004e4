//! `bridge`: connects a container to a Linux bridge, with addresses from an IPAM plugin and, if
//! configured, the bridge as its gateway.
//!
//! `conf` reads the configuration. `device` finds or creates the bridge, `port` sets flags, VLANs
//! and spoof rules of the port, `gateway` adds the gateways' addresses to the bridge. `add` uses
//! them for ADD, `add::chained` for ADD after a plugin that created the interface (*chained use*).
//! `record` reads which ports CNI plugins created. `check` implements CHECK.
//! [`cni_plugin::interface`] does the rest.
//!
//! Other networks and programs may share the bridge, so ADD's rollback, DEL and GC never undo the
//! bridge, its gateway addresses or the forwarding sysctls. They only remove what has this
//! attachment's *mark*, which for a link is its alias.

mod add;
mod check;
mod conf;
mod device;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod gateway;
mod port;
mod record;

use cni::AttachmentId;
use cni::config::{NetConf, ValidAttachments};
use cni::json::Json;
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::skel::{Call, RestoreMode};
use cni::{Code, Error, Result};
use cni_firewall::spoof::SpoofCheck;
use cni_linux::{Link, Netlink, Watch};
use cni_plugin::interface::{
    AttachmentContext, Check, CreatedLink, HostEnd, HostState, Interface, Layer3, Layer3Policy, LinkState,
};

pub use conf::DEFAULT_BRIDGE;

use add::{AttachedPort, chained};
use conf::{Conf, Keys};

/// The plugin.
#[derive(Clone, Copy, Debug)]
pub struct Bridge;

impl Interface for Bridge {
    type Keys = Keys;
    type Conf = Conf;
    type Link = AttachedPort;

    const NAME: &'static str = "bridge";
    const KIND: &'static str = "veth";
    /// In the result, the bridge is listed before the host's end of the veth pair.
    const HOST_END: HostEnd = HostEnd::Veth { listed_after: 1 };

    fn parse(&self, conf: &NetConf, args: &str) -> Result<Conf> {
        Conf::new(conf, args)
    }

    /// Returns what the configuration requires for addresses and routes.
    fn layer3<'c>(&self, conf: &'c Conf) -> Layer3Policy<'c> {
        Layer3Policy {
            masquerade: conf.masquerade.as_ref(),
            gateway: conf.gateway,
            dad: conf.dad,
            state: if conf.container_down { LinkState::Down } else { LinkState::Up },
            ..Layer3Policy::default()
        }
    }

    fn find_adopted(&self, call: &Call<'_>) -> Result<Option<AddResult>> {
        chained::find_adopted(call)
    }

    /// Attaches the container to the bridge with a new veth pair or, in chained use, with the
    /// earlier plugin's interface.
    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<AttachedPort>> {
        match &context.adopted {
            Some(earlier) => chained::plug_in(context, earlier, rollback),
            None => add::create(context, rollback),
        }
    }

    /// Adds the gateways' addresses to the bridge. In chained use, first records in the port's mark
    /// which addresses this plugin has added.
    fn configure_host<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        created: &mut CreatedLink<AttachedPort>,
        layer3: &Layer3,
        rollback: &mut Rollback<'a>,
    ) -> Result<HostState> {
        if context.adopted.is_some() {
            chained::record_addresses(context, created, layer3, rollback)?;
        }
        gateway::add_gateways(context, created, layer3, rollback)
    }

    /// Waits until the port, the gateway's link and the container's end pass frames.
    fn wait_for_frames(
        &self,
        context: &AttachmentContext<'_, Conf>,
        created: &CreatedLink<AttachedPort>,
        watch: &Watch,
    ) -> Result<()> {
        add::wait_for_frames(context, created, watch)
    }

    /// Updates the bridge's entry in the result, because the MAC is only final now. In chained use,
    /// adds the entry if the earlier plugins have not listed the bridge.
    fn finish(&self, context: &AttachmentContext<'_, Conf>, created: &mut CreatedLink<AttachedPort>) -> Result<()> {
        let bridge = &created.link.bridge;
        let interfaces = &mut created.result.interfaces;
        if context.adopted.is_none() {
            // `add::create` has listed the bridge first.
            interfaces[0] = device::interface(&context.host, bridge)?;
        } else if !interfaces.iter().any(|interface| interface.name == bridge.name && interface.sandbox.is_empty()) {
            // At the end, because addresses refer to interfaces by their index.
            interfaces.push(device::interface(&context.host, bridge)?);
        }
        Ok(())
    }

    fn check(&self, check: &Check<'_, Conf>) -> Result<()> {
        check::check(check)
    }

    /// Whether `outer`, the host's end of an interface without a mark, is a port of the configured
    /// bridge, or of the default bridge if the configuration has no readable name. Such an
    /// interface counts as the Go plugin's, which sets no marks.
    fn owns_unmarked(&self, call: &Call<'_>, host: &Netlink, outer: Option<&Link>) -> Result<bool> {
        let Some(master) = outer.and_then(|outer| outer.master) else { return Ok(false) };
        let configured = call.conf.json().get("bridge").and_then(Json::as_str).filter(|name| !name.is_empty());
        let bridge = host.find_link(configured.unwrap_or(DEFAULT_BRIDGE))?;
        Ok(bridge.is_some_and(|bridge| bridge.index == master))
    }

    /// Removes the attachment's spoof rules. If they belong to another attachment, leaves them and
    /// prints a note.
    ///
    /// Done even without `macspoofchk`, because the configuration may have had the key at ADD. Done
    /// after the link is deleted, so that the container's last frames are still checked.
    fn clean(&self, call: &Call<'_>, attachment: &AttachmentId) -> Result<()> {
        if let Some(owner) = SpoofCheck::open()?.purge(attachment)? {
            call.notes.note(format_args!("spoof rules were not removed: they belong to {owner}"));
        }
        Ok(())
    }

    /// Removes the spoof rules of the network's attachments that are not in `valid`.
    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        Ok(SpoofCheck::open()?.gc(call.conf.name(), valid)?)
    }

    /// Checks that the kernel and the bridge, if it exists, support what the configuration
    /// requires.
    fn ready(&self, call: &Call<'_>, conf: &Conf) -> Result<()> {
        let not_available = |error: Error| error.with_code(Code::NOT_AVAILABLE);
        let host = Netlink::open().map_err(|error| not_available(error.into()))?;
        let mut filters_vlans = false;
        if let Some(link) = host.find_link(&conf.bridge).map_err(|error| not_available(error.into()))? {
            let Some(bridge) = &link.bridge else {
                let msg = format!("{:?} already exists but is not a bridge", conf.bridge);
                return Err(Error::new(Code::NOT_AVAILABLE, msg));
            };
            filters_vlans = bridge.vlan_filtering;
            if conf.vlans.is_some() && !filters_vlans {
                device::check_foreign_ports(&host, &link).map_err(not_available)?;
            }
        }
        // A bridge that filters VLANs shows that the kernel supports VLAN filtering.
        if !filters_vlans {
            device::check_vlan_filtering(call, conf)?;
        }
        if conf.spoof_check {
            SpoofCheck::open()
                .and_then(|mut spoof| spoof.probe())
                .map_err(|error| not_available(Error::from(error).context("\"macspoofchk\": true")))?;
        }
        Ok(())
    }

    fn restore_rules<'a>(&self, call: &'a Call<'_>, mode: RestoreMode<'_, 'a>) -> Result<Option<Vec<String>>> {
        check::restore_rules(&Check::open(self, call)?, mode)
    }
}
