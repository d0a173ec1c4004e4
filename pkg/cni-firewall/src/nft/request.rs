//! Builds the requests of nf_tables: a type, a family and attributes, whose numbers are those of
//! `linux/netfilter/nf_tables.h`. Numbers are big-endian.

use cni_linux::netlink::wire::{new_attribute, new_nest};

use super::{Family, NFNL_SUBSYS_NFTABLES, Table, userdata};

/// The type of a request (`NFT_MSG_*`).
#[derive(Clone, Copy, Debug)]
pub(super) enum RequestType {
    NewTable = 0,
    GetTable = 1,
    #[cfg(test)]
    DeleteTable = 2,
    NewChain = 3,
    GetChain = 4,
    DeleteChain = 5,
    NewRule = 6,
    GetRule = 7,
    DeleteRule = 8,
    NewSet = 9,
    DeleteSet = 11,
    NewElement = 12,
    GetElement = 13,
    DeleteElement = 14,
    GetGeneration = 16,
}

/// A request.
#[derive(Debug)]
pub(super) struct Request {
    /// The type of its netlink message.
    pub(super) kind: u16,
    /// What follows the netlink header: `struct nfgenmsg` and the attributes.
    pub(super) body: Vec<u8>,
    /// Whether a comment and tags were left out because they are longer than the kernel stores.
    pub(super) lacks_userdata: bool,
}

impl Request {
    /// Returns a request without attributes.
    pub(super) fn new(kind: RequestType, family: Family) -> Request {
        Request::of_subsystem(NFNL_SUBSYS_NFTABLES, kind as u16, family)
    }

    /// Returns a request without attributes to a subsystem of netfilter; `kind` is its type there.
    pub(super) fn of_subsystem(subsystem: u16, kind: u16, family: Family) -> Request {
        // Family, version 0, resource id 0.
        Request { kind: subsystem << 8 | kind, body: vec![family as u8, 0, 0, 0], lacks_userdata: false }
    }

    /// Returns a request about a table, or about something in it: the first attribute is the
    /// table's name.
    pub(super) fn in_table(kind: RequestType, table: Table<'_>) -> Request {
        Request::new(kind, table.family).text(1, table.name)
    }

    /// Adds an attribute with the handle of a rule or chain.
    pub(super) fn handle(mut self, number: u16, handle: u64) -> Request {
        self.body.extend(new_attribute(number, &handle.to_be_bytes()));
        self
    }

    /// Adds an attribute whose value is a list of attributes.
    pub(super) fn nest(mut self, number: u16, attributes: &[u8]) -> Request {
        self.body.extend(new_nest(number, attributes));
        self
    }

    /// Adds an attribute with a text.
    pub(super) fn text(mut self, number: u16, text: &str) -> Request {
        self.body.extend(text_attribute(number, text));
        self
    }

    /// Adds an attribute with a number.
    pub(super) fn number(mut self, number: u16, value: u32) -> Request {
        self.body.extend(number_attribute(number, value));
        self
    }

    /// Adds an attribute with the comment and the tags of an object, if it has any.
    pub(super) fn userdata(mut self, number: u16, comment: Option<&str>, tags: &[(u8, Vec<u8>)]) -> Request {
        match userdata::encode(comment, tags) {
            Some(bytes) if bytes.is_empty() => {}
            Some(bytes) => self.body.extend(new_attribute(number, &bytes)),
            None => self.lacks_userdata = true,
        }
        self
    }

    /// Adds the attribute of an element that has this address.
    pub(super) fn element(self, address: std::net::IpAddr) -> Request {
        let key = new_nest(1, &constant_attribute(1, &cni::cidr::octets(address)));
        self.nest(3, &key)
    }
}

/// Returns an attribute with a text.
pub(super) fn text_attribute(number: u16, text: &str) -> Vec<u8> {
    new_attribute(number, &[text.as_bytes(), &[0]].concat())
}

/// Returns an attribute with a number.
pub(super) fn number_attribute(number: u16, value: u32) -> Vec<u8> {
    new_attribute(number, &value.to_be_bytes())
}

/// Returns an attribute with a constant, which is itself an attribute (`NFTA_DATA_VALUE`).
pub(super) fn constant_attribute(number: u16, value: &[u8]) -> Vec<u8> {
    new_nest(number, &new_attribute(1, value))
}
