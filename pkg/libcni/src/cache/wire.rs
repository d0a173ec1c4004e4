//! Encodes and decodes a cache entry.
//!
//! The value of the key `config` is the configuration in base64, as Go writes byte slices: with the
//! standard alphabet and padding.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{Content, Entry};
use crate::Attachment;
use crate::members::{Members, compact};
use cni::json::Json;
use cni::{Code, Error, Result};

/// The value of the key `kind`.
const KIND: &str = "cniCacheV1";

/// The JSON of an entry, for encoding, with the keys in Go's order.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WriteWire<'a> {
    kind: &'a str,
    container_id: &'a str,
    config: String,
    if_name: &'a str,
    network_name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    netns: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    cni_args: &'a [(String, String)],
    #[serde(skip_serializing_if = "Members::is_empty")]
    capability_args: &'a Members,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'a RawValue>,
}

/// The JSON of an entry, for decoding, without the keys whose values stay verbatim.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ReadWire {
    container_id: String,
    config: String,
    if_name: String,
    network_name: String,
    netns: String,
    cni_args: Vec<(String, String)>,
}

/// Returns the entry as one line of JSON, without a newline.
///
/// # Errors
/// Code 999 if the entry cannot be written as JSON, which does not happen.
pub(super) fn encode(entry: &Entry) -> Result<String> {
    let Attachment { container_id, netns, ifname, args, capability_args } = &entry.attachment;
    let wire = WriteWire {
        kind: KIND,
        container_id,
        config: BASE64_STANDARD.encode(&entry.config),
        if_name: ifname,
        network_name: &entry.network,
        netns,
        cni_args: args,
        capability_args,
        result: entry.result.as_deref(),
    };
    let text = serde_json::to_string(&wire)
        .map_err(|error| Error::caused(Code::INTERNAL, "failed to encode a cache entry", error))?;
    // The result and the capability arguments are verbatim and may have several lines.
    Ok(compact(&text))
}

/// Decodes a file: an entry, or a bare result. A JSON object without the `kind` of an entry counts
/// as a bare result, which is not decoded further.
///
/// # Errors
/// The reason why the file is neither.
pub(super) fn decode(bytes: &[u8]) -> Result<Content, String> {
    let text = cni::text::lossy(bytes);
    // `members` has the values that stay verbatim, `json` the others.
    let (members, json) = Members::parse_with_json(&text).map_err(|error| error.to_string())?;
    if json.get("kind").and_then(Json::as_str) != Some(KIND) {
        let result = RawValue::from_string(text.trim().to_owned());
        return result.map(Content::BareResult).map_err(|error| error.to_string());
    }
    let wire: ReadWire = json.decode().map_err(|error| error.to_string())?;
    let config = BASE64_STANDARD.decode(&wire.config).map_err(|error| format!("config: {error}"))?;
    let capability_args = match members.get("capabilityArgs") {
        None => Members::default(),
        Some(value) => Members::parse(value.get()).map_err(|error| format!("capabilityArgs: {error}"))?,
    };
    let entry = Entry {
        network: wire.network_name,
        attachment: Attachment {
            container_id: wire.container_id,
            netns: wire.netns,
            ifname: wire.if_name,
            args: wire.cni_args,
            capability_args,
        },
        config,
        result: members.get("result").map(RawValue::to_owned),
    };
    Ok(Content::Entry(Box::new(entry.with_netns_of_result())))
}
