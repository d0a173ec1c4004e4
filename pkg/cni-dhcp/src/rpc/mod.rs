//! Encodes and decodes the two calls from plugin to daemon, in the format of Go's `net/rpc`: a line
//! of HTTP, then gob.
//!
//! Names and fields are those of Go, because a Go plugin may call this daemon, and this plugin may
//! call a Go daemon.

use std::net::IpAddr;

use cni::Cidr;
use cni::cidr::{from_octets, octets};
use cni::result::{AddResult, Dns, IpConfig, Route};

use crate::gob::{
    BYTES, Definition, Fields, GobError, INT, Reader, TEXT, UINT, Value, sized, write_definition, write_struct,
};

/// The line that a client sends first.
pub const CONNECT: &[u8] = b"CONNECT /_goRPC_ HTTP/1.0\n\n";
/// The line that a daemon answers to [`CONNECT`].
pub const CONNECTED: &[u8] = b"HTTP/1.0 200 Connected to Go RPC\n\n";
/// The beginning of [`CONNECT`]. The rest, which is the version of HTTP, is not checked.
const CONNECT_BEGINNING: &str = "CONNECT /_goRPC_ ";
/// The beginning of [`CONNECTED`].
const CONNECTED_BEGINNING: &str = "HTTP/1.0 200 Connected to Go RPC";
/// How many bytes may be received before the end of the line of HTTP.
const MAX_HTTP_LINE: usize = 4096;

/// The calls that a daemon knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The daemon returns the attachment's lease. It acquires one if there is none.
    Allocate,
    /// The same, of a configuration with DHCPv6. Go's daemon, which would ignore the keys, does not
    /// know this call.
    AllocateIpv6,
    /// The daemon releases the attachment's lease.
    Release,
}

impl Method {
    /// Returns the name in `net/rpc`.
    pub fn name(self) -> &'static str {
        match self {
            Method::Allocate => "DHCP.Allocate",
            Method::AllocateIpv6 => "DHCP.AllocateIPv6",
            Method::Release => "DHCP.Release",
        }
    }

    /// Returns the method with this name in `net/rpc`, or `None`.
    fn find(name: &str) -> Option<Method> {
        [Method::Allocate, Method::AllocateIpv6, Method::Release].into_iter().find(|method| method.name() == name)
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
    /// The plugin's configuration.
    pub stdin: Vec<u8>,
}

/// A call, as a daemon receives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The name of the call.
    pub name: String,
    /// The call, or `None` if the daemon does not know the name.
    pub method: Option<Method>,
    /// The number of the call, which the response repeats.
    pub seq: u64,
    /// The arguments of the call.
    pub args: CmdArgs,
}

// The numbers of the types in a stream. Go's numbers begin at 64, but each end accepts any numbers.
// Requests and responses are in different streams, so their numbers may be equal.
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

/// Returns the bytes of a call. The client sends them after the daemon has answered [`CONNECT`]: a
/// Go daemon loses bytes that arrive earlier.
pub fn write_request(method: Method, args: &CmdArgs) -> Vec<u8> {
    let mut out = Vec::new();
    let request = [("ServiceMethod", TEXT), ("Seq", UINT)];
    write_definition(&mut out, REQUEST, "Request", Definition::Struct(&request));
    let mut head = Fields::default();
    head.text(method.name());
    // Seq is left out, because it is 0: a connection has only one call.
    write_struct(&mut out, REQUEST, head);
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
    let mut body = Fields::default();
    for text in [&args.container_id, &args.netns, &args.ifname, &args.args, &args.path] {
        body.text(text);
    }
    // NetnsOverride is left out.
    body.skip();
    body.data(&args.stdin);
    write_struct(&mut out, BODY, body);
    out
}

/// Returns the bytes of the answer to a call, which a daemon sends after [`CONNECTED`]. `outcome`
/// is the lease, nothing after a release, or the text of an error.
pub fn write_response(request: &Request, outcome: Result<Option<&AddResult>, &str>) -> Vec<u8> {
    let mut out = Vec::new();
    let response = [("ServiceMethod", TEXT), ("Seq", UINT), ("Error", TEXT)];
    write_definition(&mut out, RESPONSE, "Response", Definition::Struct(&response));
    let mut head = Fields::default();
    head.text(&request.name);
    head.uint(request.seq);
    head.text(outcome.err().unwrap_or_default());
    write_struct(&mut out, RESPONSE, head);
    match outcome {
        Ok(Some(result)) => write_result(&mut out, result),
        Ok(None) | Err(_) => {
            write_definition(&mut out, BODY, "", Definition::Struct(&[]));
            write_struct(&mut out, BODY, Fields::default());
        }
    }
    out
}

/// Appends the definitions of the types of Go's result, and the parts of `result` that a lease has:
/// IPs, routes and DNS.
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
    // CNIVersion and Interfaces are left out.
    fields.skip();
    fields.skip();
    fields.list(&result.ips, |ip| {
        let mut fields = Fields::default();
        // Interface is left out.
        fields.skip();
        fields.nested(ip_net(&ip.address));
        fields.data(&ip.gateway.map(octets).unwrap_or_default());
        fields.end()
    });
    fields.list(&result.routes, |route| {
        let mut fields = Fields::default();
        fields.nested(ip_net(&route.dst));
        fields.data(&route.gw.map(octets).unwrap_or_default());
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

/// Encodes a CIDR as Go's `net.IPNet`.
fn ip_net(cidr: &Cidr) -> Fields {
    let address = octets(cidr.address());
    let mask_byte = |index: usize| {
        // How many bits of this byte the prefix covers. For 0, the shift overflows.
        let ones = usize::from(cidr.prefix()).saturating_sub(index * 8).min(8);
        0xff_u8.checked_shl(8 - ones as u32).unwrap_or(0)
    };
    let mask: Vec<u8> = (0..address.len()).map(mask_byte).collect();
    let mut fields = Fields::default();
    fields.data(&address);
    fields.data(&mask);
    fields
}

/// Decodes what one end of a connection receives.
#[derive(Debug, Default)]
pub struct Connection {
    reader: Reader,
    /// The bytes that are not decoded yet.
    received: Vec<u8>,
    /// The header of a call or response whose body is not complete yet.
    head: Option<Value>,
    /// Whether the line of HTTP has been received.
    is_handshake_done: bool,
}

/// The reason why the received bytes cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// The gob is invalid.
    #[error(transparent)]
    Gob(#[from] GobError),
    /// The first line is not that of Go's `net/rpc`. The value is this line. The text is Go's.
    #[error("unexpected HTTP response: {0}")]
    HttpLine(String),
    /// A value lacks a field or is not in the range of its type.
    #[error("the result of the daemon is invalid: {0}")]
    Invalid(&'static str),
}

impl Connection {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.received.extend(bytes);
    }

    /// Returns the number of bytes that are not decoded yet.
    pub fn waiting(&self) -> usize {
        self.received.len()
    }

    /// Whether the line of HTTP has been received.
    pub fn handshake_done(&self) -> bool {
        self.is_handshake_done
    }

    /// Removes the line of HTTP, which must begin with `expected`, and the empty line after it.
    /// Returns whether both have been received, now or by an earlier call.
    ///
    /// # Errors
    /// The line begins differently or is too long.
    fn take_http_line(&mut self, expected: &str) -> Result<bool, RpcError> {
        if self.is_handshake_done {
            return Ok(true);
        }
        // Go ends lines with LF, other implementations may use CR and LF.
        let end = (2..=self.received.len()).find(|end| {
            let text = &self.received[..*end];
            text.ends_with(b"\n\n") || text.ends_with(b"\n\r\n")
        });
        // Bytes of another protocol are refused even before a line is complete.
        let comparable = self.received.len().min(expected.len());
        let is_as_expected = self.received[..comparable] == expected.as_bytes()[..comparable];
        let is_too_long = end.is_none() && self.received.len() > MAX_HTTP_LINE;
        if !is_as_expected || is_too_long {
            let first_line = self.received.split(|byte| *byte == b'\n').next().unwrap_or_default();
            return Err(RpcError::HttpLine(String::from_utf8_lossy(first_line).into_owned()));
        }
        if let Some(end) = end {
            self.received.drain(..end);
            self.is_handshake_done = true;
        }
        Ok(self.is_handshake_done)
    }

    /// Decodes the next header and its body. Returns `None` until both have been received.
    fn head_and_body(&mut self) -> Result<Option<(Value, Value)>, RpcError> {
        if self.head.is_none() {
            self.head = self.reader.take(&mut self.received)?;
        }
        let Some(head) = &self.head else { return Ok(None) };
        let Some(body) = self.reader.take(&mut self.received)? else { return Ok(None) };
        let head = head.clone();
        self.head = None;
        Ok(Some((head, body)))
    }

    /// Decodes the next call, for a daemon. Returns `None` until the whole call has been received.
    ///
    /// # Errors
    /// The bytes are not a call; nothing after the error can be decoded.
    pub fn request(&mut self) -> Result<Option<Request>, RpcError> {
        if !self.take_http_line(CONNECT_BEGINNING)? {
            return Ok(None);
        }
        let Some((head, body)) = self.head_and_body()? else { return Ok(None) };
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
            // A field with the value zero is absent.
            _ => 0,
        };
        Ok(Some(Request { method: Method::find(&name), name, seq, args }))
    }

    /// Decodes the daemon's answer, for a client: the result, or the text of an error. Returns
    /// `None` until the whole answer has been received.
    ///
    /// # Errors
    /// The bytes are not an answer; nothing after the error can be decoded.
    pub fn response(&mut self) -> Result<Option<Result<AddResult, String>>, RpcError> {
        if !self.take_http_line(CONNECTED_BEGINNING)? {
            return Ok(None);
        }
        let Some((head, body)) = self.head_and_body()? else { return Ok(None) };
        match head.text("Error") {
            "" => read_result(&body).map(|result| Some(Ok(result))),
            text => Ok(Some(Err(text.to_owned()))),
        }
    }
}

/// Converts Go's result. The answer to a release has an empty result.
///
/// # Errors
/// A value lacks a field or is not in the range of its type.
fn read_result(body: &Value) -> Result<AddResult, RpcError> {
    let ips = body.list("IPs").iter().map(|ip| {
        let address = ip.get("Address").and_then(read_net);
        let address = address.ok_or(RpcError::Invalid("IPs.Address is not an address with a mask"))?;
        let gateway = read_address(ip.bytes("Gateway"), "IPs.Gateway is not an address")?;
        Ok(IpConfig { interface: None, address, gateway })
    });
    let routes = body.list("Routes").iter().map(|route| {
        let dst = route.get("Dst").and_then(read_net);
        let dst = dst.ok_or(RpcError::Invalid("Routes.Dst is not an address with a mask"))?;
        let number = |name: &str| -> Result<Option<u32>, RpcError> {
            let number = route.int(name).map(u32::try_from).transpose();
            number.map_err(|_| RpcError::Invalid("a number of a route is out of range"))
        };
        let scope = number("Scope")?.map(u8::try_from).transpose();
        let scope = scope.map_err(|_| RpcError::Invalid("the scope of a route is out of range"))?;
        Ok(Route {
            dst,
            gw: read_address(route.bytes("GW"), "Routes.GW is not an address")?,
            gws: None,
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

/// Returns the address in the bytes of Go's `net.IP`, or `None` for no bytes. An IPv4 address in
/// the form of IPv6 becomes an IPv4 address.
///
/// # Errors
/// [`RpcError::Invalid`] with the text `invalid` if the number of bytes is not that of an address.
fn read_address(bytes: &[u8], invalid: &'static str) -> Result<Option<IpAddr>, RpcError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let address = from_octets(bytes).ok_or(RpcError::Invalid(invalid))?;
    Ok(Some(address.to_canonical()))
}

/// Returns the CIDR of Go's `net.IPNet`, or `None` if the address or the mask is invalid.
fn read_net(net: &Value) -> Option<Cidr> {
    let address = read_address(net.bytes("IP"), "").ok()??;
    let mask = net.bytes("Mask");
    let ones: usize = mask.iter().map(|byte| byte.count_ones() as usize).sum();
    let leading_ones = match mask.iter().position(|byte| *byte != 255) {
        Some(index) => index * 8 + mask[index].leading_ones() as usize,
        None => mask.len() * 8,
    };
    // The mask of an IPv4 address may be that of its form in IPv6, which begins with 96 more ones.
    let extra = if address.is_ipv4() && mask.len() == 16 { 96 } else { 0 };
    let has_valid_length = extra > 0 || mask.len() == octets(address).len();
    if leading_ones != ones || !has_valid_length {
        return None;
    }
    Cidr::new(address, u8::try_from(ones.checked_sub(extra)?).ok()?)
}

#[cfg(test)]
mod tests;
