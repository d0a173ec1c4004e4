//! The daemon: it acquires leases for the plugin, renews them, and releases them.
//!
//! One thread runs a task for each attachment, and a few threads close sockets. Leases are recorded
//! in files, so that a daemon that is started later continues them.

mod adopt;
mod attachment;
mod call;
mod connection;
mod exchange;
mod flags;
mod network;
mod own_file;
mod socket;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use cni_dhcp::lease::{Identity, Limits, Session};
use cni_dhcp::message::ReplyMode;
use cni_linux::{Mac, Watch};
use libcni::cache::DEFAULT_DIR;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{LocalSet, spawn_local};

use crate::record::{Record, RecordedLease, Records, key};
pub(crate) use attachment::now;
use attachment::{Attachment, Handle, LeaseCommand, Status};
use flags::Flags;
use network::Interface;
use own_file::OwnFile;

/// How long to wait for further deletions after an interface was deleted, before each task checks
/// its interface.
const DELETION_PAUSE: Duration = Duration::from_secs(1);
/// The pause after a failure to accept a connection, for example because of too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The number of threads that close packet sockets. Each close takes up to 20 ms. tokio would start
/// up to 512 threads.
const CLOSING_THREADS: usize = 4;

/// The state that all tasks share.
pub(crate) struct Daemon {
    /// The flag `-hostprefix`: where this process sees the host's root directory.
    host_prefix: String,
    reply_mode: ReplyMode,
    limits: Limits,
    records: Records,
    /// The running tasks by the keys of their attachments.
    attachments: RefCell<HashMap<String, Handle>>,
}

/// Writes a line to stderr, which systemd connects to the journal. An error is ignored: there is no
/// other place to report it.
fn log(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Runs the daemon until a signal ends it. The exit status is 2 for invalid arguments, and 1 if the
/// daemon cannot start.
pub fn run(args: Vec<String>) -> ExitCode {
    let flags = match Flags::parse(args) {
        Ok(flags) => flags,
        Err(text) => {
            log(format_args!("{text}"));
            return ExitCode::from(2);
        }
    };
    raise_descriptor_limit();
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().max_blocking_threads(CLOSING_THREADS).build();
    let served = runtime.and_then(|runtime| {
        let tasks = LocalSet::new();
        let served = tasks.block_on(&runtime, serve(flags));
        // Tasks that still exchange messages close their sockets in other threads of the runtime.
        let _context = runtime.enter();
        drop(tasks);
        served
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log(format_args!("{error}"));
            ExitCode::FAILURE
        }
    }
}

/// Raises the soft limit of open files to the hard limit. An error is logged.
fn raise_descriptor_limit() {
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        log(format_args!("failed to raise the limit of open files: {error}"));
    }
}

/// Continues the recorded leases, adopts those of Go's daemon, and handles calls until SIGTERM or
/// SIGINT. Then releases the leases if the flag `-release-on-exit` is set.
///
/// # Errors
/// The socket or the PID file cannot be created.
async fn serve(flags: Flags) -> io::Result<()> {
    let path = PathBuf::from(format!("{}{}", flags.host_prefix, flags.socket.display()));
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (listener, owner) = socket::listen(&path)?;
    let mut own_files = Vec::new();
    if owner == socket::SocketOwner::Daemon {
        own_files.push(OwnFile::created(&path)?);
    }
    match flags.pidfile.as_deref().map(own_file::write_pid).transpose() {
        Ok(pid_file) => own_files.extend(pid_file),
        Err(error) => {
            own_files.iter().for_each(OwnFile::remove);
            return Err(error);
        }
    }
    let daemon = Rc::new(Daemon {
        host_prefix: flags.host_prefix,
        reply_mode: flags.reply_mode,
        limits: flags.limits,
        records: Records::for_socket(&path),
        attachments: RefCell::default(),
    });
    daemon.resume();
    // Configurations name the socket with or without the prefix.
    daemon.adopt(&[&path, &flags.socket]);
    match Watch::open_everywhere().map_err(io::Error::other).and_then(network::register) {
        Ok(watch) => drop(spawn_local(Rc::clone(&daemon).watch_deletions(watch))),
        Err(error) => {
            log(format_args!("failed to subscribe to changes of interfaces, so deleted ones are noticed late: {error}"))
        }
    }
    let accept = async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(spawn_local(connection::serve(Rc::clone(&daemon), stream))),
                Err(error) => {
                    log(format_args!("failed to accept a connection: {error}"));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    tokio::select! {
        () = accept => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    if flags.on_exit == flags::OnExit::Release {
        let keys: Vec<String> = daemon.attachments.borrow().keys().cloned().collect();
        for key in keys {
            daemon.release(&key).await;
        }
    }
    own_files.iter().for_each(OwnFile::remove);
    Ok(())
}

impl Daemon {
    /// Starts the task of an attachment. The task's first status depends on whether `session` has a
    /// lease.
    fn start(self: &Rc<Self>, interface: Interface, record: Record, session: Session) -> Handle {
        let status = match session.lease() {
            Some(lease) => Status::Leased(Rc::new(record.result(&lease.terms, interface.mtu()))),
            None => Status::Acquiring,
        };
        self.start_with_status(interface, record, session, status)
    }

    /// Starts the task of an attachment with `status` as its first status.
    fn start_with_status(
        self: &Rc<Self>,
        interface: Interface,
        record: Record,
        session: Session,
        status: Status,
    ) -> Handle {
        let (command_sender, commands) = mpsc::unbounded_channel();
        let (status, status_receiver) = watch::channel(status);
        let handle = Handle {
            commands: command_sender,
            status: status_receiver,
            interface: interface.clone(),
            waiting: Rc::default(),
        };
        self.attachments.borrow_mut().insert(record.key(), handle.clone());
        let daemon = Rc::clone(self);
        let task = Attachment { daemon, interface, record, session, status, commands, pending: None };
        spawn_local(task.run());
        handle
    }

    /// Removes a task that ends from `attachments`. `status` identifies the task: a newer task with
    /// the same key stays.
    fn forget(&self, key: &str, status: &watch::Sender<Status>) {
        let mut attachments = self.attachments.borrow_mut();
        if attachments.get(key).is_some_and(|handle| handle.status.same_channel(&status.subscribe())) {
            attachments.remove(key);
        }
    }

    /// Adds the prefix of the flag `-hostprefix` to a path of the host.
    fn host_path(&self, path: &str) -> PathBuf {
        format!("{}{path}", self.host_prefix).into()
    }

    /// Returns the interface of a recorded attachment, whether it still exists or not.
    fn recorded_interface(&self, record: &Record) -> Interface {
        Interface {
            netns: self.host_path(&record.netns),
            netns_id: record.netns_id,
            name: record.ifname.clone(),
            index: record.index,
            mac: Mac(record.client.mac()),
        }
    }

    /// Starts the tasks of the recorded leases.
    fn resume(self: &Rc<Self>) {
        self.records.purge_temporary();
        let records = self.records.list().unwrap_or_else(|error| {
            log(format_args!("{error}"));
            Vec::new()
        });
        for record in records {
            // An address that was only requested gets no task: a DEL releases the address, or an
            // ADD requests it again.
            if let RecordedLease::Bound(lease) = &record.lease {
                let session = Session::resume(record.client.clone(), self.limits, random(), lease.clone());
                let handle = self.start(self.recorded_interface(&record), record, session);
                // The interface may have been deleted while no daemon ran. Sending fails only if
                // the task has ended.
                let _ = handle.commands.send(LeaseCommand::CheckInterface);
            }
        }
    }

    /// Continues the leases of Go's daemon. Starts a task for each attachment in libcni's result
    /// cache that uses one of `sockets` and has no record, if its interface has the cached address.
    fn adopt(self: &Rc<Self>, sockets: &[&Path]) {
        let cached = adopt::list(&self.host_path(DEFAULT_DIR), sockets).unwrap_or_else(|error| {
            log(format_args!("leases of another daemon are not adopted: {error}"));
            Vec::new()
        });
        for adopt::Cached { args, conf, ipam, result } in cached {
            let key = key(&args.container_id, conf.name(), &args.ifname);
            // A record, even an unreadable one, means that the lease is this daemon's, not Go's.
            if !matches!(self.records.find(&key), Ok(None)) {
                continue;
            }
            // Without its interface, there is nothing to adopt.
            let Ok((interface, records)) = self.prepare(&args, &conf, ipam) else { continue };
            // Go's daemon has leases of DHCPv4 only.
            let mut records = records.into_iter();
            let Some((record, client)) = records.find_map(|record| match record.client.clone() {
                Identity::V4(client) => Some((record, client)),
                Identity::V6(_) => None,
            }) else {
                continue;
            };
            let mut cidrs = result.ips.iter().map(|ip| ip.address);
            let leased = cidrs.find(|cidr| cidr.address().is_ipv4() && interface.has_address(*cidr));
            if let Some(leased) = leased {
                log(format_args!("{key}: adopting the lease of {}", leased.address()));
                let session = Session::adopt(client, self.limits, random(), leased, attachment::now());
                self.start_with_status(interface, record, session, Status::Leased(Rc::new(result)));
            }
        }
    }

    /// Commands each task to check its interface whenever interfaces are deleted.
    async fn watch_deletions(self: Rc<Self>, watch: AsyncFd<Watch>) {
        loop {
            let Ok(mut ready) = watch.readable().await else { return };
            let was_deleted = watch.get_ref().drain();
            ready.clear_ready();
            if was_deleted {
                tokio::time::sleep(DELETION_PAUSE).await;
                // The checks cover the deletions during the pause too.
                watch.get_ref().drain();
                for handle in self.attachments.borrow().values() {
                    // Sending fails only if the task has ended.
                    let _ = handle.commands.send(LeaseCommand::CheckInterface);
                }
            }
        }
    }

    /// Commands the attachment's task to release its lease, and waits until the task has ended.
    /// Does nothing if there is no task.
    async fn release(&self, key: &str) {
        let handle = self.attachments.borrow().get(key).cloned();
        if let Some(handle) = handle {
            let (done, released) = oneshot::channel();
            // Sending or waiting fails if the task ends before it processes the command. Then there
            // is nothing to release.
            if handle.commands.send(LeaseCommand::Release(done)).is_ok() {
                let _ = released.await;
            }
        }
    }
}

/// Returns a random number. If the kernel provides none, returns one from the clock, which is
/// enough to distinguish transactions.
fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| u64::from(attachment::now().subsec_nanos()))
}
