//! The backend firewalld: adds a container's addresses to a zone as sources.
//!
//! As with Go, the sources are only in firewalld's running configuration, which firewalld loses
//! when it stops. firewalld does not record owners. [`cni_firewall::forward::sources`] has a record
//! of an address's owner from before the address is added until after it is removed.

use std::fmt;
use std::net::IpAddr;

use cni::AttachmentId;
use cni::machine::{Machine, OnSigterm};
use cni::{Cidr, Code, Error, Result};
use cni_firewall::AttachmentFilter;
use cni_firewall::forward::sources;

/// The D-Bus methods of firewalld's zones that the plugin calls.
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
    /// Returns the method's name on the bus.
    pub fn name(self) -> &'static str {
        match self {
            Method::Add => "addSource",
            Method::Remove => "removeSource",
            Method::Query => "querySource",
        }
    }
}

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// There is no system bus.
    #[error("{0}")]
    NoBus(String),
    /// firewalld, or the bus if firewalld does not run, refused the call with this text.
    #[error("{0}")]
    Refused(String),
    /// The bus or firewalld cannot be reached, or did not answer.
    #[error("{0}")]
    Unreachable(String),
}

impl Failure {
    /// Whether firewalld's text contains its error code `code`, such as `ZONE_CONFLICT`.
    fn has_firewalld_code(&self, code: &str) -> bool {
        matches!(self, Failure::Refused(text) if text.contains(code))
    }

    /// Returns the CNI error code for the failure.
    fn code(&self) -> Code {
        match self {
            // The bus's answer if firewalld does not run and cannot be started.
            Failure::Refused(text) if text.contains("not provided by any") => Code::TRY_AGAIN,
            failure if failure.has_firewalld_code("INVALID_ZONE") => Code::INVALID_CONFIG,
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
    /// Whether firewalld runs. Never starts it.
    ///
    /// # Errors
    /// If the bus does not answer.
    fn is_running(&self) -> std::result::Result<bool, Failure>;

    /// Calls a method for a source of a zone. Returns the answer to [`Method::Query`], or `true`
    /// for the other methods. If firewalld does not run, the bus may start it.
    ///
    /// # Errors
    /// If firewalld refuses or does not answer.
    fn call(&self, method: Method, zone: &str, source: IpAddr) -> std::result::Result<bool, Failure>;
}

/// Returns the address in the form that these plugins and Go's send to firewalld: with /32 or /128.
pub fn source_text(address: IpAddr) -> String {
    Cidr::host(address).to_string()
}

/// A zone of firewalld.
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

/// What an ADD has done, for its undo. [`Zone::add`] fills it in, even on an error.
#[derive(Debug, Default)]
pub(crate) struct AddedSources {
    /// Whether addresses may have been added or recorded. If so, the caller owes an
    /// [`undo`](Zone::undo) if its ADD fails.
    pub(crate) changed: bool,
    /// Whether the attachment, or one without a DEL that had one of the addresses, was recorded
    /// before.
    pub(crate) replaced: bool,
    /// The addresses that already were sources of a zone, without a record: the administrator, or
    /// the Go plugin, has added them.
    foreign: Vec<IpAddr>,
}

impl<'m> Zone<'m> {
    /// Connects to the system bus.
    fn connect(&self, on_sigterm: OnSigterm) -> std::result::Result<Box<dyn Firewalld + 'm>, Failure> {
        crate::bus::open(self.machine, on_sigterm)
    }

    /// Connects to firewalld; `None` if firewalld or the system bus does not run.
    fn connect_if_running(&self, on_sigterm: OnSigterm) -> Result<Option<Box<dyn Firewalld + 'm>>> {
        let firewalld = match self.connect(on_sigterm) {
            Err(Failure::NoBus(_)) => return Ok(None),
            result => result?,
        };
        Ok(firewalld.is_running()?.then_some(firewalld))
    }

    /// Whether firewalld runs.
    pub(crate) fn is_running(&self) -> Result<bool> {
        Ok(self.connect_if_running(OnSigterm::Kill)?.is_some())
    }

    /// Makes exactly `addresses` the attachment's sources: adds them to the zone, and removes the
    /// stale ones of an earlier ADD.
    pub(crate) fn add(&self, attachment: &AttachmentId, addresses: &[IpAddr], added: &mut AddedSources) -> Result<()> {
        let recorded = sources::find(AttachmentFilter::one(attachment))?;
        let is_unrecorded = |address: &IpAddr| !recorded.own.contains(address);
        let stale: Vec<IpAddr> = recorded.own.iter().copied().filter(|address| !addresses.contains(address)).collect();
        let firewalld = self.connect(OnSigterm::Kill)?;
        added.changed |= addresses.iter().any(is_unrecorded);
        // The stale addresses stay recorded until they are removed.
        match sources::record(attachment, &[addresses, &stale].concat()) {
            // Without nf_tables there are no records: DEL then needs prevResult, as with Go.
            Err(error) if error.is_unsupported() => {}
            result => added.replaced = result?,
        }
        for address in addresses {
            let Err(failure) = firewalld.call(Method::Add, &self.name, *address) else { continue };
            let is_in_this_zone = failure.has_firewalld_code("ZONE_ALREADY_SET");
            if is_unrecorded(address) && (is_in_this_zone || failure.has_firewalld_code("ZONE_CONFLICT")) {
                added.foreign.push(*address);
            }
            if !is_in_this_zone {
                let doing = format!("failed to add the address {} to {} zone", source_text(*address), self.name);
                return Err(Error::from(failure).context(doing));
            }
        }
        if stale.is_empty() {
            return Ok(());
        }
        // An address that another attachment also has stays.
        for address in stale.iter().filter(|address| !recorded.others.contains(address)) {
            self.remove(&*firewalld, *address, ZoneSelection::Any)?;
        }
        sources::record(attachment, addresses)?;
        Ok(())
    }

    /// Removes from firewalld the recorded addresses of the selected attachments, and `addresses`,
    /// which may be unrecorded sources of the Go plugin. Addresses that another attachment has
    /// stay. Then removes the records of the selected attachments. Returns the unrecorded addresses
    /// that were removed.
    pub(crate) fn purge(&self, selection: AttachmentFilter<'_>, addresses: &[IpAddr]) -> Result<Vec<IpAddr>> {
        self.purge_except(selection, addresses, &[])
    }

    /// Removes the attachment's sources and records for an ADD of `addresses` that fails. Sources
    /// that another program had added before the ADD stay.
    pub(crate) fn undo(&self, attachment: &AttachmentId, addresses: &[IpAddr], added: &AddedSources) -> Result<()> {
        // On a kernel without nf_tables, the addresses are not recorded.
        self.purge_except(AttachmentFilter::one(attachment), addresses, &added.foreign).map(drop)
    }

    /// Does [`purge`](Zone::purge), but leaves the `kept` addresses in firewalld.
    fn purge_except(
        &self,
        selection: AttachmentFilter<'_>,
        addresses: &[IpAddr],
        kept: &[IpAddr],
    ) -> Result<Vec<IpAddr>> {
        let recorded = sources::find(selection)?;
        let stays = |address: &IpAddr| recorded.others.contains(address) || kept.contains(address);
        if recorded.own.is_empty() && addresses.is_empty() {
            return Ok(Vec::new());
        }
        let (mut unrecorded, mut errors) = (Vec::new(), Vec::new());
        // If firewalld does not run, it has no sources, and only the records are removed.
        if let Some(firewalld) = self.connect_if_running(OnSigterm::Finish)? {
            for address in recorded.own.iter().filter(|address| !stays(address)) {
                errors.extend(self.remove(&*firewalld, *address, ZoneSelection::Any).err());
            }
            for address in addresses {
                if recorded.own.contains(address) || stays(address) {
                    continue;
                }
                match self.remove(&*firewalld, *address, ZoneSelection::This) {
                    Ok(true) => unrecorded.push(*address),
                    Ok(false) => {}
                    Err(error) => errors.push(error),
                }
            }
        }
        // On failure the records stay, so that the next DEL or GC tries again.
        Error::join(errors)?;
        if !recorded.own.is_empty() {
            sources::forget(selection)?;
        }
        Ok(unrecorded)
    }

    /// Removes a source from the selected zones. Returns `false` if the source was in none of them.
    fn remove(&self, firewalld: &dyn Firewalld, address: IpAddr, zones: ZoneSelection) -> Result<bool> {
        let is_not_in_zone = |failure: &Failure| {
            failure.has_firewalld_code("ZONE_CONFLICT") || failure.has_firewalld_code("INVALID_ZONE")
        };
        let mut answer = firewalld.call(Method::Remove, &self.name, address);
        if zones == ZoneSelection::Any && answer.as_ref().is_err_and(is_not_in_zone) {
            // firewalld takes the empty name for the zone that has the source.
            answer = firewalld.call(Method::Remove, "", address);
        }
        match answer {
            Ok(_) => Ok(true),
            Err(failure) if failure.has_firewalld_code("UNKNOWN_SOURCE") || is_not_in_zone(&failure) => Ok(false),
            Err(failure) => {
                let doing = format!("failed to remove the address {} from {} zone", source_text(address), self.name);
                Err(Error::from(failure).context(doing))
            }
        }
    }

    /// Returns a sentence for each address that is not a source of the zone; empty if all are.
    pub(crate) fn check(&self, addresses: &[IpAddr]) -> Result<Vec<String>> {
        let firewalld = self.connect(OnSigterm::Kill)?;
        let mut missing = Vec::new();
        for address in addresses {
            let sentence = format!("failed to find the address {} in {} zone", source_text(*address), self.name);
            match firewalld.call(Method::Query, &self.name, *address) {
                Ok(true) => {}
                Ok(false) => missing.push(sentence),
                Err(Failure::Refused(text)) => missing.push(format!("{sentence}: {text}")),
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(missing)
    }

    /// Checks that [`add`](Zone::add) can work: firewalld runs and has the zone.
    pub(crate) fn probe(&self) -> Result<()> {
        let firewalld = self.connect(OnSigterm::Kill)?;
        if !firewalld.is_running()? {
            return Err(Error::new(
                Code::TRY_AGAIN,
                "firewalld is not running: start it, or choose another \"backend\"",
            ));
        }
        // The query fails if firewalld does not know the zone. The answer does not matter: the
        // address is reserved for documentation.
        let any_address = IpAddr::from([192, 0, 2, 1]);
        firewalld.call(Method::Query, &self.name, any_address).map(drop).map_err(|failure| {
            let doing = format!("firewalldZone: failed to query {} zone of firewalld", self.name);
            Error::from(failure).context(doing)
        })
    }
}

/// The zones that [`Zone::remove`] removes a source from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ZoneSelection {
    /// Only this zone: a source in another zone may be the administrator's.
    This,
    /// This zone or, if the source is not in this zone, the one that has the source. For recorded
    /// sources: since the ADD, the configured zone may have changed, or the administrator may have
    /// moved the source.
    Any,
}
