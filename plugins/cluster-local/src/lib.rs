//! The IPAM plugin `cluster-local`: reserves addresses that are unique across the nodes of a
//! cluster.
//!
//! Configuration, reservations and texts are host-local's. The difference is that ADD allocates
//! only from blocks that this node has claimed in a store of the cluster. `cni_cluster` keeps the
//! list of these blocks, the ledger, and asks the store. Only an ADD that needs a block, and a DEL
//! or GC that empties one, send requests. No request is sent while host-local's lock is held.

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::machine::Machine;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};
use cni_cluster::cluster::{Cluster, InUse, Network};
use cni_cluster::conf::{self, Conf};
use cni_cluster::ledger::{Host, Ledger};
use cni_cluster::pool;
use cni_cluster::store::Store;
use cni_ipam::{Lease, RangeSet, allocator};
use plugin_host_local::{HostLocal, Pool, Request, Reservations};
use serde::Deserialize;

/// Opens the store of claims that the node's file names.
pub type Open = for<'m> fn(&Conf, &'m dyn Machine) -> Result<Box<dyn Store + 'm>>;

/// The plugin `cluster-local`.
#[derive(Clone, Copy, Debug)]
pub struct ClusterLocal {
    /// How to open the store. A program that only checks configurations passes a function without
    /// TLS, which would add a megabyte to it.
    pub open: Open,
}

/// The keys in `ipam` that `cluster-local` has besides host-local's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    /// The addresses of a block, or `None` for the size of the pool's blocks.
    pub block_size: Option<u32>,
    /// The layer 2 network, or empty.
    pub layer2: String,
    cluster_conf: Option<PathBuf>,
}

impl Keys {
    /// Reads and checks the keys.
    ///
    /// # Errors
    /// Code 7 if a key is invalid.
    pub fn read(conf: &NetConf) -> Result<Keys> {
        let keys = conf.json().get("ipam").map_or_else(|| Ok(Keys::default()), Json::decode);
        let keys: Keys = keys.map_err(|error| Error::config(format!("ipam.{error}")))?;
        keys.block_size.map_or(Ok(()), pool::check_block_size)?;
        pool::check_layer2(&keys.layer2)?;
        Ok(keys)
    }

    /// Returns the path of the node's file.
    pub fn node_file(&self) -> &Path {
        self.cluster_conf.as_deref().unwrap_or(Path::new(conf::DEFAULT_PATH))
    }
}

impl ClusterLocal {
    /// Returns the blocks of the call's network.
    ///
    /// # Errors
    /// Code 7 if a key is invalid; 5 if the boot's ID cannot be read.
    fn blocks<'a>(
        &self,
        call: &'a Call<'_>,
        reservations: &'a Reservations<'a>,
        sets: &'a [RangeSet],
    ) -> Result<Cluster<'a>> {
        let (keys, open) = (Keys::read(&call.conf)?, self.open);
        Ok(Cluster::new(Network {
            name: call.conf.name(),
            sidecar: reservations.sidecar().to_owned(),
            layer2: keys.layer2.clone(),
            block_size: keys.block_size,
            sets,
            host: Host::read(Path::new("/"))?,
            machine: call.machine,
            notes: call.notes.clone(),
            open: Box::new(move || {
                let conf = Conf::read(keys.node_file())?;
                Ok((open(&conf, call.machine)?, conf.timeout))
            }),
            lock_reservations: Box::new(|| {
                let mut locked = reservations.lock()?;
                Ok(InUse { addresses: locked.occupied()?, lock: Box::new(locked) })
            }),
        }))
    }

    /// Gives the blocks back that DEL or GC has emptied. An error is a note: DEL succeeds without
    /// the store.
    fn give_back(
        &self,
        call: &Call<'_>,
        reservations: &Reservations<'_>,
        sets: &[RangeSet],
        released: Option<&[IpAddr]>,
    ) {
        let blocks = self.blocks(call, reservations, sets);
        if let Err(error) = blocks.and_then(|mut blocks| blocks.give_back(released)) {
            call.notes.note(format_args!("failed to give back the claims of empty blocks: {error}"));
        }
    }
}

impl Plugin for ClusterLocal {
    fn name(&self) -> &'static str {
        "cluster-local"
    }

    fn role(&self) -> Role {
        Role::Ipam
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        Keys::read(conf)?;
        HostLocal.examine(conf)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        let mut unknown = HostLocal.unknown_keys(json);
        let own = ["ipam.blockSize", "ipam.layer2", "ipam.clusterConf"];
        unknown.retain(|key| !own.iter().any(|name| name.eq_ignore_ascii_case(&key.path)));
        unknown
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        plugin_host_local::add_with(call, |request| {
            let mut blocks = self.blocks(call, &request.reservations, request.sets.sets())?;
            let lease = reserve(request, &mut blocks)?;
            note_lost(call, &request.reservations, blocks.ledger());
            Ok(lease)
        })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        HostLocal.check(call)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        let reservations = Reservations::read(call)?;
        let released = reservations.release(call)?;
        self.give_back(call, &reservations, &[], Some(&released));
        Ok(())
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let outcome = HostLocal.gc(call, valid);
        let reservations = Reservations::read(call)?;
        let ranges = Pool::read(&call.conf, &call.notes).ok().and_then(|pool| pool.ranges);
        self.give_back(call, &reservations, ranges.as_ref().map_or(&[], |sets| sets.sets()), None);
        note_lost(call, &reservations, &Ledger::read(reservations.sidecar()));
        outcome
    }

    fn status(&self, call: &Call<'_>) -> Result<()> {
        HostLocal.status(call)?;
        Conf::read(Keys::read(&call.conf)?.node_file())
            .and_then(|conf| conf.check_files())
            .map_err(|error| Error::new(Code::NOT_AVAILABLE, error.to_string()))?;
        let reservations = Reservations::read(call)?;
        let ledger = Ledger::read(reservations.sidecar());
        note_lost(call, &reservations, &ledger);
        let (occupied, blocks) = (reservations.occupied(), ledger.spans(|_| true));
        for set in Pool::read(&call.conf, &call.notes)?.ranges.iter().flat_map(|sets| sets.sets()) {
            if !allocator::has_free(set, &blocks, &occupied) {
                call.notes
                    .note(format_args!("no block has a free address of range set {set}; the next ADD claims one"));
            }
        }
        Ok(())
    }
}

/// Reserves the addresses of an ADD from the node's blocks, and claims blocks until they suffice.
///
/// # Errors
/// Those of host-local's ADD and of [`Cluster::obtain`].
fn reserve(request: &Request<'_>, blocks: &mut Cluster<'_>) -> Result<Lease> {
    let Request { reservations, owner, sets, requested } = request;
    loop {
        let mut locked = reservations.lock()?;
        let shortage = match blocks.held()? {
            Some(held) => match locked.reserve_in(owner, sets, requested, &held)? {
                Ok(lease) => return Ok(lease),
                Err(shortage) => Some(shortage),
            },
            None => None,
        };
        drop(locked);
        blocks.obtain(shortage)?;
    }
}

/// Writes a note about each block that another node has and that has reservations of this node.
fn note_lost(call: &Call<'_>, reservations: &Reservations<'_>, ledger: &Ledger) {
    if ledger.has_lost() {
        ledger.lost_notes(&reservations.occupied()).iter().for_each(|note| call.notes.note(note));
    }
}
