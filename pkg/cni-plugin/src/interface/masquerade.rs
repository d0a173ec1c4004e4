//! `ipMasq`: what leaves the network goes with the host's address.
//!
//! Only ADD asks what the configuration wants; DEL and GC take away whatever there is, in both
//! backends, since the configuration may have changed. The rules know addresses, not interfaces, so
//! they can be there before the interface is up: its first packet is masqueraded already.

use std::rc::Rc;

use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_firewall::masquerade::PreviousRules;
use cni_firewall::{Backend, Masquerade};

use super::AttachmentContext;
use crate::keys::Masquerading;

/// Masquerading on this host, for one call.
pub(super) fn open<'m>(call: &Call<'m>) -> Masquerade<'m> {
    Masquerade::new(call.machine, call.notes.clone())
}

/// ADD: puts the rules in force, if they are wanted.
pub(super) fn ensure<'a, C>(
    context: &AttachmentContext<'a, C>,
    wanted: Masquerading,
    addresses: &[Cidr],
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    let Masquerading::On(backend) = wanted else { return Ok(()) };
    let (call, mark) = (context.call, &context.mark);
    // Registered before the effect, because one family may be done when the other fails. Rules that
    // an earlier ADD of the attachment made, into another namespace, stay.
    let former = Rc::new(PreviousRules::default());
    let (mine, its, before) = (mark.clone(), addresses.to_vec(), Rc::clone(&former));
    let undo = move || open(call).put_back(&mine, &its, &before);
    rollback.push(format!("put the masquerade rules of {} back as they were", mark.ifname), undo);
    open(call).ensure(mark, backend, addresses, &former).map_err(|error| {
        let error = Error::from(error).context(key(backend));
        // Does this host have what it takes at all?
        if open(call).probe(backend).is_err() { error.with_code(Code::UNSUPPORTED_FIELD) } else { error }
    })
}

/// STATUS: whether the next ADD's rules could be made.
pub(super) fn status(call: &Call<'_>, wanted: Masquerading) -> Result<()> {
    let Masquerading::On(backend) = wanted else { return Ok(()) };
    open(call).probe(backend).map_err(|error| Error::from(error).context(key(backend)).with_code(Code::NOT_AVAILABLE))
}

/// The keys that ask for it, as the configuration has them.
fn key(backend: Option<Backend>) -> String {
    let backend = backend.map(|backend| format!(", \"ipMasqBackend\": \"{backend}\"")).unwrap_or_default();
    format!("\"ipMasq\": true{backend}")
}
