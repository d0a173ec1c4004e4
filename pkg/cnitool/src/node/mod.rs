//! The state of a node: the configured networks, the attachments, and everything that exists of
//! them in the kernel and on the disk.

pub(crate) mod attachments;
pub(crate) mod ipam;
pub(crate) mod leftovers;
pub(crate) mod objects;
pub(crate) mod snapshot;

use cni::config::NetConf;
use cni::delegate::keeps_reservations;
use cni::json::Json;
use cni::{AttachmentId, Error};
use libcni::{AddedKeys, Members, NetworkList};

use crate::call::Context;

impl Context<'_> {
    /// Returns the valid configured networks, sorted by name. If several files define the same
    /// network, the first one is used, as in runtimes.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub(crate) fn networks(&self) -> Result<Vec<NetworkList>, Error> {
        let mut lists: Vec<NetworkList> =
            self.conf_folder().files()?.into_iter().filter_map(|file| file.list.ok()).collect();
        // The sort is stable, so the first file of a network stays the first.
        lists.sort_by(|a, b| a.name().cmp(b.name()));
        lists.dedup_by(|later, first| later.name() == first.name());
        Ok(lists)
    }
}

/// Returns the position, the type and the configuration of each plugin of a network, which contains
/// the capability arguments. Skips invalid configurations, which `cnitool validate` reports.
pub(crate) fn plugin_confs<'a>(
    list: &'a NetworkList,
    capability_args: Option<&'a Members>,
) -> impl Iterator<Item = (usize, &'a str, NetConf)> {
    let added = AddedKeys { capability_args, ..AddedKeys::default() };
    list.plugins().iter().enumerate().filter_map(move |(index, plugin)| {
        Some((index, plugin.kind(), list.request(plugin, added).and_then(NetConf::parse).ok()?))
    })
}

/// As [`plugin_confs`], but only of plugins with an IPAM plugin that keeps reservations.
pub(crate) fn reserving_confs<'a>(
    list: &'a NetworkList,
    capability_args: Option<&'a Members>,
) -> impl Iterator<Item = (usize, &'a str, NetConf)> {
    plugin_confs(list, capability_args)
        .filter(|(_, kind, conf)| keeps_reservations(kind) || keeps_reservations(conf.ipam_type()))
}

/// Returns the position and the configuration of each plugin of the type `kind`.
pub(crate) fn confs_of_type(list: &NetworkList, kind: &str) -> impl Iterator<Item = (usize, NetConf)> {
    let of_type = plugin_confs(list, None).filter(move |(_, found, _)| *found == kind);
    of_type.map(|(index, _, conf)| (index, conf))
}

/// Returns the names of the bridges of a network's bridge plugins. A plugin that names no bridge
/// uses the default bridge.
pub(crate) fn bridges_of(list: &NetworkList) -> Vec<String> {
    let name = |(_, conf): (usize, NetConf)| {
        let named = conf.json().get("bridge").and_then(Json::as_str).unwrap_or_default().to_owned();
        if named.is_empty() { plugin_bridge::DEFAULT_BRIDGE.to_owned() } else { named }
    };
    confs_of_type(list, "bridge").map(name).collect()
}

/// Returns the JSON objects of all plugins in a configuration: those of a list or, because Go's
/// libcni stores it so in the result cache, a single plugin. Returns none if the configuration is
/// invalid.
pub(crate) fn plugins_in(config: &[u8]) -> Vec<Json> {
    let Ok(config) = Json::parse(config) else { return Vec::new() };
    match config.get("plugins") {
        Some(Json::Array(plugins)) => plugins.clone(),
        _ => vec![config],
    }
}

/// Returns the JSON objects of all plugins of the type `kind` in a configuration.
pub(crate) fn plugins_of_type(config: &[u8], kind: &str) -> Vec<Json> {
    let has_kind = |plugin: &Json| plugin.get("type").and_then(Json::as_str) == Some(kind);
    plugins_in(config).into_iter().filter(has_kind).collect()
}

/// Whether a plugin's object turns `key` on: with the value true, or, as `ipMasq` can, with an
/// object that does not turn off both address families.
pub(crate) fn is_true(plugin: &Json, key: &str) -> bool {
    match plugin.get(key) {
        Some(Json::Bool(value)) => *value,
        Some(keys @ Json::Object(_)) => ["ipv4", "ipv6"].iter().any(|key| keys.get(key) != Some(&Json::Bool(false))),
        _ => false,
    }
}

/// Returns the network, container ID and interface for people.
pub(crate) fn name_of(AttachmentId { network, container_id, ifname }: &AttachmentId) -> String {
    format!("{network} {container_id} {ifname}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugins_of_a_list_and_a_single_plugin_are_found() {
        let kinds = |config: &str| -> Vec<String> {
            let kind = |plugin: &Json| plugin.get("type").and_then(Json::as_str).unwrap_or_default().to_owned();
            plugins_in(config.as_bytes()).iter().map(kind).collect()
        };
        assert_eq!(kinds(r#"{"name":"n","plugins":[{"type":"bridge"},{"type":"portmap"}]}"#), ["bridge", "portmap"]);
        assert_eq!(kinds(r#"{"name":"n","type":"bridge","ipMasq":true}"#), ["bridge"]);
        assert_eq!(kinds("{"), [""; 0]);
        assert_eq!(plugins_of_type(br#"{"name":"n","type":"bridge"}"#, "bridge").len(), 1);
    }
}
