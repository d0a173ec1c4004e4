//! The versions of the CNI specification.
//!
//! A configuration's `cniVersion` must be exactly the text of one of [`Version::ALL`], or empty,
//! which means 0.1.0. As in Go, the skeleton checks whether the version has the verb before it
//! checks whether the version is supported. So [`parse_triple`] also reads versions that are not
//! supported.

use std::fmt;

/// A supported version of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// 0.1.0: results have `ip4` and `ip6`.
    V0_1_0,
    /// 0.2.0 added VERSION.
    V0_2_0,
    /// 0.3.0 added lists of plugins. Results have `interfaces` and `ips` instead of `ip4` and
    /// `ip6`.
    V0_3_0,
    /// 0.3.1 changed nothing that these plugins read or write.
    V0_3_1,
    /// 0.4.0 added CHECK, and `prevResult` for DEL.
    V0_4_0,
    /// 1.0.0 removed `ips[].version`.
    V1_0_0,
    /// 1.1.0 added GC, STATUS, and fields of interfaces and routes.
    V1_1_0,
}

impl Version {
    /// All supported versions, oldest first.
    pub const ALL: [Version; 7] = [
        Version::V0_1_0,
        Version::V0_2_0,
        Version::V0_3_0,
        Version::V0_3_1,
        Version::V0_4_0,
        Version::V1_0_0,
        Version::V1_1_0,
    ];

    /// The newest supported version.
    pub const NEWEST: Version = Version::V1_1_0;

    /// Returns the text of the version in `cniVersion`.
    pub fn as_str(self) -> &'static str {
        match self {
            Version::V0_1_0 => "0.1.0",
            Version::V0_2_0 => "0.2.0",
            Version::V0_3_0 => "0.3.0",
            Version::V0_3_1 => "0.3.1",
            Version::V0_4_0 => "0.4.0",
            Version::V1_0_0 => "1.0.0",
            Version::V1_1_0 => "1.1.0",
        }
    }

    /// Parses a `cniVersion`. An empty text is 0.1.0. Returns `None` for a version that is not
    /// supported.
    pub fn find(text: &str) -> Option<Version> {
        if text.is_empty() {
            return Some(Version::V0_1_0);
        }
        Version::ALL.into_iter().find(|version| version.as_str() == text)
    }

    /// Returns the form that results of this version have.
    pub fn shape(self) -> Shape {
        match self {
            Version::V0_1_0 | Version::V0_2_0 => Shape::Ip4Ip6,
            Version::V0_3_0 | Version::V0_3_1 | Version::V0_4_0 => Shape::VersionedIps,
            Version::V1_0_0 | Version::V1_1_0 => Shape::Ips,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The form of a result's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// 0.1.0 and 0.2.0: one address of each family, as `ip4` and `ip6`.
    Ip4Ip6,
    /// 0.3.0 to 0.4.0: a list `ips`, whose elements have a `version`.
    VersionedIps,
    /// 1.0.0 and 1.1.0: a list `ips`.
    Ips,
}

impl Shape {
    /// Returns the versions whose results have this form.
    pub fn versions(self) -> impl Iterator<Item = Version> {
        Version::ALL.into_iter().filter(move |version| version.shape() == self)
    }
}

/// Parses a version `a.b.c` into its numbers. As in Go, missing second and third numbers are 0, and
/// an empty text is 0.1.0.
///
/// # Errors
/// Go's text for an invalid version.
pub fn parse_triple(text: &str) -> Result<[u64; 3], String> {
    if text.is_empty() {
        return Ok([0, 1, 0]);
    }
    let mut triple = [0; 3];
    let parts: Vec<&str> = text.split('.').collect();
    if parts.len() > 3 {
        return Err(format!("invalid version \"{text}\": too many parts"));
    }
    for (number, part) in triple.iter_mut().zip(parts) {
        *number =
            part.parse().map_err(|_| format!("failed to convert version part \"{part}\" of \"{text}\" to a number"))?;
    }
    Ok(triple)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_text_of_a_version_is_found() {
        for version in Version::ALL {
            assert_eq!(Version::find(version.as_str()), Some(version));
        }
        assert_eq!(Version::find(""), Some(Version::V0_1_0));
        for text in ["0.4", "1.1", "1.1.1", "01.0.0", " 1.0.0", "9.9.9"] {
            assert_eq!(Version::find(text), None, "{text}");
        }
    }

    #[test]
    fn malformed_versions_do_not_parse() {
        for text in ["asdf", "asdf.", ".x", "0.", "..", "1.2.3.4", "1.2.3.4.5", "1.-2.3"] {
            assert!(parse_triple(text).is_err(), "{text}");
        }
        assert_eq!(parse_triple("1.2"), Ok([1, 2, 0]));
        assert_eq!(parse_triple(""), Ok([0, 1, 0]));
    }
}
