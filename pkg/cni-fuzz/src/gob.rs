//! What plugin and daemon of dhcp say to each other. Where the bytes are divided makes no
//! difference.

use cni_dhcp::rpc::Connection;

use crate::input::Input;

/// The target.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let at = usize::from(input.u16());
    let bytes = input.rest();
    let (first, second) = bytes.split_at(at.min(bytes.len()));
    assert_eq!(requests(&[first, second]), requests(&[bytes]), "requests");
    assert_eq!(responses(&[first, second]), responses(&[bytes]), "responses");
}

fn requests(parts: &[&[u8]]) -> Vec<String> {
    all(parts, |conversation| conversation.request().map(|request| request.map(|request| format!("{request:?}"))))
}

fn responses(parts: &[&[u8]]) -> Vec<String> {
    all(parts, |conversation| conversation.response().map(|answer| answer.map(|answer| format!("{answer:?}"))))
}

/// Everything that is read, and an error as the last.
fn all<E>(parts: &[&[u8]], mut next: impl FnMut(&mut Connection) -> Result<Option<String>, E>) -> Vec<String> {
    let mut conversation = Connection::default();
    let mut read = Vec::new();
    for part in parts {
        conversation.push(part);
        loop {
            match next(&mut conversation) {
                Ok(Some(one)) => read.push(one),
                Ok(None) => break,
                Err(_) => {
                    read.push("refused".to_owned());
                    return read;
                }
            }
        }
    }
    read
}
