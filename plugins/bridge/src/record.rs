//! Reads from libcni's cached results which links of the host a CNI plugin created.
//!
//! A container's port that a Go plugin created has no mark. The cached results distinguish it from
//! a port of another program. Only the default folder of Go's libcni is read, which most runtimes
//! use.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fs::{self, DirEntry, File};
use std::io::Read;
use std::path::Path;

use cni::json::Json;

/// The folder of libcni's cached results.
const CACHE: &str = "/var/lib/cni/results";

/// The longest file that is read, in bytes; results are shorter.
const FILE_MAX: u64 = 64 << 20;

/// The names of the host's interfaces in all cached results. The results are read at the first
/// look-up.
#[derive(Debug, Default)]
pub(crate) struct HostInterfaces(OnceCell<BTreeSet<String>>);

impl HostInterfaces {
    /// Whether a cached result lists a link of this name on the host.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.get_or_init(|| read_all(Path::new(CACHE))).contains(name)
    }
}

/// Returns the names of the host's interfaces in all results that can be read; none if the folder
/// cannot be read. All ports without a mark then count as those of other programs, and fewer
/// settings of the bridge are changed.
fn read_all(folder: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let Ok(files) = fs::read_dir(folder) else { return names };
    for file in files.flatten() {
        if let Some(bytes) = read_file(&file) {
            names.extend(host_interfaces(&bytes));
        }
    }
    names
}

/// Returns the content of a file, or `None` if it is not a regular file, cannot be read, or is
/// longer than [`FILE_MAX`]. The type is checked before opening: opening a FIFO would block.
fn read_file(file: &DirEntry) -> Option<Vec<u8>> {
    if !file.file_type().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(file.path()).ok()?.take(FILE_MAX + 1).read_to_end(&mut bytes).ok()?;
    if bytes.len() as u64 > FILE_MAX { None } else { Some(bytes) }
}

/// Returns the names of the host's interfaces in a cached result; none if it cannot be parsed.
fn host_interfaces(cached: &[u8]) -> Vec<String> {
    let Ok(json) = Json::parse(cached) else { return Vec::new() };
    // Old versions of libcni stored the result itself, without the wrapper `cniCacheV1`.
    let result = json.get("result").unwrap_or(&json);
    let Some(Json::Array(interfaces)) = result.get("interfaces") else { return Vec::new() };
    let mut names = Vec::new();
    for interface in interfaces {
        let sandbox = interface.get("sandbox").and_then(Json::as_str).unwrap_or_default();
        if let Some(name) = interface.get("name").and_then(Json::as_str)
            && sandbox.is_empty()
        {
            names.push(name.to_owned());
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_a_sane_length_are_read() {
        let folder = std::env::temp_dir().join(format!("cni-bridge-record-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("a"), r#"{"interfaces":[{"name":"veth1"}]}"#).unwrap();
        fs::create_dir(folder.join("b")).unwrap();
        File::create(folder.join("c")).unwrap().set_len(FILE_MAX + 1).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(folder.join("d")).status().unwrap().success());
        let (sender, receiver) = std::sync::mpsc::channel();
        let path = folder.clone();
        std::thread::spawn(move || {
            let contents = fs::read_dir(&path).unwrap().flatten().filter_map(|file| read_file(&file)).count();
            sender.send((contents, read_all(&path)))
        });
        let found = receiver.recv_timeout(std::time::Duration::from_secs(20));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.unwrap(), (1, BTreeSet::from(["veth1".to_owned()])));
    }

    #[test]
    fn both_layouts_of_the_cache_are_read_and_garbage_ignored() {
        let result = r#"{"interfaces":[{"name":"cni0"},{"name":"veth1","sandbox":""},{"name":"eth0","sandbox":"/x"}]}"#;
        assert_eq!(host_interfaces(result.as_bytes()), ["cni0", "veth1"]);
        let cached = format!(r#"{{"kind":"cniCacheV1","result":{result}}}"#);
        assert_eq!(host_interfaces(cached.as_bytes()), ["cni0", "veth1"]);
        for garbage in ["", "{}", r#"{"interfaces":5}"#, r#"{"result":{"interfaces":[5,{"name":6}]}}"#] {
            assert!(host_interfaces(garbage.as_bytes()).is_empty(), "{garbage}");
        }
    }
}
