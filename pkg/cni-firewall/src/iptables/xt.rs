//! Declares the structures of the xtables matches and targets that plugins write, for reading and
//! writing.
//!
//! The structures consist of bytes and numbers of fixed size, so each field has the same offset on
//! every processor. Only the padding after the last field differs ([`ALIGN`]).

use std::mem::size_of;

/// A match or target of xtables, with the size of its structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extension {
    pub(super) name: &'static str,
    pub(super) revision: u32,
    pub(super) size: usize,
}

/// Describes the match or target with the structure `T`.
const fn extension<T>(name: &'static str, revision: u32) -> Extension {
    Extension { name, revision, size: size_of::<T>() }
}

/// The alignment of structures: the kernel and iptables round the size of each up to a multiple of
/// this, except on 32-bit x86.
pub(super) const ALIGN: usize = 8;
/// The maximum number of ports in a multiport match.
pub(super) const PORTS_MAX: usize = 15;

/// The `kind` of a [`Multiport`] match of destination ports.
pub(super) const MULTIPORT_DESTINATION: u8 = 1;

pub(super) const COMMENT: Extension = extension::<[u8; 256]>("comment", 0);
pub(super) const MULTIPORT: Extension = extension::<Multiport>("multiport", 1);
pub(super) const ADDRTYPE: Extension = extension::<Addrtype>("addrtype", 1);
pub(super) const MARK: Extension = extension::<Mark>("mark", 1);
pub(super) const CONNTRACK: Extension = extension::<Conntrack>("conntrack", 3);
pub(super) const TCP: Extension = extension::<Tcp>("tcp", 0);
pub(super) const UDP: Extension = extension::<Udp>("udp", 0);
pub(super) const SCTP: Extension = extension::<Sctp>("sctp", 0);
pub(super) const MASQUERADE_V4: Extension = extension::<NatV4>("MASQUERADE", 0);
pub(super) const MASQUERADE_V6: Extension = extension::<Range>("MASQUERADE", 0);
/// Revision 2, because iptables-nft reads every DNAT target as the newest revision that it and the
/// kernel have.
pub(super) const DNAT: Extension = extension::<Range2>("DNAT", 2);
pub(super) const SET_MARK: Extension = extension::<SetMark>("MARK", 2);

/// Declares structures with C's layout, and checks that each has the size (`= N`) that it has in
/// the kernel.
macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident = $size:literal { $($(#[$about:meta])* $field:ident: $kind:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[allow(dead_code, reason = "only the offsets of its fields are used")]
        pub(super) struct $name { $($(#[$about])* pub(super) $field: $kind),* }

        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

structures! {
    /// `struct xt_multiport_v1`
    Multiport = 48 {
        /// The ports that are compared: 0 source, 1 destination, 2 either.
        kind: u8,
        count: u8,
        ports: [u16; PORTS_MAX],
        /// By port: 1 if the next port is the end of a range that begins here.
        begins_range: [u8; PORTS_MAX],
        invert: u8,
    }
    /// `struct xt_addrtype_info_v1`: sets of bits by route type.
    Addrtype = 8 { source: u16, destination: u16, flags: u32 }
    /// `struct xt_mark_mtinfo1`
    Mark = 12 { value: u32, mask: u32, invert: u8 }
    /// `struct xt_conntrack_mtinfo3`, which begins as `xt_conntrack_mtinfo2`.
    Conntrack = 164 {
        addresses: [[u8; 16]; 8],
        expiry: [u32; 2],
        protocol: u16,
        ports: [u16; 4],
        matched: u16,
        inverted: u16,
        states: u16,
        status: u16,
        last_ports: [u16; 4],
    }
    /// `struct xt_tcp`; ports are the first and the last of a range.
    Tcp = 12 { source_ports: [u16; 2], destination_ports: [u16; 2], option: u8, flag_mask: u8, flags: u8, invert: u8 }
    /// `struct xt_udp`
    Udp = 10 { source_ports: [u16; 2], destination_ports: [u16; 2], invert: u8 }
    /// `struct xt_sctp_info`
    Sctp = 292 {
        destination_ports: [u16; 2],
        source_ports: [u16; 2],
        chunks: [u32; 64],
        chunk_match: u32,
        chunk_flags: [[u8; 3]; 4],
        chunk_flag_count: i32,
        /// The set of compared fields: 2 for the destination ports.
        matched: u32,
        invert: u32,
    }
    /// `struct nf_nat_ipv4_multi_range_compat`, with one range.
    NatV4 = 20 { count: u32, flags: u32, first: [u8; 4], last: [u8; 4], first_port: [u8; 2], last_port: [u8; 2] }
    /// `struct nf_nat_range`
    Range = 40 { flags: u32, first: [u8; 16], last: [u8; 16], first_port: [u8; 2], last_port: [u8; 2] }
    /// `struct nf_nat_range2`, which begins as [`Range`].
    Range2 = 44 {
        flags: u32,
        first: [u8; 16],
        last: [u8; 16],
        first_port: [u8; 2],
        last_port: [u8; 2],
        base_port: [u8; 2],
    }
    /// `struct xt_mark_tginfo2`
    SetMark = 8 { value: u32, mask: u32 }
}
