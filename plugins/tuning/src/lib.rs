//! `tuning`: settings of an interface that another plugin made, and of the network namespace it is
//! in: sysctls, MAC, MTU, promiscuous and all-multicast mode, length of the transmit queue.
//!
//! Rooms: `conf` reads the configuration, `key` the names of sysctls, `allowlist` what the node's
//! administrator permits; `apply` is ADD, `check` CHECK, `restore` DEL, `collect` GC; `backup` is
//! the file that says what was there before, `sysctl` the values in the container, `value` when two
//! of them are the same.
//!
//! The file is shared with the Go plugin and, in one list, with other entries of
//! this plugin. What was there first stays in it until it has been restored.

mod allowlist;
mod apply;
mod backup;
mod check;
mod collect;
mod conf;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod key;
mod restore;
mod sysctl;
mod value;

use std::path::{Path, PathBuf};

use cni::config::{NetConf, ValidAttachments};
use cni::json::{Json, UnknownKey};
use cni::rollback::Notes;
use cni::skel::{Added, Call, Plugin, Role};
use cni::{Code, Error, Result};

use allowlist::AllowList;
use backup::{Content, Folder};
use conf::Conf;

/// The plugin.
#[derive(Clone, Copy, Debug)]
pub struct Tuning;

/// Where the node's administrator says which sysctls may be set. Without the file: all below `net`.
const ALLOW_LIST: &str = "/etc/cni/tuning/allowlist.conf";

/// The saved values of an attachment, for `cnitool inspect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The file.
    pub path: PathBuf,
    /// Network, container ID and interface; `None` in the Go plugin's files, which do not say.
    pub owner: Option<(String, String, String)>,
    /// A sentence for each setting that will be put back.
    pub settings: Vec<String>,
}

/// Every backup in the folder `conf` names. Unreadable files are reported to `notes`.
///
/// # Errors
/// Code 5 if the folder or a file cannot be read; 6 for the configuration.
pub fn saved(conf: &NetConf, notes: &Notes) -> Result<Vec<Saved>> {
    let mut all = Vec::new();
    for backup in Folder::new(conf::data_dir(conf)?, conf.name()).list()? {
        let path = backup.path().to_owned();
        match backup.read()? {
            Some(Content::Record(record, _)) => {
                let settings = record.in_words();
                let owner = record.attachment.map(|whose| (whose.network, whose.container_id, whose.ifname));
                all.push(Saved { path, owner, settings });
            }
            Some(Content::Garbage(why)) => notes.note(format_args!("{}: {why}", path.display())),
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
        apply::add(call, &conf, prev)
    }

    fn check(&self, call: &Call<'_>) -> Result<()> {
        let conf = Conf::new(call)?;
        let prev = call.conf.prev_result()?.ok_or_else(no_prev_result)?;
        check::check(call, &conf, &prev)
    }

    fn del(&self, call: &Call<'_>) -> Result<()> {
        restore::del(call)
    }

    fn gc(&self, call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
        collect::gc(call, valid)
    }

    /// An ADD needs its folder, and its sysctls to be permitted. What a container has or lacks is
    /// not known here.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        let mut conf = Conf::of_network(&call.conf)?;
        let mut ready = || {
            if let Some(list) = AllowList::read(Path::new(ALLOW_LIST))? {
                list.filter(&mut conf.sysctls)?;
            }
            Folder::new(conf::data_dir(&call.conf)?, call.conf.name()).check_writable()
        };
        ready().map_err(|error: Error| error.with_code(Code::NOT_AVAILABLE))
    }
}

fn no_prev_result() -> Error {
    Error::config("Required prevResult missing")
}
