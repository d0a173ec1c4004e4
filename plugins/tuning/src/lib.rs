//! `tuning`: settings of an interface that another plugin made, and of the network namespace it is in: sysctls, MAC,
//! MTU, promiscuous and all-multicast mode, length of the transmit queue.
//!
//! Rooms: `conf` reads the configuration, `key` the names of sysctls, `allowlist` what the node's administrator permits;
//! `apply` is ADD, `check` CHECK, `restore` DEL, `collect` GC; `backup` is the file that says what was there before,
//! `sysctl` the values in the container, `value` when two of them are the same.
//!
//! Easy to get wrong: the file is shared with the Go plugin and, in one list, with other entries of this plugin. What
//! was there first stays in it until it has been restored.

mod allowlist;
mod apply;
mod backup;
mod check;
mod collect;
mod conf;
mod key;
mod restore;
mod sysctl;
mod value;

use std::path::Path;

use cni::config::ValidAttachments;
use cni::skel::{Added, Call, Plugin};
use cni::{Code, Error, Result};

use allowlist::AllowList;
use backup::Folder;
use conf::Conf;

/// The plugin.
#[derive(Clone, Copy, Debug)]
pub struct Tuning;

/// Where the node's administrator says which sysctls may be set. Without the file: all below `net`.
const ALLOW_LIST: &str = "/etc/cni/tuning/allowlist.conf";

impl Plugin for Tuning {
    fn name(&self) -> &'static str {
        "tuning"
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

    /// An ADD needs its folder, and its sysctls to be permitted. What a container has or lacks is not known here.
    fn status(&self, call: &Call<'_>) -> Result<()> {
        let mut conf = Conf::of_network(&call.conf)?;
        let mut ready = || {
            if let Some(list) = AllowList::read(Path::new(ALLOW_LIST))? {
                list.filter(&mut conf.sysctls)?;
            }
            Folder::new(conf::data_dir(&call.conf)?).check_writable()
        };
        ready().map_err(|error: Error| error.with_code(Code::NOT_AVAILABLE))
    }
}

fn no_prev_result() -> Error {
    Error::config("Required prevResult missing")
}
