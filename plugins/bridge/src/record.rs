//! Reads from libcni's cached results which links of the host a CNI plugin created.
//!
//! Read only for bridges that these plugins did not create. There a container's port created by a
//! Go plugin, which has no mark, must be distinguished from a port of another program. The default
//! folder of Go's libcni is the only one that all runtimes share.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fs::{self, DirEntry, File};
use std::io::Read;
use std::path::Path;

use cni::json::Json;

const CACHE: &str = "/var/lib/cni/results";
/// Longer than any result that a plugin may be given.
const LONGEST: u64 = 64 << 20;

/// The host's interfaces in all cached results; read when first asked.
#[derive(Debug, Default)]
pub(crate) struct HostVeths(OnceCell<BTreeSet<String>>);

impl HostVeths {
    /// Whether a cached result names this link on the host.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.get_or_init(|| read(Path::new(CACHE))).contains(name)
    }
}

/// Returns the names that can be read. If the folder cannot be read, the port counts as foreign,
/// which is the cautious side.
fn read(folder: &Path) -> BTreeSet<String> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| content(&file)).flat_map(|bytes| host_interfaces(&bytes)).collect()
}

/// A regular file's content, unless it is far too long. The kind is asked first: opening a FIFO
/// waits for its other end.
fn content(file: &DirEntry) -> Option<Vec<u8>> {
    if !file.file_type().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(file.path()).ok()?.take(LONGEST + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= LONGEST).then_some(bytes)
}

fn host_interfaces(cached: &[u8]) -> Vec<String> {
    let Ok(json) = Json::parse(cached) else { return Vec::new() };
    // Before cniCacheV1 the file was the result itself.
    let result = json.get("result").unwrap_or(&json);
    let Some(Json::Array(interfaces)) = result.get("interfaces") else { return Vec::new() };
    let on_host =
        interfaces.iter().filter(|interface| interface.get("sandbox").and_then(Json::as_str).is_none_or(str::is_empty));
    on_host.filter_map(|interface| interface.get("name")?.as_str().map(str::to_owned)).collect()
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
        File::create(folder.join("c")).unwrap().set_len(LONGEST + 1).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(folder.join("d")).status().unwrap().success());
        let (sender, receiver) = std::sync::mpsc::channel();
        let path = folder.clone();
        std::thread::spawn(move || {
            let contents = fs::read_dir(&path).unwrap().flatten().filter_map(|file| content(&file)).count();
            sender.send((contents, read(&path)))
        });
        let found = receiver.recv_timeout(std::time::Duration::from_secs(20));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.unwrap(), (1, BTreeSet::from(["veth1".to_owned()])));
    }

    #[test]
    fn both_layouts_of_the_cache_are_read_and_garbage_says_nothing() {
        let result = r#"{"interfaces":[{"name":"cni0"},{"name":"veth1","sandbox":""},{"name":"eth0","sandbox":"/x"}]}"#;
        assert_eq!(host_interfaces(result.as_bytes()), ["cni0", "veth1"]);
        let cached = format!(r#"{{"kind":"cniCacheV1","result":{result}}}"#);
        assert_eq!(host_interfaces(cached.as_bytes()), ["cni0", "veth1"]);
        for garbage in ["", "{}", r#"{"interfaces":5}"#, r#"{"result":{"interfaces":[5,{"name":6}]}}"#] {
            assert!(host_interfaces(garbage.as_bytes()).is_empty(), "{garbage}");
        }
    }
}
