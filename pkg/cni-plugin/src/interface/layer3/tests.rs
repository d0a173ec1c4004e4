//! Unit tests of addresses and routes.

use super::*;
use cni::json::Json;
use cni::version::Version;

fn layer3(ipam: &str, gateway: Gateway) -> Result<Layer3> {
    let ipam = AddResult::decode(&Json::parse(ipam.as_bytes()).unwrap(), Version::V1_1_0).unwrap();
    Layer3::new(&ipam, &Layer3Policy { gateway, ..Layer3Policy::default() }, 2, &[])
}

#[test]
fn an_ipam_default_route_without_gateway_gets_the_own_one() {
    let made = layer3(
        r#"{"ips":[{"address":"10.1.0.5/24"},{"address":"fd00::5/64"}],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0","table":7}]}"#,
        Gateway::DefaultRoute,
    )
    .unwrap();
    let routes: Vec<_> =
        made.routes.iter().map(|r| (r.dst.to_string(), r.gw.map(|gw| gw.to_string()), r.table)).collect();
    assert_eq!(
        routes,
        [
            ("0.0.0.0/0".into(), Some("10.1.0.1".into()), None),
            ("::/0".into(), None, Some(7)),
            ("::/0".into(), Some("fd00::1".into()), None)
        ]
    );
    assert_eq!(made.ips[0].interface, Some(2));
}

#[test]
fn a_default_route_with_a_gateway_is_enough() {
    for route in [r#""priority":1024"#, r#""table":7"#, r#""priority":0"#] {
        let made = layer3(
            &format!(
                r#"{{"ips":[{{"address":"10.1.0.5/24"}}],"routes":[{{"dst":"0.0.0.0/0","gw":"10.1.0.9",{route}}}]}}"#
            ),
            Gateway::DefaultRoute,
        );
        assert_eq!(made.unwrap().routes.len(), 1, "{route}");
    }
}

#[test]
fn a_subnet_behind_its_gateway_has_two_routes() {
    let ipam = r#"{"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"},{"address":"10.1.0.6/24","gateway":"10.1.0.1"},
        {"address":"fd00::5/128","gateway":"fe80::1"}],"routes":[{"dst":"0.0.0.0/0"}]}"#;
    let ipam = AddResult::decode(&Json::parse(ipam.as_bytes()).unwrap(), Version::V1_1_0).unwrap();
    let policy = Layer3Policy { subnet: SubnetRoute::ThroughGateway, ..Layer3Policy::default() };
    let made = Layer3::new(&ipam, &policy, 1, &[]).unwrap();
    let routes: Vec<String> = made.kernel_routes(1).iter().map(ToString::to_string).collect();
    assert_eq!(routes, ["10.1.0.1/32", "10.1.0.0/24 via 10.1.0.1", "fe80::1/128", "0.0.0.0/0 via 10.1.0.1"]);
    assert_eq!(made.kernel_routes(1)[0].source, Some([10, 1, 0, 5].into()));
}

#[test]
fn a_gateway_may_be_required_of_ipam() {
    let error = layer3(r#"{"ips":[{"address":"10.1.0.5/24"}]}"#, Gateway::Required).unwrap_err();
    assert_eq!(
        (error.code(), error.msg()),
        (Code::INVALID_CONFIG, "IPAM plugin returned address 10.1.0.5/24 without a gateway")
    );
}

#[test]
fn a_bridge_that_is_not_a_gateway_reports_none() {
    let made = layer3(r#"{"ips":[{"address":"10.1.0.5/24"}]}"#, Gateway::None).unwrap();
    assert_eq!((made.ips[0].gateway, made.routes.len()), (None, 0));
}

#[test]
fn impossible_routes_are_refused_before_any_change() {
    for (routes, why) in [
        (r#"{"dst":"10.9.0.1/16"}"#, "host bits"),
        (r#"{"dst":"10.9.0.0/16","gw":"fd00::1"}"#, "other address family"),
        (r#"{"dst":"10.9.0.0/16","gw":"10.2.0.1"}"#, "reaches the gateway"),
    ] {
        let ipam = format!(r#"{{"ips":[{{"address":"10.1.0.5/24"}}],"routes":[{routes}]}}"#);
        let error = layer3(&ipam, Gateway::None).unwrap_err();
        assert_eq!(error.code(), Code::INVALID_CONFIG);
        assert!(error.msg().contains(why), "{error}");
    }
    assert!(
        layer3(r#"{"ips":[]}"#, Gateway::None).unwrap_err().msg().starts_with("IPAM plugin returned missing IP config")
    );
}

#[test]
fn a_route_on_the_link_may_carry_the_next_ones_gateway() {
    let made = layer3(
        r#"{"ips":[{"address":"10.1.0.5/32"}],"routes":[{"dst":"169.254.1.1/32","scope":253},{"dst":"0.0.0.0/0","gw":"169.254.1.1"},{"dst":"fd00:1::/64","gw":"fe80::1"}]}"#,
        Gateway::None,
    )
    .unwrap();
    let hops: Vec<_> = made.kernel_routes(1).iter().map(|route| route.gw.is_some()).collect();
    assert_eq!(hops, [false, true, true]);
}

#[test]
fn the_unspecified_ipv4_address_is_not_a_gateway() {
    let made = layer3(
        r#"{"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"}],"routes":[{"dst":"10.9.0.0/16","gw":"0.0.0.0"}]}"#,
        Gateway::None,
    )
    .unwrap();
    assert_eq!(made.kernel_routes(1).iter().map(|route| route.gw).collect::<Vec<_>>(), [None]);
    assert!(
        layer3(r#"{"ips":[{"address":"fd00::5/64"}],"routes":[{"dst":"fd01::/64","gw":"::"}]}"#, Gateway::None)
            .is_err()
    );
}
