//! `dhcp`: asks a daemon for addresses that a DHCP server leases.
//!
//! The plugin ends with its call, but a lease must be renewed: the [`daemon`] keeps it. Both may be
//! Go's: they talk to each other as Go's do.

mod conf;
pub mod daemon;
pub mod leases;
mod record;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::result::AddResult;
use cni::skel::{Added, Call, MachineRef, Plugin, Role};
use cni::{Code, Error, Result};
use cni_dhcp::rpc::{CONNECT, CmdArgs, Conversation, Method, write_request};
use cni_linux::stream::wait_readable;

use conf::Conf;
use record::Records;

/// Longer than a daemon tries to get a lease, unless its flags say otherwise: then the runtime's
/// patience ends the wait.
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs the daemon if the first of the program's arguments is `daemon`, otherwise the plugin.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut args = args.map(|arg| arg.to_string_lossy().into_owned());
    match args.next().as_deref() {
        Some("daemon") => daemon::run(args.collect()),
        _ => cni_plugin::process::run(&Dhcp),
    }
}

/// The plugin.
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
        let daemon = Daemon::of(call)?;
        let args = args(call);
        let stream = daemon.connect()?;
        let mut rollback = call.rollback();
        let (undo, undo_args) = (daemon.clone(), args.clone());
        rollback.push("release the lease", move || undo.call(Method::Release, &undo_args).map(drop));
        let result = daemon.speak(stream, Method::Allocate, &args)?;
        Ok(Added { result, rollback })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        Daemon::of(call)?.call(Method::Allocate, &args(call)).map(drop)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        let daemon = Daemon::lenient(call);
        match daemon.connect() {
            Ok(stream) => daemon.speak(stream, Method::Release, &args(call)).map(drop),
            Err(error) => {
                let key = record::key(&call.container_id, call.conf.name(), &call.ifname);
                match Records::of(&daemon.socket).find(&key)? {
                    None => Ok(()),
                    Some(_) => Err(error.context("the attachment has a lease").with_code(Code::TRY_AGAIN)),
                }
            }
        }
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let daemon = Daemon::lenient(call);
        let stale = Records::of(&daemon.socket).list()?.into_iter().filter(|record| {
            record.network == call.conf.name() && !valid.contains(&record.container_id, &record.ifname)
        });
        let errors = stale.filter_map(|record| {
            let args = CmdArgs {
                container_id: record.container_id,
                netns: record.netns,
                ifname: record.ifname,
                stdin: call.conf.raw().to_vec(),
                ..CmdArgs::default()
            };
            daemon.call(Method::Release, &args).err()
        });
        Error::join(errors.collect::<Vec<_>>())
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        Daemon::of(call)?.connect().map(drop).map_err(|error| error.with_code(Code::NOT_AVAILABLE))
    }
}

fn args(call: &Call<'_>) -> CmdArgs {
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

/// The daemon, as a client sees it.
#[derive(Clone)]
struct Daemon<'a> {
    socket: PathBuf,
    machine: MachineRef<'a>,
}

impl<'a> Daemon<'a> {
    fn of(call: &Call<'a>) -> Result<Daemon<'a>> {
        Conf::read(&call.conf, &call.environment.args)?;
        Ok(Daemon::lenient(call))
    }

    /// For DEL and GC, which clean up whatever else the configuration says.
    fn lenient(call: &Call<'a>) -> Daemon<'a> {
        Daemon { socket: conf::socket(&call.conf), machine: call.machine }
    }

    fn connect(&self) -> Result<UnixStream> {
        let doing = format!("error dialing DHCP daemon: dial unix {}: connect", self.socket.display());
        UnixStream::connect(&self.socket).map_err(|error| Error::caused(Code::TRY_AGAIN, doing, error))
    }

    fn call(&self, method: Method, args: &CmdArgs) -> Result<AddResult> {
        self.speak(self.connect()?, method, args)
    }

    fn speak(&self, mut stream: UnixStream, method: Method, args: &CmdArgs) -> Result<AddResult> {
        let failed = |error: std::io::Error| {
            Error::caused(Code::TRY_AGAIN, format_args!("error calling {}", method.name()), error)
        };
        let deadline = self.machine.now() + PATIENCE;
        stream.write_all(CONNECT).map_err(failed)?;
        // Not before the greeting: what a Go daemon has read beyond the first line by then is lost.
        let mut unsent = Some(write_request(method, args));
        let mut conversation = Conversation::default();
        let mut buffer = [0; 4096];
        loop {
            let answer = conversation
                .response()
                .map_err(|error| Error::caused(Code::DECODE, format_args!("error calling {}", method.name()), error))?;
            if let Some(answer) = answer {
                let failed = |text| Error::new(Code::TRY_AGAIN, format!("error calling {}: {text}", method.name()));
                return answer.map_err(failed);
            }
            if conversation.is_greeted()
                && let Some(request) = unsent.take()
            {
                stream.write_all(&request).map_err(failed)?;
            }
            wait_readable(&stream, deadline, &*self.machine).map_err(failed)?;
            match stream.read(&mut buffer).map_err(failed)? {
                0 => return Err(failed(std::io::ErrorKind::UnexpectedEof.into())),
                length => conversation.push(&buffer[..length]),
            }
        }
    }
}
