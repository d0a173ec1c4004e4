//! The plugin `tap`: creates a tap in the container's network namespace, an Ethernet interface
//! whose frames go to and come from a program, such as a virtual machine.
//!
//! ADD makes the tap persistent as its last step: if ADD is killed earlier, the kernel removes the
//! tap. The exception is a tap with `selinuxContext`. The kernel takes the SELinux label of a tap
//! from the program that creates it, so the program `ip` creates this tap, which is persistent at
//! once.
//!
//! This file reads the configuration and creates the tap. [`cni_plugin::interface`] does the rest.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::time::Duration;

use cni::args::CniArgs;
use cni::config::{self, ConfDns, NetConf};
use cni::machine::{Child, Exit, OnSigterm};
use cni::result::{AddResult, Dns};
use cni::rollback::{Notes, Rollback};
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Link, Mac, Queues, Tap, TapSpec, program, selinux, tun};
use cni_plugin::interface::{
    AttachmentContext, Check, CreatedLink, HostEnd, Interface, Layer3Policy, failed, name_taken,
};
use cni_plugin::keys;
use serde::Deserialize;

/// The MTUs that the kernel accepts for a tap, in bytes.
const MTU: RangeInclusive<u32> = 68..=65521;

/// How long `ip tuntap add` may take.
const IP_TIMEOUT: Duration = Duration::from_secs(20);

/// The part of the plugin `tap` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct TapPlugin;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    /// The IPAM plugin.
    ipam: Option<String>,
    /// The DNS settings that replace those of the IPAM plugin.
    dns: Option<Dns>,
    /// The MTU, or `None` for the kernel's default.
    mtu: Option<u32>,
    /// The hardware address, or `None` for one that the kernel chooses.
    mac: Option<Mac>,
    /// The ID of the user who may open the tap.
    owner: Option<u32>,
    /// The ID of the group whose members may open the tap.
    group: Option<u32>,
    /// How many queues the tap may have.
    queues: Queues,
    /// The SELinux label of the tap.
    selinux_context: Option<String>,
    /// The name of a bridge in the container that the tap is attached to.
    bridge: Option<String>,
}

/// The keys of the configuration, unchecked.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    multi_queue: bool,
    mtu: i64,
    mac: String,
    owner: Option<u32>,
    group: Option<u32>,
    selinux_context: String,
    bridge: String,
    dns: ConfDns,
    runtime_config: keys::RuntimeConfig,
}

impl Interface for TapPlugin {
    type Keys = Keys;
    type Conf = Conf;
    /// The tap, as long as the kernel removes it at the end of this process. `None` once
    /// [`finish`](Interface::finish) has made it persistent, or if `ip` has created it.
    type Link = Option<Tap>;

    const NAME: &'static str = "tap";
    const KIND: &'static str = "tun";
    const HOST_END: HostEnd = HostEnd::None;

    fn parse(&self, conf: &NetConf, args: &str, notes: &Notes) -> Result<Conf> {
        let args = CniArgs::parse(args)?;
        args.check_known(&["MAC", "IP"])?;
        let keys: Keys = conf.decode()?;
        let mac = keys::mac([&keys.runtime_config.mac, args.get("MAC").unwrap_or_default(), &keys.mac]);
        Ok(Conf {
            ipam: keys::ipam_type(conf),
            dns: config::dns_override(keys.runtime_config.dns.as_ref(), keys.dns, notes),
            mtu: keys::mtu(keys.mtu, MTU)?,
            mac: mac.map_err(Error::config)?,
            owner: keys.owner,
            group: keys.group,
            queues: if keys.multi_queue { Queues::Several } else { Queues::One },
            selinux_context: keys::non_empty(keys.selinux_context),
            bridge: keys::non_empty(keys.bridge),
        })
    }

    fn layer3<'c>(&self, conf: &'c Conf) -> Layer3Policy<'c> {
        Layer3Policy { ipam: conf.ipam.as_deref(), dns: conf.dns.as_ref(), ..Layer3Policy::default() }
    }

    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<Option<Tap>>> {
        let AttachmentContext { container, conf, call, .. } = context;
        let bridge = match &conf.bridge {
            Some(name) => Some(container.find_link(name)?.ok_or_else(|| no_bridge(name))?),
            None => None,
        };
        let spec = TapSpec { name: &call.ifname, owner: conf.owner, group: conf.group, queues: conf.queues };
        let tap = match &conf.selinux_context {
            // Needs no undo before `finish`: the kernel removes the tap when the value is dropped.
            None => Some(create_tap(context, &spec)?),
            Some(selinux_context) => {
                register_removal(context, rollback);
                create_labelled(context, &spec, selinux_context)?;
                None
            }
        };
        let link = container.link(&call.ifname)?;
        if tap.is_some() {
            // This undo is needed once `finish` has made the tap persistent.
            let undo_container = container.clone();
            rollback.push(format!("delete {}", link.name), move || undo_container.purge_link(link.index).map(drop));
        }
        container.set_alias(link.index, &context.attachment.alias())?;
        let mac = configure(context, &link)?;
        if let Some(bridge) = bridge {
            let action = format!("failed to set tap {} as a port of bridge {}", link.name, bridge.name);
            container.set_master(link.index, bridge.index).map_err(|error| Error::from(error).context(action))?;
        }
        let result = AddResult { interfaces: vec![context.container_interface(mac)], ..AddResult::default() };
        Ok(CreatedLink { index: link.index, mac, result, interface_position: 0, link: tap })
    }

    /// Makes the tap persistent, so that it outlives this process.
    fn finish(&self, _context: &AttachmentContext<'_, Conf>, created: &mut CreatedLink<Option<Tap>>) -> Result<()> {
        match created.link.take() {
            Some(tap) => Ok(tap.keep()?),
            None => Ok(()),
        }
    }

    fn check(&self, check: &Check<'_, Conf>) -> Result<()> {
        check.compare_interface()?;
        if let Some(name) = &check.context.conf.bridge {
            let bridge = check.context.container.find_link(name)?;
            if bridge.is_none_or(|bridge| check.inner.master != Some(bridge.index)) {
                return Err(failed(format!("{} is not attached to bridge {name}", check.inner.name)));
            }
        }
        check.compare_layer3()?;
        // On a tap of Go's plugin, duplicate address detection is enabled. The detection only runs
        // while a program has the tap open (state running). Without a program, it would never end.
        if check.inner.running { check.wait_for_dad(check.settle_deadline()) } else { Ok(()) }
    }

    fn ready(&self, _call: &Call<'_>, _conf: &Conf) -> Result<()> {
        tun::probe().map_err(|error| Error::from(error).with_code(Code::NOT_AVAILABLE))
    }
}

/// Returns the error for a configured bridge that the container does not have, with the text of
/// Go's plugin.
fn no_bridge(name: &str) -> Error {
    Error::config(format!("failed to get bridge {name}: Link not found"))
        .with_details("the container has no such interface")
}

/// Creates a tap, which the kernel removes when the [`Tap`] is dropped or this process ends, unless
/// it is [kept](Tap::keep).
///
/// # Errors
/// - Code 102 if the container has an interface of that name.
/// - The errors of the kernel.
fn create_tap(context: &AttachmentContext<'_, Conf>, spec: &TapSpec<'_>) -> Result<Tap> {
    Tap::create(&context.netns, spec)
        .map_err(|error| if error.is_exists() { name_taken::<TapPlugin>(&context.attachment) } else { error.into() })
}

/// Sets the configured MTU and hardware address, if any. Returns the resulting hardware address.
fn configure(context: &AttachmentContext<'_, Conf>, link: &Link) -> Result<Mac> {
    let AttachmentContext { container, conf, .. } = context;
    if let Some(mtu) = conf.mtu {
        container.set_mtu(link.index, mtu)?;
    }
    match conf.mac {
        Some(mac) => {
            container.set_mac(link.index, mac)?;
            Ok(mac)
        }
        None => link.mac.ok_or_else(|| Error::new(Code::KERNEL, format!("{} has no hardware address", link.name))),
    }
}

/// Registers the removal of the tap that `ip` is about to create, in case ADD fails. The undo finds
/// the tap by its name, which was free before.
fn register_removal<'a>(context: &AttachmentContext<'a, Conf>, rollback: &mut Rollback<'a>) {
    let (container, name) = (context.container.clone(), context.call.ifname.clone());
    rollback.push(format!("delete {name}"), move || match container.find_link(&name)? {
        Some(link) if link.kind.to_string() == TapPlugin::KIND => container.purge_link(link.index).map(drop),
        _ => Ok(()),
    });
}

/// Runs `ip tuntap add` to create the tap with the SELinux label `selinux_context`. As with Go's
/// plugin, such a tap has no virtio header.
///
/// # Errors
/// - Code 2 if `ip` is not installed.
/// - Code 5 if `ip` cannot be run.
/// - Code 100 if `ip` fails or the kernel refuses the label.
fn create_labelled(context: &AttachmentContext<'_, Conf>, spec: &TapSpec<'_>, selinux_context: &str) -> Result<()> {
    let missing =
        || Error::new(Code::UNSUPPORTED_FIELD, "\"selinuxContext\" needs the program ip, which is not installed");
    let path = std::env::var_os("PATH");
    let mut args = ["tuntap", "add", "mode", "tap", "name", spec.name].map(OsString::from).to_vec();
    if spec.queues == Queues::Several {
        args.push("multi_queue".into());
    }
    for (key, id) in [("user", spec.owner), ("group", spec.group)] {
        if let Some(id) = id {
            args.extend([key.into(), id.to_string().into()]);
        }
    }
    let child = Child {
        program: program::find(&program::folders(path), "ip").ok_or_else(missing)?,
        args,
        env: None,
        stdin: b"",
        timeout: IP_TIMEOUT,
        on_sigterm: OnSigterm::Kill,
    };
    // `ip` inherits both the label and the namespace of the thread that starts it. `Netns::run` is
    // not meant for starting programs, because they stay in the namespace, but here that is wanted.
    let run_in_netns = || context.netns.run(|| context.call.machine.run(&child));
    let labelled_run = selinux::with_exec_label(selinux_context, run_in_netns);
    let result_of_entering = labelled_run.map_err(|error| Error::from(error).context("failed set socket label"))?;
    let result_of_run = result_of_entering?;
    let output = result_of_run.map_err(|error| Error::caused(Code::IO, "failed to run ip", error))?;
    if output.status == Exit::Status(0) {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let msg = format!("failed to run command {}: {}", stderr.trim(), output.status);
    Err(Error::new(Code::KERNEL, msg).with_details(format!("ip tuntap add mode tap name {}", spec.name)))
}
