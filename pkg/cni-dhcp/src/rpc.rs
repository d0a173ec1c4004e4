//! The two calls between plugin and daemon, as Go's `net/rpc` sends them: a line of HTTP, then gob.
//!
//! Both directions are here, because a Go plugin may talk to this daemon and this plugin to a Go
//! daemon.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni::Cidr;
use cni::result::{AddResult, Dns, IpConfig, Route};

use crate::gob::{
    BYTES, Definition, Fields, GobError, INT, Reader, TEXT, UINT, Value, sized, write_definition, write_struct,
};

/// The line that a client sends before its call.
pub const CONNECT: &[u8] = b"CONNECT /_goRPC_ HTTP/1.0\n\n";
/// The line that a daemon answers before its reply.
pub const CONNECTED: &[u8] = b"HTTP/1.0 200 Connected to Go RPC\n\n";

/// The calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Returns the attachment's lease, after acquiring one if there is none.
    Allocate,
    /// Gives the attachment's lease up.
    Release,
}

impl Method {
    /// Returns the name in `net/rpc`.
    pub fn name(self) -> &'static str {
        match self {
            Method::Allocate => "DHCP.Allocate",
            Method::Release => "DHCP.Release",
        }
    }

    fn find(name: &str) -> Option<Method> {
        [Method::Allocate, Method::Release].into_iter().find(|method| method.name() == name)
    }
}

/// The arguments that the runtime gave the plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CmdArgs {
    /// CNI_CONTAINERID.
    pub container_id: String,
    /// CNI_NETNS.
    pub netns: String,
    /// CNI_IFNAME.
    pub ifname: String,
    /// CNI_ARGS.
    pub args: String,
    /// CNI_PATH.
    pub path: String,
    /// The configuration.
    pub stdin: Vec<u8>,
}

/// A call, as a daemon receives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The name of the call, which may be unknown.
    pub name: String,
    /// The call.
    pub method: Option<Method>,
    /// Its number, which the response repeats.
    pub seq: u64,
    /// Its arguments.
    pub args: CmdArgs,
}

const REQUEST: i64 = 64;
const RESPONSE: i64 = 64;
const BODY: i64 = 65;
const INTERFACE: i64 = 66;
const INTERFACES: i64 = 67;
const IP: i64 = 68;
const NET: i64 = 69;
const IPS: i64 = 70;
const ROUTE: i64 = 71;
const ROUTES: i64 = 72;
const DNS: i64 = 73;
const TEXTS: i64 = 74;

/// Returns a call as a client sends it after [`CONNECT`], once the daemon has answered that: a Go
/// daemon loses what comes earlier.
pub fn write_request(method: Method, args: &CmdArgs) -> Vec<u8> {
    let mut out = Vec::new();
    let request = [("ServiceMethod", TEXT), ("Seq", UINT)];
    write_definition(&mut out, REQUEST, "Request", Definition::Struct(&request));
    let mut fields = Fields::default();
    fields.text(method.name());
    write_struct(&mut out, REQUEST, fields);
    let cmd_args = [
        ("ContainerID", TEXT),
        ("Netns", TEXT),
        ("IfName", TEXT),
        ("Args", TEXT),
        ("Path", TEXT),
        ("NetnsOverride", TEXT),
        ("StdinData", BYTES),
    ];
    write_definition(&mut out, BODY, "CmdArgs", Definition::Struct(&cmd_args));
    let mut fields = Fields::default();
    for text in [&args.container_id, &args.netns, &args.ifname, &args.args, &args.path] {
        fields.text(text);
    }
    fields.skip();
    fields.data(&args.stdin);
    write_struct(&mut out, BODY, fields);
    out
}

/// Returns the answer to a call as a daemon sends it after [`CONNECTED`]. `outcome` has no result
/// for a release.
pub fn write_response(request: &Request, outcome: Result<Option<&AddResult>, &str>) -> Vec<u8> {
    let mut out = Vec::new();
    let response = [("ServiceMethod", TEXT), ("Seq", UINT), ("Error", TEXT)];
    write_definition(&mut out, RESPONSE, "Response", Definition::Struct(&response));
    let mut fields = Fields::default();
    fields.text(&request.name);
    fields.uint(request.seq);
    fields.text(outcome.err().unwrap_or_default());
    write_struct(&mut out, RESPONSE, fields);
    match outcome {
        Ok(Some(result)) => write_result(&mut out, result),
        _ => {
            write_definition(&mut out, BODY, "", Definition::Struct(&[]));
            write_struct(&mut out, BODY, Fields::default());
        }
    }
    out
}

fn write_result(out: &mut Vec<u8>, result: &AddResult) {
    let types = [
        (
            BODY,
            "Result",
            Definition::Struct(&[
                ("CNIVersion", TEXT),
                ("Interfaces", INTERFACES),
                ("IPs", IPS),
                ("Routes", ROUTES),
                ("DNS", DNS),
            ]),
        ),
        (INTERFACES, "[]*types100.Interface", Definition::List(INTERFACE)),
        (
            INTERFACE,
            "",
            Definition::Struct(&[
                ("Name", TEXT),
                ("Mac", TEXT),
                ("Mtu", INT),
                ("Sandbox", TEXT),
                ("SocketPath", TEXT),
                ("PciID", TEXT),
            ]),
        ),
        (IPS, "[]*types100.IPConfig", Definition::List(IP)),
        (IP, "", Definition::Struct(&[("Interface", INT), ("Address", NET), ("Gateway", BYTES)])),
        (NET, "IPNet", Definition::Struct(&[("IP", BYTES), ("Mask", BYTES)])),
        (ROUTES, "[]*types.Route", Definition::List(ROUTE)),
        (
            ROUTE,
            "",
            Definition::Struct(&[
                ("Dst", NET),
                ("GW", BYTES),
                ("MTU", INT),
                ("AdvMSS", INT),
                ("Priority", INT),
                ("Table", INT),
                ("Scope", INT),
            ]),
        ),
        (
            DNS,
            "DNS",
            Definition::Struct(&[("Nameservers", TEXTS), ("Domain", TEXT), ("Search", TEXTS), ("Options", TEXTS)]),
        ),
        (TEXTS, "[]string", Definition::List(TEXT)),
    ];
    for (id, name, definition) in types {
        write_definition(out, id, name, definition);
    }
    let mut fields = Fields::default();
    fields.skip();
    fields.skip();
    fields.list(&result.ips, |ip| {
        let mut fields = Fields::default();
        fields.skip();
        fields.nested(net(&ip.address));
        fields.data(&octets(ip.gateway));
        fields.end()
    });
    fields.list(&result.routes, |route| {
        let mut fields = Fields::default();
        fields.nested(net(&route.dst));
        fields.data(&octets(route.gw));
        for number in [route.mtu, route.advmss, route.priority, route.table, route.scope.map(u32::from)] {
            fields.int(number.unwrap_or_default().into());
        }
        fields.end()
    });
    let mut dns = Fields::default();
    dns.list(&result.dns.nameservers, |text| sized(text.as_bytes()));
    dns.text(&result.dns.domain);
    dns.list(&result.dns.search, |text| sized(text.as_bytes()));
    dns.list(&result.dns.options, |text| sized(text.as_bytes()));
    fields.nested(dns);
    write_struct(out, BODY, fields);
}

fn net(cidr: &Cidr) -> Fields {
    let mut mask = octets(Some(cidr.address()));
    for (index, byte) in mask.iter_mut().enumerate() {
        let bits = usize::from(cidr.prefix()).saturating_sub(index * 8).min(8);
        *byte = 0xff_u8.checked_shl(8 - bits as u32).unwrap_or(0);
    }
    let mut fields = Fields::default();
    fields.data(&octets(Some(cidr.address())));
    fields.data(&mask);
    fields
}

fn octets(address: Option<IpAddr>) -> Vec<u8> {
    match address {
        None => Vec::new(),
        Some(IpAddr::V4(address)) => address.octets().to_vec(),
        Some(IpAddr::V6(address)) => address.octets().to_vec(),
    }
}

/// One end of a connection: what has been received of it.
#[derive(Debug, Default)]
pub struct Connection {
    reader: Reader,
    received: Vec<u8>,
    head: Option<Value>,
    greeted: bool,
}

/// Why the other end cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// The gob is invalid.
    #[error(transparent)]
    Gob(#[from] GobError),
    /// The other end does not speak Go's `net/rpc`.
    #[error("unexpected HTTP response: {0}")]
    Greeting(String),
    /// A value does not have the fields or ranges of its type.
    #[error("the result is invalid: {0}")]
    Invalid(&'static str),
}

impl Connection {
    /// Adds what has been received.
    pub fn push(&mut self, bytes: &[u8]) {
        self.received.extend(bytes);
    }

    /// How many bytes wait to be understood.
    pub fn waiting(&self) -> usize {
        self.received.len()
    }

    /// Whether the greeting has been received.
    pub fn handshake_done(&self) -> bool {
        self.greeted
    }

    /// Takes the greeting away. `false` if more must be received first.
    fn greeting(&mut self, expected: &str) -> Result<bool, RpcError> {
        if self.greeted {
            return Ok(true);
        }
        let line = |bytes: &[u8]| {
            String::from_utf8_lossy(bytes.split(|byte| *byte == b'\n').next().unwrap_or_default()).into_owned()
        };
        let end = (2..=self.received.len()).find(|end| {
            let text = &self.received[..*end];
            text.ends_with(b"\n\n") || text.ends_with(b"\n\r\n")
        });
        let known = self.received.len().min(expected.len());
        if self.received[..known] != expected.as_bytes()[..known] || (end.is_none() && self.received.len() > 4096) {
            return Err(RpcError::Greeting(line(&self.received)));
        }
        if let Some(end) = end {
            self.received.drain(..end);
            self.greeted = true;
        }
        Ok(self.greeted)
    }

    /// The next head and body. `None` if more must be received first.
    fn pair(&mut self) -> Result<Option<(Value, Value)>, RpcError> {
        if self.head.is_none() {
            self.head = self.reader.take(&mut self.received)?;
        }
        let Some(head) = &self.head else { return Ok(None) };
        let Some(body) = self.reader.take(&mut self.received)? else { return Ok(None) };
        let head = head.clone();
        self.head = None;
        Ok(Some((head, body)))
    }

    /// The call that the client makes, at a daemon. `None` if more must be received first.
    ///
    /// # Errors
    /// [`RpcError`]; the connection is of no use after one.
    pub fn request(&mut self) -> Result<Option<Request>, RpcError> {
        if !self.greeting("CONNECT /_goRPC_ ")? {
            return Ok(None);
        }
        let Some((head, body)) = self.pair()? else { return Ok(None) };
        let text = |name: &str| body.text(name).to_owned();
        let args = CmdArgs {
            container_id: text("ContainerID"),
            netns: text("Netns"),
            ifname: text("IfName"),
            args: text("Args"),
            path: text("Path"),
            stdin: body.bytes("StdinData").to_vec(),
        };
        let name = head.text("ServiceMethod").to_owned();
        let seq = match head.get("Seq") {
            Some(Value::Uint(seq)) => *seq,
            _ => 0,
        };
        Ok(Some(Request { method: Method::find(&name), name, seq, args }))
    }

    /// The daemon's answer, at a client: the result, or the error's text. `None` if more must be
    /// received first.
    ///
    /// # Errors
    /// [`RpcError`]; the connection is of no use after one.
    pub fn response(&mut self) -> Result<Option<Result<AddResult, String>>, RpcError> {
        if !self.greeting("HTTP/1.0 200 Connected to Go RPC")? {
            return Ok(None);
        }
        let Some((head, body)) = self.pair()? else { return Ok(None) };
        match head.text("Error") {
            "" => read_result(&body).map(|result| Some(Ok(result))),
            text => Ok(Some(Err(text.to_owned()))),
        }
    }
}

fn read_result(body: &Value) -> Result<AddResult, RpcError> {
    let ips = body.list("IPs").iter().map(|ip| {
        let address = ip.get("Address").and_then(read_net).ok_or(RpcError::Invalid("an address"))?;
        Ok(IpConfig { interface: None, address, gateway: read_address(ip.bytes("Gateway"))? })
    });
    let routes = body.list("Routes").iter().map(|route| {
        let dst = route.get("Dst").and_then(read_net).ok_or(RpcError::Invalid("a route's destination"))?;
        let number = |name: &str| -> Result<Option<u32>, RpcError> {
            let number = route.int(name).map(u32::try_from).transpose();
            number.map_err(|_| RpcError::Invalid("a route's number"))
        };
        let scope = number("Scope")?.map(u8::try_from).transpose().map_err(|_| RpcError::Invalid("a route's scope"))?;
        Ok(Route {
            dst,
            gw: read_address(route.bytes("GW"))?,
            mtu: number("MTU")?,
            advmss: number("AdvMSS")?,
            priority: number("Priority")?,
            table: number("Table")?,
            scope,
        })
    });
    let empty = Value::Struct(Vec::new());
    let dns = body.get("DNS").unwrap_or(&empty);
    let texts = |name: &str| -> Vec<String> {
        let text = |value: &Value| if let Value::Text(text) = value { Some(text.clone()) } else { None };
        dns.list(name).iter().filter_map(text).collect()
    };
    Ok(AddResult {
        ips: ips.collect::<Result<_, RpcError>>()?,
        routes: routes.collect::<Result<_, RpcError>>()?,
        dns: Dns {
            nameservers: texts("Nameservers"),
            domain: dns.text("Domain").to_owned(),
            search: texts("Search"),
            options: texts("Options"),
        },
        ..AddResult::default()
    })
}

fn read_address(bytes: &[u8]) -> Result<Option<IpAddr>, RpcError> {
    match bytes.len() {
        0 => Ok(None),
        4 => Ok(<[u8; 4]>::try_from(bytes).ok().map(|bytes| Ipv4Addr::from(bytes).into())),
        16 => Ok(<[u8; 16]>::try_from(bytes).ok().map(|bytes| IpAddr::from(Ipv6Addr::from(bytes)).to_canonical())),
        _ => Err(RpcError::Invalid("an address")),
    }
}

fn read_net(net: &Value) -> Option<Cidr> {
    let address = read_address(net.bytes("IP")).ok()??;
    let mask = net.bytes("Mask");
    let ones: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
    let leading = mask
        .iter()
        .position(|byte| *byte != 255)
        .map_or(mask.len() * 8, |at| at * 8 + mask[at].leading_ones() as usize);
    // The mask of an IPv4 address may be that of its form in IPv6.
    let extra = if address.is_ipv4() && mask.len() == 16 { 96 } else { 0 };
    if leading != ones as usize || (mask.len() != octets(Some(address)).len() && extra == 0) {
        return None;
    }
    Cidr::new(address, u8::try_from(ones.checked_sub(extra)?).ok()?)
}

#[cfg(test)]
mod tests;
