//! Tests which reservations of an earlier boot are reclaimed, and that they are searched only once.

use std::cell::RefCell;

use cni_testkit::probe::Probed;
use cni_testkit::require;

use super::*;

/// Returns a machine whose boot began `up` seconds ago.
fn booted(root: &Path, boot: &str, up: &str) -> Host {
    for (name, content) in [("etc/machine-id", "m"), ("proc/sys/kernel/random/boot_id", boot), ("proc/uptime", up)] {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    Host::read(root)
}

/// Probes that the store's folder outlives a reboot: only then it can have reservations of an
/// earlier boot.
fn on_disk(net: &Net) -> Probed {
    let folder = net.data.path();
    let local = crate::store::reboot::is_local(&File::open(folder).unwrap());
    if local { Ok(()) } else { Err(format!("{} is not on a local disk; set TMPDIR", folder.display())) }
}

type Lines = Rc<RefCell<Vec<String>>>;

fn store(net: &Net, host: Host) -> (Store, Lines) {
    let lines = Lines::default();
    let sink = Rc::clone(&lines);
    let notes = Notes::new(move |line| sink.borrow_mut().push(line.to_owned()));
    (
        Store::open(
            net.data.path(),
            "net",
            Options { after_reboot: RebootPolicy::Reclaim, ..Options::new(notes, host) },
        ),
        lines,
    )
}

fn add(store: &Store, id: &str, sets: &RangeSets) -> Result<String> {
    let mut locked = store.lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
    Ok(locked.reserve(&owner(id), sets, &Requested::none())?.addresses[0].1.to_string())
}

#[test]
fn only_the_first_add_of_a_boot_releases_and_reports() {
    let (net, root, pool) = (Net::new(), tempfile::tempdir().unwrap(), sets(&["10.0.0.0/29"]));
    require!(on_disk(&net));
    let (first, _) = store(&net, booted(root.path(), "one", "1000"));
    for id in ["a", "b", "c"] {
        add(&first, id, &pool).unwrap();
    }
    net.write("10.0.0.5", "go\r\neth0");
    let (second, lines) = store(&net, booted(root.path(), "two", "0"));
    assert_eq!(second.usage(&pool).unwrap()[0].used, 4, "not full, so no search for old reservations");
    assert_eq!(add(&second, "d", &pool).unwrap(), "10.0.0.6");
    let path = net.store.path().display();
    let note = format!("released 3 reservations in {path}, made before this boot: 10.0.0.2, 10.0.0.3, 10.0.0.4");
    assert_eq!(*lines.borrow(), [note]);
    assert!(second.is_searched());
    assert_eq!(net.names(), ["10.0.0.5", "10.0.0.6", "last_reserved_ip.0", "lock"]);
    // An ADD that searches nothing works without the time of the boot.
    fs::remove_file(root.path().join("proc/uptime")).unwrap();
    assert_eq!(add(&second, "e", &pool).unwrap(), "10.0.0.2");
}

#[test]
fn status_counts_reclaimable_addresses_as_free() {
    let (net, root, pool) = (Net::new(), tempfile::tempdir().unwrap(), sets(&["10.0.0.0/29", "10.1.0.0/24"]));
    require!(on_disk(&net));
    let (first, _) = store(&net, booted(root.path(), "one", "1000"));
    for id in ["a", "b", "c", "d"] {
        add(&first, id, &pool).unwrap();
    }
    net.write("10.0.0.6", "go\r\neth0");
    assert!(first.usage(&pool).unwrap()[0].is_exhausted());
    let (second, _) = store(&net, booted(root.path(), "two", "0"));
    let used = |store: &Store| store.usage(&pool).unwrap().iter().map(|set| set.used).collect::<Vec<_>>();
    assert_eq!(used(&second), [1, 0]);
    // DEL releases only its owner's reservation.
    second.lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap().release(&owner("a")).unwrap();
    assert!(!second.is_searched());
    net.write("10.0.0.2", "go\r\neth0");
    assert_eq!(used(&second), [2, 0]);
    assert_eq!(net.names().len(), 11);
    let mut keep = second.clone();
    keep.options.after_reboot = RebootPolicy::Keep;
    assert_eq!(used(&keep), [5, 3]);
}

#[test]
fn a_clock_set_late_postpones_the_search_without_repeating_it() {
    let (net, root, pool) = (Net::new(), tempfile::tempdir().unwrap(), sets(&["10.0.0.0/24"]));
    require!(on_disk(&net));
    let (first, _) = store(&net, booted(root.path(), "one", "1000"));
    add(&first, "a", &pool).unwrap();
    // A boot that seems to have begun before the reservation was made.
    let (second, lines) = store(&net, booted(root.path(), "two", "500000"));
    add(&second, "b", &pool).unwrap();
    assert!(second.is_searched() && lines.borrow().is_empty());
    fs::write(root.path().join("proc/uptime"), "0").unwrap();
    assert_eq!(add(&second, "a", &pool).unwrap(), "10.0.0.4");
    assert_eq!(net.names(), ["10.0.0.3", "10.0.0.4", "last_reserved_ip.0", "lock"]);
    fs::write(root.path().join("proc/uptime"), "900000").unwrap();
    assert!(second.is_searched(), "nothing is left to search");
}

#[test]
fn releasing_very_many_at_once_leaves_correct_links() {
    let (net, root, pool) = (Net::new(), tempfile::tempdir().unwrap(), sets(&["10.0.0.0/24"]));
    require!(on_disk(&net));
    let (first, _) = store(&net, booted(root.path(), "one", "1000"));
    for id in 0..200 {
        add(&first, &format!("c{id}"), &pool).unwrap();
    }
    let (second, _) = store(&net, booted(root.path(), "two", "0"));
    add(&second, "a", &pool).unwrap();
    assert_eq!(second.usage(&pool).unwrap()[0].used, 1);
    assert_eq!((net.names().len(), net.linked().len(), second.is_searched()), (3, 1, true));
}

#[test]
fn a_reservation_of_a_killed_add_is_reclaimed_after_reboot() {
    let pool = sets(&["10.0.0.0/24"]);
    for (name, between) in [("nothing", None), ("another ADD", Some("b"))] {
        let (net, root) = (Net::new(), tempfile::tempdir().unwrap());
        require!(on_disk(&net));
        let (first, _) = store(&net, booted(root.path(), "one", "1000"));
        add(&first, "a", &pool).unwrap();
        let mut locked = first.lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
        locked.prepare_view().unwrap();
        for address in ["10.0.0.3", "10.0.0.4"] {
            let link = Link::new(b"killed\r\neth0", address.parse().unwrap(), locked.recorded_boot());
            locked.folder.create(&link, "killed\r\neth0").unwrap();
        }
        // Dropped without a stamp, as by SIGKILL. One of the two is then changed.
        drop(locked);
        net.write("10.0.0.4", "foreign\r\neth0");
        between.map(|id| add(&first, id, &pool).unwrap());
        let (second, _) = store(&net, booted(root.path(), "two", "0"));
        add(&second, "c", &pool).unwrap();
        let names = net.names().into_iter().filter(|name| name.starts_with("10."));
        let mut held: Vec<String> = names.map(|name| fs::read_to_string(net.path(&name)).unwrap()).collect();
        held.sort();
        assert_eq!(held, ["c\r\neth0", "foreign\r\neth0"], "after {name}");
    }
}

#[test]
fn without_a_search_the_file_system_decides_on_the_boot() {
    let (net, root) = (Net::new(), tempfile::tempdir().unwrap());
    require!(on_disk(&net));
    let (reclaiming, _) = store(&net, booted(root.path(), "one", "1000"));
    let mut keeping = reclaiming.clone();
    keeping.options.after_reboot = RebootPolicy::Keep;
    let pool = sets(&["10.0.0.0/24"]);
    add(&keeping, "a", &pool).unwrap();
    add(&reclaiming, "b", &pool).unwrap();
    let boot = reclaiming.options.host.boot().unwrap().to_string();
    assert!(net.linked().iter().all(|name| name.ends_with(&boot)), "{:?}", net.linked());
    // As on a shared file system.
    let record = net.data.path().join(".cni/net/boot");
    fs::remove_file(&record).unwrap();
    std::os::unix::fs::symlink(format!("{boot} shared"), &record).unwrap();
    add(&reclaiming, "c", &pool).unwrap();
    assert_eq!(net.linked().iter().filter(|name| name.ends_with(&boot)).count(), 2);
}
