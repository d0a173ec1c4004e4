//! The runtime's cache of attachments. The file of an attachment is always in the cache's folder.
//! An entry is only read if it is about the attachment that its file is named after. An entry that
//! was read can be written, and is then read unchanged. No other file is changed.
//!
//! The input: network, container and interface, a line each; the rest is the file.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use cni::AttachmentId;
use cni::ident;
use cni::json::Json;
use cni::version::Version;
use libcni::Cache;
use libcni::cache::Entry;

use crate::input::Input;

/// Runs the target with one input.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (network, container_id, ifname) = (input.line_text(), input.line_text(), input.line_text());
    let id = AttachmentId::new(&network, &container_id, &ifname);
    let dir = tempfile::tempdir().expect("a temporary folder");
    let cache = Cache::new(dir.path());
    let is_valid = ident::check_network_name(&network).is_ok()
        && ident::check_container_id(&container_id).is_ok()
        && ident::check_interface_name(&ifname).is_ok();
    let path = cache.path(&id);
    assert_eq!(path.is_ok(), is_valid, "{id:?}");
    let Ok(path) = path else {
        assert!(cache.find(&id).is_err() && cache.purge(&id).is_err());
        return;
    };
    let folder = dir.path().join("results");
    assert_eq!(path.parent(), Some(folder.as_path()), "{id:?}");
    fs::create_dir(&folder).expect("a folder");
    // The file of another attachment, which must stay unchanged.
    let bystander = folder.join("net-other-eth0");
    fs::write(&bystander, "x").expect("a bystander");
    if path == bystander {
        return;
    }
    if fs::write(&path, input.rest()).is_err() {
        // For example because the name is too long. The cache has no entry then.
        assert!(matches!(cache.find(&id), Ok(None) | Err(_)));
        return;
    }
    let listed = cache.list(&network).expect("a listing");
    assert!(
        listed
            .entries
            .iter()
            .all(|entry| entry.network == network && cache.path(&entry.id()).ok().as_ref() == Some(&path))
    );
    if let Ok(Some(entry)) = cache.find(&id) {
        assert_eq!(entry.id(), id);
        for version in Version::ALL {
            if let Ok(Some(result)) = entry.result_as(version) {
                assert!(Json::parse(result.get().as_bytes()).is_ok());
            }
        }
        cache.write(&entry).expect("to write what was read");
        let again = cache.find(&id).expect("to read what was written").expect("it is there");
        assert_same(&again, &entry);
        assert_eq!(mode(&path), 0o600);
        cache.write(&again).expect("to write it a second time");
        assert_same(&cache.find(&id).expect("to read it").expect("it is there"), &entry);
    }
    let _ = cache.purge(&id);
    assert_eq!(fs::read(&bystander).expect("the bystander"), b"x");
    let mut names: Vec<_> =
        fs::read_dir(dir.path()).expect("the folder").map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["results"]);
}

/// Returns the permission bits of a file.
fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("a file").permissions().mode() & 0o7777
}

/// Checks that two entries are equal; their results only need to be the same JSON.
fn assert_same(one: &Entry, other: &Entry) {
    let parsed = |entry: &Entry| entry.result.as_ref().map(|result| Json::parse(result.get().as_bytes()));
    assert_eq!((one.id(), &one.config), (other.id(), &other.config));
    assert_eq!(one.attachment.args, other.attachment.args);
    assert_eq!(one.attachment.netns, other.attachment.netns);
    assert_eq!(parsed(one), parsed(other));
}
