use super::*;
use std::collections::BTreeMap;

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Conf {
    cni_version: String,
    mtu: u32,
    vlan: Option<i64>,
    ranges: Vec<Vec<Inner>>,
    sysctl: BTreeMap<String, String>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Inner {
    subnet: String,
}

fn decode(text: &str) -> Result<Conf, JsonError> {
    Json::parse(text.as_bytes())?.decode()
}

#[test]
fn keys_of_structures_match_in_any_case_and_the_last_one_counts() {
    let conf = decode(r#"{"CNIVERSION":"0.4.0","Mtu":1,"mtu":2,"MTU":null,"ranges":[[{"Subnet":"x"}]]}"#).unwrap();
    assert_eq!((conf.cni_version.as_str(), conf.mtu), ("0.4.0", 2));
    assert_eq!(conf.ranges[0][0].subnet, "x");
}

#[test]
fn unknown_keys_are_found_in_every_nested_structure() {
    let json =
        r#"{"CNIVersion":"1","mtuu":1,"ranges":[[{"subnet":"x"},{"subnets":"y"}]],"sysctl":{"anything":"1"},"X":[{}]}"#;
    let unknown = Json::parse(json.as_bytes()).unwrap().unknown_keys::<Conf>();
    let paths: Vec<&str> = unknown.iter().map(|key| key.path.as_str()).collect();
    assert_eq!(paths, ["mtuu", "X", "ranges[0][1].subnets"]);
    assert!(unknown[0].known.contains(&"mtu") && unknown[2].known == ["subnet"]);
}

#[test]
fn keys_of_maps_keep_their_case() {
    let conf = decode(r#"{"sysctl":{"A":"1","a":"2"}}"#).unwrap();
    assert_eq!(conf.sysctl.len(), 2);
}

#[test]
fn null_is_the_default_everywhere() {
    let conf = decode(r#"{"cniVersion":null,"mtu":null,"vlan":null,"ranges":[null,[null]],"sysctl":null}"#).unwrap();
    assert_eq!(conf, Conf { ranges: vec![vec![], vec![Inner::default()]], ..Conf::default() });
}

#[test]
fn errors_name_the_path() {
    let error = decode(r#"{"ranges":[[{"subnet":"a"},{"subnet":5}]]}"#).unwrap_err();
    assert_eq!(error.path(), "ranges[0][1].subnet");
    assert!(error.to_string().starts_with("ranges[0][1].subnet: invalid type"), "{error}");
}

#[test]
fn what_go_refuses_is_refused() {
    for text in ["", "[]", "{} {}", "{}x", r#"{"mtu":"1"}"#, r#"{"mtu":1.0}"#, r#"{"mtu":-1}"#, r#"{"ranges":{}}"#] {
        assert!(decode(text).is_err(), "{text:?} was accepted");
    }
}

#[test]
fn nesting_of_128_levels_is_refused() {
    let nested = |depth: usize| format!("{{\"x\":{}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1));
    assert!(decode(&nested(127)).is_ok());
    let error = decode(&nested(128)).unwrap_err().to_string();
    assert!(error.starts_with("recursion limit exceeded"), "{error}");
    assert!(decode(r#"{"x":"[[[[\"[["}"#).is_ok());
}

#[test]
fn bytes_that_are_not_utf8_become_replacement_characters() {
    assert_eq!(Json::parse(b"\"a\xffb\"").unwrap().as_str(), Some("a\u{fffd}b"));
}
