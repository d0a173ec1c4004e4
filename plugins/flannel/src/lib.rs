//! The plugin `flannel`: connects a container to the node's subnet of a flannel network. It reads
//! the subnet from flanneld's file, makes a configuration of it, and runs another plugin with that:
//! the delegate, by default `bridge` with `host-local`.
//!
//! The delegate's configuration is stored in the file `<dataDir>/<containerID>`, because the subnet
//! file can be missing or have another subnet at DEL. The upstream plugin uses the same file with
//! the same content. The file's name has neither network nor interface, so a container in two
//! flannel networks has only the configuration of the last ADD. For the other network, DEL and
//! CHECK make the configuration from the subnet file.

mod conf;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod subnet;

use std::collections::BTreeMap;
use std::path::PathBuf;

use cni::config::{NetConf, ValidAttachments};
use cni::delegate::Delegate;
use cni::json::{Json, UnknownKey};
use cni::skel::{Added, Call, Plugin, Role, Verb};
use cni::{Code, Error, Result};
use cni_plugin::folder::{Content, Folder, StateFile};
use serde_json::{Map, Value};

use conf::{Conf, Paths};
use subnet::Lease;

/// The plugin `flannel`.
#[derive(Clone, Copy, Debug)]
pub struct Flannel;

/// A configuration of the delegate.
type Delegated = Map<String, Value>;

/// The file of a container in the folder of stored configurations.
enum Stored {
    /// The configuration of the delegate, for the network of the call.
    Delegated(Delegated),
    /// A regular file that is not JSON. No network can use it.
    Undecodable,
    /// The file does not exist, is not a regular file, or it belongs to another network.
    None,
}

/// A stored configuration, for `cnitool inspect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The ID of the container.
    pub container_id: String,
    /// The network. `None` if the file cannot be decoded.
    pub network: Option<String>,
    /// A text with the type and the ranges of the delegate, or the error.
    pub text: String,
}

/// Returns the stored configurations of all networks in the configuration's `dataDir`.
///
/// # Errors
/// Code 5 if the folder or a file cannot be read, 6 if a path of the configuration has a wrong
/// type.
pub fn stored_files(conf: &NetConf) -> Result<Vec<StoredFile>> {
    let mut all = Vec::new();
    for file in folder(conf)?.list()?.into_iter().filter(|file| !file.is_temporary()) {
        let Some(content) = file.read()? else { continue };
        let (network, text) = match content.decode::<Value>() {
            Err(why) => (None, why),
            Ok(stored) => (stored["name"].as_str().map(str::to_owned), describe(&stored)),
        };
        let container_id = file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        all.push(StoredFile { path: file.path().to_owned(), container_id, network, text });
    }
    Ok(all)
}

/// Returns the type and the ranges of a delegate's configuration, as a text.
fn describe(delegated: &Value) -> String {
    let subnets = delegated["ipam"]["ranges"].as_array().into_iter().flatten();
    let subnets = subnets.filter_map(|set| set[0]["subnet"].as_str());
    let words: Vec<&str> = delegated["type"].as_str().into_iter().chain(subnets).collect();
    format!("delegate {}", words.join(" "))
}

/// Returns the delegate's configuration with an example of a lease, so that a caller can check the
/// keys in `delegate` and `ipam`.
///
/// # Errors
/// Those of ADD for the configuration.
pub fn example_delegate(conf: &NetConf) -> Result<Value> {
    let example = "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true";
    let lease = Lease::parse(example).map_err(Error::config)?;
    Ok(Conf::new(conf)?.delegate(&lease).into())
}

impl Plugin for Flannel {
    fn name(&self) -> &'static str {
        "flannel"
    }

    fn role(&self) -> Role {
        Role::Interface
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        Conf::new(conf).map(drop)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        json.unknown_keys::<conf::Keys>()
    }

    /// Stores the configuration before the delegate runs, so that DEL finds it after a kill.
    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let delegated = delegated(&call.conf)?;
        let delegate = find_delegate(call, &delegated)?;
        let file = folder(&call.conf)?.file(&call.container_id);
        let earlier = file.read()?;
        let mut rollback = call.rollback();
        file.write(Value::Object(delegated).to_string().as_bytes())?;
        rollback.push(format!("undo the change of {}", file.path().display()), move || match earlier {
            // A second ADD for a running container fails, and its DEL needs the earlier file.
            Some(Content::Bytes(bytes)) => file.write(&bytes),
            Some(Content::Garbage(_)) | None => file.purge().map(drop),
        });
        let result = delegate.lease(&mut rollback)?;
        Ok(Added { result, rollback })
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let file = folder(&call.conf)?.file(&call.container_id);
        let delegated = match stored(call, &file)? {
            Stored::Delegated(stored) => stored,
            Stored::Undecodable | Stored::None => delegated(&call.conf)?,
        };
        find_delegate(call, &delegated)?.call(Verb::Check)
    }

    /// Also runs the delegate if no configuration of this network is stored: the ADD of another
    /// network, or the DEL of another interface, may have replaced or removed the file. Removes the
    /// container's file if it cannot be decoded: then it is of no use to any network.
    fn del(&self, call: &Call<'_>) -> Result<()> {
        let file = folder(&call.conf)?.file(&call.container_id);
        let stored = stored(call, &file)?;
        let is_removed = !matches!(stored, Stored::None);
        let delegated = match stored {
            Stored::Delegated(stored) => Ok(stored),
            Stored::Undecodable | Stored::None => delegated(&call.conf),
        };
        match delegated {
            Ok(delegated) => find_delegate(call, &delegated)?.call(Verb::Del)?,
            Err(error) => call.notes.note(format_args!(
                "flannel: no plugin was run, since {} has no configuration of this network: {error}",
                file.path().display()
            )),
        }
        if is_removed { file.purge().map(drop) } else { file.purge_temporary() }
    }

    /// Runs the GC of each delegate of the network: the present one, and those in the stored
    /// configurations. Then removes the stored configurations of containers without an attachment
    /// in `valid`. After an error they stay for the next GC. A file that cannot be decoded is only
    /// noted: it may be a file of another program.
    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        let mut delegates = BTreeMap::new();
        let mut stale = Vec::new();
        for file in folder(&call.conf)?.list()? {
            if file.is_temporary() {
                stale.push(file);
                continue;
            }
            let Stored::Delegated(stored) = stored(call, &file)? else { continue };
            delegates.insert(gc_key(&stored), stored);
            let id = file.path().file_name().unwrap_or_default();
            if !valid.iter().any(|(valid_id, _)| id == valid_id) {
                stale.push(file);
            }
        }
        match delegated(&call.conf) {
            Ok(present) => drop(delegates.insert(gc_key(&present), present)),
            Err(error) => call.notes.note(format_args!("gc: only stored configurations are used: {error}")),
        }
        let run = |delegated: Delegated| find_delegate(call, &delegated)?.call(Verb::Gc);
        Error::join(delegates.into_values().filter_map(|delegated| run(delegated).err()))?;
        let purge = |file: StateFile| {
            call.notes.note(format_args!("gc: removes {}", file.path().display()));
            file.purge()
        };
        Error::join(stale.into_iter().filter_map(|file| purge(file).err()))
    }

    /// Checks that flanneld has written a complete subnet file, that a configuration can be stored,
    /// and that the delegate is ready.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        let delegated = delegated(&call.conf).map_err(|error| match error.code() {
            Code::TRY_AGAIN => error.with_code(Code::NOT_AVAILABLE),
            _ => error,
        })?;
        folder(&call.conf)?.check_writable()?;
        find_delegate(call, &delegated)?.call(Verb::Status)
    }
}

/// Returns what distinguishes the configurations whose GC must run: the delegate, its IPAM plugin
/// and the folder of that plugin's reservations.
fn gc_key(delegated: &Delegated) -> [String; 3] {
    let ipam = delegated.get("ipam").unwrap_or(&Value::Null);
    [delegated.get("type").unwrap_or(&Value::Null), &ipam["type"], &ipam["dataDir"]].map(Value::to_string)
}

/// Returns the folder of the stored configurations.
///
/// # Errors
/// Code 6 if a path of the configuration has the wrong type.
fn folder(conf: &NetConf) -> Result<Folder> {
    Ok(Folder::new(Paths::new(conf)?.data_dir, "stored configuration", conf.name()))
}

/// Makes the delegate's configuration from the configuration and the subnet file.
///
/// # Errors
/// Those of [`Conf::new`] and [`Lease::read`].
fn delegated(conf: &NetConf) -> Result<Delegated> {
    let conf = Conf::new(conf)?;
    let lease = Lease::read(&conf.paths.subnet_file)?;
    Ok(conf.delegate(&lease))
}

/// Reads the stored configuration in `file`. Notes a file that is not used, except that of another
/// network.
///
/// # Errors
/// Code 5 if the file cannot be read.
fn stored(call: &Call<'_>, file: &StateFile) -> Result<Stored> {
    let bytes = match file.read()? {
        None => return Ok(Stored::None),
        Some(Content::Bytes(bytes)) => bytes,
        Some(Content::Garbage(why)) => {
            call.notes.note(format_args!("flannel: {} is not used: {why}", file.path().display()));
            return Ok(Stored::None);
        }
    };
    match serde_json::from_slice::<Delegated>(&bytes) {
        Ok(stored) if stored.get("name") == Some(&call.conf.name().into()) => Ok(Stored::Delegated(stored)),
        Ok(_) => Ok(Stored::None),
        Err(error) => {
            call.notes.note(format_args!("flannel: {} is not used: {error}", file.path().display()));
            Ok(Stored::Undecodable)
        }
    }
}

/// Finds the delegate, which gets `delegated` with what the runtime has added to this call's
/// configuration.
///
/// # Errors
/// - Code 4 if CNI_PATH has no such plugin.
/// - Code 6 or 7 if a stored configuration is not valid.
fn find_delegate<'a>(call: &'a Call<'_>, delegated: &Delegated) -> Result<Delegate<'a>> {
    let mut conf = delegated.clone();
    conf.remove("cniVersion");
    if let Json::Object(members) = call.conf.json() {
        for (key, value) in members {
            if key == "cniVersion" || key == "prevResult" || key.starts_with("cni.dev/") {
                conf.insert(key.clone(), value.into());
            }
        }
    }
    Delegate::find_interface_plugin(call, NetConf::parse(Value::Object(conf).to_string())?)
}
