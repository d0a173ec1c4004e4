//! A resolver's configuration file. No value is empty or has white space. The values are the same
//! after they are written as a resolver's file, or as the `dns` of a result, and read again.

use std::fmt::Write as _;

use cni::json::Json;
use cni::result::AddResult;
use cni::version::Version;
use plugin_host_local::fuzzing::resolv_conf;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let dns = resolv_conf(&String::from_utf8_lossy(data));
    let lists = [&dns.nameservers, &dns.search, &dns.options];
    for value in lists.into_iter().flatten().chain(Some(&dns.domain).filter(|domain| !domain.is_empty())) {
        assert!(!value.is_empty() && !value.contains(char::is_whitespace), "invalid value {value:?}");
    }
    let mut text = String::new();
    dns.nameservers.iter().for_each(|server| writeln!(text, "nameserver {server}").unwrap());
    dns.search.iter().for_each(|domain| writeln!(text, "search {domain}").unwrap());
    dns.options.iter().for_each(|option| writeln!(text, "options {option}").unwrap());
    if !dns.domain.is_empty() {
        writeln!(text, "domain {}", dns.domain).unwrap();
    }
    assert_eq!(resolv_conf(&text), dns, "read from {text:?}");
    let result = AddResult { dns, ..AddResult::default() };
    let encoded = result.encode(Version::NEWEST).unwrap();
    assert_eq!(AddResult::decode_as(&Json::parse(&encoded).unwrap(), Version::NEWEST).unwrap(), result);
}
