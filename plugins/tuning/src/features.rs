//! The key `ethtool`: features of the interface, such as checksum offload, by the kernel's names.

use cni::{Code, Error, Result};
use cni_linux::{Ethtool, Features};

use crate::backup::{Record, make_last};
use crate::conf::Feature;

/// The features that an ADD changes, with access to the container's interface.
pub(crate) struct FeatureChange {
    ethtool: Ethtool,
    ifname: String,
    /// All features of the interface before the change.
    before: Features,
    wanted: Vec<Feature>,
}

impl FeatureChange {
    /// Reads the features of the interface in the calling thread's namespace. Returns `None` if
    /// none is wanted.
    ///
    /// # Errors
    /// Code 7 if the kernel does not know a feature, or cannot change one that has another value.
    pub(crate) fn find(ifname: &str, wanted: &[Feature]) -> Result<Option<FeatureChange>> {
        if wanted.is_empty() {
            return Ok(None);
        }
        let ethtool = Ethtool::open()?;
        let before = ethtool.features(ifname)?;
        for Feature { name, is_on } in wanted {
            match before.find(name) {
                None => return Err(Error::config(format!("ethtool: {ifname} has no feature {name:?}"))),
                Some(found) if !found.is_changeable && found.is_active != *is_on => {
                    let state = on_or_off(found.is_active);
                    let msg = format!("ethtool: the feature {name} of {ifname} is fixed to {state}");
                    return Err(Error::config(msg));
                }
                Some(_) => {}
            }
        }
        Ok(Some(FeatureChange { ethtool, ifname: ifname.to_owned(), before, wanted: wanted.to_vec() }))
    }

    /// Adds the features to the record: the values that will be written and, if the record does not
    /// have them yet, the original values.
    pub(crate) fn save(&self, record: &mut Record) {
        for Feature { name, is_on } in &self.wanted {
            if let Some(found) = self.before.find(name).filter(|found| found.is_changeable) {
                record.ethtool.entry(name.clone()).or_insert(found.is_requested);
                make_last(record.written.ethtool.entry(name.clone()).or_default(), *is_on);
            }
        }
    }

    /// Sets the features.
    ///
    /// # Errors
    /// The kernel's error, or code 100 if the kernel does not turn a feature on or off.
    pub(crate) fn apply(&self) -> Result<()> {
        self.set(|feature| feature.is_on)?;
        let after = self.ethtool.features(&self.ifname)?;
        for Feature { name, is_on } in &self.wanted {
            if after.find(name).is_none_or(|found| found.is_active != *is_on) {
                let state = on_or_off(*is_on);
                let msg = format!("the kernel did not turn the feature {name} of {} {state}", self.ifname);
                let details = "another feature that it needs, or that needs it, has another value";
                return Err(Error::new(Code::KERNEL, msg).with_details(details));
            }
        }
        Ok(())
    }

    /// Asks for the values that this ADD has found. An interface that has been removed needs none.
    pub(crate) fn undo(&self) -> Result<()> {
        let before = |feature: &Feature| self.before.find(&feature.name).is_some_and(|found| found.is_requested);
        match self.set(before) {
            Err(error) if error.errno() == Some(libc::ENODEV) => Ok(()),
            outcome => Ok(outcome?),
        }
    }

    /// Asks for the value that `is_on` returns for each changeable feature.
    fn set(&self, is_on: impl Fn(&Feature) -> bool) -> cni_linux::Result<()> {
        let is_changeable =
            |feature: &&Feature| self.before.find(&feature.name).is_some_and(|found| found.is_changeable);
        let values: Vec<(&str, bool)> =
            self.wanted.iter().filter(is_changeable).map(|feature| (feature.name.as_str(), is_on(feature))).collect();
        self.ethtool.set_features(&self.ifname, &self.before, &values)
    }
}

/// Restores the features in the record that differ from it.
pub(crate) fn restore(ethtool: &Ethtool, ifname: &str, record: &Record) -> cni_linux::Result<()> {
    let current = ethtool.features(ifname)?;
    let is_different =
        |(name, is_on): &(&str, bool)| current.find(name).is_some_and(|found| found.is_requested != *is_on);
    let originals = record.ethtool.iter().map(|(name, is_on)| (name.as_str(), *is_on));
    let different: Vec<(&str, bool)> = originals.filter(is_different).collect();
    if different.is_empty() { Ok(()) } else { ethtool.set_features(ifname, &current, &different) }
}

/// Returns a text for each feature that differs from the configuration: its name, the expected and
/// the current state. Accepts the value of a later entry of the list, which `record` has.
///
/// # Errors
/// The kernel's error if the features cannot be read.
pub(crate) fn differences(
    ethtool: &Ethtool,
    ifname: &str,
    wanted: &[Feature],
    record: &Record,
) -> Result<Vec<[String; 3]>> {
    let current = ethtool.features(ifname)?;
    let mut all = Vec::new();
    for Feature { name, is_on } in wanted {
        let found = current.find(name).map(|found| found.is_active);
        let history = record.written.ethtool.get(name).map(Vec::as_slice).unwrap_or_default();
        let is_of_later_entry = history.contains(is_on) && history.last().copied() == found;
        if found != Some(*is_on) && !is_of_later_entry {
            let found = found.map_or("absent", on_or_off);
            all.push([format!("feature {name} of {ifname}"), on_or_off(*is_on).to_owned(), found.to_owned()]);
        }
    }
    Ok(all)
}

/// Returns the word for the state of a feature.
fn on_or_off(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}
