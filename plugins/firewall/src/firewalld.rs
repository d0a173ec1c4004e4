//! The backend firewalld: adds a container's addresses to a zone as sources.
//!
//! As with Go, the sources are only in firewalld's running configuration, which firewalld loses
//! when it stops. firewalld does not record owners. [`cni_firewall::forward::sources`] has a record
//! of an address's owner from before the address is added until after it is removed.

use std::net::IpAddr;

use cni::AttachmentId;
use cni::machine::{Machine, OnSigterm};
use cni::{Code, Error, Result};
use cni_firewall::AttachmentFilter;
use cni_firewall::forward::sources;

use crate::bus::{ADD_SOURCE, Failure, Firewalld, QUERY_SOURCE, REMOVE_SOURCE, source_text};

/// A zone of firewalld.
pub(crate) struct Zone<'m> {
    pub(crate) machine: &'m dyn Machine,
    pub(crate) name: String,
}

/// What an ADD has done, for its undo by [`Zone::purge`]. [`Zone::add`] fills it in, even on an
/// error.
#[derive(Debug, Default)]
pub(crate) struct AddedSources {
    /// Whether addresses that the attachment had no record of may have been added or recorded. If
    /// so, the caller owes an undo if its ADD fails.
    pub(crate) changed: bool,
    /// Whether the attachment, or one without a DEL that had one of the addresses, was recorded
    /// before.
    pub(crate) replaced: bool,
    /// The addresses that already were sources of a zone, without a record: the administrator, or
    /// the Go plugin, has added them. The undo keeps them.
    pub(crate) foreign: Vec<IpAddr>,
}

impl<'m> Zone<'m> {
    /// Connects to firewalld; `None` if firewalld or the system bus does not run.
    fn connect_if_running(&self, on_sigterm: OnSigterm) -> Result<Option<Firewalld<'m>>> {
        let firewalld = match Firewalld::connect(self.machine, on_sigterm) {
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
    /// stale ones of an earlier ADD. Fills in `added`, even on an error. Fails if an address is a
    /// source of another zone.
    pub(crate) fn add(&self, attachment: &AttachmentId, addresses: &[IpAddr], added: &mut AddedSources) -> Result<()> {
        let recorded = sources::find(AttachmentFilter::one(attachment))?;
        let is_unrecorded = |address: &IpAddr| !recorded.selected.contains(address);
        let stale: Vec<IpAddr> = recorded.selected.iter().copied().filter(|old| !addresses.contains(old)).collect();
        let firewalld = Firewalld::connect(self.machine, OnSigterm::Kill)?;
        // Set before the first change, which may fail. If an earlier ADD has recorded all
        // addresses, the failure of this one does not remove them.
        added.changed |= addresses.iter().any(is_unrecorded);
        // The stale addresses stay recorded until they are removed.
        match sources::record(attachment, &[addresses, &stale].concat()) {
            // Without nf_tables there are no records: DEL then needs prevResult, as with Go.
            Err(error) if error.is_unsupported() => {}
            result => added.replaced = result?,
        }
        for address in addresses {
            let Err(failure) = firewalld.call(ADD_SOURCE, &self.name, *address) else { continue };
            // ZONE_ALREADY_SET: the address already is a source of this zone, which is not an
            // error. ZONE_CONFLICT: of another zone. Without a record, the undo must keep either.
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
            self.remove(&firewalld, *address, ZoneSelection::Any)?;
        }
        sources::record(attachment, addresses)?;
        Ok(())
    }

    /// Removes from firewalld the recorded addresses of the selected attachments, and `addresses`,
    /// which may be unrecorded sources of the Go plugin. Addresses that another attachment has, and
    /// those in `kept`, stay. Then removes the records of the selected attachments. Returns the
    /// unrecorded addresses that were removed.
    pub(crate) fn purge(
        &self,
        selection: AttachmentFilter<'_>,
        addresses: &[IpAddr],
        kept: &[IpAddr],
    ) -> Result<Vec<IpAddr>> {
        let recorded = sources::find(selection)?;
        let stays = |address: &IpAddr| recorded.others.contains(address) || kept.contains(address);
        if recorded.selected.is_empty() && addresses.is_empty() {
            return Ok(Vec::new());
        }
        let (mut unrecorded, mut errors) = (Vec::new(), Vec::new());
        // If firewalld does not run, it has no sources, and only the records are removed.
        if let Some(firewalld) = self.connect_if_running(OnSigterm::Finish)? {
            for address in recorded.selected.iter().filter(|address| !stays(address)) {
                errors.extend(self.remove(&firewalld, *address, ZoneSelection::Any).err());
            }
            for address in addresses.iter().filter(|address| !recorded.selected.contains(address) && !stays(address)) {
                match self.remove(&firewalld, *address, ZoneSelection::This) {
                    Ok(true) => unrecorded.push(*address),
                    Ok(false) => {}
                    Err(error) => errors.push(error),
                }
            }
        }
        // On failure the records stay, so that the next DEL or GC tries again.
        Error::join(errors)?;
        if !recorded.selected.is_empty() {
            sources::forget(selection)?;
        }
        Ok(unrecorded)
    }

    /// Removes a source from the selected zones. Returns `false` if the source was in none of them.
    fn remove(&self, firewalld: &Firewalld<'_>, address: IpAddr, zones: ZoneSelection) -> Result<bool> {
        // ZONE_CONFLICT: another zone has the source. INVALID_ZONE: firewalld does not have this
        // zone. UNKNOWN_SOURCE, below: no zone has the source.
        let is_not_in_zone = |failure: &Failure| {
            failure.has_firewalld_code("ZONE_CONFLICT") || failure.has_firewalld_code("INVALID_ZONE")
        };
        let mut answer = firewalld.call(REMOVE_SOURCE, &self.name, address);
        if zones == ZoneSelection::Any && answer.as_ref().is_err_and(is_not_in_zone) {
            // firewalld takes the empty name for the zone that has the source.
            answer = firewalld.call(REMOVE_SOURCE, "", address);
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
        let firewalld = Firewalld::connect(self.machine, OnSigterm::Kill)?;
        let mut missing = Vec::new();
        for address in addresses {
            let sentence = format!("failed to find the address {} in {} zone", source_text(*address), self.name);
            match firewalld.call(QUERY_SOURCE, &self.name, *address) {
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
        let firewalld = Firewalld::connect(self.machine, OnSigterm::Kill)?;
        if !firewalld.is_running()? {
            return Err(Error::new(
                Code::TRY_AGAIN,
                "firewalld is not running: start it, or choose another \"backend\"",
            ));
        }
        // The query fails if firewalld does not know the zone. The answer does not matter: the
        // address is reserved for documentation.
        let any_address = IpAddr::from([192, 0, 2, 1]);
        firewalld.call(QUERY_SOURCE, &self.name, any_address).map(drop).map_err(|failure| {
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
