//! The backend firewalld: a container's addresses are sources of a zone.
//!
//! firewalld keeps them in its running configuration alone, as with Go, and does not know whose
//! they are. That is recorded beside it ([`cni_firewall::forward::sources`]): before an address is
//! added, until it has been removed.

use std::cell::RefCell;
use std::fmt;
use std::net::IpAddr;

use cni::AttachmentId;
use cni::machine::{Machine, OnSigterm};
use cni::{Cidr, Code, Error, Result};
use cni_firewall::forward::sources::{self, AttachmentFilter};

/// The methods of a zone that are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `addSource`
    Add,
    /// `removeSource`
    Remove,
    /// `querySource`
    Query,
}

impl Method {
    /// Its name on the bus.
    pub fn name(self) -> &'static str {
        match self {
            Method::Add => "addSource",
            Method::Remove => "removeSource",
            Method::Query => "querySource",
        }
    }
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// There is no system bus.
    #[error("{0}")]
    NoBus(String),
    /// firewalld, or the bus in its place, refused; in its words.
    #[error("{0}")]
    Refused(String),
    /// The bus or firewalld cannot be reached, or did not answer.
    #[error("{0}")]
    Unreachable(String),
}

impl Failure {
    /// Whether firewalld's code is this one, `ZONE_CONFLICT` for example.
    fn has_code(&self, code: &str) -> bool {
        matches!(self, Failure::Refused(text) if text.contains(code))
    }

    fn code(&self) -> Code {
        match self {
            Failure::Refused(text) if text.contains("not provided by any") => Code::TRY_AGAIN,
            failure if failure.has_code("INVALID_ZONE") => Code::INVALID_CONFIG,
            Failure::Refused(_) => Code::KERNEL,
            Failure::NoBus(_) | Failure::Unreachable(_) => Code::TRY_AGAIN,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::new(failure.code(), failure.to_string())
    }
}

/// A connection to firewalld.
pub trait Firewalld {
    /// Whether it runs. Never starts it.
    ///
    /// # Errors
    /// The bus did not answer.
    fn is_running(&self) -> std::result::Result<bool, Failure>;

    /// Calls a method; what [`Method::Query`] answers. Starts firewalld where the bus knows how to.
    ///
    /// # Errors
    /// What firewalld said, or that it did not answer.
    fn call(&self, method: Method, zone: &str, source: IpAddr) -> std::result::Result<bool, Failure>;
}

/// An address as firewalld is given it, by Go too.
pub fn host(address: IpAddr) -> String {
    Cidr::host(address).to_string()
}

/// A zone, and the way to it.
#[derive(Clone)]
pub(crate) struct Zone<'m> {
    pub(crate) machine: &'m dyn Machine,
    pub(crate) name: String,
}

impl fmt::Debug for Zone<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Zone").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The sources that a zone had, and the changes of an ADD, so that a failed ADD undoes only its own
/// changes.
#[derive(Debug, Default)]
pub(crate) struct PreviousZones {
    recorded: RefCell<Vec<IpAddr>>,
    added: RefCell<Vec<IpAddr>>,
}

impl<'m> Zone<'m> {
    fn bus(&self, on_sigterm: OnSigterm) -> std::result::Result<Box<dyn Firewalld + 'm>, Failure> {
        crate::bus::open(self.machine, on_sigterm)
    }

    /// The connection, if firewalld runs.
    fn running(&self, on_sigterm: OnSigterm) -> Result<Option<Box<dyn Firewalld + 'm>>> {
        let bus = match self.bus(on_sigterm) {
            Err(Failure::NoBus(_)) => return Ok(None),
            bus => bus?,
        };
        Ok(bus.is_running()?.then_some(bus))
    }

    pub(crate) fn is_running(&self) -> Result<bool> {
        Ok(self.running(OnSigterm::Kill)?.is_some())
    }

    /// Makes these the attachment's sources of the zone.
    pub(crate) fn add(&self, mark: &AttachmentId, addresses: &[IpAddr], former: &PreviousZones) -> Result<()> {
        let known = sources::find(AttachmentFilter::Of(mark))?;
        former.recorded.replace(known.own.clone());
        let stale: Vec<IpAddr> = known.own.into_iter().filter(|one| !addresses.contains(one)).collect();
        let bus = self.bus(OnSigterm::Kill)?;
        match sources::record(mark, &[addresses, &stale].concat()) {
            // Then only prevResult knows them, as with Go.
            Err(error) if error.is_unsupported() => {}
            done => done?,
        }
        for address in addresses {
            former.added.borrow_mut().push(*address);
            match bus.call(Method::Add, &self.name, *address) {
                Err(failure) if failure.has_code("ZONE_ALREADY_SET") => {
                    former.added.borrow_mut().pop();
                }
                done => {
                    done.map_err(|failure| {
                        let doing = format!("failed to add the address {} to {} zone", host(*address), self.name);
                        Error::from(failure).context(doing)
                    })?;
                }
            }
        }
        if stale.is_empty() {
            return Ok(());
        }
        for address in stale.iter().filter(|address| !known.others.contains(address)) {
            self.remove(&*bus, *address, Recorded::Yes)?;
        }
        Ok(sources::record(mark, addresses)?)
    }

    /// Undoes an [`add`](Zone::add), complete or not.
    pub(crate) fn put_back(&self, mark: &AttachmentId, former: &PreviousZones) -> Result<()> {
        let (recorded, added) = (former.recorded.take(), former.added.take());
        let known = sources::find(AttachmentFilter::Of(mark))?;
        if added.is_empty() && known.own.iter().all(|one| recorded.contains(one)) {
            return Ok(());
        }
        if let Some(bus) = self.running(OnSigterm::Finish)? {
            for address in added.iter().filter(|one| !recorded.contains(one) && !known.others.contains(one)) {
                self.remove(&*bus, *address, Recorded::No)?;
            }
            for address in recorded.iter().filter(|one| !added.contains(one)) {
                match bus.call(Method::Add, &self.name, *address) {
                    Err(failure) if failure.has_code("ZONE_ALREADY_SET") || failure.has_code("ZONE_CONFLICT") => {}
                    done => drop(done?),
                }
            }
        }
        if recorded.is_empty() {
            Ok(sources::forget(AttachmentFilter::Of(mark))?)
        } else {
            Ok(sources::record(mark, &recorded)?)
        }
    }

    /// Removes what is recorded of the attachments, and the further `addresses`, unless another
    /// attachment has them. Returns those that firewalld had without a record: the Go plugin added
    /// them.
    pub(crate) fn purge(&self, whose: AttachmentFilter<'_>, addresses: &[IpAddr]) -> Result<Vec<IpAddr>> {
        let known = sources::find(whose)?;
        if known.own.is_empty() && addresses.is_empty() {
            return Ok(Vec::new());
        }
        let (mut unrecorded, mut errors) = (Vec::new(), Vec::new());
        // Sources do not outlive firewalld.
        if let Some(bus) = self.running(OnSigterm::Finish)? {
            for address in known.own.iter().filter(|one| !known.others.contains(one)) {
                errors.extend(self.remove(&*bus, *address, Recorded::Yes).err());
            }
            for address in addresses.iter().filter(|one| !known.own.contains(one) && !known.others.contains(one)) {
                match self.remove(&*bus, *address, Recorded::No) {
                    Ok(Removed::Yes) => unrecorded.push(*address),
                    done => errors.extend(done.err()),
                }
            }
        }
        // The records stay if a source does, so that the next DEL or GC finds it.
        Error::join(errors)?;
        if !known.own.is_empty() {
            sources::forget(whose)?;
        }
        Ok(unrecorded)
    }

    fn remove(&self, bus: &dyn Firewalld, address: IpAddr, recorded: Recorded) -> Result<Removed> {
        let mut answer = bus.call(Method::Remove, &self.name, address);
        let is_elsewhere = |failure: &Failure| failure.has_code("ZONE_CONFLICT") || failure.has_code("INVALID_ZONE");
        if recorded == Recorded::Yes && answer.as_ref().is_err_and(is_elsewhere) {
            // Removes it from the zone that has it: the configuration may have changed, or the
            // administrator may have moved it.
            answer = bus.call(Method::Remove, "", address);
        }
        match answer {
            Ok(_) => Ok(Removed::Yes),
            Err(failure) if failure.has_code("UNKNOWN_SOURCE") || is_elsewhere(&failure) => Ok(Removed::No),
            Err(failure) => {
                let doing = format!("failed to remove the address {} from {} zone", host(address), self.name);
                Err(Error::from(failure).context(doing))
            }
        }
    }

    /// Returns a sentence for each address that firewalld lacks.
    pub(crate) fn check(&self, addresses: &[IpAddr]) -> Result<Vec<String>> {
        let bus = self.bus(OnSigterm::Kill)?;
        let mut missing = Vec::new();
        for address in addresses {
            let lacks = format!("failed to find the address {} in {} zone", host(*address), self.name);
            match bus.call(Method::Query, &self.name, *address) {
                Ok(true) => {}
                Ok(false) => missing.push(lacks),
                Err(Failure::Refused(text)) => missing.push(format!("{lacks}: {text}")),
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(missing)
    }

    /// Whether addresses could be added.
    pub(crate) fn probe(&self) -> Result<()> {
        let bus = self.bus(OnSigterm::Kill)?;
        if !bus.is_running()? {
            return Err(Error::new(Code::TRY_AGAIN, "firewalld is not running"));
        }
        // An address that no container has: only the zone matters.
        bus.call(Method::Query, &self.name, IpAddr::from([192, 0, 2, 1])).map(drop).map_err(|failure| {
            let doing = format!("firewalldZone: firewalld does not answer for {} zone", self.name);
            Error::from(failure).context(doing)
        })
    }
}

/// Whether an address has a record.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Recorded {
    Yes,
    No,
}

/// Whether firewalld had an address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Removed {
    Yes,
    No,
}
