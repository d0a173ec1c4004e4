//! The backup of an attachment: the values before the first change.
//!
//! It is the file `<dataDir>/<containerID>_<ifname>.json` in the Go plugin's format, so that either
//! plugin can restore the interface settings that the other plugin has saved. The Go plugin ignores
//! the keys that only this plugin writes: the attachment, its namespace, sysctls, and the written
//! values.
//!
//! Both parts of the file's name may contain `_`, so the name does not identify the attachment. The
//! content does, but not in Go's files.

use std::collections::BTreeMap;

use cni::config::NetConf;
use cni::json::Json;
use cni::skel::Call;
use cni::{AttachmentId, Code, Error, Result};
use cni_linux::{Link, Netns};
use cni_plugin::folder::{self, Folder, StateFile};
use serde::{Deserialize, Serialize};

use crate::conf::data_dir;
use crate::neighbours::SavedNeighbour;
use crate::value::is_same;

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// A record, and the bytes from which it was decoded.
    Record(Box<Record>, Vec<u8>),
    /// Something that is not a record, with the reason.
    Garbage(String),
}

/// The content of a backup. Settings that were not changed are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Record {
    /// The original MAC.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) mac: String,
    /// Whether the interface was in promiscuous mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) promisc: Option<bool>,
    /// The original MTU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<u32>,
    /// Whether the interface was in all-multicast mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) allmulti: Option<bool>,
    /// The original length of the transmit queue.
    #[serde(rename = "txQLen", skip_serializing_if = "Option::is_none")]
    pub(crate) txqlen: Option<u32>,
    /// The original values of the features of the interface: whether they were asked for.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) ethtool: BTreeMap<String, bool>,
    /// The permanent neighbours that were created.
    #[serde(rename = "staticNeighbors", skip_serializing_if = "Vec::is_empty")]
    pub(crate) neighbours: Vec<SavedNeighbour>,
    /// The sysctls in the order in which they were written first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) sysctls: Vec<SavedSysctl>,
    /// The values that were written to the interface.
    #[serde(skip_serializing_if = "Written::is_empty")]
    pub(crate) written: Written,
    /// The attachment that the record belongs to; absent in Go's files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) attachment: Option<Attachment>,
}

/// The original and the written values of a sysctl.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SavedSysctl {
    /// The path of its file below /proc/sys.
    pub(crate) path: String,
    /// The value before the first change.
    pub(crate) original: String,
    /// The values that this plugin's entries in the list have written, each once, the newest last.
    pub(crate) written: Vec<String>,
    /// The value that the kernel returned after the last write, if it differs from the written one.
    #[serde(rename = "reads", skip_serializing_if = "Option::is_none")]
    pub(crate) read_back: Option<String>,
}

/// The values that this plugin's entries in the list have written to the interface, each once, the
/// newest last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Written {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) mac: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) mtu: Vec<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) allmulti: Vec<bool>,
    #[serde(rename = "txQLen", skip_serializing_if = "Vec::is_empty")]
    pub(crate) txqlen: Vec<u32>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) ethtool: BTreeMap<String, Vec<bool>>,
}

/// The attachment that a record belongs to, with its namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Attachment {
    pub(crate) network: String,
    #[serde(rename = "containerID")]
    pub(crate) container_id: String,
    pub(crate) ifname: String,
    pub(crate) namespace: Namespace,
    /// The interface; absent as long as only sysctls were changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) interface: Option<Interface>,
}

/// A network namespace, by the numbers of its file. A new namespace can soon get the numbers of a
/// deleted one, so the interface is recorded too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Namespace {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    #[serde(rename = "bootID")]
    pub(crate) boot_id: String,
}

/// An interface, by its indexes, which the kernel does not use again for a long time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Interface {
    pub(crate) index: u32,
    /// The index of a veth's other end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<u32>,
}

impl Written {
    /// Whether nothing was written to the interface.
    fn is_empty(&self) -> bool {
        *self == Written::default()
    }
}

/// Returns the folder of the backups of all networks.
///
/// # Errors
/// Code 6 if `dataDir` has a wrong type.
pub(crate) fn folder(conf: &NetConf) -> Result<Folder> {
    Ok(Folder::new(data_dir(conf)?, "backup", conf.name()))
}

/// Returns the name of an attachment's backup in the folder.
pub(crate) fn file_name(container_id: &str, ifname: &str) -> String {
    format!("{container_id}_{ifname}.json")
}

/// Returns the backup of the call's attachment.
///
/// # Errors
/// Those of [`folder`].
pub(crate) fn find(call: &Call<'_>) -> Result<StateFile> {
    Ok(folder(&call.conf)?.file(&file_name(&call.container_id, &call.ifname)))
}

/// Returns the backups and temporary files of all networks, sorted by path.
///
/// # Errors
/// Code 5 if the folder cannot be read.
pub(crate) fn list(folder: &Folder) -> Result<Vec<StateFile>> {
    let mut all = folder.list()?;
    all.retain(|file| file.path().extension().is_some_and(|end| end == "json" || end == "tmp"));
    Ok(all)
}

/// Returns the content of a backup, or `None` if there is no file.
///
/// # Errors
/// Code 5 if it exists and cannot be read.
pub(crate) fn read(backup: &StateFile) -> Result<Option<Content>> {
    Ok(backup.read()?.map(|content| match content {
        folder::Content::Garbage(why) => Content::Garbage(why),
        folder::Content::Bytes(bytes) => match Record::parse(&bytes) {
            Ok(record) => Content::Record(Box::new(record), bytes),
            Err(why) => Content::Garbage(why),
        },
    }))
}

/// Moves or adds `value` to the end of a history in which each value occurs once.
pub(crate) fn make_last<T: PartialEq>(history: &mut Vec<T>, value: T) {
    history.retain(|old| *old != value);
    history.push(value);
}

impl Namespace {
    /// Returns the numbers of a namespace.
    ///
    /// # Errors
    /// Code 5 if the identifier of the boot cannot be read.
    pub(crate) fn of(netns: &Netns) -> Result<Namespace> {
        let (device, inode) = netns.id();
        Ok(Namespace { device, inode, boot_id: boot_id()? })
    }
}

impl From<&Link> for Interface {
    fn from(link: &Link) -> Interface {
        Interface { index: link.index, peer: link.peer_index }
    }
}

/// Returns the kernel's random identifier of this boot.
///
/// # Errors
/// Code 5 if it cannot be read.
pub(crate) fn boot_id() -> Result<String> {
    cni_linux::sysctl::read("kernel/random/boot_id").map_err(|error| Error::from(error).with_code(Code::IO))
}

impl Attachment {
    /// Whether the container, interface or network differs from that of the call.
    pub(crate) fn is_foreign_to(&self, call: &Call<'_>) -> bool {
        AttachmentId::new(&self.network, &self.container_id, &self.ifname) != call.attachment()
    }
}

impl Record {
    /// Returns a text with name and original value for each setting that DEL restores.
    pub(crate) fn describe_settings(&self) -> Vec<String> {
        let mut texts: Vec<String> =
            self.sysctls.iter().map(|saved| format!("{}={}", saved.path, saved.original)).collect();
        let mut add_setting =
            |name: &str, value: Option<String>| texts.extend(value.map(|value| format!("{name} {value}")));
        add_setting("mac", Some(self.mac.clone()).filter(|mac| !mac.is_empty()));
        add_setting("mtu", self.mtu.map(|mtu| mtu.to_string()));
        add_setting("promisc", self.promisc.map(|promisc| promisc.to_string()));
        add_setting("allmulti", self.allmulti.map(|allmulti| allmulti.to_string()));
        add_setting("txQLen", self.txqlen.map(|length| length.to_string()));
        texts.extend(self.ethtool.iter().map(|(name, is_on)| format!("ethtool {name} {is_on}")));
        texts.extend(self.neighbours.iter().map(|saved| format!("no neighbour {} {}", saved.ip, saved.mac)));
        texts
    }

    /// Returns the saved values of a sysctl, or `None` if the record does not have it.
    pub(crate) fn find_sysctl(&self, path: &str) -> Option<&SavedSysctl> {
        self.sysctls.iter().find(|saved| saved.path == path)
    }

    /// Whether the record has a setting of the interface.
    pub(crate) fn has_link_settings(&self) -> bool {
        !self.mac.is_empty()
            || self.mtu.is_some()
            || self.promisc.is_some()
            || self.allmulti.is_some()
            || self.txqlen.is_some()
            || !self.ethtool.is_empty()
            || !self.neighbours.is_empty()
    }

    /// Decodes a backup. The error is the reason why it cannot be decoded.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Record, String> {
        match Json::parse(bytes) {
            Ok(json @ Json::Object(_)) => json.decode().map_err(|why| why.to_string()),
            Ok(_) => Err("it is not a JSON object".to_owned()),
            Err(why) => Err(why.to_string()),
        }
    }

    /// Returns the record as JSON, indented by one space as Go writes it.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(512);
        let formatter = serde_json::ser::PrettyFormatter::with_indent(b" ");
        let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
        // This cannot fail: all keys are strings, and the output is in memory.
        let outcome = self.serialize(&mut serializer);
        debug_assert!(outcome.is_ok());
        bytes
    }
}

impl SavedSysctl {
    /// Whether `current` is the value that was written last, as it was written or as the kernel
    /// returned it.
    pub(crate) fn is_in_force(&self, current: &str) -> bool {
        self.read_back.iter().chain(self.written.last()).any(|written| is_same(written, current))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            mac: "02:00:00:00:00:01".into(),
            promisc: Some(false),
            mtu: Some(1500),
            allmulti: Some(true),
            txqlen: Some(0),
            ethtool: BTreeMap::from([("tx-gre-segmentation".into(), true)]),
            neighbours: vec![SavedNeighbour { ip: "10.1.0.9".into(), mac: "02:00:00:00:00:09".into() }],
            sysctls: vec![SavedSysctl {
                path: "net/ipv4/x".into(),
                original: "0".into(),
                written: vec!["1".into()],
                read_back: None,
            }],
            written: Written { mtu: vec![1400], ..Written::default() },
            attachment: Some(Attachment { network: "net".into(), ..Attachment::default() }),
        }
    }

    #[test]
    fn a_record_is_read_back() {
        assert_eq!(Record::parse(&record().encode()).unwrap(), record());
    }

    #[test]
    fn gos_keys_are_written_as_go_writes_them() {
        let text = String::from_utf8(record().encode()).unwrap();
        let go = "{\n \"mac\": \"02:00:00:00:00:01\",\n \"promisc\": false,\n \"mtu\": 1500,\n \"allmulti\": true,\n \"txQLen\": 0,\n";
        assert!(text.starts_with(go), "{text}");
        let small = Record { mtu: Some(1500), ..Record::default() };
        assert_eq!(small.encode(), b"{\n \"mtu\": 1500\n}");
    }

    #[test]
    fn gos_files_are_read() {
        let go = Record::parse(b"{\n \"mac\": \"02:00:00:00:00:01\",\n \"txQLen\": 1000\n}").unwrap();
        assert_eq!((go.mac.as_str(), go.txqlen, go.mtu), ("02:00:00:00:00:01", Some(1000), None));
        assert!(go.attachment.is_none() && go.has_link_settings() && go.sysctls.is_empty());
    }

    #[test]
    fn garbage_is_not_a_record() {
        for garbage in ["", "x", "[]", "{\"mtu\":\"5\"}", "{} {}", "{\"mtu\":-1}"] {
            assert!(Record::parse(garbage.as_bytes()).is_err(), "{garbage}");
        }
    }

    #[test]
    fn a_history_has_every_value_once_and_the_last_one_is_in_force() {
        let mut history = Vec::new();
        for value in [1, 2, 1, 1, 3] {
            make_last(&mut history, value);
        }
        assert_eq!(history, [2, 1, 3]);
        let saved = SavedSysctl { written: vec!["1".into(), "0x10".into()], ..Default::default() };
        assert!(saved.is_in_force("16") && !saved.is_in_force("1"));
        let saved = SavedSysctl { written: vec!["1,2,3".into()], read_back: Some("1-3".into()), ..Default::default() };
        assert!(saved.is_in_force("1-3"));
        assert!(!SavedSysctl::default().is_in_force(""));
    }
}
