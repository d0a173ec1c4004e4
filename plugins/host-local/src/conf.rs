//! The plugin's keys: `ipam`, and what the runtime adds in `runtimeConfig`, `args` and CNI_ARGS.
//!
//! Reads the configuration in three ways: [`AddConf`] is strict and for ADD; [`StatusConf`] is as
//! strict about STATUS's configuration; [`StoreLocation`] has what the other verbs need, and
//! ignores errors in keys that do not affect the place of the store. `ipam.subnet` and its
//! neighbours are one more range set, before those of `ipam.ranges` and behind those of the
//! runtime; a set's position names its `last_reserved_ip` file.

use std::path::PathBuf;
use std::time::Duration;

use cni::args::CniArgs;
use cni::config::NetConf;
use cni::json::Json;
use cni::result::Route;
use cni::rollback::Notes;
use cni::version::Version;
use cni::{Code, Error, Result};
use cni_ipam::lock::DEFAULT_LIMIT;
use cni_ipam::store::DEFAULT_DATA_DIR;
use cni_ipam::{RangeConf, RangeSets, RebootPolicy, RepeatPolicy, Requested};
use serde::Deserialize;

/// Where the store is, how long a verb waits for it, and what becomes of what an earlier boot left
/// in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreLocation {
    pub(crate) data_dir: PathBuf,
    pub(crate) lock_timeout: Duration,
    pub(crate) earlier: RebootPolicy,
    /// The reaction to a repeated ADD; no other verb needs it.
    pub(crate) again: RepeatPolicy,
}

/// All that ADD needs.
#[derive(Clone, Debug)]
pub(crate) struct AddConf {
    pub(crate) place: StoreLocation,
    pub(crate) sets: RangeSets,
    pub(crate) requested: Requested,
    pub(crate) routes: Vec<Route>,
    pub(crate) resolv_conf: Option<PathBuf>,
}

/// The configuration that STATUS judges: what ADD reads, without the runtime's part.
#[derive(Clone, Debug)]
pub(crate) struct StatusConf {
    pub(crate) place: StoreLocation,
    /// `None` if only the runtime knows them.
    pub(crate) sets: Option<RangeSets>,
    pub(crate) resolv_conf: Option<PathBuf>,
    pub(crate) shortage: ShortagePolicy,
}

/// The reaction of STATUS to a shortage that passes: a used-up range, a full disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShortagePolicy {
    /// STATUS succeeds and reports the shortage.
    Report,
    /// STATUS fails with code 50.
    Fail,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Keys {
    ipam: Option<Ipam>,
    runtime_config: RuntimeConfig,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Ipam {
    subnet: Option<String>,
    range_start: Option<String>,
    range_end: Option<String>,
    gateway: Option<String>,
    ranges: Vec<Vec<RangeConf>>,
    routes: Vec<Route>,
    resolv_conf: String,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct RuntimeConfig {
    ip_ranges: Vec<Vec<RangeConf>>,
    ips: Vec<String>,
}

impl StoreLocation {
    /// Reads what every verb needs. An invalid `lockTimeout` is noted and replaced by the default,
    /// an invalid `reclaimAfterReboot` by `false`, which releases nothing.
    pub(crate) fn read(conf: &NetConf, notes: &Notes) -> Result<StoreLocation> {
        let lock_timeout = lock_timeout(conf).unwrap_or_else(|error| {
            notes.note(format_args!("{error}; {} s is used", DEFAULT_LIMIT.as_secs()));
            DEFAULT_LIMIT
        });
        let earlier = earlier(conf).unwrap_or_else(|error| {
            notes.note(format_args!("{error}; reservations from before the last boot are kept"));
            RebootPolicy::Keep
        });
        Ok(StoreLocation { data_dir: data_dir(conf)?, lock_timeout, earlier, again: RepeatPolicy::Refuse })
    }

    /// Reads the same, and `reuse`, and refuses every error.
    fn strict(conf: &NetConf) -> Result<StoreLocation> {
        let again = match boolean(conf, "reuse")? {
            Some(true) => RepeatPolicy::Reuse,
            Some(false) | None => RepeatPolicy::Refuse,
        };
        let (data_dir, lock_timeout) = (data_dir(conf)?, lock_timeout(conf)?);
        Ok(StoreLocation { data_dir, lock_timeout, earlier: earlier(conf)?, again })
    }
}

impl StatusConf {
    /// Reads and checks the whole configuration of a STATUS.
    pub(crate) fn read(conf: &NetConf) -> Result<StatusConf> {
        let (keys, place): (Keys, StoreLocation) = (conf.decode()?, StoreLocation::strict(conf)?);
        let shortage = shortage(conf)?;
        let sets = ranges(conf)?;
        Ok(StatusConf { place, sets, resolv_conf: keys.ipam.and_then(resolv_conf), shortage })
    }
}

/// Returns `resolvConf`; `None` if it is empty.
fn resolv_conf(ipam: Ipam) -> Option<PathBuf> {
    Some(ipam.resolv_conf).filter(|path| !path.is_empty()).map(PathBuf::from)
}

impl AddConf {
    /// Reads and checks everything.
    pub(crate) fn read(conf: &NetConf, args: &CniArgs) -> Result<AddConf> {
        let keys: Keys = conf.decode()?;
        let place = StoreLocation::strict(conf)?;
        shortage(conf)?;

        let mut requested = Requested::none();
        requested.add("runtimeConfig.ips", keys.runtime_config.ips.iter().map(String::as_str))?;
        let in_args: Vec<String> = match conf.json().get("args").and_then(|args| args.get("cni")?.get("ips")) {
            Some(ips) => ips
                .decode()
                .map_err(|error| Error::caused(Code::DECODE, "failed to load netconf: args.cni.ips", error))?,
            None => Vec::new(),
        };
        requested.add("args.cni.ips", in_args.iter().map(String::as_str))?;
        args.check_known(&["IP"])?;
        // An empty value asks for nothing, as in Go.
        let ip = args.get("IP").filter(|ip| !ip.is_empty());
        requested.add("CNI_ARGS IP", ip).map_err(|error| {
            let pair = ip.unwrap_or_default();
            let msg = format!("ARGS: error parsing value of pair \"IP={pair}\": {error}");
            Error::new(Code::INVALID_ENVIRONMENT, msg).with_details("CNI_ARGS")
        })?;

        let sets = check(&keys, conf.version())?;
        let mut ipam = keys.ipam.unwrap_or_default();
        let routes = std::mem::take(&mut ipam.routes);
        Ok(AddConf { place, sets, requested, routes, resolv_conf: resolv_conf(ipam) })
    }
}

/// The range sets, if the request has any: STATUS and CHECK judge by them where they can.
pub(crate) fn ranges(conf: &NetConf) -> Result<Option<RangeSets>> {
    let keys: Keys = conf.decode()?;
    let Some(ipam) = &keys.ipam else { return Err(no_ipam()) };
    if ipam.subnet.is_none() && ipam.ranges.is_empty() && keys.runtime_config.ip_ranges.is_empty() {
        return Ok(None);
    }
    check(&keys, conf.version()).map(Some)
}

fn check(keys: &Keys, version: Version) -> Result<RangeSets> {
    let ipam = keys.ipam.as_ref().ok_or_else(no_ipam)?;
    let single = RangeConf {
        subnet: ipam.subnet.clone(),
        range_start: ipam.range_start.clone(),
        range_end: ipam.range_end.clone(),
        gateway: ipam.gateway.clone(),
    };
    let sets = RangeSets::check(&keys.runtime_config.ip_ranges, &single, &ipam.ranges)?;
    if version < Version::V0_3_0 {
        sets.require_one_per_family(version.as_str())?;
    }
    sets.require_disjoint()?;
    Ok(sets)
}

/// The keys of `ipam` that are read separately, because errors in the others must not make DEL
/// fail.
const READ_APART: [&str; 6] = ["type", "dataDir", "lockTimeout", "reuse", "reclaimAfterReboot", "fullIsUnavailable"];

/// Returns the keys of `ipam` and `runtimeConfig` that this plugin does not read.
pub(crate) fn unknown_keys(json: &Json) -> Vec<cni::json::UnknownKey> {
    let mut unknown = json.unknown_keys::<Keys>();
    let apart = |key: &str| READ_APART.iter().any(|name| name.eq_ignore_ascii_case(key));
    unknown.retain(|key| match key.path.split_once('.') {
        Some(("ipam", rest)) => !apart(rest),
        Some(("runtimeConfig", _)) => true,
        // The delegating plugin has keys of its own.
        _ => false,
    });
    unknown
}

fn no_ipam() -> Error {
    Error::config("IPAM config missing 'ipam' key")
}

fn in_ipam<'a>(conf: &'a NetConf, key: &str) -> Option<&'a Json> {
    conf.json().get("ipam")?.get(key)
}

fn data_dir(conf: &NetConf) -> Result<PathBuf> {
    match in_ipam(conf, "dataDir") {
        None => Ok(PathBuf::from(DEFAULT_DATA_DIR)),
        Some(Json::String(path)) if path.is_empty() => Ok(PathBuf::from(DEFAULT_DATA_DIR)),
        Some(Json::String(path)) => Ok(cni::file::clean(path)),
        Some(_) => Err(Error::new(Code::DECODE, "failed to load netconf: ipam.dataDir: expected a string")),
    }
}

fn earlier(conf: &NetConf) -> Result<RebootPolicy> {
    Ok(match boolean(conf, "reclaimAfterReboot")? {
        Some(true) | None => RebootPolicy::Reclaim,
        Some(false) => RebootPolicy::Keep,
    })
}

fn shortage(conf: &NetConf) -> Result<ShortagePolicy> {
    Ok(match boolean(conf, "fullIsUnavailable")? {
        Some(true) => ShortagePolicy::Fail,
        Some(false) | None => ShortagePolicy::Report,
    })
}

fn boolean(conf: &NetConf, key: &str) -> Result<Option<bool>> {
    match in_ipam(conf, key) {
        None => Ok(None),
        Some(Json::Bool(value)) => Ok(Some(*value)),
        Some(_) => Err(Error::new(Code::DECODE, format!("failed to load netconf: ipam.{key}: expected a boolean"))),
    }
}

fn lock_timeout(conf: &NetConf) -> Result<Duration> {
    match in_ipam(conf, "lockTimeout") {
        None => Ok(DEFAULT_LIMIT),
        Some(Json::Number(number)) if number.as_u64().is_some_and(|seconds| (1..=300).contains(&seconds)) => {
            Ok(Duration::from_secs(number.as_u64().unwrap_or_default()))
        }
        Some(_) => Err(Error::config("ipam.lockTimeout must be a whole number of seconds, from 1 to 300")),
    }
}
