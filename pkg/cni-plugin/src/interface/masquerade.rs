//! `ipMasq`: packets that leave the network get the host's address as their source.
//!
//! ADD writes the rules of the configured backend. DEL and GC remove the rules of both backends,
//! because the configuration may have changed since ADD. The rules match addresses, not interfaces,
//! so ADD writes them before the interface is up: already the first packet is masqueraded.

use cni::rollback::Rollback;
use cni::skel::Call;
use cni::{Cidr, Code, Error, Result};
use cni_firewall::{Backend, Masquerade};

use super::AttachmentContext;
use crate::keys::MasqueradeScope;

/// Returns a handle to the masquerade rules of this host, for one call.
pub(super) fn open<'m>(call: &Call<'m>) -> Masquerade<'m> {
    Masquerade::new(call.machine, call.notes.clone())
}

/// Writes the masquerade rules of those of `addresses` that `scope` selects. Adds the undo
/// to `rollback`, unless all rules were in place.
///
/// # Errors
/// - Code 2 if this host does not have the backend.
/// - The rules cannot be written.
pub(super) fn ensure<'a, C>(
    context: &AttachmentContext<'a, C>,
    scope: Option<&MasqueradeScope>,
    addresses: &[Cidr],
    rollback: &mut Rollback<'a>,
) -> Result<()> {
    let Some(scope) = scope else { return Ok(()) };
    let (addresses, backend) = (scope.select(addresses), scope.backend);
    if addresses.is_empty() {
        return Ok(());
    }
    let (call, attachment) = (context.call, &context.attachment);
    let result = open(call).excluding(&scope.exclude).ensure(attachment, backend, &addresses);
    // After an error, the rules of one address family may be in force.
    let is_in_place = matches!(result, Ok(None));
    if !is_in_place {
        let attachment = attachment.clone();
        let changed = result.as_ref().ok().copied().flatten().or(backend);
        rollback.push(format!("remove the masquerade rules of {}", attachment.ifname), move || {
            open(call).undo(&attachment, changed)
        });
    }
    result.map(drop).map_err(|error| {
        let error = Error::from(error).context(configured_keys(backend));
        // The backend is only probed after a failure, because the probe may start a process.
        if open(call).probe(backend).is_err() { error.with_code(Code::UNSUPPORTED_FIELD) } else { error }
    })
}

/// STATUS: checks that the next ADD can write its masquerade rules.
///
/// # Errors
/// Code 50 if this host does not have the backend.
pub(super) fn status(call: &Call<'_>, scope: Option<&MasqueradeScope>) -> Result<()> {
    let Some(&MasqueradeScope { backend, .. }) = scope else { return Ok(()) };
    open(call)
        .probe(backend)
        .map_err(|error| Error::from(error).context(configured_keys(backend)).with_code(Code::NOT_AVAILABLE))
}

/// Returns the configuration's masquerading keys as JSON, for error messages.
fn configured_keys(backend: Option<Backend>) -> String {
    let backend = backend.map(|backend| format!(", \"ipMasqBackend\": \"{backend}\"")).unwrap_or_default();
    format!("\"ipMasq\": true{backend}")
}
