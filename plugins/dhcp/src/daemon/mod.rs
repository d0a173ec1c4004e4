//! The daemon: it acquires leases for the plugin, renews them, and releases them.
//!
//! One thread runs a task for each attachment, and a few threads close sockets. Leases are recorded
//! in files, so that a daemon that is started later continues them.

mod adopt;
mod attachment;
mod connection;
mod exchange;
mod flags;
mod network;
mod own_file;
mod socket;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use cni::config::NetConf;
use cni::hash::sha512_hex;
use cni::result::AddResult;
use cni_dhcp::lease::{Identity, Limits, Session};
use cni_dhcp::message::{Client, ReplyMode, v6};
use cni_dhcp::rpc::CmdArgs;
use cni_linux::{Mac, Watch};
use libcni::cache::DEFAULT_DIR;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{LocalSet, spawn_local};

use crate::client::daemon_limit;
use crate::conf::{Conf, Ipv6Mode};
use crate::record::{Record, RecordedLease, Records, key, key_v6};
pub(crate) use attachment::now;
use attachment::{Attachment, Handle, LeaseCommand, Status};
use flags::Flags;
use network::Interface;
use own_file::OwnFile;

/// The code of the option with the client identifier.
const CLIENT_ID: u8 = 61;
/// How many bytes of an attachment's key fit into a client identifier: an option has at most 255
/// bytes, and the first one is zero.
const MAX_KEY_IN_ID: usize = 254;
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

    /// Returns the leases of an attachment as a result. Starts a task for each lease that has none
    /// for the present interface. Waits until the tasks have acquired their leases or one has given
    /// up, or until `client_closed`. A search whose last client is gone ends: otherwise it could
    /// lease an address that no DEL would release.
    ///
    /// # Errors
    /// The text for the plugin: the configuration or interface is unusable, a lease is lost or was
    /// released, or no server has granted one. Then the leases that this call has requested are
    /// released.
    async fn allocate(
        self: &Rc<Self>,
        args: &CmdArgs,
        client_closed: impl Future<Output = ()>,
    ) -> Result<AddResult, String> {
        let (conf, ipam) = read_conf(args)?;
        let limits = Limits { total: self.limits.total.min(daemon_limit(&conf)), ..self.limits };
        let (interface, records) = self.prepare(args, &conf, ipam)?;
        let (mut handles, mut started) = (Vec::new(), Vec::new());
        for record in records {
            let key = record.key();
            let handle = match self.running(&key, &interface).await {
                Some(handle) => handle,
                None => {
                    started.push(key.clone());
                    let session = Session::new(record.client.clone(), limits, random(), attachment::now());
                    self.start(interface.clone(), record, session)
                }
            };
            handles.push((key, handle));
        }
        tokio::pin!(client_closed);
        let mut results = Vec::new();
        for (_, handle) in &handles {
            let outcome = tokio::select! {
                outcome = handle.lease() => outcome,
                () = &mut client_closed => {
                    for (key, handle) in &handles {
                        self.stop_unattended(key, handle).await;
                    }
                    return Err("the client has closed the connection".to_owned());
                }
            };
            match outcome {
                Ok(result) => results.push(result),
                Err(why) => {
                    for key in &started {
                        self.release(key).await;
                    }
                    return Err(why);
                }
            }
        }
        Ok(merge(&results))
    }

    /// Returns the task of a lease, if it has one for this interface.
    async fn running(&self, key: &str, interface: &Interface) -> Option<Handle> {
        loop {
            let running = self.attachments.borrow().get(key).cloned()?;
            if running.is_for(interface) {
                return Some(running);
            }
            // The container has been restarted. Its former interface must lose the address, because
            // the server leases the same address to the same client again.
            log(format_args!("{key}: the attachment has another interface now"));
            self.release(key).await;
        }
    }

    /// Stops the search of `handle`, whose client is gone, unless another call waits for it too.
    async fn stop_unattended(&self, key: &str, handle: &Handle) {
        // One reference is the daemon's, the other that of `handle`.
        let is_last = Rc::strong_count(&handle.waiting) <= 2;
        let is_acquiring = matches!(*handle.status.borrow(), Status::Acquiring);
        let is_current =
            self.attachments.borrow().get(key).is_some_and(|current| current.status.same_channel(&handle.status));
        if is_last && is_acquiring && is_current {
            log(format_args!("{key}: the plugin has ended, so the search for a lease ends"));
            self.release(key).await;
        }
    }

    /// Returns an attachment's interface, and a new record without a lease for each protocol.
    ///
    /// # Errors
    /// The text for the plugin: the interface does not exist or has no MAC.
    fn prepare(&self, args: &CmdArgs, conf: &NetConf, ipam: Conf) -> Result<(Interface, Vec<Record>), String> {
        let interface = network::find(self.host_path(&args.netns), &args.ifname)?;
        let key = key(&args.container_id, conf.name(), &args.ifname);
        let mut provide = ipam.provide;
        // The client identifier is the configured one or, as in Go, a zero byte and the key.
        let id = match provide.iter().position(|(code, _)| *code == CLIENT_ID) {
            Some(index) => provide.remove(index).1,
            None => [&[0], &key.as_bytes()[..key.len().min(MAX_KEY_IN_ID)]].concat(),
        };
        let mac = interface.mac.0;
        let v4 = Client { mac, id, request: ipam.request, provide, answers: self.reply_mode };
        let v6 = |mode| {
            let (uuid, iaid) = identifiers(&key);
            let duid = ipam.duid.clone().unwrap_or(uuid);
            v6::Client { mac, duid, iaid: Some(iaid).filter(|_| mode == Ipv6Mode::Stateful) }
        };
        let clients = ipam.has_ipv4.then_some(Identity::V4(v4)).into_iter();
        let clients: Vec<Identity> = clients.chain(ipam.ipv6.map(|mode| Identity::V6(v6(mode)))).collect();
        let has_both = clients.len() > 1;
        let record = |client: Identity| Record {
            container_id: args.container_id.clone(),
            network: conf.name().to_owned(),
            ifname: args.ifname.clone(),
            netns: args.netns.clone(),
            netns_id: interface.netns_id,
            index: interface.index,
            priority: ipam.priority,
            // With both protocols, each lease has the routes of its family.
            routes: ipam
                .routes
                .iter()
                .filter(|route| !has_both || route.dst.is_ipv4() != client.is_v6())
                .cloned()
                .collect(),
            mtu_target: ipam.mtu_target,
            client,
            lease: RecordedLease::Nothing,
            error: None,
        };
        let records = clients.into_iter().map(record).collect();
        Ok((interface, records))
    }

    /// Releases the lease of an attachment, even if the attachment has only a record and no task.
    /// Reads only the network's name from the configuration, so that DEL works even if another key
    /// is invalid.
    ///
    /// # Errors
    /// The text for the plugin: the configuration or the record cannot be read.
    async fn release_attachment(self: &Rc<Self>, args: &CmdArgs) -> Result<(), String> {
        let conf = NetConf::parse(args.stdin.clone()).map_err(|error| format!("error parsing netconf: {error}"))?;
        let key = key(&args.container_id, conf.name(), &args.ifname);
        for key in [key_v6(&key), key] {
            if !self.attachments.borrow().contains_key(&key)
                && let Some(record) = self.records.find(&key).map_err(|error| error.to_string())?
            {
                // An earlier daemon ended after it had requested this address, and `resume` starts
                // no task for such a record. The task that is started here only releases the
                // address.
                let session = Session::new(record.client.clone(), self.limits, random(), attachment::now());
                self.start(self.recorded_interface(&record), record, session);
            }
            self.release(&key).await;
        }
        Ok(())
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

/// Reads the configuration and its `ipam` from the arguments of a call. The error is the text for
/// the plugin.
fn read_conf(args: &CmdArgs) -> Result<(NetConf, Conf), String> {
    let conf = NetConf::parse(args.stdin.clone()).map_err(|error| format!("error parsing netconf: {error}"))?;
    let ipam = Conf::read(&conf, &args.args).map_err(|error| error.to_string())?;
    Ok((conf, ipam))
}

/// Returns the identifiers of an attachment's DHCPv6 client: a DUID that is a UUID (RFC 6355), and
/// an IAID. Both are hashes of the key, so that they are the same after each restart.
fn identifiers(key: &str) -> (Vec<u8>, u32) {
    /// The type of a DUID that is a UUID.
    const DUID_UUID: [u8; 2] = [0, 4];
    let digits = sha512_hex(&[b"dhcpv6", key.as_bytes()], 40);
    let number = |range| u128::from_str_radix(digits.get(range).unwrap_or_default(), 16).unwrap_or_default();
    let mut uuid = number(0..32).to_be_bytes();
    // Version 8 and the variant of RFC 9562: a UUID of the program's own making.
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    ([&DUID_UUID[..], &uuid].concat(), number(32..40) as u32)
}

/// Returns one result with the addresses, routes and name resolution of several.
fn merge(results: &[Rc<AddResult>]) -> AddResult {
    let mut merged = AddResult::default();
    for result in results {
        merged.ips.extend(result.ips.iter().cloned());
        merged.routes.extend(result.routes.iter().cloned());
        let (dns, more) = (&mut merged.dns, &result.dns);
        for (list, more) in [(&mut dns.nameservers, &more.nameservers), (&mut dns.search, &more.search)] {
            let new: Vec<String> = more.iter().filter(|text| !list.contains(text)).cloned().collect();
            list.extend(new);
        }
        if dns.domain.is_empty() {
            dns.domain.clone_from(&more.domain);
        }
    }
    merged
}

/// Returns a random number. If the kernel provides none, returns one from the clock, which is
/// enough to distinguish transactions.
fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| u64::from(attachment::now().subsec_nanos()))
}
