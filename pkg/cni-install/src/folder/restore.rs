//! Puts a kept set back.

use std::fs;
use std::path::Path;

use super::Folder;
use crate::Error;
use crate::disk::{is_same, link_or_copy};
use crate::kept::{Kept, exists};
use crate::report::RestoreReport;
use crate::staging;

impl Folder {
    /// Puts the kept files back, and removes programs that did not exist before the install. A
    /// program that another installer has replaced or removed since is left unchanged, and its kept
    /// file stays kept. Can be repeated after a failure.
    ///
    /// # Errors
    /// All failures, joined. The programs without a failure have been put back.
    pub(super) fn restore(&self, kept: &Kept) -> Result<RestoreReport, Error> {
        let staging = self.own_path("staging");
        staging::create_empty(&staging)?;
        let (mut report, mut errors) = (RestoreReport::default(), Vec::new());
        for name in kept.names() {
            match self.restore_program(kept, name, &staging, &mut report) {
                Ok(names) => names.push(name.to_owned()),
                Err(error) => errors.push(error.to_string()),
            }
        }
        errors.extend(self.sync().err().map(|error| error.to_string()));
        if !errors.is_empty() {
            return Err(Error::new(errors.join("; ")));
        }
        report.still_kept = kept.not_restored_in(&self.path)?;
        Ok(report)
    }

    /// Whether [`restore`](Folder::restore) would change nothing: the plugin folder has all files
    /// of the kept set, and none of the installed programs whose names did not exist before.
    pub(super) fn is_restored(&self, kept: &Kept) -> Result<bool, Error> {
        for name in kept.names().into_iter().filter(|name| kept.was_absent(name)) {
            if self.has_installed_program(kept, name)? {
                return Ok(false);
            }
        }
        Ok(kept.not_restored_in(&self.path)?.is_empty())
    }

    /// Whether the program of this name in the plugin folder is one that, according to `kept`,
    /// cni-install has installed. False if another installer has replaced it.
    fn has_installed_program(&self, kept: &Kept, name: &str) -> Result<bool, Error> {
        Ok(self.mode_and_sum(name)?.is_some_and(|(_, sum)| kept.was_installed(name, &sum)))
    }

    /// Puts one program back, or removes it if it did not exist before. The kept file is linked or
    /// copied into `staging` and renamed from there, so that the program is always complete.
    /// Returns the list of `report` to which the program's name belongs.
    fn restore_program<'r>(
        &self,
        kept: &Kept,
        name: &str,
        staging: &Path,
        report: &'r mut RestoreReport,
    ) -> Result<&'r mut Vec<String>, Error> {
        let (kept_file, installed) = (kept.file(name), self.path.join(name));
        if kept.was_absent(name) {
            if exists(&installed)? {
                if !self.has_installed_program(kept, name)? {
                    return Ok(&mut report.left);
                }
                fs::remove_file(&installed).map_err(Error::io("remove", &installed))?;
            }
            return Ok(&mut report.removed);
        }
        if !exists(&kept_file)? {
            return Ok(&mut report.lost);
        }
        if !is_same(&installed, &kept_file).map_err(Error::io("compare", &installed))? {
            if !self.has_installed_program(kept, name)? {
                return Ok(&mut report.left);
            }
            let copy = staging.join(name);
            link_or_copy(&kept_file, &copy)
                .and_then(|()| fs::rename(&copy, &installed))
                .map_err(Error::io("put back", &installed))?;
        }
        Ok(&mut report.restored)
    }
}
