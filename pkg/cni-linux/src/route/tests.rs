use super::*;
use crate::testing::{in_new_netns, machine, output};
use crate::{BridgeSpec, Dad, Watch};
use std::time::{Duration, Instant};

/// Calls `body` in a new namespace, with a connection to it and the index of a bridge that has
/// addresses of both families.
fn with_bridge(body: impl FnOnce(&Netlink, u32) + Send) {
    in_new_netns(|| {
        let netlink = Netlink::open().unwrap();
        let bridge = netlink.create_bridge(&BridgeSpec { up: true, ..BridgeSpec::named("br0") }).unwrap();
        for text in ["10.1.0.2/16", "fd00::2/64"] {
            netlink.add_address(bridge.index, text.parse().unwrap(), Dad::Skip).unwrap();
        }
        body(&netlink, bridge.index);
    });
}

fn route(dst: &str, gw: Option<&str>, oif: u32) -> Route {
    Route::new(dst.parse().unwrap(), gw.map(|gw| gw.parse().unwrap()), oif)
}

/// Adds the route, checks that it is then the only conflicting route and identical, and deletes it.
/// Returns the route as it was read.
fn round_trip(netlink: &Netlink, route: Route) -> Route {
    netlink.add_route(&route).unwrap_or_else(|error| panic!("{route:?}: {error}"));
    let error = netlink.add_route(&route).unwrap_err();
    assert!(error.is_exists(), "{route:?}: {error}");
    let conflicting = netlink.list_conflicting(&route).unwrap();
    assert!(conflicting.len() == 1 && conflicting[0].is_same(&route), "{route:?} became {conflicting:?}");
    for family in ["-4", "-6"] {
        output(&format!("ip {family} route flush table all proto boot"));
    }
    assert!(netlink.list_conflicting(&route).unwrap().is_empty());
    conflicting[0]
}

#[test]
fn every_field_reaches_the_kernel_and_comes_back() {
    with_bridge(|netlink, oif| {
        let plain = route("10.5.0.0/24", Some("10.1.0.1"), oif);
        let back = round_trip(netlink, plain);
        assert_eq!((back.protocol, back.scope, back.table, back.onlink), (3, Some(0), Some(254), false));
        round_trip(netlink, Route { mtu: Some(1400), advmss: Some(1360), ..plain });
        round_trip(netlink, Route { priority: Some(77), ..plain });
        round_trip(netlink, Route { table: Some(200), ..plain });
        assert_eq!(round_trip(netlink, Route { table: Some(5000), ..plain }).table, Some(5000));
        round_trip(netlink, route("10.6.0.0/24", None, oif));
        let back = round_trip(netlink, Route { scope: Some(253), ..route("10.6.0.0/24", None, oif) });
        assert_eq!(back.scope, Some(253));
        round_trip(netlink, Route { scope: Some(200), ..route("10.6.0.0/24", None, oif) });
        let far = route("10.7.0.0/24", Some("192.0.2.1"), oif);
        assert!(netlink.add_route(&far).is_err());
        assert!(round_trip(netlink, Route { onlink: true, ..far }).onlink);
        round_trip(netlink, route("0.0.0.0/0", Some("10.1.0.1"), oif));
        round_trip(netlink, Route { source: Some([10, 1, 0, 2].into()), ..plain });
        netlink.add_route(&Route { source: Some([10, 1, 0, 2].into()), ..plain }).unwrap();
        assert!(output("ip route show 10.5.0.0/24").contains("via 10.1.0.1 dev br0 src 10.1.0.2"));
    });
}

#[test]
fn every_ipv6_field_reaches_the_kernel_and_comes_back() {
    with_bridge(|netlink, oif| {
        let plain = route("fd05::/64", Some("fd00::1"), oif);
        let back = round_trip(netlink, plain);
        assert_eq!((back.priority, back.protocol), (Some(1024), 3));
        round_trip(netlink, Route { mtu: Some(1400), advmss: Some(1340), ..plain });
        round_trip(netlink, Route { priority: Some(77), table: Some(5000), ..plain });
        round_trip(netlink, Route { scope: Some(253), ..route("fd06::/64", None, oif) });
        round_trip(netlink, Route { onlink: true, ..route("fd07::/64", Some("fd99::1"), oif) });
        round_trip(netlink, route("::/0", Some("fd00::1"), oif));
    });
}

#[test]
fn a_route_over_another_gateway_conflicts() {
    with_bridge(|netlink, oif| {
        for (dst, first, second) in [("0.0.0.0/0", "10.1.0.1", "10.1.0.9"), ("::/0", "fd00::1", "fd00::9")] {
            netlink.add_route(&route(dst, Some(first), oif)).unwrap();
            let late = route(dst, Some(second), oif);
            assert!(netlink.add_route(&late).unwrap_err().is_exists());
            let conflicting = netlink.list_conflicting(&late).unwrap();
            assert!(conflicting.len() == 1 && !conflicting[0].is_same(&late), "{conflicting:?}");
            netlink.add_route(&Route { priority: Some(2000), ..late }).unwrap();
        }
    });
}

#[test]
fn an_empty_table_is_not_an_error_and_tables_are_separate() {
    with_bridge(|netlink, oif| {
        assert_eq!(netlink.list_routes(Family::V4, Some(4711)).unwrap(), []);
        assert_eq!(netlink.list_routes(Family::V6, Some(4711)).unwrap(), []);
        let other = Route { table: Some(4711), ..route("10.5.0.0/24", None, oif) };
        netlink.add_route(&other).unwrap();
        let main = netlink.list_routes(Family::V4, None).unwrap();
        assert_eq!(main.iter().map(|route| route.dst.to_string()).collect::<Vec<_>>(), ["10.1.0.0/16"]);
        assert_eq!(netlink.list_routes(Family::V4, Some(4711)).unwrap().len(), 1);
        assert!(netlink.list_all_routes(Family::V4).unwrap().len() >= 2);
    });
}

#[test]
fn a_route_over_several_gateways_is_listed_once_for_each() {
    with_bridge(|netlink, oif| {
        output("ip route add 10.5.0.0/24 nexthop via 10.1.0.1 nexthop via 10.1.0.9");
        let conflicting = netlink.list_conflicting(&route("10.5.0.0/24", None, oif)).unwrap();
        let gateways: Vec<_> = conflicting.iter().map(|route| route.gw.unwrap().to_string()).collect();
        assert_eq!(gateways, ["10.1.0.1", "10.1.0.9"]);
    });
}

#[test]
fn several_gateways_make_one_route_over_several_paths() {
    with_bridge(|netlink, oif| {
        let paths = [route("10.5.0.0/24", Some("10.1.0.1"), oif), route("10.5.0.0/24", Some("10.1.0.9"), oif)];
        netlink.add_multipath_route(&paths).unwrap();
        assert_eq!(output("ip route show 10.5.0.0/24").matches("nexthop via").count(), 2);
        assert_eq!(netlink.list_conflicting(&paths[0]).unwrap().len(), 2);
        let error = netlink.add_multipath_route(&paths).unwrap_err();
        assert!(error.is_exists() && error.to_string().contains("via 10.1.0.1 and 10.1.0.9"), "{error}");
    });
}

#[test]
fn an_error_names_the_route() {
    with_bridge(|netlink, oif| {
        let far = Route { priority: Some(5), table: Some(99), ..route("10.7.0.0/24", Some("192.0.2.1"), oif) };
        let text = netlink.add_route(&far).unwrap_err().to_string();
        let expected = "failed to add route 10.7.0.0/24 via 192.0.2.1 metric 5 table 99 dev br0: ";
        assert!(text.starts_with(expected), "{text}");
    });
}

#[test]
fn an_address_is_local_once_the_kernel_accepts_packets() {
    with_bridge(|netlink, oif| {
        let own = |ip: &str| netlink.is_local_address(ip.parse().unwrap()).unwrap();
        // No route at all, a route to others, and a default route that leads away.
        assert!(!own("fd00:9::1") && !own("10.1.0.200"));
        output("ip route add default via 10.1.0.1");
        assert!(!own("192.0.2.1"));
        for kind in ["unreachable", "prohibit", "blackhole"] {
            output(&format!("ip -6 route add {kind} fd00:9::/48"));
            assert!(!own("fd00:9::1"), "{kind}");
            output("ip -6 route del fd00:9::/48");
        }
        let watch = Watch::open().unwrap();
        netlink.add_address(oif, "fd00:9::1/64".parse().unwrap(), Dad::Skip).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let check = || Ok(netlink.is_local_address("fd00:9::1".parse().unwrap())?.then_some(()));
        watch.wait("the address", deadline, &machine(), check).unwrap();
        assert!(own("fd00:9::1") && !own("fd00:9::2"));
    });
}

#[test]
fn the_default_interface_is_that_of_the_lowest_metric() {
    with_bridge(|netlink, oif| {
        assert_eq!(netlink.find_default_interface().unwrap(), None);
        output("ip link add far0 type veth peer name far1");
        for link in ["far0", "far1"] {
            output(&format!("ip link set {link} up"));
        }
        let far = |name| Some(netlink.link(name).unwrap().index);
        // Neither a route of another table nor an unreachable one leads anywhere.
        output("ip route add default dev far0 table 99");
        output("ip -6 route add unreachable default metric 5");
        assert_eq!(netlink.find_default_interface().unwrap(), None);
        output("ip -6 route add default dev far1 metric 10");
        assert_eq!(netlink.find_default_interface().unwrap(), far("far1"));
        output("ip route add default dev far1 metric 200");
        output("ip route add default dev br0 metric 100");
        assert_eq!(netlink.find_default_interface().unwrap(), Some(oif));
        output("ip route add default nexthop dev far0 nexthop dev br0");
        assert_eq!(netlink.find_default_interface().unwrap(), far("far0"));
    });
}
