//! Implements the creation of the tap by ADD.

use std::ffi::OsString;
use std::time::Duration;

use cni::machine::{Child, Exit, OnSigterm};
use cni::result::AddResult;
use cni::rollback::Rollback;
use cni::{Code, Error, Result};
use cni_linux::{Link, Mac, Queues, Tap, TapSpec, program, selinux};
use cni_plugin::interface::{AttachmentContext, CreatedLink, Interface, name_taken};

use crate::{Conf, TapPlugin};

/// How long `ip tuntap add` may take.
const IP_TIMEOUT: Duration = Duration::from_secs(20);

/// Creates the tap in the container, and makes it a port of the configured bridge.
///
/// # Errors
/// - Code 7 if the container does not have the configured bridge.
/// - Those of [`create_tap`] and [`create_labelled`], and of the kernel.
pub(crate) fn create<'a>(
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
