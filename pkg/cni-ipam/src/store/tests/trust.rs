//! Tests changes that the links do not have: they must not be trusted then.

use super::*;

#[test]
fn a_change_after_reading_the_links_is_noticed() {
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
fn an_unnoticed_removal_is_found_before_reporting_exhaustion() {
    let net = Net::new();
    let pool = sets(&["10.0.0.0/29"]);
    for id in ["a", "b", "c", "d"] {
        net.add(id, &pool).unwrap();
    }
    let mut locked = net.lock();
    locked.prepare_view().unwrap();
    let were_complete = locked.begin_change();
    assert!(were_complete);
    // Without the lock, in the few microseconds between the comparison and the new stamp.
    fs::remove_file(net.path("10.0.0.3")).unwrap();
    let link = Link::new(b"e\r\neth0", "10.0.0.6".parse().unwrap(), None);
    locked.folder.create(&link, "e\r\neth0").unwrap();
    locked.finish_change(were_complete);
    drop(locked);
    assert_eq!(net.linked().len(), 5, "so a link of a removed reservation is left");
    assert_eq!(net.add("f", &pool).unwrap(), ["10.0.0.3"]);
    drop(net.lock().scan().unwrap());
    assert_eq!(net.linked().len(), 5);
}

#[test]
fn two_mtimes_of_the_kernel_prove_nothing() {
    let net = Net::new();
    net.add("a", &sets(&["10.0.0.0/24"])).unwrap();
    net.write("10.0.0.9", "y\r\neth0");
    // As if the folder of links was created in the same tick of the kernel's clock.
    let now = fs::metadata(net.store.path()).unwrap().modified().unwrap();
    File::open(net.links()).unwrap().set_modified(now).unwrap();
    assert_eq!(net.del("y"), ["10.0.0.9"]);
}

#[test]
fn only_files_without_a_link_are_read() {
    let net = Net::new();
    net.add("a", &sets(&["10.0.0.0/24"])).unwrap();
    net.write("10.0.0.9", "y\r\neth0");
    let mut locked = net.lock();
    // No folder, so that nothing in it can be read.
    locked.folder.file = File::open(net.path("lock")).unwrap();
    let scan = locked.scan().unwrap();
    assert_eq!((scan.held.len(), scan.unread.len(), scan.occupied().count()), (1, 1, 2));
    drop(locked);
    assert_eq!(net.lock().scan().unwrap().held.len(), 2, "what was unreadable is read again");
}

#[test]
fn a_sidecar_on_another_file_system_hides_no_reservation() {
    let (net, elsewhere) = (Net::new(), tempfile::tempdir_in("/dev/shm").unwrap());
    fs::create_dir_all(net.data.path().join(".cni")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), net.data.path().join(".cni/net")).unwrap();
    let pool = sets(&["10.0.0.0/24"]);
    assert_eq!(net.add("a", &pool).unwrap(), ["10.0.0.2"], "it has no link then");
    assert_eq!(net.del("a"), ["10.0.0.2"]);
}
