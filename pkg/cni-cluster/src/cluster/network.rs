//! A network that takes addresses from pools, and what its configuration requires of them.

use std::path::PathBuf;

use cni::machine::Machine;
use cni::rollback::Notes;
use cni::{Cidr, Code, Error, Result};
use cni_ipam::ranges::{Range, RangeSet, number};

use super::{InUse, Open};
use crate::ledger::Host;
use crate::pool::{self, Block};
use crate::store::Pool;

/// A network of this node, as configured, and what its calls need.
pub struct Network<'a> {
    /// The name.
    pub name: &'a str,
    /// The folder of these plugins' own files, `<dataDir>/.cni/<network>`.
    pub sidecar: PathBuf,
    /// The layer 2 network, or empty.
    pub layer2: String,
    /// The key `blockSize`.
    pub block_size: Option<u32>,
    /// The range sets, which ADD needs. GC keeps an empty block of their pools.
    pub sets: &'a [RangeSet],
    /// The node.
    pub host: Host,
    /// The clock, and the signals that end a wait.
    pub machine: &'a dyn Machine,
    /// Receives notes for the operator.
    pub notes: Notes,
    /// Called at most once, when the store is needed.
    pub open: Box<Open<'a>>,
    /// Locks the reservations of the network and lists them.
    pub lock_reservations: Box<dyn Fn() -> Result<InUse> + 'a>,
}

impl<'a> Network<'a> {
    /// Returns the name of the pool of a range.
    pub(super) fn pool(&self, range: &Range) -> String {
        pool::name(&self.layer2, range.subnet())
    }

    /// Returns all ranges.
    pub(super) fn ranges(&self) -> impl Iterator<Item = &'a Range> {
        self.sets.iter().flat_map(RangeSet::ranges)
    }

    /// Returns the name and the subnet of each range's pool.
    pub(super) fn pools(&self) -> Vec<(String, Cidr)> {
        self.ranges().map(|range| (self.pool(range), range.subnet())).collect()
    }

    /// Returns the block size of a new pool of a subnet.
    pub(super) fn new_block_size(&self, subnet: Cidr) -> u32 {
        let size = |range: &Range| (number(range.last()) - number(range.first())).saturating_add(1);
        let sizes = self.ranges().filter(|range| range.subnet() == subnet).map(size);
        self.block_size.unwrap_or_else(|| pool::default_block_size(sizes.fold(0, u128::saturating_add)))
    }

    /// Checks the size of the blocks of the pool with this name and subnet.
    ///
    /// # Errors
    /// Code 7 if another size is configured, or if a block would be larger than the subnet.
    pub(super) fn check_block_size(&self, name: &str, subnet: Cidr, size: u32) -> Result<()> {
        pool::check_block_size(size).map_err(|error| error.context(format_args!("pool {name}")))?;
        if let Some(configured) = self.block_size.filter(|configured| *configured != size) {
            let why = format!("blockSize {configured} differs from that of pool {name}, {size}");
            return Err(Error::config(format!("{why}: it is fixed when the pool is first used")));
        }
        if Block::of("", size, subnet.address()).last > subnet.last() {
            return Err(Error::config(format!("blocks of {size} addresses are larger than subnet {subnet}")));
        }
        Ok(())
    }

    /// Checks that the pool with this name and subnet overlaps no other one of its layer 2 network.
    ///
    /// # Errors
    /// Code 102.
    pub(super) fn check_overlap(&self, name: &str, subnet: Cidr, pools: &[(String, Pool)]) -> Result<()> {
        let overlaps = |(other, pool): &&(String, Pool)| {
            other != name
                && pool::name(&self.layer2, pool.subnet) == *other
                && (pool.subnet.contains(subnet.address()) || subnet.contains(pool.subnet.address()))
        };
        let Some((other, _)) = pools.iter().find(overlaps) else { return Ok(()) };
        let why = "addresses would be given out twice; use the same subnet, or another layer2";
        Err(Error::new(Code::CONFLICT, format!("pool {name} overlaps pool {other}: {why}")))
    }
}
