//! The IPAM plugin `dhcp`: gets addresses from a DHCP server.
//!
//! A lease must be renewed after the plugin has ended, so the [`daemon`] acquires and renews it,
//! and the plugin calls the daemon. Plugin and daemon work with Go's daemon and plugin too.

mod client;
mod conf;
pub mod daemon;
pub mod leases;
mod option;
mod record;

use std::ffi::OsString;
use std::process::ExitCode;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_dhcp::rpc::{CmdArgs, Method};

use client::DaemonClient;
use conf::Conf;
use record::Records;

/// Runs the daemon if the first of the program's arguments is `daemon`, otherwise the plugin.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut args = args.map(|arg| arg.to_string_lossy().into_owned());
    match args.next().as_deref() {
        Some("daemon") => daemon::run(args.collect()),
        _ => cni_plugin::process::run(&Dhcp),
    }
}

/// The plugin `dhcp`.
#[derive(Clone, Copy, Debug)]
pub struct Dhcp;

impl Plugin for Dhcp {
    fn name(&self) -> &'static str {
        "dhcp"
    }

    fn role(&self) -> Role {
        Role::Ipam
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        Conf::read(conf, "").map(drop)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let daemon = DaemonClient::for_call(call)?;
        let args = cmd_args(call);
        // If the daemon does not answer, nothing has been requested, and there is nothing to undo.
        let connection = daemon.greet()?;
        let mut rollback = call.rollback();
        let (daemon_of_undo, args_of_undo) = (daemon.for_undo(&call.conf), args.clone());
        rollback.push("release the lease", move || daemon_of_undo.call(Method::Release, &args_of_undo)?.map(drop));
        let result = connection.call(allocation(call)?, &args)??;
        Ok(Added { result, rollback })
    }

    /// Checks that the daemon has a lease for the attachment. As in Go, the daemon acquires one if
    /// there is none.
    fn check(&self, call: &Call<'_>) -> Result<()> {
        DaemonClient::for_call(call)?.call(allocation(call)?, &cmd_args(call))?.map(drop)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        let daemon = DaemonClient::for_call_unchecked(call);
        match daemon.call(Method::Release, &cmd_args(call)) {
            Ok(answer) => answer.map(drop),
            // The daemon does not answer. Without a record there is no lease to release.
            Err(error) => {
                let key = record::key(&call.container_id, call.conf.name(), &call.ifname);
                let records = Records::for_socket(&daemon.socket);
                match records.find(&key)?.or(records.find(&record::key_v6(&key))?) {
                    None => Ok(()),
                    Some(_) => {
                        let why = "the attachment has a lease, which only the DHCP daemon can release";
                        Err(error.context(why).with_code(Code::TRY_AGAIN))
                    }
                }
            }
        }
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let daemon = DaemonClient::for_call_unchecked(call);
        let stale = Records::for_socket(&daemon.socket).list()?.into_iter().filter(|record| {
            record.network == call.conf.name() && !valid.contains(&record.container_id, &record.ifname)
        });
        let mut errors = Vec::new();
        for record in stale {
            let args = CmdArgs {
                container_id: record.container_id,
                netns: record.netns,
                ifname: record.ifname,
                stdin: call.conf.raw().to_vec(),
                ..CmdArgs::default()
            };
            // Without an answer GC ends here; after an answer with an error it continues.
            errors.extend(daemon.call(Method::Release, &args)?.err());
        }
        Error::join(errors)
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        DaemonClient::for_call(call)?.greet().map(drop).map_err(|error| error.with_code(Code::NOT_AVAILABLE))
    }
}

/// Returns the call that acquires the leases of the configuration.
fn allocation(call: &Call<'_>) -> Result<Method> {
    let conf = Conf::read(&call.conf, &call.environment.args)?;
    Ok(if conf.ipv6.is_some() { Method::AllocateIpv6 } else { Method::Allocate })
}

/// Returns the arguments with which the plugin was called, in the form in which the daemon gets
/// them.
fn cmd_args(call: &Call<'_>) -> CmdArgs {
    let environment = call.environment;
    CmdArgs {
        container_id: call.container_id.clone(),
        netns: environment.netns.clone(),
        ifname: call.ifname.clone(),
        args: environment.args.clone(),
        path: environment.path.clone(),
        stdin: call.conf.raw().to_vec(),
    }
}
