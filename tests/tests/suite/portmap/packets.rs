//! Real packets in both families: from outside, the node, other pods and the pod itself.

use std::net::UdpSocket;
use std::time::Duration;

use cni_testkit::patience;
use serde_json::json;

use super::world::{BACKENDS, HOST, IN_VAIN, ask_tcp, ask_tcp_for, ask_udp, ask_udp_for, at, each, map, udp_client};

#[test]
fn a_client_outside_reaches_the_container_and_is_seen_as_itself() {
    each(&BACKENDS, |world| {
        let pod = world.mapped(json!([map(8080, 80, "tcp"), map(8080, 53, "UDP")]));
        pod.serve_tcp(80, "pod");
        pod.serve_udp(53, "pod");
        for (family, client) in ["192.0.2.9", "2001:db8::9"].into_iter().enumerate() {
            let answer = world.client.enter(|| ask_tcp(&at(family, 8080)));
            assert_eq!(answer, Some(format!("pod {client}")), "{:?}\n{}", world.backend, world.rules());
        }
        let answer = world.client.enter(|| ask_udp(&udp_client(), &at(0, 8080)));
        assert_eq!(answer.as_deref(), Some("pod 192.0.2.9"), "{:?}\n{}", world.backend, world.rules());
        assert_eq!(world.client.enter(|| ask_tcp_for(IN_VAIN, &at(0, 8081))), None);
        pod.leave();
        assert_eq!(world.client.enter(|| ask_tcp_for(IN_VAIN, &at(0, 8080))), None, "{:?}", world.backend);
    });
}

#[test]
fn the_node_reaches_the_container_by_each_of_its_addresses() {
    each(&BACKENDS, |world| {
        let pod = world.mapped(json!([map(8080, 80, "tcp")]));
        pod.serve_tcp(80, "pod");
        for to in ["127.0.0.1:8080", "192.0.2.1:8080", "[2001:db8::1]:8080"] {
            let answer = world.node.enter(|| ask_tcp(to));
            assert!(
                answer.is_some_and(|answer| answer.starts_with("pod ")),
                "{to} {:?}\n{}",
                world.backend,
                world.rules()
            );
        }
        pod.leave();
    });
}

#[test]
fn a_pod_reaches_another_and_itself_through_the_host_port() {
    each(&BACKENDS, |world| {
        let pod = world.mapped(json!([map(8080, 80, "tcp")]));
        let other = world.dual();
        pod.serve_tcp(80, "pod");
        for (family, host) in HOST.iter().enumerate() {
            for (who, from) in [("itself", &pod), ("another", &other)] {
                let answer = from.container.enter(|| ask_tcp(&at(family, 8080)));
                let fine = answer.is_some_and(|answer| answer.starts_with("pod "));
                assert!(fine, "{who}, {host} {:?}\n{}", world.backend, world.rules());
            }
        }
        pod.leave();
        other.leave();
    });
}

#[test]
fn a_host_address_limits_the_mapping_to_it() {
    each(&BACKENDS, |world| {
        world.node.exec(&["ip", "address", "add", "192.0.2.2/24", "dev", "up0"]);
        let on = |host_ip: &str, port: u16| json!({"hostPort": port, "containerPort": 80, "protocol": "tcp", "hostIP": host_ip});
        let pod = world.mapped(json!([on("192.0.2.2", 8080), on("0.0.0.0", 8081), on("::", 8082), on(HOST[1], 8083)]));
        pod.serve_tcp(80, "pod");
        for (to, reached) in [
            ("192.0.2.2:8080", true),
            ("192.0.2.1:8080", false),
            ("[2001:db8::1]:8080", false),
            ("192.0.2.1:8081", true),
            ("[2001:db8::1]:8081", false),
            ("[2001:db8::1]:8082", true),
            ("192.0.2.1:8082", false),
            ("[2001:db8::1]:8083", true),
        ] {
            let time = if reached { patience(Duration::from_secs(10)) } else { IN_VAIN };
            assert_eq!(
                world.client.enter(|| ask_tcp_for(time, to)).is_some(),
                reached,
                "{to} {:?}\n{}",
                world.backend,
                world.rules()
            );
        }
        pod.leave();
    });
}

#[test]
fn snat_and_masq_all_decide_which_source_the_pod_sees() {
    each(&BACKENDS, |world| {
        let mut config = world.config(json!([map(8080, 80, "tcp")]));
        config["snat"] = json!(false);
        let pod = world.dual();
        pod.add(&config).success();
        pod.serve_tcp(80, "pod");
        assert_eq!(world.client.enter(|| ask_tcp(&at(0, 8080))).as_deref(), Some("pod 192.0.2.9"));
        assert_eq!(pod.container.enter(|| ask_tcp_for(IN_VAIN, &at(0, 8080))), None, "{:?}", world.backend);
        pod.del(&config).success();

        config["snat"] = json!(true);
        config["masqAll"] = json!(true);
        pod.add(&config).success();
        pod.check(&config).success();
        for (family, gateway) in ["10.1.0.1", "fd00:1::1"].into_iter().enumerate() {
            let answer = world.client.enter(|| ask_tcp(&at(family, 8080)));
            assert_eq!(answer, Some(format!("pod {gateway}")), "{:?}\n{}", world.backend, world.rules());
        }
        pod.leave();
    });
}

#[test]
fn udp_goes_to_the_new_container_once_the_port_has_moved() {
    each(&BACKENDS, |world| {
        let config = world.config(json!([map(5353, 53, "udp")]));
        let (old, new) = (world.dual(), world.dual());
        old.serve_udp(53, "old");
        new.serve_udp(53, "new");
        let client = world.client.enter(udp_client);
        // Before anything is mapped: conntrack keeps an entry of the unanswered packet.
        assert_eq!(ask_udp_for(IN_VAIN, &client, &at(0, 5353)), None);
        old.add(&config).success();
        assert!(ask_udp(&client, &at(0, 5353)).is_some_and(|answer| answer.starts_with("old")), "{:?}", world.backend);
        old.del(&config).success();
        assert_eq!(
            ask_udp_for(IN_VAIN, &client, &at(0, 5353)),
            None,
            "DEL forgets what it mapped: {:?}",
            world.backend
        );
        new.add(&config).success();
        assert!(ask_udp(&client, &at(0, 5353)).is_some_and(|answer| answer.starts_with("new")), "{:?}", world.backend);
        old.leave();
        new.leave();
    });
}

#[test]
fn a_flow_to_the_same_port_elsewhere_survives() {
    each(&BACKENDS, |world| {
        let (pod, other) = (world.dual(), world.dual());
        // The node forwards the pod's flow, and so tracks it, once something asks for tracking.
        pod.add(&world.config(json!([map(9999, 99, "udp")]))).success();
        let server = world.client.enter(|| UdpSocket::bind("0.0.0.0:5353").unwrap());
        world.client.exec(&["ip", "route", "add", "10.1.0.0/24", "via", HOST[0]]);
        let flow = other.container.enter(|| UdpSocket::bind("0.0.0.0:4444").unwrap());
        flow.send_to(b"?", "192.0.2.9:5353").unwrap();
        let mut buffer = [0; 8];
        server.set_read_timeout(Some(patience(Duration::from_secs(10)))).unwrap();
        server.recv_from(&mut buffer).expect("the flow arrives");
        let tracked = || world.node.enter(|| std::fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap());
        let is_there = |table: String| table.lines().any(|line| line.contains("dst=192.0.2.9 sport=4444 dport=5353"));
        assert!(is_there(tracked()), "{}", tracked());
        let config = world.config(json!([map(5353, 53, "udp")]));
        pod.add(&config).success();
        assert!(is_there(tracked()), "ADD: {:?}", world.backend);
        pod.del(&config).success();
        assert!(is_there(tracked()), "DEL: {:?}", world.backend);
        pod.leave();
        other.leave();
    });
}

#[test]
fn traffic_that_is_not_for_the_host_is_left_alone() {
    each(&BACKENDS, |world| {
        let pod = world.mapped(json!([map(8080, 80, "tcp")]));
        let other = world.dual();
        pod.serve_tcp(80, "pod");
        other.serve_tcp(8080, "other");
        let to = format!("{}:8080", other.address(0));
        let answer = pod.container.enter(|| ask_tcp(&to));
        assert!(answer.is_some_and(|answer| answer.starts_with("other")), "{:?}\n{}", world.backend, world.rules());
        pod.leave();
        other.leave();
    });
}
