//! The node's file: the store that the node uses, and the files with its credentials.
//!
//! No network configuration has these, because a network is the same on all nodes and is often
//! written by people who must not choose credentials. Only the operator writes this file, so
//! unknown keys are errors.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cni::json::Json;
use cni::{Code, Error, Result};
use serde::Deserialize;

/// The path of the node's file, unless the network has the key `clusterConf`.
pub const DEFAULT_PATH: &str = "/etc/cni/cluster-local.json";

/// A valid node's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conf {
    /// The node's name in claims, if the file has it.
    pub node: Option<String>,
    /// How long one call may spend on the store.
    pub timeout: Duration,
    /// The kind of store.
    pub kind: Kind,
    /// The servers, one to 16, each as `host:port`. An IPv6 address is in brackets.
    pub endpoints: Vec<String>,
    /// The name in the server's certificate, if it is not the endpoint's host.
    pub server_name: Option<String>,
    /// The file with the certificates of the server's authorities (PEM).
    pub ca_file: PathBuf,
    /// How the node proves to the server who it is.
    pub credentials: Credentials,
}

/// A kind of store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// The Kubernetes API.
    Kubernetes,
    /// etcd v3, with the beginning of all keys.
    Etcd(String),
}

/// How the node proves to the server who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credentials {
    /// The files of a certificate and of its key (PEM). One file may have both.
    Certificate(PathBuf, PathBuf),
    /// The file of a bearer token.
    Token(PathBuf),
}

/// The keys of the file.
#[derive(Deserialize)]
struct Keys {
    node: Option<String>,
    timeout: Option<u64>,
    kubernetes: Option<KubernetesKeys>,
    etcd: Option<EtcdKeys>,
}

/// The keys of `kubernetes`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct KubernetesKeys {
    server: String,
    server_name: Option<String>,
    ca_file: PathBuf,
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    token_file: Option<PathBuf>,
}

/// The keys of `etcd`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EtcdKeys {
    endpoints: Vec<String>,
    prefix: Option<String>,
    ca_file: PathBuf,
    cert_file: PathBuf,
    key_file: PathBuf,
}

impl Conf {
    /// Reads the node's file.
    ///
    /// # Errors
    /// Code 5 if the file cannot be read, 7 if its content is wrong.
    pub fn read(path: &Path) -> Result<Conf> {
        Conf::parse(&read(path)?).map_err(|error| error.context(path.display()))
    }

    /// Parses the content of the node's file.
    ///
    /// # Errors
    /// Code 7, with the key.
    pub fn parse(bytes: &[u8]) -> Result<Conf> {
        let json = Json::parse(bytes).map_err(|error| Error::config(error.to_string()))?;
        let keys: Keys = json.decode().map_err(|error| Error::config(error.to_string()))?;
        if let Some(unknown) = json.unknown_keys::<Keys>().first() {
            return Err(Error::config(format!("unknown key {}; known: {}", unknown.path, unknown.known.join(", "))));
        }
        let seconds = keys.timeout.unwrap_or(10);
        if !(1..=20).contains(&seconds) {
            return Err(Error::config(format!("timeout: {seconds} is not between 1 and 20 (seconds)")));
        }
        let (kind, urls, server_name, ca_file, credentials) = match (keys.kubernetes, keys.etcd) {
            (Some(keys), None) => {
                let credentials = match (keys.cert_file, keys.key_file, keys.token_file) {
                    (Some(cert), Some(key), None) => Credentials::Certificate(cert, key),
                    (None, None, Some(token)) => Credentials::Token(token),
                    _ => return Err(Error::config("kubernetes: needs either certFile and keyFile, or tokenFile")),
                };
                (Kind::Kubernetes, vec![keys.server], keys.server_name, keys.ca_file, credentials)
            }
            (None, Some(keys)) => {
                let kind = Kind::Etcd(keys.prefix.unwrap_or_else(|| "/cni/".to_owned()));
                (kind, keys.endpoints, None, keys.ca_file, Credentials::Certificate(keys.cert_file, keys.key_file))
            }
            _ => return Err(Error::config("needs exactly one of the keys kubernetes and etcd")),
        };
        if !(1..=16).contains(&urls.len()) {
            return Err(Error::config("etcd.endpoints: needs 1 to 16 of them"));
        }
        let endpoints = urls.iter().map(|url| endpoint(url)).collect::<Result<_>>()?;
        let (node, timeout) = (keys.node.filter(|node| !node.is_empty()), Duration::from_secs(seconds));
        Ok(Conf { node, timeout, kind, endpoints, server_name, ca_file, credentials })
    }

    /// Checks that the files which this file names can be read.
    ///
    /// # Errors
    /// Code 5, with the path.
    pub fn check_files(&self) -> Result<()> {
        let files = match &self.credentials {
            Credentials::Certificate(cert, key) => vec![&self.ca_file, cert, key],
            Credentials::Token(token) => vec![&self.ca_file, token],
        };
        files.into_iter().try_for_each(|path| read(path).map(drop))
    }
}

/// Returns `host:port` of a URL.
fn endpoint(url: &str) -> Result<String> {
    let endpoint = url.strip_prefix("https://").map(|rest| rest.trim_end_matches('/'));
    let parts = endpoint.and_then(|endpoint| endpoint.rsplit_once(':'));
    let is_valid = |(host, port): (&str, &str)| {
        !host.is_empty() && !host.contains(['/', '@', ' ', '\n']) && port.parse::<u16>().is_ok()
    };
    let valid = endpoint.filter(|_| parts.is_some_and(is_valid));
    valid.map(str::to_owned).ok_or_else(|| Error::config(format!("{url:?} is not https://HOST:PORT")))
}

/// Reads a file.
///
/// # Errors
/// Code 5, with the path.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    cni::file::read(path).map_err(|error| Error::caused(Code::IO, format!("failed to read {}", path.display()), error))
}

/// Reads a file with one line.
///
/// # Errors
/// Code 5, with the path.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    Ok(String::from_utf8_lossy(&read(path)?).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KUBERNETES: &str =
        r#"{"kubernetes": {"server": "https://10.96.0.1:443", "caFile": "/ca", "certFile": "/c", "keyFile": "/k"}}"#;
    const ETCD: &str = r#"{"node": "n1", "timeout": 3, "etcd": {"endpoints": ["https://[fd00::1]:2379", "https://e.x:1/"],
        "prefix": "/p/", "caFile": "/ca", "certFile": "/c", "keyFile": "/k"}}"#;

    #[test]
    fn the_file_of_a_kubernetes_node_needs_four_keys() {
        let certificate = Credentials::Certificate("/c".into(), "/k".into());
        let expected = Conf {
            node: None,
            timeout: Duration::from_secs(10),
            kind: Kind::Kubernetes,
            endpoints: vec!["10.96.0.1:443".to_owned()],
            server_name: None,
            ca_file: "/ca".into(),
            credentials: certificate,
        };
        assert_eq!(Conf::parse(KUBERNETES.as_bytes()).unwrap(), expected);
    }

    #[test]
    fn the_file_of_an_etcd_node_may_have_every_key() {
        let conf = Conf::parse(ETCD.as_bytes()).unwrap();
        assert_eq!((conf.node.as_deref(), conf.timeout), (Some("n1"), Duration::from_secs(3)));
        assert_eq!(conf.kind, Kind::Etcd("/p/".to_owned()));
        assert_eq!(conf.endpoints, ["[fd00::1]:2379", "e.x:1"]);
    }

    #[test]
    fn a_wrong_value_is_named() {
        let token =
            r#"{"kubernetes": {"server": "https://a:1", "caFile": "/ca", "tokenFile": "/t", "serverName": "x"}}"#;
        assert_eq!(Conf::parse(token.as_bytes()).unwrap().credentials, Credentials::Token("/t".into()));
        for (text, from, to, expected) in [
            (KUBERNETES, "https:", "http:", r#""http://10.96.0.1:443" is not https://HOST:PORT"#),
            (KUBERNETES, ":443", "", r#""https://10.96.0.1" is not https://HOST:PORT"#),
            (KUBERNETES, "10.96.0.1:443", "a/b:1", r#""https://a/b:1" is not https://HOST:PORT"#),
            (KUBERNETES, "caFile", "cafile2", "kubernetes: missing field `caFile`"),
            (KUBERNETES, "\"keyFile\"", "\"tokenFile\"", "kubernetes: needs either certFile and keyFile, or tokenFile"),
            (
                KUBERNETES,
                "{\"kubernetes\"",
                "{\"x\": 1, \"kubernetes\"",
                "unknown key x; known: node, timeout, kubernetes, etcd",
            ),
            (
                token,
                "serverName",
                "servername2",
                "unknown key kubernetes.servername2; known: server, serverName, caFile, certFile, keyFile, tokenFile",
            ),
            (ETCD, "3", "21", "timeout: 21 is not between 1 and 20 (seconds)"),
            (ETCD, "3", "0", "timeout: 0 is not between 1 and 20 (seconds)"),
            (ETCD, "[\"https://[fd00::1]:2379\", \"https://e.x:1/\"]", "[]", "etcd.endpoints: needs 1 to 16 of them"),
            (ETCD, "{\"node\"", "{\"kubernetes\": null, \"node\"", ""),
            ("{}", "", "", "needs exactly one of the keys kubernetes and etcd"),
        ] {
            assert!(text.contains(from));
            let parsed = Conf::parse(text.replacen(from, to, 1).as_bytes());
            let message = parsed.as_ref().map_or_else(|error| (error.code().0, error.msg()), |_| (7, ""));
            assert_eq!(message, (7, expected), "{from} => {to}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let conf = Conf::parse(KUBERNETES.as_bytes()).unwrap();
        let error = conf.check_files().unwrap_err();
        assert_eq!(
            (error.code(), error.msg()),
            (Code::IO, "failed to read /ca: No such file or directory (os error 2)")
        );
        assert_eq!(Conf::read(Path::new("/nowhere/x")).unwrap_err().code(), Code::IO);
    }
}
