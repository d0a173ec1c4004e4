//! Traffic control: the token bucket filter (tbf), which limits what an interface sends, and the
//! `ingress` qdisc with a filter that redirects what an interface receives to another interface.
//!
//! The packet crate supports neither tbf nor the action of this filter, so the messages are encoded
//! and decoded here.

use netlink_packet_core::{Emitable, NLM_F_CREATE, NLM_F_EXCL};

use crate::error::{Error, Result};
use crate::netlink::wire::{attribute, new_attribute, new_nest};
use crate::netlink::{Body, Kind, Netlink, Reply, attributes, text};

/// The parameters of a token bucket filter, in the kernel's units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tbf {
    /// Bytes per second.
    pub rate: u64,
    /// The size of the queue in bytes.
    pub limit: u32,
    /// The size of the bucket: the time that `rate` takes to fill it, in ticks of [`TICK`]
    /// nanoseconds.
    pub buffer: u32,
}

/// The length of a tick of the kernel's packet scheduler, in nanoseconds.
pub const TICK: u64 = 64;

/// The place of an interface at which a qdisc is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QdiscParent {
    /// Sending.
    Root,
    /// Receiving.
    Ingress,
}

/// A qdisc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qdisc {
    /// The kind, as the kernel names it: `tbf`, `ingress`, `fq_codel`, …
    pub kind: String,
    /// The parameters, if it is a token bucket filter.
    pub tbf: Option<Tbf>,
}

/// The action of a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// The packet is sent over the interface with this index.
    Redirect(u32),
    /// Any other action.
    Other,
}

const TC_H_ROOT: u32 = 0xffff_ffff;
const TC_H_INGRESS: u32 = 0xffff_fff1;
/// The handle `1:`, which the Go plugin uses too.
const ROOT_HANDLE: u32 = 0x1_0000;
/// The handle `ffff:`, which the kernel prescribes.
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
    /// Returns the kernel's number for this place.
    fn parent(self) -> u32 {
        match self {
            QdiscParent::Root => TC_H_ROOT,
            QdiscParent::Ingress => TC_H_INGRESS,
        }
    }

    /// Returns the handle of the qdisc that is created here.
    fn handle(self) -> u32 {
        match self {
            QdiscParent::Root => ROOT_HANDLE,
            QdiscParent::Ingress => INGRESS_HANDLE,
        }
    }

    /// Returns the kind of qdisc that is created here.
    fn kind(self) -> &'static str {
        match self {
            QdiscParent::Root => "tbf",
            QdiscParent::Ingress => "ingress",
        }
    }
}

impl Netlink {
    /// Returns the qdisc of an interface at this place, or `None` if it has only the kernel's
    /// default.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn find_qdisc(&self, index: u32, place: QdiscParent) -> Result<Option<Qdisc>> {
        let (handle, parent) = match place {
            QdiscParent::Root => (0, place.parent()),
            // Looked up by its handle: after an ingress qdisc was removed, a lookup by the parent
            // returns another qdisc.
            QdiscParent::Ingress => (place.handle(), 0),
        };
        match self.get_echoed(Kind::GetQdisc, &Traffic::new(index, handle, parent)) {
            Ok(reply) => Ok(reply.as_ref().and_then(decode)),
            // EINVAL is the kernel's answer for an interface that has never been up.
            Err(cause) if matches!(cause.errno(), Some(libc::ENOENT | libc::EINVAL)) => Ok(None),
            Err(cause) => Err(Error::new(format_args!("failed to look up the qdisc of {}", self.label(index)), cause)),
        }
    }

    /// Attaches a token bucket filter to an interface, which limits what it sends.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the interface has a qdisc already.
    pub fn create_tbf(&self, index: u32, tbf: &Tbf) -> Result<()> {
        self.create_qdisc(index, QdiscParent::Root, tbf_options(tbf))
    }

    /// Attaches the `ingress` qdisc, whose filters apply to what an interface receives.
    ///
    /// # Errors
    /// [`Error::is_exists`] if the interface has one already.
    pub fn create_ingress(&self, index: u32) -> Result<()> {
        self.create_qdisc(index, QdiscParent::Ingress, Vec::new())
    }

    /// Creates the qdisc of this place. `options` are its encoded attributes.
    fn create_qdisc(&self, index: u32, place: QdiscParent, options: Vec<u8>) -> Result<()> {
        let mut message = Traffic::new(index, place.handle(), place.parent()).kind(place.kind());
        message.attributes.extend(options);
        self.control(Kind::NewQdisc, &message, NLM_F_CREATE | NLM_F_EXCL, |link| {
            format!("failed to add qdisc {} to {link}", place.kind())
        })
    }

    /// Removes the qdisc that [`create_tbf`](Netlink::create_tbf) or
    /// [`create_ingress`](Netlink::create_ingress) has attached, and its filters. Does nothing if
    /// there is none. Leaves a qdisc of another kind.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn purge_qdisc(&self, index: u32, place: QdiscParent) -> Result<()> {
        let message = Traffic::new(index, place.handle(), place.parent()).kind(place.kind());
        let deleted = self.control(Kind::DelQdisc, &message, 0, |link| {
            format!("failed to remove qdisc {} from {link}", place.kind())
        });
        match deleted {
            // EINVAL: the qdisc has another handle or is of another kind.
            Err(error) if error.is_not_found() || error.errno() == Some(libc::EINVAL) => Ok(()),
            outcome => outcome,
        }
    }

    /// Adds a filter that redirects everything that an interface receives to the sending side of
    /// the interface `to`. The interface must have the `ingress` qdisc.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn create_redirect(&self, index: u32, to: u32) -> Result<()> {
        const PRIORITY: u32 = 1;
        let protocol = u16::try_from(libc::ETH_P_ALL).unwrap_or_default().to_be();
        let mut message = Traffic::new(index, 0, INGRESS_HANDLE).kind("u32");
        message.info = PRIORITY << 16 | u32::from(protocol);
        message.attributes.extend(new_nest(TCA_OPTIONS, &redirect_options(to)));
        self.control(Kind::NewFilter, &message, NLM_F_CREATE | NLM_F_EXCL, |link| {
            format!("failed to redirect the traffic that {link} receives to {}", self.label(to))
        })
    }

    /// Returns the actions of the filters of an interface's `ingress` qdisc, in order. A
    /// redirection to an interface that does not exist any more has the index 0.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn list_filters(&self, index: u32) -> Result<Vec<Filter>> {
        let filters = self
            .dump(Kind::GetFilter, &Traffic::new(index, 0, INGRESS_HANDLE))
            .map_err(|cause| Error::new(format_args!("failed to list the filters of {}", self.label(index)), cause))?;
        let filters = filters.iter().filter_map(|reply| reply.body(Kind::NewFilter));
        Ok(filters.flat_map(decode_filter).collect())
    }

    /// Sends a request. On failure, `doing` returns the beginning of the error message for the
    /// interface's name.
    fn control(&self, kind: Kind, message: &Traffic, flags: u16, doing: impl FnOnce(&str) -> String) -> Result<()> {
        match self.request(kind, message, flags) {
            Ok(_) => Ok(()),
            Err(cause) => Err(Error::new(doing(&self.label(message.index)), cause)),
        }
    }
}

/// A request of traffic control: `struct tcmsg` and attributes.
struct Traffic {
    index: u32,
    handle: u32,
    parent: u32,
    /// A filter's priority and protocol.
    info: u32,
    attributes: Vec<u8>,
}

/// The length of `struct tcmsg`.
const HEADER: usize = 20;

impl Traffic {
    /// Returns a request about a qdisc or filter of the interface `index`.
    fn new(index: u32, handle: u32, parent: u32) -> Traffic {
        Traffic { index, handle, parent, info: 0, attributes: Vec::new() }
    }

    /// Sets the kind of qdisc or filter.
    fn kind(mut self, kind: &str) -> Traffic {
        self.attributes.extend(new_attribute(TCA_KIND, format!("{kind}\0").as_bytes()));
        self
    }
}

impl Emitable for Traffic {
    fn buffer_len(&self) -> usize {
        HEADER + self.attributes.len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        let header = [0, self.index, self.handle, self.parent, self.info].map(u32::to_ne_bytes).concat();
        buffer.copy_from_slice(&[header, self.attributes.clone()].concat());
    }
}

impl Body for Traffic {
    fn words(&self) -> Vec<String> {
        let kind = attribute(&self.attributes, TCA_KIND).map(text);
        kind.into_iter().chain([format!("dev index {}", self.index)]).collect()
    }
}

/// Encodes the options of a token bucket filter.
fn tbf_options(tbf: &Tbf) -> Vec<u8> {
    // `struct tc_tbf_qopt`: the specifications of the rate and of the peak rate, three numbers each
    // with the rate last; then limit, buffer and MTU.
    let rate = u32::try_from(tbf.rate);
    let numbers = [0, 0, rate.unwrap_or(u32::MAX), 0, 0, 0, tbf.limit, tbf.buffer, 0];
    let mut options = new_attribute(TCA_TBF_PARMS, &numbers.map(u32::to_ne_bytes).concat());
    // A rate of more than 32 bits has an attribute of its own.
    if rate.is_err() {
        options.extend(new_attribute(TCA_TBF_RATE64, &tbf.rate.to_ne_bytes()));
    }
    new_nest(TCA_OPTIONS, &options)
}

/// Encodes the options of a `u32` filter that matches every packet and redirects it to the
/// interface `to`.
fn redirect_options(to: u32) -> Vec<u8> {
    const TC_U32_TERMINAL: u8 = 1;
    const TC_ACT_STOLEN: u32 = 4;
    const CLASS: u32 = 0x1_0001;
    // `struct tc_u32_sel` with one key, whose mask 0 matches every packet.
    let mut selector = [0; 32];
    (selector[0], selector[2]) = (TC_U32_TERMINAL, 1);
    // `struct tc_mirred`: index, capabilities, the packet's fate (stolen), two counters, the kind
    // of redirection, the other interface.
    let parameters = [0, 0, TC_ACT_STOLEN, 0, 0, TCA_EGRESS_REDIR, to].map(u32::to_ne_bytes).concat();
    let action =
        [new_attribute(TCA_KIND, b"mirred\0"), new_nest(TCA_OPTIONS, &new_attribute(TCA_MIRRED_PARMS, &parameters))];
    [
        new_attribute(TCA_U32_CLASSID, &CLASS.to_ne_bytes()),
        new_attribute(TCA_U32_SEL, &selector),
        new_nest(TCA_U32_ACT, &new_nest(1, &action.concat())),
    ]
    .concat()
}

/// Decodes the 32-bit number at this position.
fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

/// Decodes an answer about a qdisc. Returns `None` for the kernel's default qdisc.
fn decode(reply: &Reply) -> Option<Qdisc> {
    let body = reply.body(Kind::NewQdisc)?;
    let attributes = body.get(HEADER..)?;
    // The handle in `struct tcmsg`, which is 0 for the default.
    if number(body, 8) == Some(0) {
        return None;
    }
    let kind = text(attribute(attributes, TCA_KIND)?);
    let tbf = if kind == "tbf" { attribute(attributes, TCA_OPTIONS).and_then(decode_tbf) } else { None };
    Some(Qdisc { kind, tbf })
}

/// Decodes the options of a token bucket filter; see [`tbf_options`].
fn decode_tbf(options: &[u8]) -> Option<Tbf> {
    let numbers = attribute(options, TCA_TBF_PARMS)?;
    let rate64 = attribute(options, TCA_TBF_RATE64).and_then(|bytes| bytes.first_chunk().copied());
    let rate = match rate64 {
        Some(bytes) => u64::from_ne_bytes(bytes),
        None => number(numbers, 8)?.into(),
    };
    Some(Tbf { rate, limit: number(numbers, 24)?, buffer: number(numbers, 28)? })
}

/// Decodes the actions of a filter. Returns none for a message about the hash table of `u32`
/// filters.
fn decode_filter(body: &[u8]) -> Vec<Filter> {
    let all = body.get(HEADER..).unwrap_or_default();
    let Some(options) = attribute(all, TCA_OPTIONS) else { return Vec::new() };
    if attribute(all, TCA_KIND).is_none_or(|kind| text(kind) != "u32") {
        return vec![Filter::Other];
    }
    if attribute(options, TCA_U32_SEL).is_none() {
        return Vec::new();
    }
    let mut filters = Vec::new();
    for (_, action) in attributes(attribute(options, TCA_U32_ACT).unwrap_or_default()) {
        filters.push(redirect_target(action).map_or(Filter::Other, Filter::Redirect));
    }
    if filters.is_empty() {
        filters.push(Filter::Other);
    }
    filters
}

/// Returns the interface to which an action redirects, or `None` for another action; see
/// [`redirect_options`].
fn redirect_target(action: &[u8]) -> Option<u32> {
    if text(attribute(action, TCA_KIND)?) != "mirred" {
        return None;
    }
    let parameters = attribute(attribute(action, TCA_OPTIONS)?, TCA_MIRRED_PARMS)?;
    if number(parameters, 20)? == TCA_EGRESS_REDIR { number(parameters, 24) } else { None }
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
    fn another_kind_of_qdisc_is_seen_and_stays() {
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
    fn what_is_received_is_redirected_until_the_target_goes() {
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
        let options = tbf_options(&Tbf { rate: 1, limit: 2, buffer: 3 });
        let mut body = Traffic::new(7, ROOT_HANDLE, TC_H_ROOT).kind("tbf");
        body.attributes.extend(options);
        let bytes = crate::netlink::wire::emitted(&body);
        let whole = decode(&Reply::new(Kind::NewQdisc, &bytes)).unwrap();
        assert_eq!(whole.tbf, Some(Tbf { rate: 1, limit: 2, buffer: 3 }));
        let filter =
            [vec![0; HEADER], new_attribute(TCA_KIND, b"u32\0"), new_nest(TCA_OPTIONS, &redirect_options(9))].concat();
        assert_eq!(decode_filter(&filter), [Filter::Redirect(9)]);
        for end in 0..bytes.len().max(filter.len()) {
            let _ = decode(&Reply::new(Kind::NewQdisc, bytes.get(..end).unwrap_or(&bytes)));
            let _ = decode_filter(filter.get(..end).unwrap_or(&filter));
        }
    }
}
