//! Reads and checks the configuration of `bridge`.
//!
//! DEL and GC do not read it, so that neither a change of the configuration nor a mistake in it
//! prevents the removal of an attachment.

use cni::args::CniArgs;
use cni::config::NetConf;
use cni::json::Json;
use cni::{Cidr, Code, Error, Result, ident};
use cni_linux::mac::Mac;
use cni_linux::{BridgeSettings, Dad};
use cni_plugin::interface::Gateway;
use cni_plugin::keys::{self, MasqueradeScope};
use serde::Deserialize;

/// The bridge's name if the configuration has none.
pub const DEFAULT_BRIDGE: &str = "cni0";

/// The longest name of a link that the kernel accepts, in bytes.
const LINK_NAME_MAX: usize = 15;

/// The largest VLAN ID; 4095 is reserved.
const VLAN_MAX: u16 = 4094;

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Conf {
    /// The bridge's name.
    pub(crate) bridge: String,
    /// Whether the bridge is the containers' gateway.
    pub(crate) gateway: Gateway,
    /// Whether an address of the bridge that conflicts with the gateway's is removed.
    pub(crate) force_address: bool,
    /// Whether packets that leave the network are masqueraded.
    pub(crate) masquerade: Option<MasqueradeScope>,
    /// The MTU of a new bridge and of both ends of the veth pair; `None` for the kernel's default.
    pub(crate) mtu: Option<Mtu>,
    /// The settings of the bridge that ADD changes and CHECK compares.
    pub(crate) settings: BridgeSettings,
    /// Whether the bridge answers neighbour requests for the container; `None` keeps the port's
    /// setting.
    pub(crate) neigh_suppress: Option<bool>,
    /// Whether the port sends frames back to the container that they came from.
    pub(crate) hairpin: bool,
    /// Whether the bridge is promiscuous.
    pub(crate) promiscuous: bool,
    /// Whether the port is isolated: isolated ports cannot reach each other.
    pub(crate) isolated: bool,
    /// The port's VLANs; `None` leaves them as the kernel sets them.
    pub(crate) vlans: Option<Vlans>,
    /// Whether frames with any other source address than the container's are dropped.
    pub(crate) spoof_check: bool,
    /// Whether duplicate address detection runs for the IPv6 addresses that ADD adds.
    pub(crate) dad: Dad,
    /// Whether the container's end stays down.
    pub(crate) container_down: bool,
    /// The container's hardware address.
    pub(crate) mac: Option<Mac>,
    /// Whether the container gets addresses.
    pub(crate) has_ipam: bool,
    /// The gateways that the `ipam` section configures, with their networks' prefix lengths.
    pub(crate) configured_gateways: Vec<Cidr>,
}

/// The value of `mtu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mtu {
    /// In bytes.
    Fixed(u32),
    /// The smallest MTU of the bridge's ports that do not belong to containers. A new bridge has
    /// the kernel's default.
    Uplink,
}

/// The VLANs of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Vlans {
    /// The VLAN of untagged frames; `None` is VLAN 1.
    pub(crate) access: Option<u16>,
    /// The VLANs of tagged frames, sorted.
    pub(crate) trunk: Vec<u16>,
    /// Whether the bridge's default VLAN stays on the port.
    pub(crate) keep_default: bool,
}

/// The plugin's keys as they are in JSON.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Keys {
    bridge: String,
    is_gateway: bool,
    is_default_gateway: bool,
    force_address: bool,
    ip_masq: Option<Json>,
    ip_masq_backend: Option<String>,
    mtu: Option<Json>,
    group_fwd_mask: Option<i64>,
    mcast_snooping: Option<bool>,
    stp: Option<bool>,
    neigh_suppress: Option<bool>,
    hairpin_mode: bool,
    promisc_mode: bool,
    vlan: i64,
    vlan_trunk: Option<Vec<RawTrunk>>,
    preserve_default_vlan: bool,
    macspoofchk: bool,
    enabledad: bool,
    disable_container_interface: bool,
    port_isolation: bool,
    args: keys::Args,
    runtime_config: keys::RuntimeConfig,
}

/// An entry of `vlanTrunk`, unchecked: a range of VLANs, a single VLAN, or both.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RawTrunk {
    #[serde(rename = "minID")]
    min: Option<i64>,
    #[serde(rename = "maxID")]
    max: Option<i64>,
    id: Option<i64>,
}

impl Conf {
    /// Reads the configuration and the key `MAC` of CNI_ARGS (`args`). The only other known key is
    /// `IP`, which IPAM plugins read.
    ///
    /// # Errors
    /// - Code 4 for an error in CNI_ARGS.
    /// - Code 6 or 7 for an error in the configuration, with Go's text where Go has one.
    pub(crate) fn new(conf: &NetConf, args: &str) -> Result<Conf> {
        let args = CniArgs::parse(args)?;
        args.check_known(&["MAC", "IP"])?;
        Conf::parse(conf, args.get("MAC").unwrap_or_default())
    }

    /// Reads the configuration; `mac_of_args` is `MAC` in CNI_ARGS, empty if absent.
    pub(crate) fn parse(conf: &NetConf, mac_of_args: &str) -> Result<Conf> {
        let raw: Keys = conf.decode()?;
        let bridge = if raw.bridge.is_empty() { DEFAULT_BRIDGE.to_owned() } else { raw.bridge };
        ident::check_host_link_name("bridge", &bridge)?;
        if raw.hairpin_mode && raw.promisc_mode {
            return Err(Error::config("cannot set hairpin mode and promiscuous mode at the same time"));
        }
        let vlans = parse_vlans(raw.vlan, raw.vlan_trunk, raw.preserve_default_vlan)?;
        let gateway = match (raw.is_gateway, raw.is_default_gateway) {
            (_, true) => Gateway::DefaultRoute,
            (true, false) => Gateway::Address,
            (false, false) => Gateway::None,
        };
        let has_ipam = !conf.ipam_type().is_empty();
        if raw.disable_container_interface && has_ipam {
            return Err(Error::config("cannot use IPAM when DisableContainerInterface flag is set"));
        }
        let masquerade = MasqueradeScope::parse(raw.ip_masq, raw.ip_masq_backend)?;
        if gateway != Gateway::None
            && let Some(vlan) = vlans.as_ref().and_then(|vlans| vlans.access)
        {
            let name = vlan_gateway_name(&bridge, vlan);
            if name.len() > LINK_NAME_MAX {
                return Err(Error::config(format!(
                    "the VLAN's gateway interface would be {name:?}, longer than {LINK_NAME_MAX} bytes: shorten \"bridge\""
                )));
            }
        }
        Ok(Conf {
            mtu: parse_mtu(raw.mtu)?,
            settings: BridgeSettings {
                group_fwd_mask: raw.group_fwd_mask.map(parse_group_fwd_mask).transpose()?,
                mcast_snooping: raw.mcast_snooping,
                spanning_tree: raw.stp,
            },
            neigh_suppress: raw.neigh_suppress,
            mac: keys::mac([&raw.runtime_config.mac, &raw.args.cni.mac, mac_of_args])
                .map_err(|why| Error::config(format!("failed to make veth pair: {why}")))?,
            configured_gateways: cni_ipam::configured_gateways(conf),
            bridge,
            gateway,
            force_address: raw.force_address,
            masquerade,
            hairpin: raw.hairpin_mode,
            promiscuous: raw.promisc_mode,
            isolated: raw.port_isolation,
            vlans,
            spoof_check: raw.macspoofchk,
            dad: if raw.enabledad { Dad::Normal } else { Dad::Skip },
            container_down: raw.disable_container_interface,
            has_ipam,
        })
    }

    /// Whether ADD adds the gateway's address to the bridge itself, not to a VLAN's gateway
    /// interface.
    pub(crate) fn puts_gateway_on_bridge(&self) -> bool {
        self.has_ipam && self.gateway != Gateway::None && self.gateway_vlan().is_none()
    }

    /// Returns the VLAN whose gateway interface gets the gateway's address; `None` if the bridge
    /// itself gets the address. Does not check whether the configuration has a gateway.
    pub(crate) fn gateway_vlan(&self) -> Option<u16> {
        self.vlans.as_ref().and_then(|vlans| vlans.access)
    }
}

/// Parses `mtu`: a number or `"uplink"`.
///
/// # Errors
/// Code 6 for another type, 7 for another text or a number that the kernel refuses for a veth.
fn parse_mtu(mtu: Option<Json>) -> Result<Option<Mtu>> {
    match mtu {
        None => Ok(None),
        Some(Json::String(text)) if text == "uplink" => Ok(Some(Mtu::Uplink)),
        Some(Json::String(text)) => {
            Err(Error::config(format!("invalid MTU {text:?} (must be a number or \"uplink\")")))
        }
        Some(other) => {
            let number =
                other.decode().map_err(|error| Error::caused(Code::DECODE, "failed to load netconf: mtu", error))?;
            Ok(keys::mtu(number, keys::VETH_MTU)?.map(Mtu::Fixed))
        }
    }
}

/// Parses `groupFwdMask`.
///
/// # Errors
/// Code 7 if it does not have 16 bits, or has a bit that the kernel refuses: 0 (STP), 1 (pause
/// frames) or 2 (LACP).
fn parse_group_fwd_mask(mask: i64) -> Result<u16> {
    match u16::try_from(mask) {
        Ok(mask) if mask & 7 == 0 => Ok(mask),
        _ => Err(Error::config(format!(
            "invalid groupFwdMask {mask} (must be between 0 and 65528, without the bits 0 to 2)"
        ))),
    }
}

/// Returns the name of the interface with a VLAN's gateway address. The name is Go's. It suggests
/// an 802.1Q device, but the interface is one end of a veth pair.
pub(crate) fn vlan_gateway_name(bridge: &str, vlan: u16) -> String {
    format!("{bridge}.{vlan}")
}

/// Parses `vlan`, `vlanTrunk` and `preserveDefaultVlan` (`keep_default`). Returns `None` if the
/// first two are absent. An empty trunk counts as present.
///
/// # Errors
/// Code 7 with Go's texts for an invalid VLAN ID, and those of [`expand_trunk`].
fn parse_vlans(vlan: i64, trunk: Option<Vec<RawTrunk>>, keep_default: bool) -> Result<Option<Vlans>> {
    let access = match u16::try_from(vlan) {
        Ok(0) => None,
        Ok(id @ 1..=VLAN_MAX) => Some(id),
        _ => return Err(Error::config(format!("invalid VLAN ID {vlan} (must be between 0 and {VLAN_MAX})"))),
    };
    if access.is_none() && trunk.is_none() {
        return Ok(None);
    }
    Ok(Some(Vlans { access, trunk: expand_trunk(trunk.unwrap_or_default())?, keep_default }))
}

/// Returns the VLANs that the entries of `vlanTrunk` name, sorted.
///
/// # Errors
/// Code 7 with Go's texts for a VLAN ID outside 1 to 4094, and for an incomplete or reversed range.
fn expand_trunk(entries: Vec<RawTrunk>) -> Result<Vec<u16>> {
    let check_id = |id: i64, key: &str| match u16::try_from(id) {
        Ok(id @ 1..=VLAN_MAX) => Ok(id),
        _ => Err(Error::config(format!("incorrect trunk {key} parameter"))),
    };
    // For each VLAN, the end of the longest range that begins with that VLAN; 0 if there is none.
    // With this array, many overlapping ranges take no longer than one.
    let mut range_ends = [0; VLAN_MAX as usize + 1];
    let mut add_range = |min: u16, max: u16| {
        let end = &mut range_ends[usize::from(min)];
        *end = max.max(*end);
    };
    for item in entries {
        match (item.min, item.max) {
            (Some(min), Some(max)) => {
                let (min, max) = (check_id(min, "minID")?, check_id(max, "maxID")?);
                if min > max {
                    return Err(Error::config("minID is greater than maxID in trunk parameter"));
                }
                add_range(min, max);
            }
            (Some(_), None) => {
                return Err(Error::config("minID and maxID should be configured simultaneously, maxID is missing"));
            }
            (None, Some(_)) => {
                return Err(Error::config("minID and maxID should be configured simultaneously, minID is missing"));
            }
            (None, None) => {}
        }
        if let Some(single) = item.id {
            let single = check_id(single, "id")?;
            add_range(single, single);
        }
    }
    let (mut trunk, mut covered_until) = (Vec::new(), 0);
    for id in 1..=VLAN_MAX {
        covered_until = covered_until.max(range_ends[usize::from(id)]);
        if id <= covered_until {
            trunk.push(id);
        }
    }
    Ok(trunk)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_firewall::Backend;

    fn parse(keys: &str, mac_of_args: &str) -> Result<Conf> {
        let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"bridge"{keys}}}"#);
        Conf::parse(&NetConf::parse(conf)?, mac_of_args)
    }

    fn refusal(keys: &str) -> String {
        let error = parse(keys, "").unwrap_err();
        assert_eq!(error.code(), cni::Code::INVALID_CONFIG, "{keys}");
        error.msg().to_owned()
    }

    #[test]
    fn only_the_name_is_required() {
        let conf = parse("", "").unwrap();
        assert_eq!((conf.bridge.as_str(), conf.gateway, conf.mtu, conf.vlans), ("cni0", Gateway::None, None, None));
        assert!(!conf.has_ipam && conf.mac.is_none());
        assert_eq!(parse(r#","isDefaultGateway":true"#, "").unwrap().gateway, Gateway::DefaultRoute);
    }

    #[test]
    fn an_mtu_is_a_number_or_that_of_the_uplink() {
        let mtu = |value: &str| parse(&format!(r#","mtu":{value}"#), "").unwrap().mtu;
        assert_eq!((mtu("1400"), mtu("0"), mtu("null")), (Some(Mtu::Fixed(1400)), None, None));
        assert_eq!(mtu(r#""uplink""#), Some(Mtu::Uplink));
        assert_eq!(refusal(r#","mtu":"1400""#), r#"invalid MTU "1400" (must be a number or "uplink")"#);
        let error = parse(r#","mtu":true"#, "").unwrap_err();
        assert!(error.code() == Code::DECODE && error.msg().starts_with("failed to load netconf: mtu: "), "{error}");
    }

    #[test]
    fn settings_of_the_bridge_are_kept_unless_given() {
        let conf = parse("", "").unwrap();
        assert_eq!((conf.settings, conf.neigh_suppress), (BridgeSettings::default(), None));
        let conf = parse(r#","groupFwdMask":16384,"stp":false,"mcastSnooping":true,"neighSuppress":true"#, "").unwrap();
        let given =
            BridgeSettings { group_fwd_mask: Some(0x4000), spanning_tree: Some(false), mcast_snooping: Some(true) };
        assert_eq!((conf.settings, conf.neigh_suppress), (given, Some(true)));
        for mask in [-1, 1, 2, 4, 65536] {
            let msg = refusal(&format!(r#","groupFwdMask":{mask}"#));
            assert!(msg.starts_with(&format!("invalid groupFwdMask {mask} (must be ")), "{msg}");
        }
    }

    #[test]
    fn contradictions_are_refused_with_gos_texts() {
        for (keys, text) in [
            (
                r#","hairpinMode":true,"promiscMode":true"#,
                "cannot set hairpin mode and promiscuous mode at the same time",
            ),
            (
                r#","disableContainerInterface":true,"ipam":{"type":"host-local"}"#,
                "cannot use IPAM when DisableContainerInterface flag is set",
            ),
            (r#","vlan":4095"#, "invalid VLAN ID 4095 (must be between 0 and 4094)"),
            (r#","vlan":-1"#, "invalid VLAN ID -1 (must be between 0 and 4094)"),
            (r#","vlanTrunk":[{"minID":0,"maxID":5}]"#, "incorrect trunk minID parameter"),
            (r#","vlanTrunk":[{"minID":1,"maxID":4095}]"#, "incorrect trunk maxID parameter"),
            (r#","vlanTrunk":[{"minID":6,"maxID":5}]"#, "minID is greater than maxID in trunk parameter"),
            (r#","vlanTrunk":[{"minID":6}]"#, "minID and maxID should be configured simultaneously, maxID is missing"),
            (r#","vlanTrunk":[{"maxID":6}]"#, "minID and maxID should be configured simultaneously, minID is missing"),
            (r#","vlanTrunk":[{"id":0}]"#, "incorrect trunk id parameter"),
            (r#","ipMasqBackend":"x""#, "unknown ipmasq backend \"x\""),
            (r#","mtu":67"#, "invalid MTU 67 (must be between 68 and 65535, or 0)"),
            (r#","runtimeConfig":{"mac":"zz"}"#, "failed to make veth pair: address zz: invalid MAC address"),
        ] {
            assert_eq!(refusal(keys), text);
        }
        for name in ["a/b", "br%d", "all", "default", "lo"] {
            let text = refusal(&format!(r#","bridge":"{name}""#));
            assert!(text.starts_with(&format!("bridge {name:?}: ")), "{text}");
        }
        assert!(refusal(r#","bridge":"twelve-bytes","isGateway":true,"vlan":100"#).contains("twelve-bytes.100"));
        assert!(refusal(r#","runtimeConfig":{"mac":"01:00:00:00:00:01"}"#).contains("not a unicast address"));
    }

    #[test]
    fn a_backend_is_of_use_to_masquerading_alone() {
        let masquerade = |keys: &str| parse(keys, "").unwrap().masquerade;
        assert_eq!(masquerade(""), None);
        assert_eq!(masquerade(r#","ipMasqBackend":"nftables""#), None);
        let backend_of = |keys: &str| masquerade(keys).expect(keys).backend;
        assert_eq!(backend_of(r#","ipMasq":true"#), None);
        assert_eq!(backend_of(r#","ipMasq":true,"ipMasqBackend":null"#), None);
        for backend in [Backend::Iptables, Backend::Nftables] {
            assert_eq!(backend_of(&format!(r#","ipMasq":true,"ipMasqBackend":"{backend}""#)), Some(backend));
        }
    }

    #[test]
    fn trunks_are_sorted_sets_and_an_empty_one_enables_vlans() {
        let trunk = |keys: &str| parse(keys, "").unwrap().vlans.unwrap();
        let vlans = trunk(r#","vlanTrunk":[{"minID":5,"maxID":7,"id":3},{"id":6}],"vlan":9"#);
        assert_eq!((vlans.access, vlans.trunk), (Some(9), vec![3, 5, 6, 7]));
        assert_eq!(trunk(r#","vlanTrunk":[]"#), Vlans { access: None, trunk: vec![], keep_default: false });
        let vlans =
            trunk(r#","vlanTrunk":[{"minID":4,"maxID":6},{"minID":5,"maxID":5},{"minID":4,"maxID":4,"id":4094}]"#);
        assert_eq!(vlans.trunk, [4, 5, 6, 4094], "a shorter entry takes nothing from a longer one");
    }

    #[test]
    fn a_trunk_of_many_entries_is_expanded_once() {
        let entries = |max: usize| {
            format!(r#","vlanTrunk":[{}]"#, vec![format!(r#"{{"minID":1,"maxID":{max}}}"#); 5000].join(","))
        };
        let (narrow, wide) = (entries(1), entries(4094));
        let check = |keys: &str, ids| assert_eq!(parse(keys, "").unwrap().vlans.unwrap().trunk.len(), ids);
        // As many entries with 4094 times as many VLANs in each.
        cni_testkit::assert_cost_below(3, || check(&narrow, 1), || check(&wide, 4094));
    }

    #[test]
    fn the_mac_of_the_runtime_precedes_args_and_cni_args() {
        let all = r#","runtimeConfig":{"mac":"02:00:00:00:00:01"},"args":{"cni":{"mac":"02:00:00:00:00:02"}}"#;
        let args = r#","args":{"cni":{"mac":"02:00:00:00:00:02","x":[]},"y":5}"#;
        for (keys, expected) in [(all, 1), (args, 2), ("", 3)] {
            let mac = parse(keys, "02:00:00:00:00:03").unwrap().mac.unwrap();
            assert_eq!(mac, Mac([2, 0, 0, 0, 0, expected]));
        }
    }
}
