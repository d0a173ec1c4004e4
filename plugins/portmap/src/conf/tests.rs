//! Tests which configurations are accepted, and with which errors the others are refused.

use super::*;

fn parse(keys: &str) -> Result<Conf> {
    let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"portmap"{keys}}}"#);
    Conf::new(&NetConf::parse(conf)?)
}

#[track_caller]
fn refusal(keys: &str) -> String {
    let error = parse(keys).unwrap_err();
    assert_eq!(error.code(), cni::Code::INVALID_CONFIG, "{keys}");
    error.msg().to_owned()
}

fn mapped(mapping: &str) -> String {
    format!(r#","runtimeConfig":{{"portMappings":[{mapping}]}}"#)
}

#[test]
fn defaults_are_those_of_go() {
    let conf = parse("").unwrap();
    assert_eq!((conf.backend, conf.snat, conf.policy), (None, Snat::Hairpin, Policy::RefuseIfAlive));
    assert_eq!(conf.set_mark, SetMark::Bit(13));
    assert!(conf.mappings.is_empty());
    for nothing in [r#","runtimeConfig":null"#, r#","runtimeConfig":{"portMappings":null}"#, &mapped("")] {
        assert!(parse(nothing).unwrap().mappings.is_empty());
    }
    let conf = parse(r#","masqAll":true,"MARKMASQBIT":5,"portConflict":"ignore""#).unwrap();
    assert_eq!((conf.snat, conf.set_mark, conf.policy), (Snat::All, SetMark::Bit(5), Policy::Ignore));
    assert_eq!(parse(r#","masqAll":true,"snat":false"#).unwrap().snat, Snat::No);
}

#[test]
fn a_mapping_has_defaults_and_a_canonical_address() {
    let conf = parse(&mapped(r#"{"hostPort":8080,"containerPort":80},{"hostPort":8080,"containerPort":80,"protocol":"UDP","hostIP":"::ffff:192.0.2.1"}"#)).unwrap();
    let expected = Mapping { protocol: Protocol::Tcp, host_ip: None, host_port: 8080, container_port: 80 };
    assert_eq!(conf.mappings[0], expected);
    let expected = Mapping { protocol: Protocol::Udp, host_ip: "192.0.2.1".parse().ok(), ..expected };
    assert_eq!(conf.mappings[1], expected);
}

#[test]
fn a_bad_port_is_refused_with_only_gos_text() {
    let good = r#"{"hostPort":1,"containerPort":1},"#;
    for (mapping, text) in [
        (r#"{"hostPort":0,"containerPort":80}"#, "Invalid host port number: 0"),
        (r#"{"hostPort":65536,"containerPort":80}"#, "Invalid host port number: 65536"),
        (r#"{"hostPort":80}"#, "Invalid container port number: 0"),
        (r#"{"hostPort":80,"containerPort":-1}"#, "Invalid container port number: -1"),
    ] {
        let keys = mapped(&format!("{good}{mapping}"));
        let error = parse(&keys).unwrap_err();
        assert_eq!(error.to_string(), text, "no details either");
        let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net"{keys}}}"#);
        let refused = Conf::refused_key(&NetConf::parse(conf).unwrap(), &error);
        assert_eq!(refused.as_deref(), Some("portMappings[1]"));
    }
}

#[test]
fn a_bad_mark_bit_is_refused_with_only_gos_text() {
    let error = parse(r#","markMasqBit":32"#).unwrap_err();
    assert_eq!(error.to_string(), "MasqMarkBit must be between 0 and 31", "no details either");
    let conf = NetConf::parse(r#"{"cniVersion":"1.0.0","name":"net","markMasqBit":32}"#).unwrap();
    assert_eq!(Conf::refused_key(&conf, &error).as_deref(), Some("\"markMasqBit\": 32"));
}

#[test]
fn other_bad_mappings_are_refused_with_their_index() {
    let good = r#"{"hostPort":1,"containerPort":1},"#;
    for (mapping, text) in [
        (
            r#"{"hostPort":80,"containerPort":80,"protocol":"icmp"}"#,
            "Invalid protocol \"icmp\": not tcp, udp or sctp (portMappings[1])",
        ),
        (r#"{"hostPort":80,"containerPort":80,"hostIP":"10.0.0"}"#, "Invalid host IP \"10.0.0\" (portMappings[1])"),
        (
            r#"{"hostPort":1,"containerPort":80,"hostIP":"0.0.0.0"}"#,
            "portMappings[1] requests the same host port as portMappings[0]: tcp port 1",
        ),
    ] {
        assert_eq!(refusal(&mapped(&format!("{good}{mapping}"))), text);
    }
    let specific = mapped(&format!(r#"{good}{{"hostPort":1,"containerPort":80,"hostIP":"192.0.2.1"}}"#));
    assert_eq!(parse(&specific).unwrap().mappings.len(), 2);
    assert_eq!(parse(r#","runtimeConfig":{"portMappings":{}}"#).unwrap_err().code(), cni::Code::DECODE);
}

#[test]
fn a_conflicting_mapping_names_the_first_in_either_family() {
    let of = |host_ip: &str| format!(r#"{{"hostPort":1,"containerPort":1,"hostIP":"{host_ip}"}}"#);
    let (any, v4, v6, one) = (of(""), of("0.0.0.0"), of("::"), of("192.0.2.1"));
    for (all, before) in [
        ([&v6, &v4, &any], Some("portMappings[2] requests the same host port as portMappings[0]: tcp port 1")),
        ([&one, &v4, &any], Some("portMappings[2] requests the same host port as portMappings[1]: tcp port 1")),
        ([&any, &one, &v6], Some("portMappings[2] requests the same host port as portMappings[0]: tcp port 1")),
        ([&v6, &one, &v4], None),
    ] {
        let keys = mapped(&all.map(String::as_str).join(","));
        assert_eq!(parse(&keys).err().as_ref().map(|error| error.msg()), before, "{keys}");
    }
}

#[test]
fn the_cost_of_many_mappings_is_not_quadratic() {
    let mapping = |port| format!(r#"{{"hostPort":{port},"containerPort":80}}"#);
    let keys = |count| mapped(&(1..=count).map(mapping).collect::<Vec<_>>().join(","));
    let (few, many) = (keys(4000), keys(16_000));
    let check = |keys: &str, count| assert_eq!(parse(keys).unwrap().mappings.len(), count);
    // 4 times as many: 16 times the work if each were compared with each.
    cni_testkit::assert_cost_below(8, || check(&few, 4000), || check(&many, 16_000));
}

#[test]
fn del_reads_only_valid_mappings() {
    let keys = mapped(r#"{"hostPort":0},7,{"hostPort":80,"containerPort":80}"#);
    let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"portmap"{keys}}}"#);
    assert_eq!(Conf::valid_mappings(&NetConf::parse(conf).unwrap()).len(), 1);
    let conf = r#"{"name":"net","runtimeConfig":[1]}"#;
    assert_eq!(Conf::valid_mappings(&NetConf::parse(conf).unwrap()), []);
}

#[test]
fn options_decide_the_backend() {
    for (keys, backend) in [
        (r#","conditionsV4":["-s","1.2.3.4"]"#, Some(Backend::Iptables)),
        (r#","conditionsV6":["ip6 saddr fd00::1"]"#, Some(Backend::Nftables)),
        (r#","externalSetMarkChain":"KUBE-MARK-MASQ""#, Some(Backend::Iptables)),
        (r#","backend":"nftables""#, Some(Backend::Nftables)),
        (r#","conditionsV4":[]"#, None),
    ] {
        assert_eq!(parse(keys).unwrap().backend, backend, "{keys}");
    }
    for (keys, text) in [
        (r#","backend":"x""#, "unrecognized backend \"x\""),
        (
            r#","backend":"iptables","conditionsV4":["ip","saddr"],"conditionsV6":["ip6"]"#,
            "iptables backend was requested but configuration contains nftables-specific options [conditionsV4 conditionsV6]",
        ),
        (
            r#","backend":"nftables","conditionsV4":["!","-s"],"externalSetMarkChain":"X""#,
            "nftables backend was requested but configuration contains iptables-specific options [externalSetMarkChain conditionsV4]",
        ),
        (
            r#","conditionsV4":["-s"],"conditionsV6":["ip6"]"#,
            "iptables backend was requested but configuration contains nftables-specific options [conditionsV6]",
        ),
        (r#","markMasqBit":32"#, "MasqMarkBit must be between 0 and 31"),
        (r#","markMasqBit":3,"externalSetMarkChain":"X""#, "Cannot specify externalSetMarkChain and markMasqBit"),
        (r#","portConflict":"steal""#, "\"portConflict\" can only be \"ignore\", not \"steal\""),
        (
            r#","externalSetMarkChain":"a b""#,
            "externalSetMarkChain: \"a b\" is not a chain name: it must be 1 to 28 bytes, without spaces or control \
             characters, and must not begin with - or !",
        ),
    ] {
        assert_eq!(refusal(keys), text);
    }
}

#[test]
fn a_condition_for_nft_may_have_a_keyword_within_a_name() {
    for condition in ["iifname \\\"drop\\\"", "iifname eth-drop", "ip saddr { 10.0.0.1, 10.0.0.0/8 } ct state new"] {
        let conf = parse(&format!(r#","conditionsV4":["{condition}"]"#)).unwrap();
        assert_eq!(conf.backend, Some(Backend::Nftables), "{condition}");
    }
}

#[test]
fn a_condition_that_is_not_a_match_is_refused() {
    for (keys, token) in [
        (r#","conditionsV4":["-s","1.2.3.4","-j","ACCEPT"]"#, "\"-j\""),
        (r#","conditionsV4":["-s","1.2.3.4\nCOMMIT"]"#, "\"1.2.3.4\\nCOMMIT\""),
        (r#","conditionsV6":["-m","comment","--comment","COMMIT"]"#, "\"COMMIT\""),
        (r#","conditionsV4":["ip saddr 1.2.3.4 accept"]"#, "\"accept\""),
        (r#","conditionsV4":["ip saddr 1.2.3.4; flush ruleset"]"#, "\"flush\""),
        (r#","conditionsV4":["ip saddr {1.2.3.4}accept"]"#, "\"accept\""),
        (r#","conditionsV4":["ip saddr 1.2.3.4drop"]"#, "\"drop\""),
        (r#","conditionsV4":["ip saddr 1.12.accept"]"#, "\"accept\""),
        (r#","conditionsV4":["meta mark 0x1jump x"]"#, "\"jump\""),
        (r#","conditionsV4":["tcp sport 1-goto x"]"#, "\"goto\""),
        (r#","conditionsV4":["meta mark 0xejump x"]"#, "\"jump\""),
        (r#","conditionsV4":["meta mark 0X1Egoto x"]"#, "\"goto\""),
        (r#","conditionsV6":["ip6 saddr fd00::ejump x"]"#, "\"jump\""),
        (r#","conditionsV4":["ether saddr 00:11:22:33:44:eereturn"]"#, "\"return\""),
        (r#","conditionsV4":["ct expiration 1h5msqueue"]"#, "\"queue\""),
        (r#","conditionsV4":["tcp sport vmap {1:drop}"]"#, "\"vmap\""),
        (r#","conditionsV4":["iifname \"x"]"#, "iifname"),
        (r#","conditionsV4":["-fjACCEPT"]"#, "\"-fjACCEPT\""),
        (r#","conditionsV4":["ip saddr 1.2.3.4; ip saddr 1.2.3.5"]"#, "1.2.3.4; ip"),
    ] {
        assert!(refusal(keys).contains(token), "{}", refusal(keys));
    }
    for chain in ["-j", "a\\nb", "", "COMMIT", "twenty-nine-bytes-is-too-much"] {
        assert!(refusal(&format!(r#","externalSetMarkChain":"{chain}""#)).contains("not a chain name"));
    }
}
