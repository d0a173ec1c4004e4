//! host-local's folder with arbitrary files, symbolic links, folders and forged links, and verbs on
//! it. An ADD gives only free addresses and writes a file with mode 0600 for each. DEL and GC
//! succeed and remove only reservations that they should remove; because of forged links they may
//! miss some.
//! Nothing else changes, in the folder or outside.
//!
//! The input: the folder's contents, then the verbs.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::time::Duration;

use cni::rollback::Notes;
use cni_ipam::fuzzing::{address_of_name, plant, reservation_text};
use cni_ipam::{Host, Lease, Options, Owner, RangeConf, RangeSets, Requested, Store};

use crate::input::Input;
use crate::links::address;
use crate::machine::NoMachine;

/// The maximum time to wait for the lock.
const LIMIT: Duration = Duration::from_secs(5);

/// The entries of the folder by name: the content of a regular file, or `None` for anything else.
type Files = BTreeMap<String, Option<Vec<u8>>>;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let dir = tempfile::tempdir().expect("failed to create a temporary folder");
    let data_dir = dir.path().join("data");
    let folder = data_dir.join("net");
    fs::create_dir_all(&folder).expect("failed to create the network's folder");
    let outside = dir.path().join("outside");
    fs::write(&outside, "c1\r\neth0").expect("failed to write the file outside");
    let is_lockable = fill_folder(&mut input, &folder, &outside);
    let host = Host::new("m", "b");
    let sets = sets();
    for _ in 0..8 {
        if input.is_empty() {
            break;
        }
        // The low three bits select what is done: 0 and 1 are ADD, 2 ADD with a requested address,
        // 3 and 4 DEL, 5 GC, 6 list and STATUS, 7 adds forged links. The next
        // two bits select the container, and the next one the interface.
        let selector = input.byte();
        let verb = selector % 8;
        if verb == 7 {
            let owner = |input: &mut Input<'_>| input.one_of(&["c1\r\neth0", "c2\r\neth0", "c3\r\nnet1", "c1"]);
            let forged: Vec<_> = (0..input.byte() % 16).map(|_| (owner(&mut input), address(&mut input))).collect();
            plant(&data_dir, "net", &forged).expect("failed to write the forged links");
            continue;
        }
        let before = files(&folder);
        let store = Store::open(&data_dir, "net", Options::new(Notes::silent(), host.clone()));
        if !is_lockable {
            assert!(store.lock(LIMIT, &NoMachine).is_err(), "locked, although the lock is a folder");
            assert_eq!(files(&folder), before, "changed without the lock");
            continue;
        }
        let mut locked = store.lock(LIMIT, &NoMachine).expect("failed to lock");
        let owner = Owner::new(
            ["c1", "c2", "c3", "\u{e4}"][usize::from(selector / 8 % 4)],
            ["eth0", "net1"][usize::from(selector / 32 % 2)],
        );
        match verb {
            0..=2 => {
                let mut requested = Requested::none();
                if verb == 2 {
                    // If the address is refused, the ADD runs without a requested address.
                    let _ = requested.add("ips", [address(&mut input).to_string().as_str()]);
                }
                let reserved = locked.reserve(&owner, &sets, &requested);
                check_add(&folder, &before, &owner, &sets, reserved.ok());
            }
            3 | 4 => {
                let removed = locked.release(&owner).expect("DEL failed");
                check_removal(&folder, &before, removed, &reservations_of(&before, &owner));
            }
            5 => {
                // Everything except the reservations of eth0 of container c2, and those of c2 in
                // the format without an interface.
                let kept: [&[u8]; 2] = [b"c2\r\neth0", b"c2"];
                let removable = reservations(&before, |text| !kept.contains(&text));
                let collected = locked.gc(&[Owner::new("c2", "eth0")]).expect("GC failed");
                assert!(collected.error.is_none(), "GC failed: {:?}", collected.error);
                let removed = collected.removed.iter().map(|reservation| reservation.address).collect();
                check_removal(&folder, &before, removed, &removable);
            }
            _ => {
                let listed = locked.list().expect("failed to list the reservations");
                assert!(listed.unread.is_empty(), "unread: {:?}", listed.unread);
                let without_file =
                    listed.reservations.iter().find(|one| !before.contains_key(&one.address.to_string()));
                assert!(without_file.is_none(), "listed without a file: {without_file:?}");
                let _ = store.usage(&sets).expect("STATUS failed");
                assert_eq!(files(&folder), before, "changed by reading");
            }
        }
        assert_eq!(fs::read(&outside).expect("failed to read the file outside"), b"c1\r\neth0");
    }
    let mut names: Vec<_> = fs::read_dir(dir.path())
        .expect("failed to list the temporary folder")
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["data", "outside"], "files in the temporary folder");
}

/// Checks that an ADD wrote a file for each address of its lease and gave no address that was
/// already reserved. If the ADD failed, `lease` is `None`. No other file must have changed, except
/// `last_reserved_ip.*`.
fn check_add(folder: &Path, before: &Files, owner: &Owner, sets: &RangeSets, lease: Option<Lease>) {
    let mut expected = before.clone();
    if let Some(lease) = lease {
        assert_eq!(lease.addresses.len(), sets.sets().len(), "the number of leased addresses");
        for (range, address) in lease.addresses {
            let name = address.to_string();
            let is_usable = range.contains(address) && sets.sets().iter().all(|set| !set.is_gateway(address));
            assert!(is_usable, "{address} is outside its range or a gateway");
            // A regular file that is not a reservation, such as an empty one, reserves no address.
            let is_free = match before.get(&name) {
                None => true,
                Some(content) => content.as_deref().is_some_and(|text| reservation_text(text).is_none()),
            };
            assert!(is_free, "{name} was already reserved");
            let metadata = fs::metadata(folder.join(&name)).expect("the reservation has no file");
            assert_eq!(metadata.permissions().mode() & 0o7777, 0o600, "the mode of {name}");
            expected.insert(name, Some(text_of(owner).into_bytes()));
        }
    }
    let mut after = files(folder);
    for files in [&mut after, &mut expected] {
        files.retain(|name, _| !name.starts_with("last_reserved_ip."));
    }
    assert_eq!(after, expected, "the files after an ADD of {owner:?}");
}

/// Checks that DEL or GC removed only reservations in `removable`, and changed no other file. They
/// need not have removed all of them: forged links may hide reservations until the next scan.
fn check_removal(folder: &Path, before: &Files, removed: Vec<IpAddr>, removable: &[String]) {
    let removed: Vec<String> = removed.iter().map(ToString::to_string).collect();
    assert!(
        removed.iter().all(|name| removable.contains(name)),
        "removed {removed:?}, although only {removable:?} are removable"
    );
    let mut expected = before.clone();
    expected.retain(|name, _| !removed.contains(name));
    assert_eq!(files(folder), expected, "the files after the removal of {removed:?}");
}

/// Creates files, links and folders in `folder`, some of them links to `outside`. Returns whether
/// the folder's lock can be taken: not if a folder is in place of the lock.
fn fill_folder(input: &mut Input<'_>, folder: &Path, outside: &Path) -> bool {
    let mut is_lockable = true;
    for _ in 0..input.byte() % 12 {
        let name = match input.byte() % 8 {
            0..=4 => address(input).to_string(),
            5 => "last_reserved_ip.0".to_owned(),
            6 => "lock".to_owned(),
            _ => input.text().replace(['/', '\0'], ""),
        };
        let path = folder.join(&name);
        if name.is_empty() || name == "." || name == ".." || path.symlink_metadata().is_ok() {
            continue;
        }
        let kind = input.byte() % 16;
        // The lock is never a link here, because the store would follow it out of the folder.
        let made = match kind {
            0 => fs::create_dir(&path),
            1 if name != "lock" => symlink(outside, &path),
            2 if name != "lock" => symlink("/nonexistent/x", &path),
            3 => fs::write(&path, "c1"),
            4..=7 => fs::write(&path, "c1\r\neth0"),
            8 | 9 => fs::write(&path, "c2\r\neth0\n"),
            10 => fs::write(&path, ""),
            11 => fs::write(&path, b"\0\0\0"),
            _ => fs::write(&path, input.bytes()),
        };
        let is_folder = made.is_ok() && kind == 0;
        if name == "lock" && is_folder {
            is_lockable = false;
        }
    }
    is_lockable
}

/// Returns two small range sets.
fn sets() -> RangeSets {
    let set = |subnet: &str| vec![RangeConf { subnet: Some(subnet.to_owned()), ..RangeConf::default() }];
    RangeSets::check(&[], &RangeConf::default(), &[set("10.0.0.0/28"), set("fd00::/125")])
        .expect("the two range sets are valid")
}

/// Returns all entries of the folder except the lock, which exists only if a process needed it.
fn files(folder: &Path) -> Files {
    let mut files = Files::new();
    for entry in fs::read_dir(folder).expect("failed to list the network's folder") {
        let entry = entry.expect("failed to list the network's folder");
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == "lock" {
            continue;
        }
        // `file_type` does not follow links.
        let is_regular = entry.file_type().is_ok_and(|kind| kind.is_file());
        let content =
            is_regular.then(|| fs::read(entry.path()).unwrap_or_else(|error| panic!("failed to read {name}: {error}")));
        files.insert(name, content);
    }
    files
}

/// Returns the names of the reservations with a text for which `condition` returns `true`.
fn reservations(files: &Files, condition: impl Fn(&[u8]) -> bool) -> Vec<String> {
    let mut names = Vec::new();
    for (name, content) in files {
        let text = content.as_deref().and_then(reservation_text);
        if address_of_name(name.as_bytes()).is_some() && text.is_some_and(|text| condition(&text)) {
            names.push(name.clone());
        }
    }
    names
}

/// Returns the names of the reservations of `owner`. If there are none, returns those with only the
/// owner's container, as old releases of host-local wrote them.
fn reservations_of(files: &Files, owner: &Owner) -> Vec<String> {
    let found = reservations(files, |text| text == text_of(owner).as_bytes());
    if found.is_empty() { reservations(files, |text| text == owner.id().as_bytes()) } else { found }
}

/// Returns the content of a file that reserves an address for `owner`.
fn text_of(owner: &Owner) -> String {
    format!("{}\r\n{}", owner.id(), owner.ifname())
}
