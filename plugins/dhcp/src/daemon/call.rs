//! The calls of the plugin: ADD and CHECK get the leases of an attachment, DEL and GC release them.

use std::future::Future;
use std::rc::Rc;

use cni::config::NetConf;
use cni::hash::sha512_hex;
use cni::result::AddResult;
use cni_dhcp::lease::{Identity, Limits, Session};
use cni_dhcp::message::{Client, v6};
use cni_dhcp::rpc::CmdArgs;

use super::attachment::{self, Handle, Status};
use super::network::{self, Interface};
use super::{Daemon, log, random};
use crate::client::daemon_limit;
use crate::conf::{Conf, Ipv6Mode};
use crate::record::{Record, RecordedLease, key, key_v6};

/// The code of the option with the client identifier.
const CLIENT_ID: u8 = 61;
/// How many bytes of an attachment's key fit into a client identifier: an option has at most 255
/// bytes, and the first one is zero.
const MAX_KEY_IN_ID: usize = 254;
impl Daemon {
    /// Returns the leases of an attachment as a result. Starts a task for each lease that has none
    /// for the present interface. Waits until the tasks have acquired their leases or one has given
    /// up, or until `client_closed`. Then ends the searches, and releases the leases that this call
    /// has requested, unless another call waits for them too: no DEL would release the address.
    ///
    /// # Errors
    /// The text for the plugin: the configuration or interface is unusable, a lease is lost or was
    /// released, or no server has granted one. Then the leases that this call has requested are
    /// released.
    pub(super) async fn allocate(
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
                        self.stop_unattended(key, handle, started.contains(key)).await;
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

    /// Stops the search of `handle`, whose client is gone, unless another call waits for it too. If
    /// the client's call has started the search, also releases a lease that was found.
    async fn stop_unattended(&self, key: &str, handle: &Handle, is_started_by_call: bool) {
        // One reference is the daemon's, the other that of `handle`.
        let is_last = Rc::strong_count(&handle.waiting) <= 2;
        let is_acquiring = matches!(*handle.status.borrow(), Status::Acquiring);
        let is_current =
            self.attachments.borrow().get(key).is_some_and(|current| current.status.same_channel(&handle.status));
        if is_last && (is_acquiring || is_started_by_call) && is_current {
            let ended = if is_acquiring { "the search for a lease ends" } else { "its lease is released" };
            log(format_args!("{key}: the plugin has ended, so {ended}"));
            self.release(key).await;
        }
    }

    /// Returns an attachment's interface, and a new record without a lease for each protocol.
    ///
    /// # Errors
    /// The text for the plugin: the interface does not exist or has no MAC.
    pub(super) fn prepare(
        &self,
        args: &CmdArgs,
        conf: &NetConf,
        ipam: Conf,
    ) -> Result<(Interface, Vec<Record>), String> {
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
    pub(super) async fn release_attachment(self: &Rc<Self>, args: &CmdArgs) -> Result<(), String> {
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
