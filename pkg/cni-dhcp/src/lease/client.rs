//! What a client's protocol decides: its messages. And the account of its search.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Path, State};
use crate::message::{Ask, Client, LeaseParameters, Reply, Server, v4, v6};

/// The identity of a client, and with it the protocol. In a record, both have the fields of their
/// type only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Identity {
    /// A DHCPv4 client.
    V4(Client),
    /// A DHCPv6 client.
    V6(v6::Client),
}

impl Identity {
    /// Returns the hardware address of the client's interface.
    pub fn mac(&self) -> [u8; 6] {
        match self {
            Identity::V4(client) => client.mac,
            Identity::V6(client) => client.mac,
        }
    }

    /// Whether this is a DHCPv6 client.
    pub fn is_v6(&self) -> bool {
        matches!(self, Identity::V6(_))
    }

    /// Whether the client asks for other options than an address.
    pub(super) fn is_stateless(&self) -> bool {
        matches!(self, Identity::V6(client) if client.iaid.is_none())
    }

    /// Returns the bytes of a state's message. `elapsed`: the time since the state was entered.
    ///
    /// # Errors
    /// An option of DHCPv4 is longer than 255 bytes.
    pub(super) fn write(&self, state: &State, xid: u32, elapsed: Duration) -> Result<Vec<u8>, String> {
        match self {
            Identity::V4(client) => {
                let ask = match state {
                    State::Requesting(LeaseParameters { cidr, server: Server::Ipv4(server), .. }) => {
                        Ask::Select { address: v4(*cidr), server: *server }
                    }
                    State::Confirming(cidr) => Ask::Confirm { address: v4(*cidr) },
                    State::Renewing(lease) | State::Rebinding(lease) => Ask::Extend { address: lease.terms.address() },
                    // The others send nothing, or a DHCPv4 client does not enter them.
                    _ => Ask::Discover,
                };
                client.write(ask, xid)
            }
            Identity::V6(client) => {
                let ask = match state {
                    State::Requesting(offer) => v6::Ask::Request(offer),
                    State::Declining(terms) => v6::Ask::Decline(terms),
                    State::Renewing(lease) => v6::Ask::Renew(&lease.terms),
                    State::Rebinding(lease) => v6::Ask::Rebind(&lease.terms),
                    // The others send nothing, or a DHCPv6 client does not enter them.
                    _ => v6::Ask::Solicit,
                };
                let hundredths = elapsed.as_millis() / 10;
                Ok(client.write(ask, xid, u16::try_from(hundredths).unwrap_or(u16::MAX)))
            }
        }
    }

    /// Decodes a server's answer; see [`Client::read`] and [`v6::Client::read`].
    pub(super) fn read(&self, bytes: &[u8], xid: u32) -> Option<Reply> {
        match self {
            Identity::V4(client) => client.read(bytes, xid),
            Identity::V6(client) => client.read(bytes, xid),
        }
    }

    /// Returns the message that releases a lease, and its path.
    ///
    /// # Errors
    /// The client identifier of DHCPv4 is longer than 255 bytes, or the lease is not DHCPv4's.
    pub(super) fn release(&self, terms: &LeaseParameters, xid: u32) -> Result<(Vec<u8>, Path), String> {
        match (self, &terms.server) {
            (Identity::V4(client), Server::Ipv4(to)) => {
                let (from, to) = (terms.address(), *to);
                let bytes = client.write(Ask::Release { address: from, server: to }, xid)?;
                Ok((bytes, Path::Unicast { from, to }))
            }
            (Identity::V6(client), _) => Ok((client.write(v6::Ask::Release(terms), xid, 0), Path::Multicast)),
            (Identity::V4(_), Server::Duid(_)) => Err("a DHCPv4 lease has no DUID of a server".to_owned()),
        }
    }
}

/// What has happened during the search for the first lease.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Search {
    /// How many messages have been sent.
    pub(super) asked: u32,
    /// How many offers were received.
    pub(super) offers: u32,
    /// How many times a server has refused the address that it had offered.
    pub(super) refusals: u32,
    /// How many leased addresses another host had.
    pub(super) duplicates: u32,
}

impl Search {
    /// Describes a search that has found nothing within `total`.
    pub(super) fn failure(self, total: Duration) -> String {
        let Search { asked, offers, refusals, duplicates } = self;
        let declined = match duplicates {
            0 => String::new(),
            _ => format!(", {duplicates} declined because another host on the link has the address"),
        };
        let times = if asked == 1 { "1 message".to_owned() } else { format!("{asked} messages") };
        let seconds = total.as_secs_f64();
        match offers {
            0 => format!("no DHCP server answered: {times} sent in {seconds} s"),
            _ => format!(
                "no DHCP server granted a lease: {times} sent in {seconds} s, {offers} offers and {refusals} refusals received{declined}"
            ),
        }
    }
}
