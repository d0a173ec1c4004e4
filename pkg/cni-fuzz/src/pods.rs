//! The answer of a runtime with its pods. Each ID in an accepted answer has at least one byte. The
//! IDs are the same after they are written as a runtime writes them and read again. No part of an
//! answer is accepted, and an answer that is cut inside of a pod is refused even if the length in
//! its frame is that of the part: gc removes what the answer does not name.

use cni_cri::fuzzing::read_body;

/// Runs the target with one input, the message in the frame of an answer.
pub(crate) fn run(data: &[u8]) {
    let body = framed(data);
    let Some(ids) = read_body(&body) else { return };
    assert!(ids.iter().all(|id| !id.is_empty()), "{ids:?}");
    for end in 0..body.len() {
        assert_eq!(read_body(&body[..end]), None, "cut at {end}");
    }
    let pods: Vec<Vec<u8>> = ids.iter().map(|id| field(&field(id.as_bytes()))).collect();
    let written = pods.concat();
    assert_eq!(read_body(&framed(&written)).as_ref(), Some(&ids));
    let pod_ends: Vec<usize> = (0..=pods.len()).map(|count| pods[..count].concat().len()).collect();
    for end in (0..written.len()).step_by(1 + written.len() / 100) {
        let read = read_body(&framed(&written[..end]));
        let whole_pods = pod_ends.iter().position(|pod_end| *pod_end == end);
        assert_eq!(read.as_deref(), whole_pods.map(|count| &ids[..count]), "cut at {end}");
    }
}

/// Returns the body of an answer with this message.
fn framed(message: &[u8]) -> Vec<u8> {
    [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes(), message].concat()
}

/// Returns the field 1 of a message, with this content.
fn field(content: &[u8]) -> Vec<u8> {
    let (mut encoded, mut length) = (vec![0x0a], content.len());
    while length >= 0x80 {
        encoded.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    encoded.push(length as u8);
    [&encoded, content].concat()
}
