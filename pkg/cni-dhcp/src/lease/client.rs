//! What a client's protocol decides: the encoding of its messages. And the account of its search.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::message::{Ask, Client, Reply, v6};

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

    /// Returns the bytes of a message. `elapsed`: the time since the exchange began.
    ///
    /// # Errors
    /// An option of DHCPv4 is longer than 255 bytes.
    pub(super) fn write(&self, ask: Ask<'_>, xid: u32, elapsed: Duration) -> Result<Vec<u8>, String> {
        match self {
            Identity::V4(client) => client.write(ask, xid),
            Identity::V6(client) => {
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
