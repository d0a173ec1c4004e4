//! Reads the lists of the valid attachments: the answer of a runtime, the JSON of
//! `crictl pods -o json`, or lines `ID/IFNAME`.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use cni::json::Json;
use cni::{Code, Error};

use super::options::parse_attachment;
use crate::call::Call;

/// The largest list that is read, in bytes. `crictl` prints about 1 KiB for each pod.
const MAX_LENGTH: u64 = 64 << 20;

/// The attachments that the runtimes have, and when they were listed.
#[derive(Debug)]
pub(super) struct ValidList {
    /// Container IDs, each with the interface or, because runtimes do not name interfaces, with
    /// `None` for all of the container. The state of a pod does not matter: a runtime still calls
    /// DEL for a pod that it lists as not ready.
    attachments: BTreeSet<(String, Option<String>)>,
    /// A time before which each list was not complete: the time of the oldest file, or of the call.
    pub(super) read_at: SystemTime,
}

impl ValidList {
    /// Reads all lists at `places`: files, `-` for stdin, and the sockets of runtimes as
    /// `unix://PATH`. A runtime has at most `limit` to answer. `began` is the time at which the
    /// call began. Returns `None` without a place.
    ///
    /// # Errors
    /// - Code 5 if a list cannot be read or is longer than 64 MiB, or a runtime does not answer.
    /// - Code 6 if a list is empty, is not the JSON of `crictl pods`, a line is not `ID/IFNAME`, or
    ///   the answer is not that of a runtime.
    pub(super) fn read(
        places: &[String],
        began: SystemTime,
        limit: Duration,
        call: &Call<'_>,
    ) -> Result<Option<ValidList>, Error> {
        let mut list = ValidList { attachments: BTreeSet::new(), read_at: began };
        for place in places {
            let outcome = match place.strip_prefix("unix://") {
                Some(socket) => cni_cri::list_pods(Path::new(socket), call.machine, limit.min(cni_cri::TIME_LIMIT))
                    .map(|pods| list.attachments.extend(pods.into_iter().map(|id| (id, None)))),
                None => list.read_file(&call.folder.join(place), place == "-"),
            };
            outcome.map_err(|error| error.context(format_args!("the list of valid attachments {place}")))?;
        }
        Ok((!places.is_empty()).then_some(list))
    }

    /// Adds the list in a file or on stdin.
    ///
    /// # Errors
    /// As [`read`](ValidList::read).
    fn read_file(&mut self, path: &Path, is_stdin: bool) -> Result<(), Error> {
        let mut bytes = Vec::new();
        let mut read = |source: &mut dyn io::Read| source.take(MAX_LENGTH + 1).read_to_end(&mut bytes);
        let outcome = match is_stdin {
            true => read(&mut io::stdin()).map(|_| self.read_at),
            // An old file has nothing of the attachments that were created since.
            false => File::open(path).and_then(|mut file| {
                read(&mut file)?;
                file.metadata()?.modified()
            }),
        };
        let modified = outcome.map_err(|error| Error::caused(Code::IO, "it cannot be read", error))?;
        if bytes.len() as u64 > MAX_LENGTH {
            return Err(Error::new(Code::IO, "it is longer than 64 MiB"));
        }
        self.read_at = self.read_at.min(modified);
        self.parse(&bytes)
    }

    /// Adds the attachments of a list.
    ///
    /// # Errors
    /// As [`read`](ValidList::read).
    fn parse(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let undecodable = |why: String| Error::new(Code::DECODE, why);
        let text = str::from_utf8(bytes).map_err(|error| undecodable(error.to_string()))?;
        if text.trim_start().starts_with('{') {
            let json = Json::parse(bytes).map_err(|error| undecodable(error.to_string()))?;
            let Some(Json::Array(pods)) = json.get("items") else {
                return Err(undecodable("it has no list \"items\", as 'crictl pods -o json' prints it".to_owned()));
            };
            for (index, pod) in pods.iter().enumerate() {
                let id = pod.get("id").and_then(Json::as_str).filter(|id| !id.is_empty());
                let id = id.ok_or_else(|| undecodable(format!("items[{index}]: a pod has no \"id\"")))?;
                self.attachments.insert((id.to_owned(), None));
            }
            return Ok(());
        }
        if text.trim().is_empty() {
            return Err(undecodable("it is empty; the command that writes it may have failed".to_owned()));
        }
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            match parse_attachment(line.trim()) {
                Ok((id, ifname)) if !ifname.contains('/') => drop(self.attachments.insert((id, Some(ifname)))),
                _ => return Err(undecodable(format!("line {} is not CONTAINER-ID/IFNAME: {line:?}", index + 1))),
            }
        }
        Ok(())
    }

    /// Whether the list names no attachment.
    pub(super) fn is_empty(&self) -> bool {
        self.attachments.is_empty()
    }

    /// Whether the list names an attachment.
    pub(super) fn names(&self, id: &str, ifname: &str) -> bool {
        [None, Some(ifname.to_owned())].into_iter().any(|name| self.attachments.contains(&(id.to_owned(), name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<ValidList, Error> {
        let mut list = ValidList { attachments: BTreeSet::new(), read_at: SystemTime::UNIX_EPOCH };
        list.parse(text.as_bytes()).map(|()| list)
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
            (r#"{"items":[{"id":"a"},{"id":""}]}"#, "items[1]: a pod has no \"id\""),
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
