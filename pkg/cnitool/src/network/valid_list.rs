//! Reads a list of the valid attachments: that of `crictl pods -o json`, or lines `ID/IFNAME`.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::time::SystemTime;

use cni::json::Json;
use cni::{Code, Error};

/// The largest list that is read, in bytes. `crictl` prints about 1 KiB for each pod.
const MAX_LENGTH: u64 = 64 << 20;

/// The attachments that a runtime has, and when they were listed.
#[derive(Debug)]
pub(super) struct ValidList {
    /// The container IDs whose interfaces are all valid: `crictl` does not name interfaces.
    containers: BTreeSet<String>,
    /// Container IDs and interface names.
    attachments: BTreeSet<(String, String)>,
    /// A time before which the list was not complete: the time of the file, or of the call for
    /// stdin.
    pub(super) read_at: SystemTime,
}

impl ValidList {
    /// Reads the list in a file, or on stdin for `-`. `began` is the time at which the call began.
    ///
    /// # Errors
    /// - Code 5 if it cannot be read or is longer than 64 MiB.
    /// - Code 6 if it is empty, is not the JSON of `crictl pods`, or a line is not `ID/IFNAME`.
    pub(super) fn read(path: &Path, began: SystemTime) -> Result<ValidList, Error> {
        let named = |error: Error| error.context(format_args!("the list of valid attachments {}", path.display()));
        let mut bytes = Vec::new();
        let mut read = |source: &mut dyn io::Read| source.take(MAX_LENGTH + 1).read_to_end(&mut bytes);
        let outcome = match path.as_os_str() == "-" {
            true => read(&mut io::stdin()).map(|_| began),
            // An old file has nothing of the attachments that were created since.
            false => File::open(path).and_then(|mut file| {
                read(&mut file)?;
                Ok(file.metadata()?.modified()?.min(began))
            }),
        };
        let read_at = outcome.map_err(|error| named(Error::caused(Code::IO, "it cannot be read", error)))?;
        if bytes.len() as u64 > MAX_LENGTH {
            return Err(named(Error::new(Code::IO, "it is longer than 64 MiB")));
        }
        ValidList::parse(&bytes, read_at).map_err(named)
    }

    /// Parses a list.
    ///
    /// # Errors
    /// As [`read`](ValidList::read).
    fn parse(bytes: &[u8], read_at: SystemTime) -> Result<ValidList, Error> {
        let undecodable = |why: String| Error::new(Code::DECODE, why);
        let text = str::from_utf8(bytes).map_err(|error| undecodable(error.to_string()))?;
        let mut list = ValidList { containers: BTreeSet::new(), attachments: BTreeSet::new(), read_at };
        if text.trim_start().starts_with('{') {
            let json = Json::parse(bytes).map_err(|error| undecodable(error.to_string()))?;
            let Some(Json::Array(pods)) = json.get("items") else {
                return Err(undecodable("it has no list \"items\", as 'crictl pods -o json' prints it".to_owned()));
            };
            for (index, pod) in pods.iter().enumerate() {
                let id = pod.get("id").and_then(Json::as_str).filter(|id| !id.is_empty());
                let missing = || undecodable(format!("items[{index}] has no \"id\""));
                list.containers.insert(id.ok_or_else(missing)?.to_owned());
            }
            return Ok(list);
        }
        if text.trim().is_empty() {
            return Err(undecodable("it is empty; the command that writes it may have failed".to_owned()));
        }
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            match line.trim().split_once('/') {
                Some((id, ifname)) if !id.is_empty() && !ifname.is_empty() && !ifname.contains('/') => {
                    list.attachments.insert((id.to_owned(), ifname.to_owned()));
                }
                _ => return Err(undecodable(format!("line {} is not CONTAINER-ID/IFNAME: {line:?}", index + 1))),
            }
        }
        Ok(list)
    }

    /// Whether the list names no attachment.
    pub(super) fn is_empty(&self) -> bool {
        self.containers.is_empty() && self.attachments.is_empty()
    }

    /// Whether the list names an attachment.
    pub(super) fn names(&self, id: &str, ifname: &str) -> bool {
        self.containers.contains(id) || self.attachments.contains(&(id.to_owned(), ifname.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<ValidList, Error> {
        ValidList::parse(text.as_bytes(), SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn crictl_names_containers_and_lines_name_interfaces() {
        let pods = parsed(r#" {"items":[{"id":"a","state":"SANDBOX_NOTREADY"},{"id":"b"}]}"#).unwrap();
        assert!(pods.names("a", "eth0") && pods.names("b", "net1") && !pods.names("c", "eth0"));
        let lines = parsed("a/eth0\n\n b/net1 \r\n").unwrap();
        assert!(lines.names("a", "eth0") && lines.names("b", "net1") && !lines.names("a", "net1"));
        assert!(parsed(r#"{"items":[]}"#).unwrap().is_empty());
    }

    #[test]
    fn a_list_that_is_not_understood_in_full_is_refused() {
        for (text, why) in [
            ("", "it is empty"),
            (" \n", "it is empty"),
            ("{", "EOF"),
            (r#"{"items":[{"id":"a"}"#, "EOF"),
            (r#"{"containers":[]}"#, "no list \"items\""),
            (r#"{"items":null}"#, "no list \"items\""),
            (r#"{"items":[{"id":"a"},{"id":""}]}"#, "items[1] has no \"id\""),
            (r#"[{"id":"a"}]"#, "line 1 is not CONTAINER-ID/IFNAME"),
            ("a/eth0\nb\n", "line 2 is not CONTAINER-ID/IFNAME: \"b\""),
            ("a/eth0\n/eth0", "line 2"),
            ("a/b/c", "line 1"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.code() == Code::DECODE && error.msg().contains(why), "{text:?}: {error}");
        }
    }
}
