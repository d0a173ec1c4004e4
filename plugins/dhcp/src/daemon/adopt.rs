//! Finds the leases of Go's daemon. That daemon records nothing, but libcni's result cache has the
//! configuration and the result of each attachment.

use std::path::Path;

use cni::config::NetConf;
use cni::json::Json;
use cni::result::AddResult;
use cni::version::Version;
use cni_dhcp::rpc::CmdArgs;
use libcni::AddedKeys;
use libcni::cache::{Cache, Entry};

use crate::conf::Conf;

/// An attachment in the result cache whose IPAM plugin is dhcp.
pub(super) struct Cached {
    /// The arguments of the ADD whose result is in the cache.
    pub(super) args: CmdArgs,
    /// The configuration of the plugin that uses dhcp.
    pub(super) conf: NetConf,
    /// The keys of `ipam` in this configuration.
    pub(super) ipam: Conf,
    /// The result of the last plugin, without interfaces.
    pub(super) result: AddResult,
}

/// Returns the attachments in the result cache whose configuration names one of these sockets.
pub(super) fn list(cache: &Path, sockets: &[&Path]) -> cni::Result<Vec<Cached>> {
    let entries = Cache::new(cache).list(None)?.entries;
    Ok(entries.iter().filter_map(|entry| read(entry, sockets)).collect())
}

/// Reads a cache entry. Returns `None` if none of its plugins uses dhcp with one of these sockets,
/// or if the entry lacks a namespace or a valid result.
fn read(entry: &Entry, sockets: &[&Path]) -> Option<Cached> {
    let attachment = &entry.attachment;
    if attachment.netns.is_empty() {
        return None;
    }
    let cni_args: Vec<String> = attachment.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let cni_args = cni_args.join(";");
    let list = entry.list().ok()?;
    let added = AddedKeys { capability_args: Some(&attachment.capability_args), ..AddedKeys::default() };
    // A plugin without a valid configuration is skipped.
    let mut stdin_of_plugins = list.plugins().iter().flat_map(|plugin| list.request(plugin, added));
    let (conf, ipam) = stdin_of_plugins.find_map(|stdin| conf_with_dhcp(stdin, &cni_args, sockets))?;
    let json = Json::parse(entry.result.as_ref()?.get().as_bytes()).ok()?;
    let mut result = AddResult::decode(&json, Version::NEWEST).ok()?;
    result.interfaces.clear();
    result.ips.iter_mut().for_each(|ip| ip.interface = None);
    let args = CmdArgs {
        container_id: attachment.container_id.clone(),
        netns: attachment.netns.clone(),
        ifname: attachment.ifname.clone(),
        args: cni_args,
        ..CmdArgs::default()
    };
    Some(Cached { args, conf, ipam, result })
}

/// Parses a plugin's configuration and the keys of its `ipam`. Returns `None` if a part is invalid,
/// or if the plugin does not use dhcp with one of these sockets.
fn conf_with_dhcp(stdin: Vec<u8>, cni_args: &str, sockets: &[&Path]) -> Option<(NetConf, Conf)> {
    let conf = NetConf::parse(stdin).ok()?;
    if conf.ipam_type() != "dhcp" {
        return None;
    }
    let ipam = Conf::read(&conf, cni_args).ok()?;
    if sockets.contains(&ipam.socket.as_path()) { Some((conf, ipam)) } else { None }
}
