//! Leases that another daemon made and did not record: Go's. libcni's result cache has the
//! configuration and the result.

use std::path::Path;

use cni::config::NetConf;
use cni::json::Json;
use cni::result::AddResult;
use cni::version::Version;
use cni_dhcp::rpc::CmdArgs;
use libcni::cache::{Cache, Entry};

use crate::conf::Conf;

/// An attachment whose address a DHCP server leased.
pub(super) struct Cached {
    /// The arguments of its ADD, as far as the cache has them.
    pub(super) args: CmdArgs,
    pub(super) conf: NetConf,
    pub(super) keys: Conf,
    /// The result of the last plugin, without interfaces.
    pub(super) result: AddResult,
}

/// Returns the attachments whose configuration names this daemon's socket, with or without the
/// prefix of the host's files.
pub(super) fn list(cache: &Path, sockets: &[&Path]) -> cni::Result<Vec<Cached>> {
    let entries = Cache::new(cache).list_all()?.entries;
    Ok(entries.iter().filter_map(|entry| read(entry, sockets)).collect())
}

fn read(entry: &Entry, sockets: &[&Path]) -> Option<Cached> {
    let attachment = &entry.attachment;
    let pairs: Vec<String> = attachment.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let args = pairs.join(";");
    let list = entry.list().ok()?;
    let mut requests = list.plugins().iter().flat_map(|plugin| list.request(plugin, Some(&attachment.capability_args)));
    let (conf, keys) = requests.find_map(|request| {
        let conf = NetConf::parse(request).ok().filter(|conf| conf.ipam_type() == "dhcp")?;
        let keys = Conf::read(&conf, &args).ok().filter(|keys| sockets.contains(&keys.socket.as_path()))?;
        Some((conf, keys))
    })?;
    let json = Json::parse(entry.result.as_ref()?.get().as_bytes()).ok()?;
    let mut result = AddResult::decode(&json, Version::NEWEST).ok()?;
    if attachment.netns.is_empty() {
        return None;
    }
    result.interfaces.clear();
    result.ips.iter_mut().for_each(|ip| ip.interface = None);
    let args = CmdArgs {
        container_id: attachment.container_id.clone(),
        netns: attachment.netns.clone(),
        ifname: attachment.ifname.clone(),
        args,
        ..CmdArgs::default()
    };
    Some(Cached { args, conf, keys, result })
}
