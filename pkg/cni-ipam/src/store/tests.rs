//! The store on a real file system: what it writes, what it leaves alone, and against a model with killed, foreign
//! and racing users.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::testing::TestMachine;
use super::*;
use crate::lock::DEFAULT_LIMIT;
use crate::{RangeConf, RangeSets, Requested};
use proptest::prelude::*;

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
        Store::open(data, "net", Options { notes: Notes::silent(), host: Host::new("m", "b") })
    }

    fn lock(&self) -> Locked {
        // A new value each time: nothing may be remembered in memory.
        Net::open(self.data.path()).lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.store.path().join(name)
    }

    fn index(&self) -> PathBuf {
        self.data.path().join(".cni/net/index")
    }

    fn add(&self, id: &str, sets: &RangeSets) -> Result<Vec<String>> {
        self.add_asking(id, sets, &Requested::none())
    }

    fn add_asking(&self, id: &str, sets: &RangeSets, requested: &Requested) -> Result<Vec<String>> {
        let lease = self.lock().reserve(&owner(id), sets, requested)?;
        Ok(lease.addresses.iter().map(|(_, made)| made.address().to_string()).collect())
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

#[test]
fn what_is_on_disk_is_byte_for_byte_what_go_writes() {
    let net = Net::new();
    assert_eq!(net.add(" abc\n", &sets(&["10.0.0.0/24", "fd00::/64"])).unwrap(), ["10.0.0.2", "fd00::2"]);
    assert_eq!(net.names(), ["10.0.0.2", "fd00::2", "last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
    assert_eq!(fs::read_to_string(net.path("10.0.0.2")).unwrap(), "abc\r\neth0");
    assert_eq!(fs::read_to_string(net.path("last_reserved_ip.1")).unwrap(), "fd00::2");
    for (name, mode) in [("10.0.0.2", 0o600), ("last_reserved_ip.0", 0o600), ("lock", 0o750)] {
        assert_eq!(fs::metadata(net.path(name)).unwrap().permissions().mode() & 0o777, mode, "{name}");
    }
    assert_eq!(fs::metadata(net.data.path().join(".cni/net")).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn a_repeated_add_is_refused_and_changes_nothing() {
    let net = Net::new();
    let pools = sets(&["10.0.0.0/24", "10.1.0.0/24"]);
    net.add("a", &sets(&["10.1.0.0/24"])).unwrap();
    let before = net.names();
    // The first set would have an address; the second one refuses.
    let error = net.add("a", &pools).unwrap_err();
    assert_eq!(error.code(), Code::CONFLICT);
    assert_eq!(
        error.msg(),
        "failed to allocate for range 1: 10.1.0.2 has been allocated to a, duplicate allocation is not allowed"
    );
    assert_eq!(net.names(), before);
    assert_eq!(net.add_asking("a", &pools, &asking("10.0.0.9")).unwrap_err().code(), Code::CONFLICT);
    assert_eq!(net.names(), before, "a refused request frees nothing either");
}

#[test]
fn a_requested_address_that_is_held_names_its_holder() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    net.add_asking("a", &pool, &asking("10.0.0.50")).unwrap();
    assert_eq!(fs::read_to_string(net.path("last_reserved_ip.0")).unwrap(), "10.0.0.50");
    let error = net.add_asking("b", &pool, &asking("10.0.0.50")).unwrap_err();
    assert_eq!(error.code(), Code::CONFLICT);
    assert_eq!(
        error.msg(),
        "failed to allocate for range 0: requested IP address 10.0.0.50 is not available in range set \
         10.0.0.1-10.0.0.254: 10.0.0.50 is held by a eth0"
    );
    let error = net.add_asking("b", &pool, &asking("10.0.0.1")).unwrap_err();
    assert_eq!(error.msg(), "failed to allocate for range 0: requested ip 10.0.0.1 is subnet's gateway");
    assert_eq!(error.code(), Code::INVALID_CONFIG);
}

#[test]
fn exhaustion_is_code_11_with_figures_and_is_found_again_without_reading_the_folder() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/29"]);
    for id in ["a", "b", "c", "d", "e"] {
        net.add(id, &pool).unwrap();
    }
    let error = net.add("f", &pool).unwrap_err();
    assert_eq!(error.code(), Code::TRY_AGAIN);
    assert_eq!(
        error.msg(),
        "failed to allocate for range 0: no IP addresses available in range set: 10.0.0.1-10.0.0.6; 5 of 5 are used"
    );
    assert!(error.details().contains("10.0.0.2 is held by a eth0 since 0 s"), "{}", error.details());
    let before = fs::read(net.index()).unwrap();
    net.add("f", &pool).unwrap_err();
    assert_eq!(fs::read(net.index()).unwrap(), before, "a second failure in a row reads the index alone");
    assert_eq!(net.del("c"), ["10.0.0.4"]);
    assert_eq!(net.add("f", &pool).unwrap(), ["10.0.0.4"]);
}

#[test]
fn del_takes_the_exact_owner_and_the_old_form_only_without_one() {
    let net = Net::new();
    net.write("10.0.0.7", "old\n");
    net.write("10.0.0.8", "both\n");
    net.write("10.0.0.9", "both\r\neth0");
    net.write("10.0.0.10", "both\r\neth1");
    assert_eq!(net.del("nobody"), [""; 0]);
    assert_eq!(net.del("both"), ["10.0.0.9"]);
    assert_eq!(net.del("both"), ["10.0.0.8"]);
    assert_eq!(net.del("old"), ["10.0.0.7"]);
    assert_eq!(net.names(), ["10.0.0.10", "lock"]);
}

#[test]
fn what_a_killed_go_plugin_left_empty_is_free() {
    let net = Net::new();
    net.write("10.0.0.2", "");
    net.write("10.0.0.3", "\0\0\0\0");
    net.write("10.0.0.4", "x");
    assert_eq!(net.add("a", &sets(&["10.0.0.0/24"])).unwrap(), ["10.0.0.2"]);
    assert_eq!(net.add_asking("b", &sets(&["10.0.0.0/24"]), &asking("10.0.0.3")).unwrap(), ["10.0.0.3"]);
    assert_eq!(net.add("c", &sets(&["10.0.0.0/24"])).unwrap(), ["10.0.0.5"], "a short text is an old reservation");
    assert_eq!(fs::read_to_string(net.path("10.0.0.3")).unwrap(), "b\r\neth0");
}

#[test]
fn a_hostile_folder_does_no_harm_and_comes_to_none() {
    let net = Net::new();
    net.write("notes.txt", "a\r\neth0");
    net.write("last_reserved_ip.0", "10.0.0.9");
    net.write("010.0.0.1", "a\r\neth0");
    symlink("/nonexistent", net.path("10.0.0.2")).unwrap();
    symlink(net.path("notes.txt"), net.path("10.0.0.3")).unwrap();
    fs::create_dir(net.path("10.0.0.4")).unwrap();
    fs::create_dir(net.path("sub")).unwrap();
    fs::write(net.path("sub/10.0.0.5"), "a\r\neth0").unwrap();
    nix::unistd::mkfifo(&net.path("10.0.0.6"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    symlink("/nonexistent", net.path("last_reserved_ip.1")).unwrap();
    net.write("last_reserved_ip.2", "garbage");
    net.write("lock", "");
    let before = net.names();
    // An ID like an address equals the content of last_reserved_ip.0.
    assert_eq!(net.del("10.0.0.9"), [""; 0]);
    assert_eq!(net.del("a"), [""; 0]);
    assert_eq!(net.lock().collect(&[]).unwrap().removed, []);
    assert_eq!(net.names(), before);
    fs::remove_file(net.path("last_reserved_ip.0")).unwrap();
    let three = sets(&["10.0.0.0/24", "10.1.0.0/24", "10.2.0.0/24"]);
    assert_eq!(net.add("10.0.0.9", &three).unwrap(), ["10.0.0.5", "10.1.0.2", "10.2.0.2"]);
    assert_eq!(net.del("10.0.0.9").len(), 3);
    assert!(net.add_asking("b", &three, &asking("10.0.0.2")).unwrap_err().msg().contains("is no reservation"));
    assert!(before.iter().filter(|name| *name != "last_reserved_ip.0").all(|name| net.names().contains(name)));
}

fn fifo(path: &Path) {
    nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
}

/// Runs what must not wait for anybody. If it does, the thread is left behind.
fn at_once<T: Send + 'static>(doing: &str, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(run()));
    match receiver.recv_timeout(Duration::from_secs(20)) {
        Ok(outcome) => outcome,
        Err(error) => panic!("{doing}: {error}"),
    }
}

#[test]
fn fifos_in_the_sidecar_are_never_waited_for() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    net.add("a", &pool).unwrap();
    let data = net.data.path().to_owned();
    let sidecar = net.data.path().join(".cni/net");
    let put_fifos = || {
        for name in ["index", "index.new", "new.1"] {
            drop(fs::remove_file(sidecar.join(name)));
            fifo(&sidecar.join(name));
        }
    };
    put_fifos();
    let (path, usage_pool) = (data.clone(), pool.clone());
    let usage = at_once("STATUS", move || Net::open(&path).usage(&usage_pool).unwrap());
    assert_eq!(usage[0].used, 1);
    let path = data.clone();
    let added = at_once("ADD", move || {
        let mut locked = Net::open(&path).lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
        locked.reserve(&owner("b"), &pool, &Requested::none()).unwrap().made()[0].address().to_string()
    });
    assert_eq!(added, "10.0.0.3");
    put_fifos();
    let released = at_once("DEL", move || {
        Net::open(&data).lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap().release(&owner("b")).unwrap()
    });
    assert_eq!(released.len(), 1);
    assert!(fs::metadata(net.index()).unwrap().is_file(), "the FIFO has made way for an index");
}

#[test]
fn fifos_in_the_folder_are_never_waited_for_and_get_nothing() {
    use std::io::Read;
    use std::os::unix::fs::OpenOptionsExt;
    let net = Net::new();
    fs::create_dir_all(net.store.path()).unwrap();
    for name in ["lock", "10.0.0.2", "last_reserved_ip.0"] {
        fifo(&net.path(name));
    }
    // With somebody at the other end, one could write to it.
    let mut reader = fs::OpenOptions::new();
    let mut reader =
        reader.read(true).custom_flags(nix::libc::O_NONBLOCK).open(net.path("last_reserved_ip.0")).unwrap();
    let data = net.data.path().to_owned();
    let outcome = at_once("the verbs", move || {
        let mut locked = Net::open(&data).lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
        let lease = locked.reserve(&owner("a"), &sets(&["10.0.0.0/24"]), &Requested::none()).unwrap();
        let removed = locked.collect(&[]).unwrap().removed.len();
        (lease.made()[0].address().to_string(), removed, locked.list().unwrap().len())
    });
    assert_eq!(outcome, ("10.0.0.3".to_owned(), 1, 0));
    let mut got = String::new();
    reader.read_to_string(&mut got).unwrap();
    assert_eq!(got, "");
    assert_eq!(net.names(), ["10.0.0.2", "last_reserved_ip.0", "lock"]);
}

#[test]
fn status_survives_a_counter_that_counts_less_than_the_gateway() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    net.add("a", &pool).unwrap();
    net.write("10.0.0.1", "somebody has the gateway");
    let mut locked = net.lock();
    locked.reserved_by(&owner("a")).unwrap();
    drop(locked);
    let mut file = fs::OpenOptions::new().read(true).write(true).open(net.index()).unwrap();
    let mut page = vec![0; 4096];
    std::io::Read::read_exact(&mut file, &mut page).unwrap();
    let mut header = index::header::Header::decode(&page).unwrap();
    header.counters.iter_mut().for_each(|counter| counter.used = 0);
    std::os::unix::fs::FileExt::write_all_at(&file, &header.encode(), 0).unwrap();
    assert_eq!(net.store.usage(&pool).unwrap()[0].used, 0);
}

#[test]
fn undoing_tries_every_address_and_tells_every_failure() {
    let net = Net::new();
    let mut locked = net.lock();
    let pools = sets(&["10.0.0.0/24", "10.1.0.0/24"]);
    let made = locked.reserve(&owner("a"), &pools, &Requested::none()).unwrap().made();
    // No folder any more, so that nothing in it can be read.
    locked.folder.file = File::open(net.path("lock")).unwrap();
    let error = locked.undo(&made).unwrap_err();
    assert_eq!(error.code(), Code::IO);
    assert!(error.msg().contains("net/10.0.0.2") && error.msg().contains("net/10.1.0.2"), "{error}");
}

#[test]
fn a_sidecar_that_cannot_be_written_costs_time_and_one_line() {
    let net = Net::new();
    fs::write(net.data.path().join(".cni"), "in the way").unwrap();
    let lines = Rc::new(std::cell::RefCell::new(Vec::new()));
    let sink = Rc::clone(&lines);
    let notes = Notes::new(move |line| sink.borrow_mut().push(line.to_owned()));
    let store = Store::open(net.data.path(), "net", Options { notes, host: Host::default() });
    let pool = sets(&["10.0.0.0/29"]);
    let mut locked = store.lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
    for id in ["a", "b", "c", "d", "e"] {
        locked.reserve(&owner(id), &pool, &Requested::none()).unwrap();
    }
    assert_eq!(locked.reserve(&owner("f"), &pool, &Requested::none()).unwrap_err().code(), Code::TRY_AGAIN);
    locked.release(&owner("b")).unwrap();
    assert_eq!(locked.reserved_by(&owner("b")).unwrap(), [] as [IpAddr; 0]);
    assert_eq!(lines.borrow().len(), 1, "{:?}", lines.borrow());
    assert!(lines.borrow()[0].contains("reads the whole folder"));
    assert_eq!(store.usage(&pool).unwrap()[0].used, 4);
}

#[test]
fn garbage_in_the_sidecar_is_replaced() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    net.add("a", &pool).unwrap();
    for garbage in [Vec::new(), vec![0; 100], vec![0xff; 40_000]] {
        fs::write(net.index(), garbage).unwrap();
        assert_eq!(net.lock().reserved_by(&owner("a")).unwrap().len(), 1);
    }
    // A true header over damaged slots: noticed by their own checks.
    let mut bytes = fs::read(net.index()).unwrap();
    bytes[4096..].fill(0xab);
    fs::write(net.index(), bytes).unwrap();
    assert_eq!(net.lock().reserved_by(&owner("a")).unwrap().len(), 1);
    assert_eq!(net.add("b", &pool).unwrap(), ["10.0.0.3"]);
    fs::remove_dir_all(net.data.path().join(".cni")).unwrap();
    assert_eq!(net.del("b"), ["10.0.0.3"]);
}

#[test]
fn undoing_an_add_frees_what_it_made_and_nothing_else() {
    let net = Net::new();
    let pools = sets(&["10.0.0.0/24", "10.1.0.0/24"]);
    net.write("10.5.0.1", "a\r\neth0");
    let made = net.lock().reserve(&owner("a"), &pools, &Requested::none()).unwrap().made();
    // Meanwhile somebody released the second address, and another container got it.
    fs::remove_file(net.path("10.1.0.2")).unwrap();
    net.write("10.1.0.2", "b\r\neth0");
    net.lock().undo(&made).unwrap();
    assert_eq!(net.names(), ["10.1.0.2", "10.5.0.1", "last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
    assert_eq!(net.lock().reserved_by(&owner("a")).unwrap().len(), 1);
}

#[test]
fn undoing_an_add_does_not_take_a_later_reservation_of_the_same_owner() {
    let net = Net::new();
    let made = net.lock().reserve(&owner("a"), &sets(&["10.0.0.0/24"]), &Requested::none()).unwrap().made();
    // The inode stays in use, so that the new file cannot get it.
    fs::hard_link(net.path("10.0.0.2"), net.data.path().join("old")).unwrap();
    replace(&net, "10.0.0.2", "a\r\neth0");
    net.lock().undo(&made).unwrap();
    assert!(net.path("10.0.0.2").exists());
}

#[test]
fn what_changes_between_reading_the_index_and_changing_the_folder_is_seen() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    net.add("a", &pool).unwrap();
    let mut locked = net.lock();
    locked.reserved_by(&owner("a")).unwrap();
    net.write("10.0.0.9", "y\r\neth0");
    locked.reserve(&owner("b"), &pool, &Requested::none()).unwrap();
    drop(locked);
    assert_eq!(net.del("y"), ["10.0.0.9"]);
}

#[test]
fn a_removal_that_nobody_could_see_is_found_before_a_range_is_called_exhausted() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/29"]);
    for id in ["a", "b", "c", "d"] {
        net.add(id, &pool).unwrap();
    }
    let mut locked = net.lock();
    assert!(locked.begin().is_ok_and(|fresh| fresh));
    // Without the lock, in the few microseconds between the comparison and the mark.
    fs::remove_file(net.path("10.0.0.3")).unwrap();
    let folder::Linked::Made(record) = locked.folder.create("10.0.0.6".parse().unwrap(), "e\r\neth0", 0).unwrap()
    else {
        panic!("10.0.0.6 was free");
    };
    locked.settle(|index| index.put(&record));
    drop(locked);
    assert_eq!(net.store.usage(&pool).unwrap()[0].used, 5, "so the index was deceived");
    assert_eq!(net.add("f", &pool).unwrap(), ["10.0.0.3"]);
}

#[test]
fn gc_judges_by_what_the_file_says() {
    let net = Net::new();
    net.write("10.0.0.2", "gone\r\neth0");
    net.lock().reserved_by(&owner("gone")).unwrap();
    net.write("10.0.0.2", "here\r\neth0"); // in place: the folder is as it was
    assert_eq!(net.lock().collect(&[owner("here")]).unwrap().removed, []);
    assert!(net.path("10.0.0.2").exists());
}

#[test]
fn gc_keeps_the_valid_the_old_form_of_a_valid_id_and_what_is_foreign() {
    let net = Net::new();
    for (name, content) in [
        ("10.0.0.2", "a\r\neth0"),
        ("10.0.0.3", "a\r\neth1"),
        ("10.0.0.4", "a"),
        ("10.0.0.5", "b"),
        ("10.0.0.6", ""),
        ("fd00::2", "b\r\neth0"),
        ("readme", "b"),
    ] {
        net.write(name, content);
    }
    let collected = net.lock().collect(&[owner("a")]).unwrap();
    let removed: Vec<String> = collected.removed.iter().map(Reservation::to_string).collect();
    assert_eq!(removed, ["10.0.0.3 is held by a eth1", "10.0.0.5 is held by b", "fd00::2 is held by b eth0"]);
    assert_eq!((collected.kept, collected.error.is_none()), (2, true));
    assert_eq!(net.names(), ["10.0.0.2", "10.0.0.4", "10.0.0.6", "lock", "readme"]);
}

#[test]
fn gc_of_very_many_leaves_a_true_index() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/24"]);
    for n in 2..200 {
        net.write(&format!("10.0.0.{n}"), &format!("c{n}\r\neth0"));
    }
    let collected = net.lock().collect(&[owner("c77")]).unwrap();
    assert_eq!((collected.removed.len(), collected.kept), (197, 1));
    assert_eq!(net.store.usage(&pool).unwrap()[0].used, 1);
    assert_eq!(net.add("x", &pool).unwrap(), ["10.0.0.2"]);
}

#[test]
fn status_counts_with_and_without_an_index_and_makes_nothing() {
    let net = Net::new();
    let pools = sets(&["10.0.0.0/29", "fd00::/64"]);
    assert_eq!(net.store.usage(&pools).unwrap()[0].to_string(), "10.0.0.1-10.0.0.6: 0 of 5 used");
    assert!(!net.store.path().exists());
    net.write("10.0.0.1", "somebody has the gateway");
    for id in ["a", "b", "c", "d"] {
        net.add(id, &pools).unwrap();
    }
    let usage = net.store.usage(&pools).unwrap();
    assert_eq!((usage[0].used, usage[1].used, usage[0].is_exhausted()), (4, 4, false));
    net.add("e", &pools).unwrap();
    let _held = net.lock();
    assert!(net.store.usage(&pools).unwrap()[0].is_exhausted(), "answered although the lock is held");
    fs::remove_file(net.index()).unwrap();
    assert!(net.store.usage(&pools).unwrap()[0].is_exhausted());
}

#[test]
fn threads_on_one_store_get_distinct_addresses() {
    let net = Net::new();
    let data = net.data.path();
    let got: Vec<String> = std::thread::scope(|scope| {
        let run = |worker: usize| {
            move || {
                let (store, pool) = (Net::open(data), sets(&["10.0.0.0/23"]));
                let mut got = Vec::new();
                for n in 0..25 {
                    let id = format!("c{worker}-{n}");
                    let mut locked = store.lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
                    let lease = locked.reserve(&owner(&id), &pool, &Requested::none()).unwrap();
                    drop(locked);
                    if n % 5 == 0 {
                        let mut locked = store.lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
                        assert_eq!(locked.release(&owner(&id)).unwrap().len(), 1);
                    } else {
                        got.push(lease.addresses[0].1.address().to_string());
                    }
                }
                got
            }
        };
        let threads: Vec<_> = (0..8).map(|worker| scope.spawn(run(worker))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(got.len(), 160);
    assert_eq!(got.iter().collect::<HashSet<_>>().len(), 160);
    assert_eq!(net.lock().list().unwrap().len(), 160);
}

/// What happens to a store, by ours, by others, and by death.
#[derive(Clone, Debug)]
enum Step {
    Add(u8),
    Ask(u8, u8),
    Del(u8),
    ForeignCreate(u8, u8),
    ForeignRemove(u8),
    ForeignBlank(u8),
    KilledAdd(u8, u8, u8),
    KilledDel(u8, u8),
    Collect(u8),
    LoseIndex,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u8..8).prop_map(Step::Add),
        1 => (0u8..8, 0u8..16).prop_map(|(id, at)| Step::Ask(id, at)),
        3 => (0u8..8).prop_map(Step::Del),
        2 => (0u8..16, 0u8..8).prop_map(|(at, id)| Step::ForeignCreate(at, id)),
        2 => (0u8..16).prop_map(Step::ForeignRemove),
        1 => (0u8..16).prop_map(Step::ForeignBlank),
        2 => (0u8..16, 0u8..8, 0u8..4).prop_map(|(at, id, stage)| Step::KilledAdd(at, id, stage)),
        2 => (0u8..16, 0u8..4).prop_map(|(at, stage)| Step::KilledDel(at, stage)),
        1 => (0u8..8).prop_map(Step::Collect),
        1 => Just(Step::LoseIndex),
    ]
}

fn at(offset: u8) -> String {
    format!("10.0.0.{offset}")
}

fn id(number: u8) -> String {
    format!("c{number}")
}

fn content(number: u8) -> String {
    format!("c{number}\r\neth0")
}

/// Changes a file as a process would that is killed after so many of the steps that `index` counts.
fn killed(net: &Net, address: &str, content: Option<&str>, stage: u8) {
    let mut locked = net.lock();
    assert!(locked.begin().is_ok_and(|fresh| fresh));
    let address_ip: IpAddr = address.parse().unwrap();
    if stage == 0 {
        return;
    }
    let made = match content {
        Some(content) => match locked.folder.create(address_ip, content, 7).unwrap() {
            folder::Linked::Made(record) => Some(record),
            folder::Linked::Exists => return,
        },
        None => {
            locked.folder.unlink(address).unwrap();
            None
        }
    };
    let mut index = locked.index.take().unwrap();
    if stage > 1 {
        index.mark(&locked.folder.file).unwrap();
    }
    if stage > 2 {
        match made {
            Some(record) => index.put(&record).unwrap(),
            None => index.remove(address_ip).unwrap(),
        }
    }
}

/// A new file, likely with the inode of the old one, within the same tick of the kernel's clock.
fn replace(net: &Net, name: &str, content: &str) {
    drop(fs::remove_file(net.path(name)));
    net.write(name, content);
}

/// The truth, as the files tell it.
fn truth(net: &Net) -> BTreeMap<IpAddr, String> {
    let Ok(entries) = fs::read_dir(net.store.path()) else { return BTreeMap::new() };
    let read = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        let address: IpAddr = entry.file_name().to_str()?.parse().ok()?;
        Some((address, fs::read_to_string(entry.path()).unwrap()))
    };
    entries.filter_map(read).filter(|(_, content)| !content.is_empty()).collect()
}

fn holds(truth: &BTreeMap<IpAddr, String>, number: u8) -> Vec<IpAddr> {
    truth.iter().filter(|(_, text)| **text == content(number)).map(|(address, _)| *address).collect()
}

fn holds_in_pool(truth: &BTreeMap<IpAddr, String>, number: u8) -> bool {
    holds(truth, number).iter().any(|address| (1..15).any(|offset| at(offset) == address.to_string()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn the_index_never_tells_what_the_files_do_not(steps in prop::collection::vec(step(), 1..40)) {
        let net = Net::new();
        let pool = sets(&["10.0.0.0/28"]);
        drop(net.lock());
        for step in steps {
            let before = truth(&net);
            match step {
                Step::Add(number) => {
                    let last = fs::read_to_string(net.path("last_reserved_ip.0")).ok();
                    let turn = turn(last.as_deref());
                    let free = turn.iter().find(|offset| !before.contains_key(&at(**offset).parse().unwrap()));
                    match (net.add(&id(number), &pool), !holds_in_pool(&before, number), free) {
                        (Ok(got), true, Some(free)) => prop_assert_eq!(&got[0], &at(*free)),
                        (Err(error), false, _) => prop_assert_eq!(error.code(), Code::CONFLICT),
                        (Err(error), true, None) => prop_assert_eq!(error.code(), Code::TRY_AGAIN),
                        (got, free, turn) => prop_assert!(false, "{:?} {} {:?}", got, free, turn),
                    }
                }
                Step::Ask(number, offset) => {
                    let address: IpAddr = at(offset).parse().unwrap();
                    let allowed = (2..15).contains(&offset)
                        && !before.contains_key(&address) && !holds_in_pool(&before, number);
                    let got = net.add_asking(&id(number), &pool, &asking(&at(offset)));
                    prop_assert_eq!(got.is_ok(), allowed, "{:?}", got);
                }
                Step::Del(number) => {
                    let got = net.lock().release(&owner(&id(number))).unwrap();
                    prop_assert_eq!(got, holds(&before, number));
                }
                Step::ForeignCreate(offset, number) => replace(&net, &at(offset), &content(number)),
                Step::ForeignBlank(offset) => replace(&net, &at(offset), ""),
                Step::ForeignRemove(offset) => drop(fs::remove_file(net.path(&at(offset)))),
                Step::KilledAdd(offset, number, stage) => killed(&net, &at(offset), Some(&content(number)), stage),
                Step::KilledDel(offset, stage) => killed(&net, &at(offset), None, stage),
                Step::Collect(number) => {
                    let collected = net.lock().collect(&[owner(&id(number))]).unwrap();
                    prop_assert_eq!(collected.removed.len(), before.len() - holds(&before, number).len());
                }
                Step::LoseIndex => drop(fs::remove_file(net.index())),
            }
            let after = truth(&net);
            for number in 0..8 {
                let got = net.lock().reserved_by(&owner(&id(number))).unwrap();
                prop_assert_eq!(got, holds(&after, number));
            }
            let used = after.keys().filter(|a| (2..15).any(|o| at(o) == a.to_string())).count() as u128;
            if net.index().exists() && !fs::read_dir(net.store.path()).unwrap().any(|e| e.unwrap().metadata().unwrap().len() == 0) {
                prop_assert_eq!(net.store.usage(&pool).unwrap()[0].used, used);
            }
        }
    }
}

/// The order in which the round robin of 10.0.0.0/28 visits the last numbers of its addresses.
fn turn(last: Option<&str>) -> Vec<u8> {
    let last: u8 = last.and_then(|text| text.rsplit_once('.')?.1.parse().ok()).unwrap_or(0);
    let (behind, before): (Vec<u8>, Vec<u8>) = (2..15).partition(|offset| *offset > last);
    behind.into_iter().chain(before).collect()
}

#[test]
fn chosen_reservations_go_and_changed_ones_stay() {
    let net = Net::new();
    let sets = sets(&["10.0.0.0/24"]);
    for id in ["a", "b", "c"] {
        net.add(id, &sets).unwrap();
    }
    let mut locked = net.lock();
    let chosen: Vec<Reservation> = locked.list().unwrap().into_iter().filter(|held| held.id != "b").collect();
    fs::write(net.path("10.0.0.4"), "other\r\neth0").unwrap();
    let removed = locked.release_chosen(&chosen).unwrap();
    drop(locked);
    assert_eq!(removed, ["10.0.0.2".parse::<IpAddr>().unwrap()], "c's file is another's now");
    let left: Vec<String> = net.lock().list().unwrap().into_iter().map(|held| held.id).collect();
    assert_eq!(left, ["b", "other"]);
    assert_eq!(net.add("d", &sets).unwrap(), ["10.0.0.5"]);
    assert_eq!(networks(net.data.path()).unwrap(), ["net"]);
    assert_eq!(networks(Path::new("/nonexistent")).unwrap(), Vec::<String>::new());
}
