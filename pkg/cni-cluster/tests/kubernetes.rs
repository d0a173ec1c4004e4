//! The client of the Kubernetes API, against a server of the test kit, which can fail in every way,
//! and against a real one, which `CNI_TEST_KUBE_APISERVER` names: see CONTRIBUTING.md.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cni_cluster::conf::Conf;
use cni_cluster::pool::Block;
use cni_cluster::store::{Change, Claim, NodeState, Outcome, Store, Version};
use cni_testkit::cluster::{ApiServer, Authority, Fault};
use cni_testkit::{patience, unprovoked};
use common::{
    QUIET, TestMachine, address, claim, create, create_pool, delete, keeps_the_contract, limit, open, open_for,
    refused, swap, unknown,
};
use serde_json::{Value, json};

const POOL: &str = "10.61.0.0-24";

/// Returns a server with a pool, and the store of node1.
fn node1() -> (ApiServer, Value, Box<dyn Store>) {
    let server = ApiServer::new();
    let file = server.node_file("node1", server.listen());
    let mut store = open(&file);
    create_pool(&mut *store, POOL, "10.61.0.0/24");
    (server, file, store)
}

#[test]
fn the_manifest_declares_what_the_client_sends_and_reads() {
    let manifest = include_str!("../../../docs/kubernetes/cluster-local.yaml");
    let documents: Vec<&str> = manifest.split("\n---\n").collect();
    let of_kind = |name: &str| {
        let found =
            documents.iter().find(|document| document.contains(&format!("name: {name}.ipam.cni-plugins-rust.dev\n")));
        let (head, schema) = found.expect(name).split_once("openAPIV3Schema:").unwrap();
        assert!(head.contains("group: ipam.cni-plugins-rust.dev\n") && head.contains("- name: v1\n"), "{head}");
        (head, schema)
    };
    let (server, _, mut store) = node1();
    let marked = Claim { absent_since: Some("2026-11-27T17:26:27Z".to_owned()), ..claim(POOL, "10.61.0.64", "node1") };
    create(&mut *store, &marked);
    for resource in ["ippools", "ipblocks"] {
        let (_, schema) = of_kind(resource);
        let (_, spec) = server.specs(resource).pop_first().unwrap();
        for field in spec.as_object().unwrap().keys() {
            assert!(schema.contains(&format!("                {field}: {{ type: ")), "{resource} has no field {field}");
        }
    }
    // Claim selectors, and the columns of the table.
    let (head, _) = of_kind("ipblocks");
    for wanted in [
        "- jsonPath: .spec.pool",
        "- jsonPath: .spec.node",
        "name: First, type: string, jsonPath: .spec.first",
        "name: Node, type: string, jsonPath: .spec.node",
    ] {
        assert!(head.contains(wanted), "{wanted}");
    }
}

/// Answers every request with this status and body.
fn always(server: &ApiServer, status: u16, body: &str) {
    let body = body.to_owned();
    server.decide(move |_| Some(Fault::Answer(status, "", body.clone())));
}

/// Lets the next request with this method fail.
fn once(server: &ApiServer, method: &'static str, fault: Fault) {
    let mut next = Some(fault);
    server.decide(move |request| next.take_if(|_| request.starts_with(method)));
}

#[test]
fn a_kubelet_certificate_or_a_token_keeps_the_contract() {
    let server = ApiServer::new();
    let port = server.listen();
    keeps_the_contract(&mut *open(&server.node_file("node1", port)), "node1", "a");
    keeps_the_contract(&mut *open(&server.token_file("node2", port)), "node2", "b");
    assert!(server.specs("ipblocks").is_empty());
}

#[test]
fn a_real_server_keeps_the_contract() {
    let Some(folder) = std::env::var_os("CNI_TEST_KUBE_APISERVER").map(std::path::PathBuf::from) else {
        // Never a failure, because no package of the scripts has an API server.
        return unprovoked("CNI_TEST_KUBE_APISERVER names no folder of a real API server");
    };
    let server = std::fs::read_to_string(folder.join("address")).unwrap();
    let (ca, pem) = (folder.join("ca.crt"), folder.join("client.pem"));
    let server = json!({"server": format!("https://{}", server.trim()), "caFile": ca});
    for (number, keys) in
        [json!({"certFile": pem, "keyFile": pem}), json!({"tokenFile": folder.join("token")})].iter().enumerate()
    {
        let mut file = json!({"kubernetes": server});
        file["kubernetes"].as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let mut store = open(&file);
        if let Err(failure) = store.pools() {
            panic!("has docs/kubernetes/cluster-local.yaml been applied? {failure:?}");
        }
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        let layer2 = format!("t{number}-{time}");
        keeps_the_contract(&mut *store, "node1", &layer2);
        let (code, text) =
            refused(store.change(&claim(&format!("{layer2}.10.61.0.0-24"), "10.61.0.64", "node2"), &Change::Create));
        assert!(code == 103 && text.contains("HTTP 422") && text.contains("node node1 may only claim"), "{text}");
        assert!(matches!(store.node_state("no-such-node").unwrap(), NodeState::Absent(now) if now > 1_795_000_000));
    }
}

#[test]
fn one_request_claims_a_block() {
    let (server, _, mut store) = node1();
    server.take_requests();
    create(&mut *store, &claim(POOL, "10.61.0.64", "node1"));
    assert_eq!(server.take_requests(), ["POST /apis/ipam.cni-plugins-rust.dev/v1/ipblocks"]);
    let name = "10.61.0.0-24.10.61.0.64";
    let spec = json!({"pool": POOL, "first": "10.61.0.64", "last": "10.61.0.64", "node": "node1", "network": "lan",
        "machine": "0123456789abcdef0123456789abcdef", "nonce": "0123456789abcdef"});
    assert_eq!(server.specs("ipblocks")[name], spec);
}

#[test]
fn a_claim_of_another_node_is_refused_with_its_text() {
    let (server, _, mut store) = node1();
    let (code, text) = refused(store.change(&claim(POOL, "10.61.0.64", "node2"), &Change::Create));
    assert!(code == 103 && text.contains("HTTP 422") && text.contains("node node1 may only claim"), "{text}");
    assert!(server.specs("ipblocks").is_empty());
}

#[test]
fn a_claim_that_another_node_has_now_counts_as_changed() {
    let (server, _, mut store) = node1();
    let own = claim(POOL, "10.61.0.64", "node1");
    let version = create(&mut *store, &own);
    server.delete("ipblocks", "10.61.0.0-24.10.61.0.64");
    create(&mut *open(&server.node_file("node2", server.listen())), &claim(POOL, "10.61.0.64", "node2"));
    // The server compares the version before the policy refuses.
    assert_eq!(swap(&mut *store, &own, &version).unwrap(), Outcome::Conflict);
    assert_eq!(delete(&mut *store, &own, &version).unwrap(), Outcome::Conflict);
    let (_, version) = store.get(&own.block()).unwrap().unwrap();
    assert_eq!(refused(delete(&mut *store, &own, &version)).0, 103);
}

#[test]
fn a_reserved_claim_has_no_node() {
    let (server, _, mut store) = node1();
    let spec = json!({"pool": POOL, "first": "10.61.0.1", "last": "10.61.0.1"});
    server.write("ipblocks", "10.61.0.0-24.10.61.0.1", &spec);
    assert_eq!(store.taken(POOL).unwrap(), [(address("10.61.0.1"), String::new())]);
    assert_eq!(store.get(&Block::of(POOL, 1, address("10.61.0.1"))).unwrap().unwrap().0.node, "");
}

#[test]
fn a_node_is_present_with_its_machine_or_absent_at_a_time() {
    let (server, _, mut store) = node1();
    server.set_node("node2", Some("abc"));
    assert_eq!(store.node_state("node2").unwrap(), NodeState::Present("abc".to_owned()));
    server.set_node("node2", None);
    let NodeState::Absent(first) = store.node_state("node2").unwrap() else { panic!("present") };
    server.advance_clock(Duration::from_secs(400 * 86_400 + 3601));
    let NodeState::Absent(second) = store.node_state("node2").unwrap() else { panic!("present") };
    assert_eq!(second - first, 400 * 86_400 + 3601);
    // The name comes from a claim, and leads to no other object.
    server.take_requests();
    assert!(matches!(store.node_state("../pods?a=b").unwrap(), NodeState::Absent(_)));
    assert_eq!(server.take_requests(), ["GET /api/v1/nodes/..%2Fpods%3Fa%3Db"]);
}

#[test]
fn credentials_of_no_node_need_the_key_node() {
    let (server, _, _) = node1();
    let mut file = server.token_file("", server.listen());
    let (code, text) = refused(open(&file).node());
    assert!(code == 7 && text.contains("cluster-local") && text.contains("set the key node"), "{text}");
    file["node"] = json!("node7");
    server.take_requests();
    assert_eq!(open(&file).node().unwrap(), "node7");
    assert!(server.take_requests().is_empty());
}

#[test]
fn statuses_that_do_not_pass_are_refused_with_their_text() {
    let (server, _, mut store) = node1();
    let own = claim(POOL, "10.61.0.64", "node1");
    let status =
        |reason: &str| json!({"kind": "Status", "message": format!("why: {reason}"), "reason": reason}).to_string();
    for (code, reason) in [(400, "BadRequest"), (401, "Unauthorized"), (403, "Forbidden"), (422, "Invalid")] {
        always(&server, code, &status(reason));
        let (number, text) = refused(store.change(&own, &Change::Create));
        assert!(number == 103 && text.contains(&format!("HTTP {code}: why: {reason}")), "{text}");
        assert_eq!(refused(store.get(&own.block())).0, 103);
        assert_eq!(refused(store.claims_of("node1")).0, 103);
        assert_eq!(refused(delete(&mut *store, &own, &Version("1".to_owned()))).0, 103);
    }
    // A redirect is not followed.
    always(&server, 301, "moved");
    assert_eq!(refused(store.pools()).0, 103);
}

#[test]
fn statuses_that_pass_are_unknown() {
    let (server, _, mut store) = node1();
    for code in [408, 429, 500, 502, 503, 504] {
        always(&server, code, "busy");
        store.set_limit(limit(300));
        let text = unknown(store.change(&claim(POOL, "10.61.0.64", "node1"), &Change::Create));
        assert!(text.contains(&format!("HTTP {code}: busy")) && text.contains("POST https://127.0.0.1:"), "{text}");
    }
}

#[test]
fn a_busy_server_is_asked_again_after_the_time_it_names() {
    let (server, file, _) = node1();
    for status in [429, 503] {
        server.take_requests();
        once(&server, "GET", Fault::Answer(status, "Retry-After: 1\r\n", "busy".to_owned()));
        let begin = Instant::now();
        let mut store = open_for(&file, 20_000);
        store.pools().unwrap();
        assert!(begin.elapsed() >= Duration::from_secs(1), "{:?}", begin.elapsed());
        assert_eq!(server.take_requests().len(), 2);
        // Beyond the deadline, nothing is sent again.
        once(&server, "GET", Fault::Answer(status, "Retry-After: 60\r\n", "busy".to_owned()));
        store.set_limit(limit(3000));
        let text = unknown(store.pools());
        assert!(text.contains(&format!("HTTP {status}: busy; gave up after 3.0 s")), "{text}");
        assert_eq!(server.take_requests().len(), 1);
    }
    // A signal ends the pause.
    server.decide(|_| Some(Fault::Answer(429, "Retry-After: 30\r\n", "busy".to_owned())));
    let machine = TestMachine::default();
    let text = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            machine.terminated.store(true, Ordering::Relaxed);
        });
        let conf = Conf::parse(file.to_string().as_bytes()).unwrap();
        let mut store = cni_cluster::open(&conf, &machine).unwrap();
        store.set_limit(limit(60_000));
        unknown(store.pools())
    });
    assert!(text.contains("HTTP 429: busy; interrupted by a signal"), "{text}");
}

#[test]
fn a_server_without_the_kinds_names_what_to_install() {
    let (server, _, mut store) = node1();
    server.uninstall();
    let (code, text) = refused(store.change(&claim(POOL, "10.61.0.64", "node1"), &Change::Create));
    assert!(
        code == 103 && text.contains("HTTP 404: the API group ipam.cni-plugins-rust.dev is not installed"),
        "{text}"
    );
}

#[test]
fn a_status_that_does_not_fit_the_request_proves_nothing() {
    let (server, _, mut store) = node1();
    let status = |code: u16, reason: &str| {
        let text = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code});
        Fault::Answer(code, "Content-Type: application/json\r\n", text.to_string())
    };
    // A node that is taken for absent loses its claims.
    once(&server, "GET", status(409, "Conflict"));
    let text = unknown(store.node_state("node2"));
    assert!(text.contains("HTTP 409"), "{text}");
    once(&server, "POST", status(404, "NotFound"));
    let text = unknown(store.change(&claim(POOL, "10.61.0.64", "node1"), &Change::Create));
    assert!(text.contains("HTTP 404"), "{text}");
}

#[test]
fn a_repeated_request_finds_the_outcome_of_a_lost_answer() {
    let (server, _, mut store) = node1();
    let own = claim(POOL, "10.61.0.64", "node1");
    for fault in [Fault::LoseAnswer, Fault::Truncate] {
        once(&server, "POST", fault.clone());
        assert_eq!(store.change(&own, &Change::Create).unwrap(), Outcome::Conflict);
        let (_, version) = store.get(&own.block()).unwrap().unwrap();
        once(&server, "PUT", fault.clone());
        let newer = Claim { nonce: "fedcba9876543210".to_owned(), ..own.clone() };
        assert_eq!(swap(&mut *store, &newer, &version).unwrap(), Outcome::Conflict);
        let (_, version) = store.get(&own.block()).unwrap().unwrap();
        once(&server, "DELETE", fault);
        assert_eq!(delete(&mut *store, &own, &version).unwrap(), Outcome::Absent);
        assert_eq!(store.get(&own.block()).unwrap(), None);
    }
}

#[test]
fn a_lost_request_is_repeated() {
    let (server, _, mut store) = node1();
    once(&server, "POST", Fault::LoseRequest);
    server.take_requests();
    create(&mut *store, &claim(POOL, "10.61.0.64", "node1"));
    assert!(!server.take_requests().is_empty());
}

#[test]
fn a_late_delete_does_not_remove_a_newer_version() {
    let (server, file, mut store) = node1();
    let own = claim(POOL, "10.61.0.64", "node1");
    let version = create(&mut *store, &own);
    // The first request is late, and its repetitions are lost.
    let mut late = Some(Fault::Late(Duration::from_millis(300)));
    server.decide(move |request| request.starts_with("DELETE").then(|| late.take().unwrap_or(Fault::LoseRequest)));
    store.set_limit(limit(200));
    unknown(delete(&mut *store, &own, &version));
    let mut other = open(&file);
    let newer = Claim { nonce: "fedcba9876543210".to_owned(), ..own.clone() };
    assert!(matches!(swap(&mut *other, &newer, &version).unwrap(), Outcome::Written(_)));
    std::thread::sleep(patience(Duration::from_millis(600)));
    assert!(other.get(&own.block()).unwrap().is_some());
}

#[test]
fn a_silent_or_slow_server_costs_no_more_than_the_deadline() {
    let (server, file, _) = node1();
    for fault in [Fault::Silence(Duration::from_secs(3)), Fault::Slow(Duration::from_millis(50))] {
        server.decide(move |_| Some(fault.clone()));
        let begin = Instant::now();
        let text = unknown(open_for(&file, 700).pools());
        assert!(
            text.contains("no answer in time") && begin.elapsed() < patience(Duration::from_millis(1500)),
            "{text}"
        );
    }
    // A server that accepts no connection: the address belongs to no host.
    let mut file = file;
    file["kubernetes"]["server"] = json!("https://192.0.2.1:6443");
    let begin = Instant::now();
    let text = unknown(open_for(&file, 700).pools());
    assert!(
        begin.elapsed() < patience(Duration::from_millis(1500)) && text.contains("https://192.0.2.1:6443"),
        "{text}"
    );
}

#[test]
fn a_signal_ends_every_wait() {
    let (server, file, _) = node1();
    let conf = Conf::parse(file.to_string().as_bytes()).unwrap();
    for fault in [Fault::Silence(Duration::from_secs(3)), Fault::Slow(Duration::from_millis(50))] {
        server.decide(move |_| Some(fault.clone()));
        let machine = TestMachine::default();
        let begin = Instant::now();
        let text = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                machine.terminated.store(true, Ordering::Relaxed);
            });
            unknown(cni_cluster::open(&conf, &machine).unwrap().pools())
        });
        assert!(
            text.contains("interrupted by a signal") && begin.elapsed() < patience(Duration::from_secs(2)),
            "{text}"
        );
    }
}

#[test]
fn hostile_answers_are_unknown() {
    let (server, file, mut store) = node1();
    let mut keys = file["kubernetes"].clone();
    keys["endpoints"] = json!([keys["server"]]);
    keys.as_object_mut().unwrap().remove("server");
    let mut etcd = open(&json!({"etcd": keys}));
    let huge = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    for answer in [
        "",
        "garbage\r\n\r\n",
        "SSH-2.0-OpenSSH_9.2\r\n",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 abc OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{",
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{\"}",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n{}",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n{}",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}xx0\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n\"x\"",
        "HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{\"items\": []}",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n{\"items\": []}\r\n",
        &huge,
    ] {
        let bytes = answer.as_bytes().to_vec();
        server.decide(move |_| Some(Fault::Bytes(bytes.clone())));
        store.set_limit(limit(150));
        unknown(store.pools());
        store.set_limit(limit(150));
        unknown(store.change(&claim(POOL, "10.61.0.64", "node1"), &Change::Create));
        store.set_limit(limit(150));
        unknown(store.taken(POOL));
        etcd.set_limit(limit(150));
        unknown(etcd.claims_of("node1"));
    }
}

#[test]
fn a_server_that_the_authority_has_not_signed_is_refused() {
    let (server, mut file, _) = node1();
    let other = Authority::new();
    let requests = server.take_requests();
    file["kubernetes"]["caFile"] = json!(other.ca_file());
    let (code, text) = refused(open(&file).pools());
    assert!(code == 103 && text.contains("invalid peer certificate"), "{text}");
    assert!(!requests.is_empty() && server.take_requests().is_empty());
}

#[test]
fn the_name_in_the_certificate_can_be_another() {
    let (_server, mut file, _) = node1();
    file["kubernetes"]["serverName"] = json!("kubernetes");
    assert!(!open(&file).pools().unwrap().is_empty());
    let url = file["kubernetes"]["server"].as_str().unwrap().replace("127.0.0.1", "localhost");
    file["kubernetes"]["server"] = json!(url);
    assert!(!open(&file).pools().unwrap().is_empty());
    file["kubernetes"]["serverName"] = json!("other");
    let (code, text) = refused(open(&file).pools());
    assert!(code == 103 && text.contains("invalid peer certificate"), "{text}");
}

#[test]
fn a_client_certificate_of_another_authority_is_refused() {
    let (_server, mut file, _) = node1();
    let other = Authority::new();
    let pem = other.issue("/CN=system:node:node1", "DNS:x");
    file["kubernetes"]["certFile"] = json!(pem);
    file["kubernetes"]["keyFile"] = json!(pem);
    let (code, text) = refused(open(&file).pools());
    assert!(code == 103 && text.contains("alert"), "{text}");
}

#[test]
fn an_expired_certificate_of_the_node_is_refused() {
    let (server, file, _) = node1();
    let certificate = file["kubernetes"]["certFile"].as_str().unwrap();
    server.authority().expire(Path::new(certificate));
    let (code, text) = refused(open(&file).pools());
    let expected = format!(" with {certificate}: received fatal alert: CertificateExpired");
    assert!(code == 103 && text.contains(&expected), "{text}");
}

#[test]
fn an_expired_certificate_of_the_server_is_refused() {
    let authority = Authority::new();
    let pem = authority.issue("/CN=kube-apiserver", "IP:127.0.0.1");
    authority.expire(&pem);
    let server = ApiServer::with(authority, &pem);
    let (code, text) = refused(open(&server.node_file("node1", server.listen())).pools());
    assert!(code == 103 && text.contains("invalid peer certificate: certificate expired"), "{text}");
    assert_eq!(server.take_requests(), [""; 0]);
}

#[test]
fn a_server_without_tls_1_3_is_refused_with_the_reason() {
    let (_server, mut file, _) = node1();
    // A program in Go that is limited to TLS 1.2 sends the fatal alert protocol_version. Others
    // send a ServerHello of TLS 1.2, here with the cipher suite c02f.
    let hello = [&[22, 3, 3, 0, 42, 2, 0, 0, 38, 3, 3][..], &[7; 32], &[0, 0xc0, 0x2f, 0]].concat();
    for answer in [vec![21, 3, 3, 0, 2, 2, 70], hello] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        file["kubernetes"]["server"] = json!(format!("https://{}", listener.local_addr().unwrap()));
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let length = stream.read(&mut [0; 4096]).unwrap();
            stream.write_all(&answer).unwrap();
            // Until the client closes.
            length + stream.read(&mut [0; 4096]).unwrap_or_default()
        });
        let (code, text) = refused(open(&file).pools());
        assert!(code == 103 && text.contains("/ippools: the server must support TLS 1.3: "), "{text}");
        assert!(server.join().unwrap() > 0);
    }
}

#[test]
fn a_rotated_token_is_read_for_each_request() {
    let (server, _, _) = node1();
    let file = server.token_file("node1", server.listen());
    let path = file["kubernetes"]["tokenFile"].as_str().unwrap().to_owned();
    let mut store = open(&file);
    assert_eq!(store.node().unwrap(), "node1");
    std::fs::write(&path, "expired\n").unwrap();
    assert!(refused(store.pools()).1.contains("HTTP 401: Unauthorized"));
    std::fs::write(&path, "token-node1\n").unwrap();
    store.pools().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(refused(store.pools()).0, 5);
}

#[test]
fn wrong_files_are_named_before_any_request() {
    let server = ApiServer::new();
    let good = server.node_file("node1", server.listen());
    let other = server.node_file("node2", server.listen());
    let ca = server.authority().ca_file();
    for (key, value, code, expected) in [
        ("caFile", json!("/nowhere"), 5, "failed to read /nowhere: No such file"),
        ("caFile", json!("/etc/hostname"), 7, "/etc/hostname: it has no certificate (PEM)"),
        ("certFile", json!("/etc/hostname"), 7, "/etc/hostname: it has no certificate (PEM)"),
        ("keyFile", json!(ca), 7, "no items found"),
        ("keyFile", other["kubernetes"]["keyFile"].clone(), 7, "KeyMismatch"),
    ] {
        let mut file = good.clone();
        file["kubernetes"][key] = value;
        let conf = Conf::parse(file.to_string().as_bytes()).unwrap();
        let error = cni_cluster::open(&conf, &QUIET).err().expect("an error");
        assert!(error.code().0 == code && error.msg().contains(expected), "{key}: {error}");
    }
}

#[test]
fn four_nodes_get_each_block_once() {
    let (server, ..) = node1();
    let port = server.listen();
    let mut turn = 0;
    server.decide(move |request| {
        turn += 1;
        [(5, Fault::LoseAnswer), (9, Fault::LoseRequest)]
            .into_iter()
            .find(|(every, _)| request.starts_with("POST") && turn % every == 0)
            .map(|(_, fault)| fault)
    });
    let claimed: Vec<usize> = std::thread::scope(|scope| {
        let node = |number: usize| {
            let name = format!("n{number}");
            let file = server.node_file(&name, port);
            scope.spawn(move || {
                let mut store = open(&file);
                let attempt = |block: u8| {
                    let own = claim(POOL, &format!("10.61.0.{block}"), &name);
                    store.change(&own, &Change::Create).unwrap();
                };
                (1..50).for_each(attempt);
                store.claims_of(&name).unwrap().len()
            })
        };
        let all: Vec<_> = (0..4).map(node).collect();
        all.into_iter().map(|node| node.join().unwrap()).collect()
    });
    assert_eq!(claimed.iter().sum::<usize>(), 49, "{claimed:?}");
}
