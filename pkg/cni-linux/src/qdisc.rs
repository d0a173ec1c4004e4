//! Traffic control: the token bucket filter that limits what an interface sends, and the `ingress`
//! qdisc with the filter that redirects what an interface receives to another one.
//!
//! netlink-packet-route supports neither the token bucket filter nor the redirect action, so this
//! module encodes and decodes the messages itself.

use netlink_packet_core::{Emitable, NLM_F_CREATE, NLM_F_EXCL};

use crate::error::{Error, Result};
use crate::netlink::wire::{attribute, new_attribute, new_nest, u32_ne};
use crate::netlink::{Body, Kind, Netlink, Reply, attributes, text};

/// The parameters of a token bucket filter, in the kernel's units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tbf {
    /// Bytes per second.
    pub rate: u64,
    /// How many bytes may wait in the queue.
    pub limit: u32,
    /// The size of the bucket: the time to send its bytes at `rate`, in ticks of [`TICK`]
    /// nanoseconds.
    pub buffer: u32,
}

/// The nanoseconds in a tick of the kernel's packet scheduler.
pub const TICK: u64 = 64;

/// Where a qdisc is attached to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QdiscParent {
    /// Where packets are sent.
    Root,
    /// Where packets are received.
    Ingress,
}

/// A qdisc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qdisc {
    /// The kind, as the kernel names it: `tbf`, `ingress`, `fq_codel`, …
    pub kind: String,
    /// The parameters, if the kind is `tbf`.
    pub tbf: Option<Tbf>,
}

/// What a filter does with the packets that match it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Sends them out through the interface with this index.
    Redirect(u32),
    /// Anything else.
    Other,
}

/// The handle or parent in a request that does not set it.
const TC_H_UNSPEC: u32 = 0;
/// The parent of the qdisc for sent packets.
const TC_H_ROOT: u32 = 0xffff_ffff;
/// The parent of the qdisc for received packets.
const TC_H_INGRESS: u32 = 0xffff_fff1;
/// The handle `1:`, which Go's bandwidth plugin also uses.
const ROOT_HANDLE: u32 = 0x1_0000;
/// The handle `ffff:`, the only one that the kernel accepts for `ingress`.
const INGRESS_HANDLE: u32 = 0xffff_0000;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_U32_CLASSID: u16 = 1;
const TCA_U32_SEL: u16 = 5;
const TCA_U32_ACT: u16 = 7;
const TCA_MIRRED_PARMS: u16 = 2;
const TCA_EGRESS_REDIR: u32 = 1;

impl QdiscParent {
    /// Returns the kind of the qdisc that these plugins create here.
    fn kind(self) -> &'static str {
        match self {
            QdiscParent::Root => "tbf",
            QdiscParent::Ingress => "ingress",
        }
    }
}

impl Netlink {
    /// Returns the qdisc that was explicitly attached to an interface; `None` if the interface has
    /// only the kernel's default qdisc, or no qdisc.
    pub fn find_qdisc(&self, index: u32, parent: QdiscParent) -> Result<Option<Qdisc>> {
        let request = match parent {
            QdiscParent::Root => TrafficRequest { parent: TC_H_ROOT, ..TrafficRequest::new(index) },
            // The ingress qdisc is looked up by its handle: a look-up by parent returns the
            // kernel's default qdisc if the interface had an ingress qdisc before.
            QdiscParent::Ingress => TrafficRequest { handle: INGRESS_HANDLE, ..TrafficRequest::new(index) },
        };
        match self.get_echoed(Kind::GetQdisc, &request) {
            Ok(reply) => Ok(reply.as_ref().and_then(decode)),
            // ENOENT: there is no such qdisc. The kernel answers EINVAL for an interface that has
            // never been up.
            Err(cause) if matches!(cause.errno(), Some(libc::ENOENT | libc::EINVAL)) => Ok(None),
            Err(cause) => Err(Error::new(format_args!("failed to look up the qdisc of {}", self.label(index)), cause)),
        }
    }

    /// Limits what an interface sends, by a token bucket filter as its root qdisc.
    ///
    /// # Errors
    /// [`Error::is_exists`] if a root qdisc was attached before.
    pub fn create_tbf(&self, index: u32, tbf: &Tbf) -> Result<()> {
        self.create_qdisc(index, QdiscParent::Root, &encode_tbf(tbf))
    }

    /// Attaches an `ingress` qdisc: its filters see what the interface receives.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the interface has an `ingress` qdisc.
    pub fn create_ingress(&self, index: u32) -> Result<()> {
        self.create_qdisc(index, QdiscParent::Ingress, &[])
    }

    /// Attaches a `tbf` at the root or an `ingress` qdisc. `options` is the encoded options
    /// attribute, or empty. Fails with EEXIST if a qdisc was attached at `parent` before.
    fn create_qdisc(&self, index: u32, parent: QdiscParent, options: &[u8]) -> Result<()> {
        let mut message = TrafficRequest::of_qdisc(index, parent);
        message.attributes.extend(options);
        self.change(Kind::NewQdisc, index, &message, NLM_F_CREATE | NLM_F_EXCL, |link| {
            format!("failed to add qdisc {} to {link}", parent.kind())
        })
    }

    /// Removes the qdisc that [`create_tbf`](Netlink::create_tbf) or
    /// [`create_ingress`](Netlink::create_ingress) attached, with its filters. Does nothing if the
    /// interface does not exist, or has no qdisc or a different one there.
    pub fn purge_qdisc(&self, index: u32, parent: QdiscParent) -> Result<()> {
        let message = TrafficRequest::of_qdisc(index, parent);
        let deleted = self.change(Kind::DelQdisc, index, &message, 0, |link| {
            format!("failed to remove qdisc {} from {link}", parent.kind())
        });
        match deleted {
            // The kernel answers EINVAL if the qdisc has another handle or is of another kind.
            Err(error) if error.is_not_found() || error.errno() == Some(libc::EINVAL) => Ok(()),
            result => result,
        }
    }

    /// Redirects every packet that the interface `from` receives to the interface `to`, which sends
    /// it. Both interfaces are in the connection's namespace; `from` must have an `ingress` qdisc.
    pub fn create_redirect(&self, from: u32, to: u32) -> Result<()> {
        const PRIORITY: u32 = 1;
        /// The Ethernet type that stands for all packets.
        const ETH_P_ALL: u16 = 3;
        let protocol = ETH_P_ALL.to_be();
        let info = PRIORITY << 16 | u32::from(protocol);
        let mut message = TrafficRequest { parent: INGRESS_HANDLE, info, ..TrafficRequest::new(from) }.kind("u32");
        message.attributes.extend(new_nest(TCA_OPTIONS, &encode_redirect(to)));
        self.change(Kind::NewFilter, from, &message, NLM_F_CREATE | NLM_F_EXCL, |link| {
            format!("failed to redirect the traffic that {link} receives to {}", self.label(to))
        })
    }

    /// Returns the actions of the filters of an interface's `ingress` qdisc, in the kernel's order.
    /// A redirection to a deleted interface has index 0.
    pub fn list_filters(&self, index: u32) -> Result<Vec<Filter>> {
        let request = TrafficRequest { parent: INGRESS_HANDLE, ..TrafficRequest::new(index) };
        let replies = self
            .dump(Kind::GetFilter, &request)
            .map_err(|cause| Error::new(format_args!("failed to list the filters of {}", self.label(index)), cause))?;
        let bodies = replies.iter().filter_map(|reply| reply.body(Kind::NewFilter));
        Ok(bodies.flat_map(decode_filter).collect())
    }
}

/// A request about a qdisc or a filter: `struct tcmsg` and its attributes.
struct TrafficRequest {
    index: u32,
    handle: u32,
    /// Of a qdisc a `TC_H_*` constant, of a filter the handle of its qdisc.
    parent: u32,
    /// For a filter: its priority in the upper, its protocol in the lower 16 bits.
    info: u32,
    attributes: Vec<u8>,
}

/// The length of `struct tcmsg`.
const HEADER: usize = 20;

impl TrafficRequest {
    /// Returns a request about the interface `index`, with only the index set.
    fn new(index: u32) -> TrafficRequest {
        TrafficRequest { index, handle: TC_H_UNSPEC, parent: TC_H_UNSPEC, info: 0, attributes: Vec::new() }
    }

    /// Returns a request about the qdisc that these plugins create at `parent`.
    fn of_qdisc(index: u32, parent: QdiscParent) -> TrafficRequest {
        let kind = parent.kind();
        let (parent, handle) = match parent {
            QdiscParent::Root => (TC_H_ROOT, ROOT_HANDLE),
            QdiscParent::Ingress => (TC_H_INGRESS, INGRESS_HANDLE),
        };
        TrafficRequest { parent, handle, ..TrafficRequest::new(index) }.kind(kind)
    }

    /// Adds the kind of the qdisc or filter, such as `tbf`.
    fn kind(mut self, kind: &str) -> TrafficRequest {
        self.attributes.extend(new_attribute(TCA_KIND, format!("{kind}\0").as_bytes()));
        self
    }
}

impl Emitable for TrafficRequest {
    fn buffer_len(&self) -> usize {
        HEADER + self.attributes.len()
    }

    /// Writes `struct tcmsg` (family, index, handle, parent, info) and the attributes.
    fn emit(&self, buffer: &mut [u8]) {
        let header = [0, self.index, self.handle, self.parent, self.info].map(u32::to_ne_bytes).concat();
        buffer.copy_from_slice(&[header, self.attributes.clone()].concat());
    }
}

impl Body for TrafficRequest {
    fn describe(&self) -> Vec<String> {
        let kind = attribute(&self.attributes, TCA_KIND).map(text);
        kind.into_iter().chain([format!("dev index {}", self.index)]).collect()
    }
}

/// Returns the options attribute of a token bucket filter. A rate that does not fit into the 32
/// bits of `struct tc_tbf_qopt` is encoded as a separate attribute.
fn encode_tbf(tbf: &Tbf) -> Vec<u8> {
    let short_rate = u32::try_from(tbf.rate);
    // `struct tc_tbf_qopt`: the rate and the peak rate, each a `struct tc_ratespec` of 12 bytes of
    // which the last 4 are the number; then limit, buffer and MTU.
    let rate = [0, 0, short_rate.unwrap_or(u32::MAX)];
    let no_peak_rate = [0, 0, 0];
    let no_mtu = 0;
    let fields = [&rate[..], &no_peak_rate, &[tbf.limit, tbf.buffer, no_mtu]].concat();
    let fields: Vec<u8> = fields.into_iter().flat_map(u32::to_ne_bytes).collect();
    let mut options = new_attribute(TCA_TBF_PARMS, &fields);
    if short_rate.is_err() {
        options.extend(new_attribute(TCA_TBF_RATE64, &tbf.rate.to_ne_bytes()));
    }
    new_nest(TCA_OPTIONS, &options)
}

/// Returns the options of a `u32` filter that matches every packet and redirects it to the
/// interface `to`.
fn encode_redirect(to: u32) -> Vec<u8> {
    const TC_U32_TERMINAL: u8 = 1;
    const TC_ACT_STOLEN: u32 = 4;
    /// The class `1:1`, which Go's bandwidth plugin also sets.
    const CLASS: u32 = 0x1_0001;
    const FIRST_ACTION: u16 = 1;
    // `struct tc_u32_sel`: flags, an unused byte, the number of keys, and other fields that stay 0;
    // then one key, whose mask of 0 matches every packet.
    let mut selector = [0; 32];
    (selector[0], selector[2]) = (TC_U32_TERMINAL, 1);
    // `struct tc_mirred`, seven numbers: index, capabilities, action, two counters, kind of
    // redirection, target.
    let parameters = [0, 0, TC_ACT_STOLEN, 0, 0, TCA_EGRESS_REDIR, to].map(u32::to_ne_bytes).concat();
    // "mirred" is the kernel's name of the action that mirrors or redirects packets.
    let action =
        [new_attribute(TCA_KIND, b"mirred\0"), new_nest(TCA_OPTIONS, &new_attribute(TCA_MIRRED_PARMS, &parameters))];
    [
        new_attribute(TCA_U32_CLASSID, &CLASS.to_ne_bytes()),
        new_attribute(TCA_U32_SEL, &selector),
        new_nest(TCA_U32_ACT, &new_nest(FIRST_ACTION, &action.concat())),
    ]
    .concat()
}

/// Decodes a qdisc. Returns `None` for a malformed message and for the kernel's default qdisc.
fn decode(reply: &Reply) -> Option<Qdisc> {
    const HANDLE_OFFSET: usize = 8;
    let body = reply.body(Kind::NewQdisc)?;
    // Only the kernel's default qdisc has handle 0.
    if u32_ne(body, HANDLE_OFFSET) == Some(TC_H_UNSPEC) {
        return None;
    }
    let encoded = body.get(HEADER..)?;
    let kind = text(attribute(encoded, TCA_KIND)?);
    let tbf = match attribute(encoded, TCA_OPTIONS) {
        Some(options) if kind == "tbf" => decode_tbf(options),
        _ => None,
    };
    Some(Qdisc { kind, tbf })
}

/// Decodes the value of the options attribute that [`encode_tbf`] returns. Returns `None` if the
/// value is malformed.
fn decode_tbf(options: &[u8]) -> Option<Tbf> {
    // In `struct tc_tbf_qopt`, see `encode_tbf`.
    const RATE_OFFSET: usize = 8;
    const LIMIT_OFFSET: usize = 24;
    const BUFFER_OFFSET: usize = 28;
    let fields = attribute(options, TCA_TBF_PARMS)?;
    let short_rate = u32_ne(fields, RATE_OFFSET)?;
    // Only present if the rate needs more than 32 bits.
    let long_rate = attribute(options, TCA_TBF_RATE64).and_then(|bytes| bytes.first_chunk());
    let rate = match long_rate {
        Some(bytes) => u64::from_ne_bytes(*bytes),
        None => u64::from(short_rate),
    };
    Some(Tbf { rate, limit: u32_ne(fields, LIMIT_OFFSET)?, buffer: u32_ne(fields, BUFFER_OFFSET)? })
}

/// Decodes one message of the kernel's list of filters. Returns the actions of the filter, or one
/// [`Filter::Other`] if it has no action or is not of kind `u32`. The kernel also lists the
/// classifiers and hash tables that contain the filters: for these, returns an empty list.
fn decode_filter(body: &[u8]) -> Vec<Filter> {
    let encoded = body.get(HEADER..).unwrap_or_default();
    // A message without options describes a classifier.
    let Some(options) = attribute(encoded, TCA_OPTIONS) else { return Vec::new() };
    if attribute(encoded, TCA_KIND).map(text).as_deref() != Some("u32") {
        return vec![Filter::Other];
    }
    // A message about a hash table has no selector.
    if attribute(options, TCA_U32_SEL).is_none() {
        return Vec::new();
    }
    let mut filters = Vec::new();
    for (_, action) in attributes(attribute(options, TCA_U32_ACT).unwrap_or_default()) {
        filters.push(match redirect_target(action) {
            Some(index) => Filter::Redirect(index),
            None => Filter::Other,
        });
    }
    if filters.is_empty() {
        filters.push(Filter::Other);
    }
    filters
}

/// Returns the index of the interface that an action redirects packets to; `None` for any other
/// action.
fn redirect_target(action: &[u8]) -> Option<u32> {
    // In `struct tc_mirred`, see `encode_redirect`.
    const REDIRECTION_OFFSET: usize = 20;
    const TARGET_OFFSET: usize = 24;
    if text(attribute(action, TCA_KIND)?) != "mirred" {
        return None;
    }
    let parameters = attribute(attribute(action, TCA_OPTIONS)?, TCA_MIRRED_PARMS)?;
    let redirection = u32_ne(parameters, REDIRECTION_OFFSET)?;
    if redirection == TCA_EGRESS_REDIR { u32_ne(parameters, TARGET_OFFSET) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, output};
    use crate::{Mac, VethSpec};
    use cni::AttachmentId;

    fn pair(netlink: &Netlink) -> u32 {
        let (host, peer) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
        let made = netlink.create_veth(&VethSpec { up: true, ..VethSpec::new("veth0", host, "peer0", peer) }).unwrap();
        netlink.set_up(made.peer_index).unwrap();
        made.index
    }

    #[test]
    fn a_token_bucket_filter_is_made_read_back_and_removed() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let index = pair(&netlink);
            assert_eq!(netlink.find_qdisc(index, QdiscParent::Root).unwrap(), None);
            for rate in [1_000_000, u64::from(u32::MAX) * 3] {
                let tbf = Tbf { rate, limit: 125_000, buffer: 1_562_500 };
                netlink.create_tbf(index, &tbf).unwrap();
                let there = netlink.find_qdisc(index, QdiscParent::Root).unwrap().unwrap();
                assert_eq!(there, Qdisc { kind: "tbf".to_owned(), tbf: Some(tbf) });
                assert!(netlink.create_tbf(index, &tbf).unwrap_err().is_exists());
                if rate == 1_000_000 {
                    let shown = output("tc qdisc show dev veth0");
                    assert!(
                        shown.contains("qdisc tbf 1: root") && shown.contains("rate 8Mbit burst 100000b"),
                        "{shown}"
                    );
                }
                netlink.purge_qdisc(index, QdiscParent::Root).unwrap();
                assert_eq!(netlink.find_qdisc(index, QdiscParent::Root).unwrap(), None);
                netlink.purge_qdisc(index, QdiscParent::Root).unwrap();
            }
        });
    }

    #[test]
    fn a_foreign_qdisc_is_listed_and_stays() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let index = pair(&netlink);
            output("tc qdisc add dev veth0 root handle 1: pfifo limit 10");
            netlink.purge_qdisc(index, QdiscParent::Root).unwrap();
            let there = netlink.find_qdisc(index, QdiscParent::Root).unwrap().unwrap();
            assert_eq!((there.kind.as_str(), there.tbf), ("pfifo", None));
        });
    }

    #[test]
    fn received_frames_are_redirected_until_the_target_is_gone() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let index = pair(&netlink);
            let mark = AttachmentId::new("net", "c1", "eth0");
            let ifb = netlink.create_ifb("bwp0", Mac([2, 0, 0, 0, 0, 3]), 1400, &mark).unwrap();
            assert_eq!(netlink.find_qdisc(index, QdiscParent::Ingress).unwrap(), None);
            assert_eq!(netlink.list_filters(index).unwrap(), []);
            netlink.create_ingress(index).unwrap();
            assert!(netlink.create_ingress(index).unwrap_err().is_exists());
            assert_eq!(netlink.find_qdisc(index, QdiscParent::Ingress).unwrap().unwrap().kind, "ingress");
            netlink.create_redirect(index, ifb.index).unwrap();
            assert_eq!(netlink.list_filters(index).unwrap(), [Filter::Redirect(ifb.index)]);
            let shown = output("tc filter show dev veth0 parent ffff:");
            assert!(shown.contains("mirred (Egress Redirect to device bwp0) stolen"), "{shown}");
            assert!(shown.contains("match 00000000/00000000 at 0") && shown.contains("protocol all pref 1"), "{shown}");
            output("tc filter add dev veth0 parent ffff: prio 2 protocol ip u32 match ip dst 1.2.3.4/32 classid 1:2");
            assert_eq!(netlink.list_filters(index).unwrap(), [Filter::Redirect(ifb.index), Filter::Other]);
            output("tc filter del dev veth0 parent ffff: prio 2");
            netlink.delete_link(ifb.index).unwrap();
            assert_eq!(netlink.list_filters(index).unwrap(), [Filter::Redirect(0)]);
            netlink.purge_qdisc(index, QdiscParent::Ingress).unwrap();
            assert_eq!(netlink.find_qdisc(index, QdiscParent::Ingress).unwrap(), None);
            assert_eq!(netlink.list_filters(index).unwrap(), []);
        });
    }

    #[test]
    fn a_failure_names_the_interface_and_the_qdisc() {
        in_new_netns(|| {
            let netlink = Netlink::open().unwrap();
            let index = pair(&netlink);
            let error = netlink.create_tbf(index, &Tbf { rate: 0, limit: 0, buffer: 0 }).unwrap_err();
            assert!(error.to_string().starts_with("failed to add qdisc tbf to veth0: Invalid argument"), "{error}");
            assert!(netlink.create_redirect(index, index).is_err());
        });
    }

    #[test]
    fn no_answer_makes_a_reader_panic() {
        let options = encode_tbf(&Tbf { rate: 1, limit: 2, buffer: 3 });
        let mut body = TrafficRequest::of_qdisc(7, QdiscParent::Root);
        body.attributes.extend(options);
        let bytes = crate::netlink::wire::emitted(&body);
        let whole = decode(&Reply::new(Kind::NewQdisc, &bytes)).unwrap();
        assert_eq!(whole.tbf, Some(Tbf { rate: 1, limit: 2, buffer: 3 }));
        let filter =
            [vec![0; HEADER], new_attribute(TCA_KIND, b"u32\0"), new_nest(TCA_OPTIONS, &encode_redirect(9))].concat();
        assert_eq!(decode_filter(&filter), [Filter::Redirect(9)]);
        for end in 0..bytes.len().max(filter.len()) {
            let _ = decode(&Reply::new(Kind::NewQdisc, bytes.get(..end).unwrap_or(&bytes)));
            let _ = decode_filter(filter.get(..end).unwrap_or(&filter));
        }
    }
}
