//! Parses `CNI_ARGS`, a list `K=V;K=V` of values for one container. The specification deprecates
//! this variable.
//!
//! Unlike in Go, a value may contain `=`, an empty pair (a trailing `;`) is skipped, and all keys
//! that begin with `K8S_` are known. Keys are case-sensitive; of duplicates the last one is used.

use crate::{Code, Error, Result};

/// The pairs of `CNI_ARGS`, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CniArgs(Vec<(String, String)>);

impl CniArgs {
    /// Parses the variable's value.
    ///
    /// # Errors
    /// Code 4 with Go's text if a pair has no `=` or no key, even with `IgnoreUnknown`.
    pub fn parse(text: &str) -> Result<CniArgs> {
        let mut pairs = Vec::new();
        for pair in text.split(';').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some((key, value)) if !key.is_empty() => pairs.push((key.to_owned(), value.to_owned())),
                _ => {
                    let msg = format!("ARGS: invalid pair {pair:?}");
                    return Err(Error::new(Code::INVALID_ENVIRONMENT, msg).with_details("CNI_ARGS"));
                }
            }
        }
        Ok(CniArgs(pairs))
    }

    /// Returns the value of a key, or `None` if the key is absent. The value may be empty.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Returns all pairs of key and value.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Checks that all keys except `IgnoreUnknown` and `K8S_*` are in `known`. If `IgnoreUnknown`
    /// is true, accepts all keys.
    ///
    /// # Errors
    /// Code 4 with Go's text if a key is unknown, or if `IgnoreUnknown` is not a boolean.
    pub fn check_known(&self, known: &[&str]) -> Result<()> {
        let ignores_unknown = match self.get("IgnoreUnknown") {
            None => false,
            Some(value) if value == "1" || value.eq_ignore_ascii_case("true") => true,
            Some(value) if value == "0" || value.eq_ignore_ascii_case("false") => false,
            Some(value) => {
                return Err(Error::new(
                    Code::INVALID_ENVIRONMENT,
                    format!("ARGS: error parsing value of pair \"IgnoreUnknown={value}\": boolean unmarshal error: invalid input {value}"),
                )
                .with_details("CNI_ARGS"));
            }
        };
        let is_known = |key: &str| known.contains(&key) || key == "IgnoreUnknown" || key.starts_with("K8S_");
        let unknown_pairs = self.iter().filter(|(key, _)| !is_known(key));
        let unknown: Vec<String> = unknown_pairs.map(|(key, value)| format!("\"{key}={value}\"")).collect();
        if ignores_unknown || unknown.is_empty() {
            return Ok(());
        }
        let msg = format!("ARGS: unknown args [{}]", unknown.join(" "));
        Err(Error::new(Code::INVALID_ENVIRONMENT, msg).with_details("CNI_ARGS"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_may_contain_equals_signs_and_args_end_in_a_semicolon() {
        let args = CniArgs::parse("A=b=c;IP=10.0.0.1;E=;A=last;").unwrap();
        assert_eq!(args.get("A"), Some("last"));
        assert_eq!((args.get("E"), args.get("a"), args.get("IP")), (Some(""), None, Some("10.0.0.1")));
        assert_eq!(CniArgs::parse("").unwrap(), CniArgs::default());
    }

    #[test]
    fn a_piece_without_a_value_is_an_error() {
        for text in ["A", "A=1;B", "=x"] {
            let error = CniArgs::parse(text).unwrap_err();
            assert!(error.msg().starts_with("ARGS: invalid pair"), "{error}");
            assert_eq!(error.code(), Code::INVALID_ENVIRONMENT);
        }
    }

    #[test]
    fn unknown_keys_are_errors_unless_ignored_or_of_kubernetes() {
        let check = |text: &str| CniArgs::parse(text).unwrap().check_known(&["IP"]);
        assert!(check("IP=1;K8S_POD_NAME=x").is_ok());
        assert_eq!(check("IP=1;X=y").unwrap_err().msg(), "ARGS: unknown args [\"X=y\"]");
        for yes in ["1", "true", "True", "TRUE"] {
            assert!(check(&format!("X=y;IgnoreUnknown={yes}")).is_ok());
        }
        for no in ["0", "false", "maybe", ""] {
            assert!(check(&format!("X=y;IgnoreUnknown={no}")).is_err(), "{no}");
        }
    }
}
