//! Tests the store on a real file system: what it writes, what it does not touch, and how it
//! compares with a model. This file has what the tests share: a store in a folder of its own.

mod hostile;
mod model;
mod reboot;
mod release;
mod reserve;
mod status;
mod trust;

use std::fs;

use super::testing::TestMachine;
use super::*;
use crate::lock::DEFAULT_LIMIT;
use crate::{RangeConf, RangeSets, Requested};

struct Net {
    data: tempfile::TempDir,
    store: Store,
}

impl Net {
    fn new() -> Net {
        let data = tempfile::tempdir().unwrap();
        let store = Net::open(data.path());
        Net { data, store }
    }

    fn open(data: &Path) -> Store {
        Store::open(data, "net", Options::new(Notes::silent(), Host::new("m", "b")))
    }

    fn lock(&self) -> Locked {
        // A new value each time: nothing may be remembered in memory.
        Net::open(self.data.path()).lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.store.path().join(name)
    }

    fn links(&self) -> PathBuf {
        self.data.path().join(".cni/net/links")
    }

    /// Returns the names of all links, without their buckets.
    fn linked(&self) -> Vec<String> {
        let mut names = Vec::new();
        for bucket in fs::read_dir(self.links()).unwrap() {
            names.extend(fs::read_dir(bucket.unwrap().path()).unwrap().map(|entry| entry.unwrap().file_name()));
        }
        let mut names: Vec<String> = names.into_iter().map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn add(&self, id: &str, sets: &RangeSets) -> Result<Vec<String>> {
        self.add_asking(id, sets, &Requested::none())
    }

    fn add_asking(&self, id: &str, sets: &RangeSets, requested: &Requested) -> Result<Vec<String>> {
        let lease = self.lock().reserve(&owner(id), sets, requested)?;
        Ok(lease.addresses.iter().map(|(_, address)| address.to_string()).collect())
    }

    fn del(&self, id: &str) -> Vec<String> {
        self.lock().release(&owner(id)).unwrap().iter().map(IpAddr::to_string).collect()
    }

    fn write(&self, name: &str, content: &str) {
        fs::create_dir_all(self.store.path()).unwrap();
        fs::write(self.path(name), content).unwrap();
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(self.store.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn owner(id: &str) -> Owner {
    Owner::new(id, "eth0")
}

fn sets(subnets: &[&str]) -> RangeSets {
    let conf = |subnet: &&str| vec![RangeConf { subnet: Some((*subnet).to_owned()), ..RangeConf::default() }];
    RangeSets::check(&[], &RangeConf::default(), &subnets.iter().map(conf).collect::<Vec<_>>()).unwrap()
}

fn asking(address: &str) -> Requested {
    let mut requested = Requested::none();
    requested.add("ips", [address]).unwrap();
    requested
}

/// Replaces a file by a new one, likely with the same inode and within the same tick of the
/// kernel's clock.
fn replace(net: &Net, name: &str, content: &str) {
    drop(fs::remove_file(net.path(name)));
    net.write(name, content);
}
