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
pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (network, container_id, ifname) = (input.line_text(), input.line_text(), input.line_text());
    let id = AttachmentId::new(&network, &container_id, &ifname);
    let dir = tempfile::tempdir().expect("failed to create a temporary folder");
    let cache = Cache::new(dir.path());
    let is_valid = ident::check_network_name(&network).is_ok()
        && ident::check_container_id(&container_id).is_ok()
        && ident::check_interface_name(&ifname).is_ok();
    let path = cache.path(&id);
    assert_eq!(path.is_ok(), is_valid, "whether {id:?} has a path");
    let Ok(path) = path else {
        assert!(cache.find(&id).is_err() && cache.purge(&id).is_err(), "the invalid {id:?} was accepted");
        return;
    };
    let folder = dir.path().join("results");
    assert_eq!(path.parent(), Some(folder.as_path()), "the folder of {id:?}");
    fs::create_dir(&folder).expect("failed to create the cache folder");
    // The file of another attachment, which must stay unchanged.
    let bystander = folder.join("net-other-eth0");
    fs::write(&bystander, "x").expect("failed to write the bystander");
    if path == bystander {
        return;
    }
    if fs::write(&path, input.rest()).is_err() {
        // For example because the name is too long. The cache has no entry then.
        assert!(matches!(cache.find(&id), Ok(None) | Err(_)), "found an entry for {id:?} without a file");
        return;
    }
    let listed = cache.list(Some(&network)).expect("failed to list the cache");
    assert!(
        listed
            .entries
            .iter()
            .all(|entry| entry.network == network && cache.path(&entry.id()).ok().as_ref() == Some(&path)),
        "the list of {network:?} has an entry of another attachment than {id:?}"
    );
    if let Ok(Some(entry)) = cache.find(&id) {
        assert_eq!(entry.id(), id);
        for version in Version::ALL {
            if let Ok(Some(result)) = entry.result_as(version) {
                assert!(Json::parse(result.get().as_bytes()).is_ok(), "not JSON in {version}: {result}");
            }
        }
        cache.write(&entry).expect("failed to write the entry that was read");
        let again = find_written(&cache, &id);
        assert_same(&again, &entry);
        assert_eq!(mode(&path), 0o600);
        cache.write(&again).expect("failed to write the entry again");
        assert_same(&find_written(&cache, &id), &entry);
    }
    let _ = cache.purge(&id);
    assert_eq!(fs::read(&bystander).expect("failed to read the bystander"), b"x");
    let mut names: Vec<_> = fs::read_dir(dir.path())
        .expect("failed to list the temporary folder")
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["results"], "files in the temporary folder");
}

/// Returns the entry that was written before.
fn find_written(cache: &Cache, id: &AttachmentId) -> Entry {
    cache.find(id).expect("failed to read the written entry").expect("the written entry is missing")
}

/// Returns the permission bits of a file.
fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("failed to read the mode of the entry").permissions().mode() & 0o7777
}

/// Checks that two entries are equal; their results only need to be the same JSON.
fn assert_same(one: &Entry, other: &Entry) {
    let parsed = |entry: &Entry| entry.result.as_ref().map(|result| Json::parse(result.get().as_bytes()));
    assert_eq!((one.id(), &one.config), (other.id(), &other.config));
    assert_eq!(one.attachment.args, other.attachment.args);
    assert_eq!(one.attachment.netns, other.attachment.netns);
    assert_eq!(parsed(one), parsed(other));
}
