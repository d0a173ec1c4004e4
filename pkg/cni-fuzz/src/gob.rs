//! The messages between the plugin dhcp and its daemon, in Go's encoding gob. The same messages are
//! read if the bytes arrive in two parts.
//!
//! The input: two bytes, which are the length of the first part; the rest is both parts.

use cni_dhcp::rpc::{Connection, RpcError};

use crate::input::Input;

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let first_len = usize::from(input.u16());
    let bytes = input.rest();
    let (first, second) = bytes.split_at(first_len.min(bytes.len()));
    assert_eq!(read_requests(&[first, second]), read_requests(&[bytes]), "requests in two parts and in one");
    assert_eq!(read_responses(&[first, second]), read_responses(&[bytes]), "responses in two parts and in one");
}

/// Returns the requests in these parts, as text.
fn read_requests(parts: &[&[u8]]) -> Vec<String> {
    read_all(parts, |connection| Ok(connection.request()?.map(|request| format!("{request:?}"))))
}

/// Returns the responses in these parts, as text.
fn read_responses(parts: &[&[u8]]) -> Vec<String> {
    read_all(parts, |connection| Ok(connection.response()?.map(|response| format!("{response:?}"))))
}

/// Returns all messages that `next` reads from the parts. Stops at an error, with `refused` as the
/// last item. `next` returns `None` if the next message is incomplete.
fn read_all(parts: &[&[u8]], mut next: impl FnMut(&mut Connection) -> Result<Option<String>, RpcError>) -> Vec<String> {
    let mut connection = Connection::default();
    let mut messages = Vec::new();
    for part in parts {
        connection.push(part);
        loop {
            match next(&mut connection) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => {
                    messages.push("refused".to_owned());
                    return messages;
                }
            }
        }
    }
    messages
}
