//! Results. A result that was read in one version can be written in every version, except that a
//! result without an address cannot be written in a version below 0.3.0. A written result is read
//! back without the parts that its version cannot express, and is then written as the same bytes.

use cni::json::Json;
use cni::result::{AddResult, Interface, ResultError, Route};
use cni::version::{Shape, Version};

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let Ok(json) = Json::parse(data) else { return };
    for version in [Version::V0_2_0, Version::V0_4_0, Version::V1_1_0] {
        // Fails if the result names a version of a different form.
        let as_version = AddResult::decode_as(&json, version);
        let as_named = AddResult::decode(&json, version);
        if let (Ok(as_version), Ok(as_named)) = (&as_version, &as_named) {
            assert_eq!(as_version, as_named, "decoded as {version} and as the named version");
        }
        for result in [as_version.ok(), as_named.ok()].into_iter().flatten() {
            check_versions(&result);
        }
    }
}

/// Checks the properties of one result in all versions.
pub(crate) fn check_versions(result: &AddResult) {
    for version in Version::ALL {
        let has_address = !result.ips.is_empty();
        let bytes = match result.encode(version) {
            Ok(bytes) => bytes,
            Err(error) => {
                assert_eq!(error, ResultError::NoAddress, "failed to write {result:?} in {version}");
                assert!(version.shape() == Shape::Ip4Ip6 && !has_address, "refused in {version}: {result:?}");
                continue;
            }
        };
        let shown = String::from_utf8_lossy(&bytes);
        let json =
            Json::parse(&bytes).unwrap_or_else(|error| panic!("wrote invalid JSON in {version}: {error}: {shown}"));
        assert_eq!(json.get("cniVersion").and_then(Json::as_str), Some(version.as_str()), "the version of {shown}");
        let back = AddResult::decode_as(&json, version)
            .unwrap_or_else(|error| panic!("failed to read what was written in {version}: {error}: {shown}"));
        assert_eq!(back, expressible(result, version), "read from {shown}");
        assert_eq!(back.encode(version).as_deref(), Ok(bytes.as_slice()), "read from {shown} and written again");
    }
}

/// Returns the result without the parts that a version cannot express.
fn expressible(result: &AddResult, version: Version) -> AddResult {
    let mut part = result.clone();
    if version != Version::V1_1_0 {
        // Only version 1.1.0 has the other keys of an interface.
        for interface in &mut part.interfaces {
            *interface = Interface {
                name: interface.name.clone(),
                mac: interface.mac.clone(),
                sandbox: interface.sandbox.clone(),
                ..Interface::default()
            };
        }
    }
    if version.shape() == Shape::Ip4Ip6 {
        part.interfaces.clear();
        part.unknown = result.unknown.without_elements();
        // This form has one address of each family, and routes only in a family with an address.
        part.ips.clear();
        part.routes.clear();
        for is_ipv4 in [true, false] {
            let Some(first) = result.ips.iter().find(|ip| ip.address.is_ipv4() == is_ipv4) else { continue };
            let mut ip = first.clone();
            ip.interface = None;
            part.ips.push(ip);
            let routes = result.routes.iter().filter(|route| route.dst.is_ipv4() == is_ipv4);
            part.routes.extend(routes.flat_map(Route::paths).map(|route| Route::new(route.dst, route.gw)));
        }
    }
    part
}
