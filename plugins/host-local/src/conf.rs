//! Reads the configuration of the plugin `host-local`: the keys in `ipam`, and what the runtime
//! adds in `runtimeConfig`, `args` and CNI_ARGS.
//!
//! Each verb reads the keys that it needs:
//!
//! - ADD uses [`AddConf::read`] and STATUS [`StatusConf::read`], which refuse every invalid key.
//! - DEL, GC and CHECK use [`StoreLocation::read`], so that they work in spite of errors in other
//!   keys. An error in a key that does not change where the store is becomes a note. CHECK also
//!   reads the ranges ([`range_sets`]).
//!
//! The range sets are in Go's order: those of the runtime, then the set of `ipam.subnet`,
//! `rangeStart` and so on, then those of `ipam.ranges`. The order matters because a set's position
//! is in the name of its file `last_reserved_ip.<position>`.

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

/// Where the store is, and how to use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreLocation {
    /// The folder with the stores of all networks.
    pub(crate) data_dir: PathBuf,
    /// How long a verb waits for the lock of the store.
    pub(crate) lock_timeout: Duration,
    /// What happens to reservations of an earlier boot.
    pub(crate) after_reboot: RebootPolicy,
    /// What a repeated ADD of an attachment does. Only ADD uses this field.
    pub(crate) on_repeat: RepeatPolicy,
    /// How long a released address is not given out again, if others are free.
    pub(crate) cooldown: Duration,
}

/// The configuration of ADD.
#[derive(Clone, Debug)]
pub(crate) struct AddConf {
    pub(crate) location: StoreLocation,
    pub(crate) sets: RangeSets,
    /// The addresses that the runtime requests.
    pub(crate) requested: Requested,
    pub(crate) routes: Vec<Route>,
    /// The file with the DNS settings of the result.
    pub(crate) resolv_conf: Option<PathBuf>,
}

/// The configuration of STATUS. The runtime passes no `runtimeConfig` to STATUS.
#[derive(Clone, Debug)]
pub(crate) struct StatusConf {
    pub(crate) location: StoreLocation,
    /// The range sets, or `None` if the configuration has none, because the runtime provides them.
    pub(crate) sets: Option<RangeSets>,
    pub(crate) resolv_conf: Option<PathBuf>,
    pub(crate) shortage: ShortagePolicy,
}

/// What STATUS does about a shortage that may pass by itself: a full range or a full disk.
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
    /// Reads the keys that DEL, GC and CHECK need. An invalid `lockTimeout` is replaced by the
    /// default, and an invalid `reclaimAfterReboot` by `false`, which releases nothing, and an
    /// invalid `releaseCooldown` by 0. `notes` gets the errors.
    ///
    /// # Errors
    /// Code 6 if `dataDir` is not a string.
    pub(crate) fn read(conf: &NetConf, notes: &Notes) -> Result<StoreLocation> {
        let lock_timeout = lock_timeout(conf).unwrap_or_else(|error| {
            notes.note(format_args!("{error}; {} s is used", DEFAULT_LIMIT.as_secs()));
            DEFAULT_LIMIT
        });
        let after_reboot = reboot_policy(conf).unwrap_or_else(|error| {
            notes.note(format_args!("{error}; reservations made before this boot are kept"));
            RebootPolicy::Keep
        });
        let cooldown = release_cooldown(conf).unwrap_or_else(|error| {
            notes.note(format_args!("{error}; released addresses do not cool down"));
            Duration::ZERO
        });
        let data_dir = data_dir(conf)?;
        Ok(StoreLocation { data_dir, lock_timeout, after_reboot, on_repeat: RepeatPolicy::Refuse, cooldown })
    }

    /// Reads the keys of [`read`](StoreLocation::read), and `reuse`. Any error in them is returned.
    ///
    /// # Errors
    /// Code 6 if a key has the wrong type; 7 if `lockTimeout` or `releaseCooldown` is invalid.
    fn read_strictly(conf: &NetConf) -> Result<StoreLocation> {
        let on_repeat = match boolean(conf, "reuse")? {
            Some(true) => RepeatPolicy::Reuse,
            Some(false) | None => RepeatPolicy::Refuse,
        };
        let (data_dir, lock_timeout) = (data_dir(conf)?, lock_timeout(conf)?);
        let (after_reboot, cooldown) = (reboot_policy(conf)?, release_cooldown(conf)?);
        Ok(StoreLocation { data_dir, lock_timeout, after_reboot, on_repeat, cooldown })
    }
}

impl StatusConf {
    /// Reads and checks the whole configuration.
    ///
    /// # Errors
    /// Code 6 for a wrong type; 7 for an invalid value.
    pub(crate) fn read(conf: &NetConf) -> Result<StatusConf> {
        let mut keys: Keys = conf.decode()?;
        let location = StoreLocation::read_strictly(conf)?;
        let shortage = shortage_policy(conf)?;
        let sets = range_sets(conf)?;
        keys.ipam.as_mut().map(routes).transpose()?;
        Ok(StatusConf { location, sets, resolv_conf: keys.ipam.and_then(resolv_conf), shortage })
    }
}

/// Removes the routes from `ipam`, and returns them.
///
/// # Errors
/// Code 7 if `gws` of one is invalid.
fn routes(ipam: &mut Ipam) -> Result<Vec<Route>> {
    let mut routes = std::mem::take(&mut ipam.routes);
    routes.iter_mut().try_for_each(Route::settle_gateways)?;
    Ok(routes)
}

/// Returns `resolvConf`, or `None` if it is empty.
fn resolv_conf(ipam: Ipam) -> Option<PathBuf> {
    Some(ipam.resolv_conf).filter(|path| !path.is_empty()).map(PathBuf::from)
}

impl AddConf {
    /// Reads and checks the whole configuration and CNI_ARGS.
    ///
    /// # Errors
    /// Code 4 for invalid CNI_ARGS; 6 for a wrong type; 7 for an invalid value.
    pub(crate) fn read(conf: &NetConf, args: &CniArgs) -> Result<AddConf> {
        let keys: Keys = conf.decode()?;
        let location = StoreLocation::read_strictly(conf)?;
        // Only STATUS uses `fullIsUnavailable`. ADD checks the key too, to find an error early.
        shortage_policy(conf)?;

        let mut requested = Requested::none();
        requested.add("runtimeConfig.ips", keys.runtime_config.ips.iter().map(String::as_str))?;
        requested.add("args.cni.ips", args_cni_ips(conf)?.iter().map(String::as_str))?;
        args.check_known(&["IP"])?;
        // An empty value requests no address, as in Go's plugin.
        let ip = args.get("IP").filter(|ip| !ip.is_empty());
        requested.add("CNI_ARGS IP", ip).map_err(|error| {
            let value = ip.unwrap_or_default();
            let msg = format!("ARGS: error parsing value of pair \"IP={value}\": {error}");
            Error::new(Code::INVALID_ENVIRONMENT, msg).with_details("CNI_ARGS")
        })?;

        let sets = check_range_sets(&keys, conf.version())?;
        let mut ipam = keys.ipam.unwrap_or_default();
        let routes = routes(&mut ipam)?;
        Ok(AddConf { location, sets, requested, routes, resolv_conf: resolv_conf(ipam) })
    }
}

/// Returns `args.cni.ips`, or nothing if the key is missing.
///
/// # Errors
/// Code 6 if it is not a list of strings.
fn args_cni_ips(conf: &NetConf) -> Result<Vec<String>> {
    let Some(ips) = conf.json().get("args").and_then(|args| args.get("cni")?.get("ips")) else {
        return Ok(Vec::new());
    };
    ips.decode().map_err(|error| Error::caused(Code::DECODE, "failed to load netconf: args.cni.ips", error))
}

/// Returns the range sets of `ipam` and `runtimeConfig`, or `None` if neither has any: the runtime
/// gives them only to ADD.
///
/// # Errors
/// Code 6 for a wrong type; 7 for invalid ranges or a missing `ipam`.
pub(crate) fn range_sets(conf: &NetConf) -> Result<Option<RangeSets>> {
    let keys: Keys = conf.decode()?;
    let Some(ipam) = &keys.ipam else { return Err(no_ipam()) };
    if ipam.subnet.is_none() && ipam.ranges.is_empty() && keys.runtime_config.ip_ranges.is_empty() {
        return Ok(None);
    }
    check_range_sets(&keys, conf.version()).map(Some)
}

/// Checks the ranges of the configuration and the runtime, and returns them in the order that the
/// head of this module describes.
///
/// # Errors
/// Code 7 if there are no ranges, if a range is invalid, or if two ranges overlap; before version
/// 0.3.0 also if two sets are of one family.
fn check_range_sets(keys: &Keys, version: Version) -> Result<RangeSets> {
    let ipam = keys.ipam.as_ref().ok_or_else(no_ipam)?;
    let single_range = RangeConf {
        subnet: ipam.subnet.clone(),
        range_start: ipam.range_start.clone(),
        range_end: ipam.range_end.clone(),
        gateway: ipam.gateway.clone(),
    };
    let sets = RangeSets::check(&keys.runtime_config.ip_ranges, &single_range, &ipam.ranges)?;
    if version < Version::V0_3_0 {
        sets.require_one_per_family(version.as_str())?;
    }
    sets.require_disjoint()?;
    Ok(sets)
}

/// The known keys of `ipam` that are not in [`Ipam`]. The skeleton reads `type`. The other keys are
/// read one by one, so that an error in another key does not make DEL fail.
const SEPARATE_KEYS: [&str; 7] =
    ["type", "dataDir", "lockTimeout", "reuse", "reclaimAfterReboot", "releaseCooldown", "fullIsUnavailable"];

/// Returns the keys of `ipam` and `runtimeConfig` that this plugin does not read.
pub(crate) fn unknown_keys(json: &Json) -> Vec<cni::json::UnknownKey> {
    let mut unknown = json.unknown_keys::<Keys>();
    let is_separate = |key: &str| SEPARATE_KEYS.iter().any(|name| name.eq_ignore_ascii_case(key));
    unknown.retain(|key| match key.path.split_once('.') {
        Some(("ipam", key)) => !is_separate(key),
        Some(("runtimeConfig", _)) => true,
        // Other keys may belong to the interface plugin that runs this one.
        _ => false,
    });
    unknown
}

/// Returns the error for a configuration without `ipam`, with the text of Go's plugin.
fn no_ipam() -> Error {
    Error::config("IPAM config missing 'ipam' key")
}

/// Returns the value of a key in `ipam`.
fn ipam_key<'a>(conf: &'a NetConf, key: &str) -> Option<&'a Json> {
    conf.json().get("ipam")?.get(key)
}

/// Reads `dataDir`: the folder with the stores of all networks.
///
/// # Errors
/// Code 6 if it is not a string.
fn data_dir(conf: &NetConf) -> Result<PathBuf> {
    match ipam_key(conf, "dataDir") {
        None => Ok(PathBuf::from(DEFAULT_DATA_DIR)),
        Some(Json::String(path)) if path.is_empty() => Ok(PathBuf::from(DEFAULT_DATA_DIR)),
        Some(Json::String(path)) => Ok(cni::file::clean(path)),
        Some(_) => Err(Error::new(Code::DECODE, "failed to load netconf: ipam.dataDir: expected a string")),
    }
}

/// Reads `reclaimAfterReboot`, which is true by default.
///
/// # Errors
/// Code 6 if it is not a boolean.
fn reboot_policy(conf: &NetConf) -> Result<RebootPolicy> {
    Ok(match boolean(conf, "reclaimAfterReboot")? {
        Some(true) | None => RebootPolicy::Reclaim,
        Some(false) => RebootPolicy::Keep,
    })
}

/// Reads `fullIsUnavailable`, which is false by default.
///
/// # Errors
/// Code 6 if it is not a boolean.
fn shortage_policy(conf: &NetConf) -> Result<ShortagePolicy> {
    Ok(match boolean(conf, "fullIsUnavailable")? {
        Some(true) => ShortagePolicy::Fail,
        Some(false) | None => ShortagePolicy::Report,
    })
}

/// Reads a boolean key in `ipam`. Returns `None` if the key is missing.
///
/// # Errors
/// Code 6 if the value is not a boolean.
fn boolean(conf: &NetConf, key: &str) -> Result<Option<bool>> {
    match ipam_key(conf, key) {
        None => Ok(None),
        Some(Json::Bool(value)) => Ok(Some(*value)),
        Some(_) => Err(Error::new(Code::DECODE, format!("failed to load netconf: ipam.{key}: expected a boolean"))),
    }
}

/// Reads `lockTimeout`, in seconds.
///
/// # Errors
/// Code 7 if it is not a whole number from 1 to 300.
fn lock_timeout(conf: &NetConf) -> Result<Duration> {
    let seconds = match ipam_key(conf, "lockTimeout") {
        None => return Ok(DEFAULT_LIMIT),
        Some(Json::Number(number)) => number.as_u64().filter(|seconds| (1..=300).contains(seconds)),
        Some(_) => None,
    };
    let seconds =
        seconds.ok_or_else(|| Error::config("ipam.lockTimeout must be a whole number of seconds, from 1 to 300"))?;
    Ok(Duration::from_secs(seconds))
}

/// Reads `releaseCooldown`, in seconds. Zero if the key is missing.
///
/// # Errors
/// Code 7 if it is not a whole number from 0 to 86400.
fn release_cooldown(conf: &NetConf) -> Result<Duration> {
    let seconds = match ipam_key(conf, "releaseCooldown") {
        None => Some(0),
        Some(Json::Number(number)) => number.as_u64().filter(|seconds| *seconds <= 86_400),
        Some(_) => None,
    };
    let msg = "ipam.releaseCooldown must be a whole number of seconds, from 0 to 86400";
    seconds.map(Duration::from_secs).ok_or_else(|| Error::config(msg))
}
