//! Putting a kept set back.

use std::fs;
use std::path::Path;

use super::Folder;
use crate::Error;
use crate::disk::{holds, link_or_copy};
use crate::kept::{Kept, exists};
use crate::report::RollbackReport;
use crate::staging;

/// The outcome for one name when a kept set was put back.
enum RestoreOutcome {
    Restored,
    Removed,
    Left,
    Lost,
}

impl Folder {
    /// Puts back what was kept, and removes what was absent before. A file that cni-install did not
    /// install stays. Can be repeated.
    pub(super) fn restore(&self, kept: &Kept) -> Result<RollbackReport, Error> {
        let staging = self.own("staging");
        staging::empty(&staging)?;
        let (mut restored, mut removed, mut left, mut lost) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut failed = Vec::new();
        for name in kept.names() {
            let names = match self.put_back(kept, name, &staging) {
                Ok(RestoreOutcome::Restored) => &mut restored,
                Ok(RestoreOutcome::Removed) => &mut removed,
                Ok(RestoreOutcome::Left) => &mut left,
                Ok(RestoreOutcome::Lost) => &mut lost,
                Err(error) => {
                    failed.push(error.to_string());
                    continue;
                }
            };
            names.push(name.to_owned());
        }
        failed.extend(self.sync().err().map(|error| error.to_string()));
        if failed.is_empty() {
            Ok(RollbackReport::Done { restored, removed, left, lost, kept: Vec::new() })
        } else {
            Err(Error::new(failed.join("; ")))
        }
    }

    fn put_back(&self, kept: &Kept, name: &str, staging: &Path) -> Result<RestoreOutcome, Error> {
        let (file, place) = (kept.file(name), self.path.join(name));
        let is_ours = || Ok(self.look(name)?.is_some_and(|(_, sum)| kept.is_ours(name, &sum)));
        if kept.was_absent(name) {
            if exists(&place)? {
                if !is_ours()? {
                    return Ok(RestoreOutcome::Left);
                }
                fs::remove_file(&place).map_err(Error::io("remove", &place))?;
            }
            return Ok(RestoreOutcome::Removed);
        }
        if !exists(&file)? {
            return Ok(RestoreOutcome::Lost);
        }
        if !holds(&place, &file).map_err(Error::io("compare", &place))? {
            if !is_ours()? {
                return Ok(RestoreOutcome::Left);
            }
            let copy = staging.join(name);
            link_or_copy(&file, &copy)
                .and_then(|()| fs::rename(&copy, &place))
                .map_err(Error::io("put back", &place))?;
        }
        Ok(RestoreOutcome::Restored)
    }
}
