//! The plugin `tap`: creates a tap in the container's network namespace, an Ethernet interface
//! whose frames go to and come from a program, such as a virtual machine.
//!
//! ADD makes the tap persistent as its last step: if ADD is killed earlier, the kernel removes the
//! tap. The exception is a tap with `selinuxContext`. The kernel takes the SELinux label of a tap
//! from the program that creates it, so the program `ip` creates this tap, which is persistent at
//! once.
//!
//! This file reads the configuration, `add` creates the tap, and [`cni_plugin::interface`] does the
//! rest.

mod add;

use std::ops::RangeInclusive;

use cni::args::CniArgs;
use cni::config::NetConf;
use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_linux::{Mac, Queues, Tap, tun};
use cni_plugin::interface::{AttachmentContext, Check, CreatedLink, HostEnd, Interface, failed};
use cni_plugin::keys;
use serde::Deserialize;

/// The MTUs that the kernel accepts for a tap, in bytes.
const MTU: RangeInclusive<u32> = 68..=65521;

/// The part of the plugin `tap` that differs from the other interface plugins.
#[derive(Clone, Copy, Debug)]
pub struct TapPlugin;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Conf {
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

    fn parse(&self, conf: &NetConf, args: &str) -> Result<Conf> {
        let args = CniArgs::parse(args)?;
        args.check_known(&["MAC", "IP"])?;
        let keys: Keys = conf.decode()?;
        let mac = keys::mac([&keys.runtime_config.mac, args.get("MAC").unwrap_or_default(), &keys.mac]);
        Ok(Conf {
            mtu: keys::mtu(keys.mtu, MTU)?,
            mac: mac.map_err(Error::config)?,
            owner: keys.owner,
            group: keys.group,
            queues: if keys.multi_queue { Queues::Several } else { Queues::One },
            selinux_context: keys::non_empty(keys.selinux_context),
            bridge: keys::non_empty(keys.bridge),
        })
    }

    fn create<'a>(
        &self,
        context: &AttachmentContext<'a, Conf>,
        rollback: &mut Rollback<'a>,
    ) -> Result<CreatedLink<Option<Tap>>> {
        add::create(context, rollback)
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
