//! CNI_ARGS. A text is refused only if a piece between semicolons lacks `=` or a key before it. Of
//! duplicate keys, the last is used. Accepted pairs that are joined to a text again are read as the
//! same pairs. With `IgnoreUnknown=1`, no key is refused as unknown.

use cni::args::CniArgs;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let is_pair = |piece: &str| piece.split_once('=').is_some_and(|(key, _)| !key.is_empty());
    let is_well_formed = text.split(';').all(|piece| piece.is_empty() || is_pair(piece));
    let args = CniArgs::parse(&text);
    assert_eq!(args.is_ok(), is_well_formed, "whether {text:?} is accepted");
    let Ok(args) = args else { return };
    let pairs: Vec<(&str, &str)> = args.iter().collect();
    for (key, _) in &pairs {
        let last = pairs.iter().rev().find(|(other, _)| other == key).map(|(_, value)| *value);
        assert_eq!(args.get(key), last, "the value of {key:?} in {text:?}");
    }
    let joined = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(";");
    assert_eq!(CniArgs::parse(&joined).as_ref().ok(), Some(&args), "the pairs of {joined:?}");
    let ignores_unknown =
        CniArgs::parse(&format!("{joined};IgnoreUnknown=1")).is_ok_and(|args| args.check_known(&[]).is_ok());
    assert!(ignores_unknown, "an unknown key was refused in {joined:?} with IgnoreUnknown=1");
    let known: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
    let ignore_unknown = args.get("IgnoreUnknown").unwrap_or("0").to_ascii_lowercase();
    // All keys are known, so only a value of IgnoreUnknown that is not a boolean is refused.
    let is_boolean = ["1", "0", "true", "false"].contains(&ignore_unknown.as_str());
    assert_eq!(args.check_known(&known).is_ok(), is_boolean, "whether only known keys are accepted in {text:?}");
}
