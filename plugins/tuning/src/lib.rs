//! The plugin `tuning`: changes settings of an interface that another plugin has created, and of
//! its network namespace: sysctls, MAC, MTU, promiscuous and all-multicast mode, length of the
//! transmit queue, features of the driver, permanent neighbours.
//!
//! - `conf`: the configuration; `key`: the names of sysctls; `allowlist`: the sysctls that the
//!   node's administrator permits.
//! - `add`, `check`, `del`, `gc`: the verbs.
//! - `features`, `neighbours`: the keys `ethtool` and `staticNeighbors`.
//! - `backup`: the original values of an attachment, in a file; `sysctl`: the values in the
//!   container; `value`: compares two values.
//!
//! The Go plugin, and other entries of this plugin in the same list, use the same backup. The
//! original values stay in it until DEL restores them and removes the backup. GC only removes
//! backups.

mod add;
mod allowlist;
mod backup;
mod check;
mod conf;
mod del;
mod features;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod gc;
mod key;
mod neighbours;
mod sysctl;
mod value;

use std::path::{Path, PathBuf};

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::rollback::Notes;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};

use allowlist::AllowList;
use backup::Content;
use conf::Conf;

/// The plugin `tuning`.
#[derive(Clone, Copy, Debug)]
pub struct Tuning;

/// The file in which the node's administrator lists the sysctls that may be set. Without the file,
/// all below `net` may be set.
const ALLOW_LIST: &str = "/etc/cni/tuning/allowlist.conf";

/// The saved values of an attachment, for `cnitool inspect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The path of the backup.
    pub path: PathBuf,
    /// The attachment's network, container ID and interface, or `None` in the Go plugin's files,
    /// which do not have them.
    pub owner: Option<(String, String, String)>,
    /// A text with name and original value for each setting that DEL will restore.
    pub settings: Vec<String>,
}

/// Returns the backups of all networks in the folders that the configurations' `dataDir` names,
/// including complete temporary files of killed processes. Reads each folder once. Files that
/// cannot be decoded are reported to `notes`.
///
/// # Errors
/// Code 5 if a folder or a file cannot be read, 6 if a `dataDir` has a wrong type.
pub fn saved(confs: &[NetConf], notes: &Notes) -> Result<Vec<Saved>> {
    let mut all = Vec::new();
    let mut folders = confs.iter().map(backup::folder).collect::<Result<Vec<_>>>()?;
    folders.sort_by(|a, b| a.path().cmp(b.path()));
    folders.dedup_by(|a, b| a.path() == b.path());
    let backups = folders.iter().map(backup::list).collect::<Result<Vec<_>>>()?;
    for backup in backups.into_iter().flatten() {
        let path = backup.path().to_owned();
        match backup::read(&backup)? {
            Some(Content::Record(record, _)) => {
                let settings = record.describe_settings();
                let owner = record.attachment.map(|owner| (owner.network, owner.container_id, owner.ifname));
                all.push(Saved { path, owner, settings });
            }
            Some(Content::Garbage(why)) => notes.note(format_args!("{}: {why}", path.display())),
            // A DEL has removed the file since the folder was listed.
            None => {}
        }
    }
    Ok(all)
}

impl Plugin for Tuning {
    fn name(&self) -> &'static str {
        "tuning"
    }

    fn role(&self) -> Role {
        Role::Chained
    }

    fn examine(&self, conf: &NetConf) -> Result<()> {
        Conf::of_network(conf).map(drop)
    }

    fn unknown_keys(&self, json: &Json) -> Vec<UnknownKey> {
        conf::unknown_keys(json)
    }

    fn add<'a>(&self, call: &'a Call<'_>) -> Result<Added<'a>> {
        let mut conf = Conf::new(call)?;
        if !conf.sysctls.is_empty()
            && let Some(list) = AllowList::read(Path::new(ALLOW_LIST))?
        {
            list.filter(&mut conf.sysctls)?;
        }
        let prev = call.conf.prev_result()?.ok_or_else(no_prev_result)?;
        add::add(call, &conf, prev)
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(call)?;
        let prev = call.conf.prev_result()?.ok_or_else(no_prev_result)?;
        check::check(call, &conf, &prev)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        del::del(call)
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        gc::gc(call, valid)
    }

    /// Checks that the sysctls are permitted and that a backup can be written. STATUS has no
    /// container, so it cannot check whether the sysctls exist there.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        let mut conf = Conf::of_network(&call.conf)?;
        let mut check_node = || {
            if let Some(list) = AllowList::read(Path::new(ALLOW_LIST))? {
                list.filter(&mut conf.sysctls)?;
            }
            backup::folder(&call.conf)?.check_writable()
        };
        check_node().map_err(|error: Error| error.with_code(Code::NOT_AVAILABLE))
    }
}

/// Returns Go's error for a configuration without prevResult.
fn no_prev_result() -> Error {
    Error::config("Required prevResult missing")
}
