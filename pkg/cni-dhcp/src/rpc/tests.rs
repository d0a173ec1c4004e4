use super::*;

const ALLOCATE: &[u8] = include_bytes!("../../testdata/allocate-plugin");
const ALLOCATED: &[u8] = include_bytes!("../../testdata/allocate-daemon");
const RELEASE: &[u8] = include_bytes!("../../testdata/release-plugin");
const RELEASED: &[u8] = include_bytes!("../../testdata/release-daemon");
const FAILED: &[u8] = include_bytes!("../../testdata/failed-daemon");

fn args() -> CmdArgs {
    let text = str::to_owned;
    let stdin = "{\"cniVersion\":\"1.1.0\",\"name\":\"net\",\"type\":\"macvlan\",\"ipam\":{\"type\":\"dhcp\",\
                 \"daemonSocketPath\":\"/tmp/dhcp-t/s/front.sock\"}}\n";
    CmdArgs {
        container_id: text("container-1"),
        netns: text("/run/netns/c"),
        ifname: text("eth0"),
        args: text("K8S_POD_NAME=a"),
        path: text("/opt/go-1.9.1"),
        stdin: stdin.into(),
    }
}

fn result() -> AddResult {
    let gateway = Some("192.168.1.1".parse().unwrap());
    AddResult {
        ips: vec![IpConfig { interface: None, address: "192.168.1.15/24".parse().unwrap(), gateway }],
        routes: vec![Route::new("0.0.0.0/0".parse().unwrap(), gateway)],
        ..AddResult::default()
    }
}

fn response(bytes: &[u8]) -> Result<AddResult, String> {
    let mut client = Connection::default();
    client.push(bytes);
    let answer = client.response().unwrap().unwrap();
    assert_eq!(client.waiting(), 0);
    answer
}

#[test]
fn calls_are_written_as_the_go_plugin_writes_them() {
    for (method, captured) in [(Method::Allocate, ALLOCATE), (Method::Release, RELEASE)] {
        assert_eq!([CONNECT, &write_request(method, &args())].concat(), captured, "{method:?}");
    }
}

#[test]
fn calls_of_the_go_plugin_are_understood_byte_by_byte() {
    for (method, captured) in [(Method::Allocate, ALLOCATE), (Method::Release, RELEASE)] {
        let mut daemon = Connection::default();
        let (last, others) = captured.split_last().unwrap();
        for byte in others {
            daemon.push(&[*byte]);
            assert_eq!(daemon.request().unwrap(), None);
        }
        daemon.push(&[*last]);
        let name = method.name().to_owned();
        let request = daemon.request().unwrap();
        assert_eq!(request, Some(Request { name, method: Some(method), seq: 0, args: args() }));
    }
}

#[test]
fn answers_are_written_as_the_go_daemon_writes_them() {
    let request = |method: Method| Request { name: method.name().into(), method: Some(method), seq: 0, args: args() };
    let written = [CONNECTED, &write_response(&request(Method::Allocate), Ok(Some(&result())))].concat();
    assert_eq!(written, ALLOCATED);
    // The number of the empty type counts what the process has sent before.
    let written = [CONNECTED, &write_response(&request(Method::Release), Ok(None))].concat();
    let (head, body) = RELEASED.split_at(RELEASED.len() - 15);
    assert_eq!(written.split_at(head.len()).0, head);
    assert_eq!(written.len(), head.len() + body.len());
}

#[test]
fn answers_of_the_go_daemon_are_understood() {
    assert_eq!(response(ALLOCATED), Ok(result()));
    assert_eq!(response(RELEASED), Ok(AddResult::default()));
    assert_eq!(response(FAILED), Err("error looking up \"nope\": Link not found".into()));
}

#[test]
fn every_field_of_a_result_arrives() {
    let mut sent = result();
    let route = Route {
        mtu: Some(1400),
        advmss: Some(1300),
        priority: Some(7),
        table: Some(9),
        scope: Some(253),
        ..sent.routes[0].clone()
    };
    sent.routes.push(Route { gw: None, dst: "10.9.128.0/17".parse().unwrap(), ..route });
    sent.dns = Dns {
        nameservers: vec!["192.168.1.1".into(), "10.0.0.1".into()],
        domain: "a.example".into(),
        search: vec!["b.example".into()],
        options: vec!["ndots:2".into()],
    };
    let request = Request { name: "DHCP.Allocate".into(), method: Some(Method::Allocate), seq: 77, args: args() };
    assert_eq!(response(&[CONNECTED, &write_response(&request, Ok(Some(&sent)))].concat()), Ok(sent));
}

#[test]
fn another_protocol_is_refused_at_once() {
    let mut client = Connection::default();
    client.push(b"HTTP/1.0 404 Not Found\n\n");
    assert_eq!(client.response(), Err(RpcError::HttpLine("HTTP/1.0 404 Not Found".into())));
    let mut daemon = Connection::default();
    daemon.push(b"GET / HTTP/1.1");
    assert!(daemon.request().is_err());
}

#[test]
fn an_invalid_result_names_the_field() {
    let fields = |fields: &[(&str, Value)]| {
        Value::Struct(fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect())
    };
    let net = fields(&[("IP", Value::Bytes(vec![10, 0, 0, 1])), ("Mask", Value::Bytes(vec![255, 255, 255, 0]))]);
    let bad = Value::Bytes(vec![10, 0, 0]);
    for (list, item, text) in [
        ("IPs", vec![], "IPs.Address is not an address with a mask"),
        ("IPs", vec![("Address", net.clone()), ("Gateway", bad.clone())], "IPs.Gateway is not an address"),
        ("Routes", vec![("Dst", bad.clone())], "Routes.Dst is not an address with a mask"),
        ("Routes", vec![("Dst", net), ("GW", bad)], "Routes.GW is not an address"),
    ] {
        let error = read_result(&fields(&[(list, Value::List(vec![fields(&item)]))])).unwrap_err();
        assert_eq!(error.to_string(), format!("the result of the daemon is invalid: {text}"));
    }
}
