//! A lease that a server has granted, and its times.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::message::LeaseParameters;

/// A lease: its parameters, and the time of its request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The lease's parameters, as the server granted them.
    pub terms: LeaseParameters,
    /// When the request was sent. According to RFC 2131, the lease time begins then.
    pub since: Duration,
}

impl Lease {
    /// Returns the time that is this many seconds after the request. Returns `Duration::MAX` for a
    /// lease that never ends (a lease time of `u32::MAX`).
    fn after(&self, seconds: u32) -> Duration {
        if self.terms.seconds == u32::MAX {
            Duration::MAX
        } else {
            self.since.saturating_add(Duration::from_secs(seconds.into()))
        }
    }

    /// Returns the time from which the client asks its server to extend the lease.
    pub fn t1(&self) -> Duration {
        self.after(self.terms.t1)
    }

    /// Returns the time from which the client asks all servers to extend the lease.
    pub fn t2(&self) -> Duration {
        self.after(self.terms.t2)
    }

    /// Returns the time from which the address must not be used.
    pub fn expiry(&self) -> Duration {
        self.after(self.terms.seconds)
    }
}
