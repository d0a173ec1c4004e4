//! Reads the configuration of the plugin `flannel`, and makes the delegate's configuration of it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cni::config::NetConf;
use cni::delegate::check_plugin_name;
use cni::json::Json;
use cni::{Error, Result};
use cni_plugin::keys::non_empty;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::subnet::Lease;

/// The `subnetFile` of a configuration without this key.
const SUBNET_FILE: &str = "/run/flannel/subnet.env";

/// The `dataDir` of a configuration without this key.
pub(crate) const DATA_DIR: &str = "/var/lib/cni/flannel";

/// A JSON object whose keys are case-sensitive, as in Go's maps.
type Object = BTreeMap<String, Json>;

/// The paths, which are all that DEL and GC need if there is a stored configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Paths {
    pub(crate) subnet_file: PathBuf,
    /// The folder of the stored configurations.
    pub(crate) data_dir: PathBuf,
}

/// A checked configuration.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Conf {
    pub(crate) paths: Paths,
    /// The delegate's configuration without the values of the lease.
    delegate: Map<String, Value>,
    /// The delegate's `ipam` without the values of the lease.
    ipam: Map<String, Value>,
    /// The routes that come before those of the lease.
    routes: Vec<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PathKeys {
    subnet_file: String,
    data_dir: String,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Keys {
    #[serde(rename = "subnetFile")]
    _subnet_file: String,
    #[serde(rename = "dataDir")]
    _data_dir: String,
    delegate: Object,
    ipam: Object,
    runtime_config: Option<Object>,
}

impl Paths {
    /// Reads the paths.
    ///
    /// # Errors
    /// Code 6 if a key has the wrong type.
    pub(crate) fn new(conf: &NetConf) -> Result<Paths> {
        let PathKeys { subnet_file, data_dir } = conf.decode()?;
        let path = |text: String, default: &str| non_empty(text).unwrap_or_else(|| default.to_owned()).into();
        Ok(Paths { subnet_file: path(subnet_file, SUBNET_FILE), data_dir: path(data_dir, DATA_DIR) })
    }
}

impl Conf {
    /// Reads the configuration.
    ///
    /// # Errors
    /// - Code 6 if a key has the wrong type.
    /// - Code 7 if `delegate` has a key that this plugin sets, or if its `type` or the routes of
    ///   `ipam` are invalid.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let paths = Paths::new(conf)?;
        let Keys { delegate, ipam, runtime_config, .. } = conf.decode()?;
        for key in ["name", "ipam"] {
            if delegate.contains_key(key) {
                return Err(Error::config(format!("delegate.{key} is not allowed: flannel sets it")));
            }
        }
        let (mut delegate, mut ipam) = (map(&delegate), map(&ipam));
        match delegate.entry("type").or_insert_with(|| "bridge".into()) {
            Value::String(kind) => check_plugin_name(kind)?,
            _ => return Err(Error::config("delegate.type is not a string")),
        }
        if delegate["type"] == "bridge" {
            delegate.entry("isGateway").or_insert(Value::Bool(true));
        }
        delegate.insert("name".to_owned(), conf.name().into());
        if let Some(version) = conf.json().get("cniVersion") {
            delegate.insert("cniVersion".to_owned(), version.into());
        }
        if let Some(runtime_config) = runtime_config {
            delegate.insert("runtimeConfig".to_owned(), map(&runtime_config).into());
        }
        ipam.entry("type").or_insert_with(|| "host-local".into());
        let routes = match ipam.remove("routes") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(routes)) => routes,
            Some(_) => return Err(Error::config("ipam.routes is not a list")),
        };
        Ok(Conf { paths, delegate, ipam, routes })
    }

    /// Returns the configuration that the delegate gets on this node.
    pub(crate) fn delegate(&self, lease: &Lease) -> Map<String, Value> {
        let Conf { mut delegate, mut ipam, mut routes, .. } = self.clone();
        delegate.entry("ipMasq").or_insert_with(|| (!lease.is_masquerading).into());
        delegate.entry("mtu").or_insert_with(|| lease.mtu.into());
        let ranges = lease.subnets.iter().map(|subnet| json!([{ "subnet": subnet }]));
        ipam.insert("ranges".to_owned(), ranges.collect());
        routes.extend(lease.networks.iter().map(|network| json!({ "dst": network })));
        ipam.insert("routes".to_owned(), routes.into());
        delegate.insert("ipam".to_owned(), ipam.into());
        delegate
    }
}

/// Converts an object. Of duplicate keys, the last one was kept.
fn map(object: &Object) -> Map<String, Value> {
    object.iter().map(|(key, value)| (key.clone(), value.into())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conf(keys: &str) -> Result<Conf> {
        Conf::new(&NetConf::parse(format!(r#"{{"cniVersion":"1.0.0","name":"cbr0","type":"flannel"{keys}}}"#))?)
    }

    fn delegate(keys: &str) -> Value {
        let lease = Lease::parse(
            "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.3.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
        );
        conf(keys).unwrap().delegate(&lease.unwrap()).into()
    }

    #[test]
    fn without_keys_the_delegate_is_bridge_with_host_local() {
        let expected = json!({"cniVersion": "1.0.0", "name": "cbr0", "type": "bridge", "isGateway": true, "ipMasq": false,
            "mtu": 1450, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.42.3.0/24"}]],
            "routes": [{"dst": "10.42.0.0/16"}]}});
        assert_eq!(delegate(""), expected);
        assert_eq!(
            delegate(r#","delegate":null,"ipam":null,"runtimeConfig":null,"subnetFile":"","dataDir":"""#),
            expected
        );
    }

    #[test]
    fn configured_keys_win_over_the_lease() {
        let made = delegate(
            r#","delegate":{"isGateway":false,"mtu":1400,"ipMasq":true,"hairpinMode":true,"x":null},
                "ipam":{"routes":[{"dst":"0.0.0.0/0"}],"dataDir":"/d"},"runtimeConfig":{"mac":"02:00:00:00:00:01"}"#,
        );
        assert_eq!(
            made,
            json!({"cniVersion": "1.0.0", "name": "cbr0", "type": "bridge", "isGateway": false, "ipMasq": true, "mtu": 1400,
                "hairpinMode": true, "x": null, "runtimeConfig": {"mac": "02:00:00:00:00:01"},
                "ipam": {"type": "host-local", "dataDir": "/d", "ranges": [[{"subnet": "10.42.3.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.42.0.0/16"}]}})
        );
        assert_eq!(delegate(r#","delegate":{"type":"ptp"}"#)["isGateway"], Value::Null);
    }

    #[test]
    fn keys_that_cannot_be_used_are_refused() {
        for (keys, code, msg) in [
            (r#","delegate":{"name":"a"}"#, 7, "delegate.name is not allowed: flannel sets it"),
            (r#","delegate":{"ipam":{}}"#, 7, "delegate.ipam is not allowed: flannel sets it"),
            (r#","delegate":{"type":5}"#, 7, "delegate.type is not a string"),
            (r#","delegate":{"type":"../bridge"}"#, 7, "invalid plugin name: ../bridge"),
            (r#","ipam":{"routes":{}}"#, 7, "ipam.routes is not a list"),
        ] {
            let error = conf(keys).unwrap_err();
            assert_eq!((error.code().0, error.msg()), (code, msg));
        }
        for keys in
            [r#","delegate":[]"#, r#","ipam":[]"#, r#","runtimeConfig":1"#, r#","subnetFile":1"#, r#","dataDir":1"#]
        {
            assert_eq!(conf(keys).unwrap_err().code().0, 6, "{keys}");
        }
    }
}
