//! Every form of results, encoded and decoded, and the values that must not get lost.

use super::*;

fn full() -> AddResult {
    let json = Json::parse(
        br#"{"cniVersion":"1.1.0",
        "interfaces":[{"name":"cni0","mac":"0a:00:00:00:00:01"},
            {"name":"eth0","mac":"0a:00:00:00:00:02","mtu":1400,"sandbox":"/run/netns/c","socketPath":"/s","pciID":"0000:03:00.1"}],
        "ips":[{"interface":0,"address":"10.1.0.2/24","gateway":"10.1.0.1"},{"address":"fd00::2/64"},{"address":"10.2.0.2/24"}],
        "routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1"},{"dst":"10.9.8.7/16","mtu":0,"advmss":1,"priority":0,"table":0,"scope":0},
            {"dst":"::/0"}],
        "dns":{"nameservers":["10.1.0.1"],"domain":"d","search":["s"],"options":["o"]}}"#,
    )
    .unwrap();
    AddResult::decode(&json, Version::V0_1_0).unwrap()
}

fn text(result: &AddResult, version: Version) -> String {
    String::from_utf8(result.encode(version).unwrap()).unwrap()
}

fn round_trip(result: &AddResult, version: Version) -> AddResult {
    let json = Json::parse(&result.encode(version).unwrap()).unwrap();
    assert_eq!(json.get("cniVersion").unwrap().as_str(), Some(version.as_str()));
    AddResult::decode_as(&json, version).unwrap()
}

#[test]
fn the_newest_version_keeps_everything() {
    assert_eq!(round_trip(&full(), Version::V1_1_0), full());
}

#[test]
fn versions_from_0_3_0_lose_only_the_1_1_0_interface_fields() {
    let mut expected = full();
    expected.interfaces[1] =
        Interface { mtu: None, socket_path: String::new(), pci_id: String::new(), ..expected.interfaces[1].clone() };
    for version in [Version::V0_3_0, Version::V0_3_1, Version::V0_4_0, Version::V1_0_0] {
        assert_eq!(round_trip(&full(), version), expected, "{version}");
    }
}

#[test]
fn the_oldest_versions_keep_one_address_per_family() {
    for version in [Version::V0_1_0, Version::V0_2_0] {
        let back = round_trip(&full(), version);
        let addresses: Vec<String> = back.ips.iter().map(|ip| ip.address.to_string()).collect();
        assert_eq!(addresses, ["10.1.0.2/24", "fd00::2/64"]);
        assert_eq!(back.routes[1], Route::new("10.9.8.7/16".parse().unwrap(), None));
        assert!(back.interfaces.is_empty() && back.dns == full().dns);
    }
}

#[test]
fn the_oldest_versions_cannot_express_a_missing_address() {
    let error = AddResult::default().encode(Version::V0_2_0).unwrap_err();
    assert_eq!(error.to_string(), "cannot convert: no valid IP addresses");
}

#[test]
fn the_oldest_versions_omit_routes_without_an_address() {
    let mut result = full();
    result.ips.truncate(1);
    assert!(!text(&result, Version::V0_2_0).contains("::/0"));
}

#[test]
fn new_shapes_are_sorted_and_old_ones_in_declared_order() {
    let result = AddResult {
        interfaces: vec![Interface { name: "lo".into(), mac: "00:00:00:00:00:00".into(), ..Interface::default() }],
        ips: vec![IpConfig { interface: Some(0), address: "127.0.0.1/8".parse().unwrap(), gateway: None }],
        ..AddResult::default()
    };
    assert_eq!(
        text(&result, Version::V1_0_0),
        "{\n    \"cniVersion\": \"1.0.0\",\n    \"interfaces\": [\n        {\n            \"mac\": \"00:00:00:00:00:00\",\n            \"name\": \"lo\"\n        }\n    ],\n    \"ips\": [\n        {\n            \"address\": \"127.0.0.1/8\",\n            \"interface\": 0\n        }\n    ]\n}"
    );
    assert_eq!(
        text(&result, Version::V0_4_0),
        "{\n    \"cniVersion\": \"0.4.0\",\n    \"interfaces\": [\n        {\n            \"name\": \"lo\",\n            \"mac\": \"00:00:00:00:00:00\"\n        }\n    ],\n    \"ips\": [\n        {\n            \"version\": \"4\",\n            \"interface\": 0,\n            \"address\": \"127.0.0.1/8\"\n        }\n    ],\n    \"dns\": {}\n}"
    );
    assert_eq!(
        text(&result, Version::V0_1_0),
        "{\n    \"cniVersion\": \"0.1.0\",\n    \"ip4\": {\n        \"ip\": \"127.0.0.1/8\"\n    },\n    \"dns\": {}\n}"
    );
}

#[test]
fn unknown_members_keep_their_place() {
    for version in [Version::V0_3_0, Version::V0_4_0, Version::V1_0_0, Version::V1_1_0] {
        let text = format!(
            r#"{{"cniVersion":"{version}","x":{{"a":[1,null]}},"n":null,"interfaces":[{{"name":"br0"}},{{"Name":"eth0",
            "sandbox":"/x","vendor":{{"id":7}}}}],"ips":[{{"address":"10.0.0.2/24","zone":"a"}}],
            "routes":[{{"dst":"0.0.0.0/0","x":true}}],"dns":{{"ttl":5}}}}"#
        );
        let json = Json::parse(text.as_bytes()).unwrap();
        let mut result = AddResult::decode_as(&json, version).unwrap();
        result.interfaces.push(Interface { name: "ifb".into(), ..Interface::default() });
        let value = serde_json::to_value(result.to_value(version).unwrap()).unwrap();
        assert_eq!((&value["x"]["a"][0], value.get("n")), (&1.into(), Some(&serde_json::Value::Null)), "{value:#}");
        assert_eq!(
            (&value["interfaces"][1]["vendor"]["id"], &value["interfaces"][1]["name"]),
            (&7.into(), &"eth0".into())
        );
        assert_eq!(value["interfaces"][1].get("Name"), None);
        assert_eq!(
            (&value["interfaces"][2]["name"], value["interfaces"].as_array().unwrap().len()),
            (&"ifb".into(), 3)
        );
        assert_eq!((&value["ips"][0]["zone"], &value["routes"][0]["x"]), (&"a".into(), &true.into()));
        assert_eq!((&value["dns"]["ttl"], &value["cniVersion"]), (&5.into(), &version.as_str().into()));
    }
    let oldest = Json::parse(br#"{"ip4":{"ip":"10.0.0.2/24"},"x":1}"#).unwrap();
    assert!(text(&AddResult::decode(&oldest, Version::V0_2_0).unwrap(), Version::V0_2_0).contains("\"x\": 1"));
}

#[test]
fn fields_that_a_version_lacks_are_not_unknown() {
    let json = br#"{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","MTU":1400,"mac":null,"socketPath":"/s"}]}"#;
    let result = AddResult::decode_as(&Json::parse(json).unwrap(), Version::V1_0_0).unwrap();
    assert!(!text(&result, Version::V1_0_0).to_lowercase().contains("mtu"));
    assert_eq!(result.unknown, super::Unknown::default());
}

#[test]
fn several_gateways_of_a_route_are_kept_in_every_version() {
    let json = br#"{"ips":[{"address":"10.0.0.2/24"}],
        "routes":[{"dst":"10.9.0.0/16","gw":"10.0.0.9","gws":["10.0.0.8","::ffff:10.0.0.9"],"mtu":1400}]}"#;
    let result = AddResult::decode(&Json::parse(json).unwrap(), Version::V1_1_0).unwrap();
    for version in Version::ALL {
        let encoded = Json::parse(&result.encode(version).unwrap()).unwrap();
        let back = AddResult::decode(&encoded, version).unwrap();
        let gateways: Vec<String> =
            back.routes.iter().flat_map(Route::gateways).map(|gateway| gateway.to_string()).collect();
        assert_eq!(gateways, ["10.0.0.8", "10.0.0.9"], "{version}");
        assert_eq!(back.routes.len(), if version < Version::V0_3_0 { 2 } else { 1 }, "{version}");
        assert_eq!(back.unknown, super::Unknown::default(), "{version}");
    }
}

#[test]
fn gws_needs_gateways_of_the_family_of_the_destination() {
    let settled = |gateways: &str| {
        let json = format!(r#"{{"routes":[{{"dst":"fd09::/64"{gateways}}}]}}"#);
        let mut result = AddResult::decode(&Json::parse(json.as_bytes()).unwrap(), Version::V1_1_0).unwrap();
        result.routes[0].settle_gateways().map(|()| result.routes[0].gw.map(|gw| gw.to_string()))
    };
    for (gateways, gw) in [
        (r#","gws":["fd00::8","fd00::9"]"#, Some("fd00::8")),
        (r#","gws":["fd00::8"],"gw":"fd00::9""#, Some("fd00::9")),
        (r#","gws":null"#, None),
        // Not this function's to judge: without `gws` it does nothing.
        (r#","gw":"10.0.0.9""#, Some("10.0.0.9")),
    ] {
        assert_eq!(settled(gateways).unwrap().as_deref(), gw, "{gateways}");
    }
    let most = |count: usize| format!(r#","gws":[{}]"#, vec![r#""fd00::8""#; count].join(","));
    assert!(settled(&most(super::MAX_GATEWAYS)).is_ok());
    for (gateways, msg) in [
        (r#","gws":[]"#.to_owned(), "route fd09::/64: gws is empty"),
        (most(super::MAX_GATEWAYS + 1), "route fd09::/64: gws has 65 gateways, at most 64 are allowed"),
        (
            r#","gws":["fd00::8","10.0.0.9"]"#.to_owned(),
            "route fd09::/64 via 10.0.0.9: the gateway is of the other address family",
        ),
        (
            r#","gws":["fd00::8"],"gw":"10.0.0.9""#.to_owned(),
            "route fd09::/64 via 10.0.0.9: the gateway is of the other address family",
        ),
    ] {
        let error = settled(&gateways).unwrap_err();
        assert_eq!((error.code(), error.msg()), (crate::Code::INVALID_CONFIG, msg));
    }
    let bad = Json::parse(br#"{"routes":[{"dst":"fd09::/64","gws":["x"]}]}"#).unwrap();
    let error = AddResult::decode(&bad, Version::V1_1_0).unwrap_err();
    assert_eq!(error.to_string(), "routes[0].gws: invalid IP address: x");
}

#[test]
fn a_result_without_version_takes_the_one_of_its_caller() {
    let json = |text: &str| Json::parse(text.as_bytes()).unwrap();
    let bare = json(r#"{"ip4":{"ip":"10.0.0.2/24"}}"#);
    assert_eq!(AddResult::decode(&bare, Version::V0_2_0).unwrap().ips.len(), 1);
    assert!(AddResult::decode(&bare, Version::V1_0_0).unwrap().ips.is_empty());
    let newer = json(r#"{"cniVersion":"1.1.0","ips":[]}"#);
    assert!(AddResult::decode_as(&newer, Version::V1_0_0).is_ok());
    assert_eq!(
        AddResult::decode_as(&newer, Version::V0_4_0).unwrap_err().to_string(),
        "result type supports [0.3.0 0.3.1 0.4.0] but unmarshalled CNIVersion is \"1.1.0\""
    );
    assert_eq!(
        AddResult::decode(&json(r#"{"cniVersion":"9.9.9"}"#), Version::V1_0_0).unwrap_err().to_string(),
        "unsupported CNI result version \"9.9.9\""
    );
}

#[test]
fn bad_addresses_are_named_with_their_path() {
    let json = Json::parse(br#"{"ips":[{"address":"10.0.0.1"}]}"#).unwrap();
    let error = AddResult::decode(&json, Version::V1_0_0).unwrap_err();
    assert_eq!(error.to_string(), "ips[0].address: invalid CIDR address: 10.0.0.1");
}
