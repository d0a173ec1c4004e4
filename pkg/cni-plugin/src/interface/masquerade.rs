//! `ipMasq`: packets that leave the network get the host's address as their source.
//!
//! ADD writes the rules of the configured backend. DEL and GC remove the rules of both backends,
//! because the configuration may have changed since ADD. The rules match addresses, not interfaces,
//! so ADD writes them before the interface is up: already the first packet is masqueraded.

use std::rc::Rc;

use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_firewall::masquerade::PreviousRules;
use cni_firewall::{Backend, Masquerade};

use super::AttachmentContext;
use crate::keys::Masquerading;

/// Returns a handle to the masquerade rules of this host, for one call.
pub(super) fn open<'m>(call: &Call<'m>) -> Masquerade<'m> {
    Masquerade::new(call.machine, call.notes.clone())
}

/// Writes the masquerade rules of `addresses`, unless `masquerading` is off.
///
/// # Errors
/// - Code 2 if this host does not have the backend.
/// - The rules cannot be written.
pub(super) fn ensure<'a, C>(
    context: &AttachmentContext<'a, C>,
    masquerading: Masquerading,
    addresses: &[Cidr],
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    let Masquerading::On(backend) = masquerading else { return Ok(()) };
    let (call, attachment) = (context.call, &context.attachment);
    // The undo is registered before the rules are written, because the rules of one address family
    // may be in force when those of the other fail. An earlier ADD of the same attachment, into
    // another namespace, may have written rules: `Masquerade::ensure` stores them in `previous`,
    // and the undo restores them.
    let previous = Rc::new(PreviousRules::default());
    let undo = {
        let (attachment, addresses, previous) = (attachment.clone(), addresses.to_vec(), Rc::clone(&previous));
        move || open(call).put_back(&attachment, &addresses, &previous)
    };
    rollback.push(format!("restore the earlier masquerade rules of {}", attachment.ifname), undo);
    open(call).ensure(attachment, backend, addresses, &previous).map_err(|error| {
        let error = Error::from(error).context(configured_keys(backend));
        // The backend is only probed after a failure, because the probe may start a process.
        if open(call).probe(backend).is_err() { error.with_code(Code::UNSUPPORTED_FIELD) } else { error }
    })
}

/// STATUS: checks that the next ADD can write its masquerade rules.
///
/// # Errors
/// Code 50 if this host does not have the backend.
pub(super) fn status(call: &Call<'_>, masquerading: Masquerading) -> Result<()> {
    let Masquerading::On(backend) = masquerading else { return Ok(()) };
    open(call)
        .probe(backend)
        .map_err(|error| Error::from(error).context(configured_keys(backend)).with_code(Code::NOT_AVAILABLE))
}

/// Returns the configuration's masquerading keys as JSON, for error messages.
fn configured_keys(backend: Option<Backend>) -> String {
    let backend = backend.map(|backend| format!(", \"ipMasqBackend\": \"{backend}\"")).unwrap_or_default();
    format!("\"ipMasq\": true{backend}")
}
