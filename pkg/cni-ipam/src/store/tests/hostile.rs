//! Foreign files in the folder or the sidecar do no harm, stay unchanged, and never block a verb.

use std::os::unix::fs::symlink;

use super::*;

#[test]
fn a_hostile_folder_does_no_harm_and_stays_unchanged() {
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
    assert_eq!(net.lock().gc(&[]).unwrap().removed, []);
    assert_eq!(net.names(), before);
    fs::remove_file(net.path("last_reserved_ip.0")).unwrap();
    let three = sets(&["10.0.0.0/24", "10.1.0.0/24", "10.2.0.0/24"]);
    assert_eq!(net.add("10.0.0.9", &three).unwrap(), ["10.0.0.5", "10.1.0.2", "10.2.0.2"]);
    assert_eq!(net.del("10.0.0.9").len(), 3);
    assert!(net.add_asking("b", &three, &asking("10.0.0.2")).unwrap_err().msg().contains("is not a reservation"));
    assert!(before.iter().filter(|name| *name != "last_reserved_ip.0").all(|name| net.names().contains(name)));
}

fn fifo(path: &Path) {
    nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
}

/// Runs code that must not block. If it blocks, the thread is left behind.
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
        for name in ["links", "boot", "boot.new", "index", "new.1"] {
            drop(fs::remove_dir_all(sidecar.join(name)).or_else(|_| fs::remove_file(sidecar.join(name))));
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
        locked.reserve(&owner("b"), &pool, &Requested::none()).unwrap().addresses[0].1.to_string()
    });
    assert_eq!(added, "10.0.0.3");
    put_fifos();
    let released = at_once("DEL", move || {
        Net::open(&data).lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap().release(&owner("b")).unwrap()
    });
    assert_eq!(released.len(), 1);
    assert!(fs::metadata(net.links()).unwrap().is_dir(), "the FIFO has made way for the links");
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
    // With a reader at the other end, the file could be written to.
    let mut reader = fs::OpenOptions::new();
    let mut reader =
        reader.read(true).custom_flags(nix::libc::O_NONBLOCK).open(net.path("last_reserved_ip.0")).unwrap();
    let data = net.data.path().to_owned();
    let outcome = at_once("the verbs", move || {
        let mut locked = Net::open(&data).lock(DEFAULT_LIMIT, &TestMachine::default()).unwrap();
        let lease = locked.reserve(&owner("a"), &sets(&["10.0.0.0/24"]), &Requested::none()).unwrap();
        let removed = locked.gc(&[]).unwrap().removed.len();
        (lease.addresses[0].1.to_string(), removed, locked.list().unwrap().reservations.len())
    });
    assert_eq!(outcome, ("10.0.0.3".to_owned(), 1, 0));
    let mut got = String::new();
    reader.read_to_string(&mut got).unwrap();
    assert_eq!(got, "");
    assert_eq!(net.names(), ["10.0.0.2", "last_reserved_ip.0", "lock"]);
}

#[test]
fn a_sidecar_that_cannot_be_written_costs_time_and_one_line() {
    costs_time_and_one_line(|sidecar| fs::write(sidecar, "in the way"));
    costs_time_and_one_line(|sidecar| std::os::unix::fs::symlink("/nowhere/at/all", sidecar));
}

#[track_caller]
fn costs_time_and_one_line(put_in_the_way: impl FnOnce(&Path) -> std::io::Result<()>) {
    let net = Net::new();
    put_in_the_way(&net.data.path().join(".cni")).unwrap();
    let lines = Rc::new(std::cell::RefCell::new(Vec::new()));
    let sink = Rc::clone(&lines);
    let notes = Notes::new(move |line| sink.borrow_mut().push(line.to_owned()));
    let store = Store::open(net.data.path(), "net", Options::new(notes, Host::default()));
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
    let links = net.linked();
    for bucket in fs::read_dir(net.links()).unwrap() {
        let bucket = bucket.unwrap().path();
        let link = bucket.join(&links[0]);
        // Links to a missing and to another file, an unknown name, a folder; and then none at all.
        fs::write(bucket.join(links[0].replace("10.0.0.2", "10.0.0.9")), "a\r\neth0").unwrap();
        fs::write(bucket.join("garbage"), "a\r\neth0").unwrap();
        assert_eq!(net.lock().reserved_by(&owner("a")).unwrap().len(), 1);
        fs::remove_file(&link).unwrap();
        fs::create_dir(&link).unwrap();
        assert_eq!(net.lock().reserved_by(&owner("a")).unwrap().len(), 1);
    }
    fs::remove_dir_all(net.links()).unwrap();
    assert_eq!(net.lock().reserved_by(&owner("a")).unwrap().len(), 1);
    fs::write(net.data.path().join(".cni/net/index"), "of an older build").unwrap();
    assert_eq!(net.add("b", &pool).unwrap(), ["10.0.0.3"]);
    fs::remove_dir_all(net.data.path().join(".cni")).unwrap();
    assert_eq!(net.del("b"), ["10.0.0.3"]);
    assert_eq!(net.linked(), ["3aa3cd12aab2d6ca-10.0.0.2"], "without the boot, which no file has");
}
