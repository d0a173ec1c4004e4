//! Finds an owner's reservations by their links, and confirms each by reading its file.
//!
//! A file that cannot be read (a broken disk, no memory, missing permission) does not end the
//! search. It is an error only if it belongs to the owner according to its link. If the file has no
//! link, its owner is unknown: every verb except STATUS tries again to read it, and writes a note
//! on failure, because an error would make every DEL of the network fail.

use std::net::IpAddr;
use std::time::Duration;

use cni::{Code, Error, Result};

use super::{Locked, Owner, Reservation, View};
use crate::content::{self, Content, hash};
use crate::links::Link;

/// All reservations that can be read, and the files that cannot.
#[derive(Debug, Default)]
pub struct Listed {
    /// The reservations, sorted by address.
    pub reservations: Vec<Reservation>,
    /// The addresses whose files could not be read, and why.
    pub unread: Vec<(IpAddr, Error)>,
    /// The addresses with an unusual file, and what is unusual. Some are also in `reservations`.
    pub unusual: Vec<(IpAddr, String)>,
    /// The free addresses that cool down, and for how long. Sorted by address.
    pub cooling: Vec<(IpAddr, Duration)>,
}

/// The reservations of one owner that have the same form.
#[derive(Default)]
pub(super) struct Reserved {
    /// Those that name the owner, sorted by address.
    pub(super) links: Vec<Link>,
    /// One error for each file that cannot be read and that names the owner according to its link.
    pub(super) errors: Vec<Error>,
}

impl Reserved {
    /// Returns the addresses, if every file of the owner could be read.
    ///
    /// # Errors
    /// The errors joined, code 5, if there are any: then addresses may be missing.
    pub(super) fn require_complete(self) -> Result<Vec<IpAddr>> {
        Error::join(self.errors).map(|()| self.links.iter().map(|link| link.address).collect())
    }
}

impl Locked {
    /// Reads the file of an address.
    ///
    /// # Errors
    /// Code 5 if the file exists and cannot be read.
    pub(super) fn read(&self, address: IpAddr) -> Result<Content> {
        content::read(&self.folder.file, address).map_err(|error| self.read_error(address, error))
    }

    /// Returns the error, code 5, for the file of an address that cannot be read.
    pub(super) fn read_error(&self, address: IpAddr, error: std::io::Error) -> Error {
        Error::caused(Code::IO, format_args!("failed to read {}/{address}", self.folder.path.display()), error)
    }

    /// Returns the reservations that name the container and the interface of `owner`, and those
    /// that name only the container, as very old plugins wrote them.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub(super) fn find_both_forms(&mut self, owner: &Owner) -> Result<[Reserved; 2]> {
        let (reserved, is_edited) = self.confirm(owner)?;
        if !is_edited {
            return Ok(reserved);
        }
        // A file was edited in place, so it may belong to this owner now.
        self.scan()?;
        Ok(self.confirm(owner)?.0)
    }

    /// Does the work of [`find_both_forms`](Locked::find_both_forms). Removes outdated links. Also
    /// returns whether a file was edited, so that it has no link now.
    fn confirm(&mut self, owner: &Owner) -> Result<([Reserved; 2], bool)> {
        let contents = [owner.content().trim().as_bytes().to_vec(), owner.id().as_bytes().to_vec()];
        let (mut reserved, mut is_edited) = (<[Reserved; 2]>::default(), false);
        for link in self.links_of(&contents)? {
            let form = contents.iter().position(|content| hash(content) == link.owner);
            let Some((content, reserved)) = form.map(|form| (&contents[form], &mut reserved[form])) else { continue };
            match self.read(link.address) {
                Ok(Content::Text(text)) if text == *content => reserved.links.push(link),
                Ok(now) => {
                    self.folder.links.remove(&link);
                    is_edited |= now != Content::Absent;
                }
                Err(error) => reserved.errors.push(error),
            }
        }
        reserved.iter_mut().for_each(|reserved| reserved.links.sort_unstable_by_key(|link| link.address));
        Ok((reserved, is_edited))
    }

    /// Returns the links of reservations with one of these contents, and perhaps others.
    fn links_of(&mut self, contents: &[Vec<u8>; 2]) -> Result<Vec<Link>> {
        self.prepare_view()?;
        if let Some(View::Links) = self.view
            && let Ok(links) = self.folder.links.of_contents(contents)
        {
            return Ok(links);
        }
        if let Some(View::Scanned(links)) = &self.view {
            return Ok(links.clone());
        }
        Ok(self.scan()?.held.into_iter().map(|(link, _)| link).collect())
    }

    /// Returns the reservations of `owner`: those that name the container and the interface or, if
    /// there are none, those that name only the container.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub(super) fn find_by_owner(&mut self, owner: &Owner) -> Result<Reserved> {
        let [exact, old] = self.find_both_forms(owner)?;
        Ok(if exact.links.is_empty() && exact.errors.is_empty() { old } else { exact })
    }

    /// Returns the addresses that are reserved for `owner`: those that name the container and the
    /// interface or, if there are none, those that name only the container.
    ///
    /// # Errors
    /// Code 5 if the folder or one of these files cannot be read.
    pub fn reserved_by(&mut self, owner: &Owner) -> Result<Vec<IpAddr>> {
        self.find_by_owner(owner)?.require_complete()
    }

    /// Returns the addresses that have a file, sorted. With
    /// [`RebootPolicy::Reclaim`](super::RebootPolicy::Reclaim), first releases reservations of an
    /// earlier boot.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub fn occupied(&mut self) -> Result<Vec<IpAddr>> {
        self.reclaim()?;
        self.store.names()
    }

    /// Returns all reservations. Reads every file whose name is an address. The result also lists
    /// the files that cannot be read.
    ///
    /// # Errors
    /// Code 5 if the folder cannot be read.
    pub fn list(&mut self) -> Result<Listed> {
        let addresses = self.store.names()?;
        let mut cooling = self.cooling().remaining(self.store.options.cooldown);
        cooling.retain(|(address, _)| addresses.binary_search(address).is_err());
        let mut listed = Listed {
            reservations: Vec::with_capacity(addresses.len()),
            unread: Vec::new(),
            unusual: Vec::new(),
            cooling,
        };
        for address in addresses {
            match self.read(address) {
                Ok(Content::Text(text)) => listed.reservations.push(Reservation::of(&self.folder, address, &text)),
                // Only added to `unusual`, below.
                Ok(Content::Foreign) => {}
                Ok(Content::Absent | Content::Blank) => continue,
                Err(error) => {
                    listed.unread.push((address, error));
                    continue;
                }
            }
            listed.unusual.extend(self.folder.peculiarity(address).map(|what| (address, what)));
        }
        Ok(listed)
    }

    /// Returns a text for messages about which container has an address: `10.0.0.2 is held by <id>
    /// <ifname>`.
    pub(super) fn describe(&self, address: IpAddr) -> String {
        match self.read(address) {
            Ok(Content::Text(text)) => Reservation::of(&self.folder, address, &text).to_string(),
            Ok(Content::Foreign) => format!("{}/{address} is not a reservation", self.folder.path.display()),
            Ok(Content::Absent | Content::Blank) => format!("{address} has just been released"),
            Err(error) => error.to_string(),
        }
    }
}
