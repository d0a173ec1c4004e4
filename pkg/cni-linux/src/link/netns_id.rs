//! Asks for the ID by which one network namespace knows another one.

use std::os::fd::{AsFd as _, AsRawFd as _};

use netlink_packet_core::Emitable;

use super::Link;
use crate::error::{Error, Result};
use crate::netlink::wire::{attribute, new_attribute};
use crate::netlink::{Body, Kind, Netlink};
use crate::netns::Netns;

/// The attribute for the ID.
const NETNSA_NSID: u16 = 1;

/// The attribute for a descriptor of the other namespace.
const NETNSA_FD: u16 = 3;

/// The length of `struct rtgenmsg`, padded.
const HEADER: usize = 4;

/// A request for the ID of a namespace, encoded.
struct Request(Vec<u8>);

impl Emitable for Request {
    fn buffer_len(&self) -> usize {
        self.0.len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.0);
    }
}

impl Body for Request {
    fn describe(&self) -> Vec<String> {
        vec!["of a namespace".to_owned()]
    }
}

impl Netlink {
    /// Whether the other end of `link`, a link of this connection's namespace that the kernel has
    /// just returned, is in `netns`.
    pub fn is_end_in(&self, link: &Link, netns: &Netns) -> Result<bool> {
        // The kernel assigned the ID when it returned the link.
        Ok(link.peer_netnsid.is_some() && link.peer_netnsid == self.find_netns_id(netns)?)
    }

    /// Returns the ID that `other` has in this connection's namespace, which
    /// [`Link::peer_netnsid`](crate::Link::peer_netnsid) names; `None` if it has none.
    pub fn find_netns_id(&self, other: &Netns) -> Result<Option<i32>> {
        let descriptor = new_attribute(NETNSA_FD, &other.as_fd().as_raw_fd().to_ne_bytes());
        let request = Request([vec![0; HEADER], descriptor].concat());
        let reply = self.get(Kind::GetNetnsId, &request).map_err(|cause| {
            Error::new(format_args!("failed to look up the ID of {}", other.path().display()), cause)
        })?;
        let body = reply.as_ref().and_then(|reply| reply.body(Kind::NewNetnsId)?.get(HEADER..));
        let id = body.and_then(|body| attribute(body, NETNSA_NSID)?.first_chunk().copied().map(i32::from_ne_bytes));
        Ok(id.filter(|id| *id >= 0))
    }
}
