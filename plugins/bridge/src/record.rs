//! Which links a runtime has on record as made by a CNI plugin: the results that libcni caches.
//!
//! Read only for bridges that we did not make, to tell a container's port that a Go plugin made (it bears no mark of
//! ours) from somebody else's. The default folder of Go's libcni is the only one all runtimes share.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fs;

use cni::json::Json;

const CACHE: &str = "/var/lib/cni/results";

/// The host's interfaces in all cached results; read when first asked.
#[derive(Debug, Default)]
pub(crate) struct HostVeths(OnceCell<BTreeSet<String>>);

impl HostVeths {
    /// Whether a cached result names this link on the host.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.get_or_init(read).contains(name)
    }
}

/// What cannot be read says nothing: then the port counts as foreign, which is the cautious side.
fn read() -> BTreeSet<String> {
    let files = fs::read_dir(CACHE).into_iter().flatten().flatten();
    files.filter_map(|file| fs::read(file.path()).ok()).flat_map(|bytes| host_interfaces(&bytes)).collect()
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
