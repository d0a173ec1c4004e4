//! CHECK: do the ports still lead to the container?
//!
//! The configured backend is looked at first. If the attachment is in the other one, from before
//! the configuration was changed, or made by Go, that one counts.

use cni::machine::OnSigterm;
use cni::result::AddResult;
use cni::skel::Call;
use cni::{Code, Error, Result};
use cni_firewall::portmap::Forwarding;
use cni_firewall::portmap::iptables::IptablesPortMap;
use cni_firewall::portmap::nft::NftPortMap;
use cni_linux::sysctl;

use crate::conf::Conf;
use crate::forward;
use cni_firewall::Backend;

pub(crate) fn check(call: &Call<'_>, conf: &Conf, prev: &AddResult) -> Result<()> {
    let wanted = forward::forwarding(call, conf, forward::containers(&call.ifname, prev));
    if wanted.all_claims().is_empty() {
        return Ok(());
    }
    let backend = forward::backend(call, conf)?;
    let other = match backend {
        Backend::Iptables => Backend::Nftables,
        Backend::Nftables => Backend::Iptables,
    };
    let wrong = match (holds(call, backend, &wanted)?, holds(call, other, &wanted)?) {
        (true, false) => differences(call, backend, &wanted)?,
        (false, true) => differences(call, other, &wanted)?,
        (true, true) => {
            let here = differences(call, backend, &wanted)?;
            if here.is_empty() {
                here
            } else {
                Some(differences(call, other, &wanted)?).filter(Vec::is_empty).unwrap_or(here)
            }
        }
        (false, false) => {
            let msg = format!("no host port of container {} is mapped", call.container_id);
            let details = format!("neither {} nor {} has rules of this attachment", backend.name(), other.name());
            return Err(Error::new(Code::UNKNOWN_CONTAINER, msg).with_details(details));
        }
    };
    if !wrong.is_empty() {
        return Err(Error::new(Code::CHECK_FAILED, wrong.join("; ")));
    }
    let value = forward::localnet_key(&wanted).map(|key| key.map(|key| (sysctl::read(&key), key)));
    match value {
        Ok(None) => Ok(()),
        Ok(Some((Ok(value), _))) if value == "1" => Ok(()),
        Ok(Some((Ok(_), key))) => {
            Err(Error::new(Code::CHECK_FAILED, format!("sysctl {key} is off: 127.0.0.1 cannot be mapped")))
        }
        // As in ADD: without a route no interface is known, so no sysctl can be judged.
        Ok(Some((Err(error), _))) if error.is_not_found() => {
            forward::note_no_localnet(call, &error.into());
            Ok(())
        }
        Ok(Some((Err(error), _))) => Err(error.into()),
        Err(error) => {
            forward::note_no_localnet(call, &error);
            Ok(())
        }
    }
}

fn holds(call: &Call<'_>, backend: Backend, wanted: &Forwarding) -> Result<bool> {
    let addresses: Vec<_> = wanted.containers.iter().map(|container| container.address()).collect();
    Ok(match backend {
        Backend::Iptables => {
            IptablesPortMap::open(call.machine, call.notes.clone(), OnSigterm::Kill)?.holds(&wanted.attachment)?
        }
        Backend::Nftables => match NftPortMap::open() {
            Ok(mut nft) => nft.holds(&wanted.attachment, &addresses)?,
            Err(error) if error.is_unsupported() => false,
            Err(error) => return Err(error.into()),
        },
    })
}

fn differences(call: &Call<'_>, backend: Backend, wanted: &Forwarding) -> Result<Vec<String>> {
    Ok(match backend {
        Backend::Iptables => IptablesPortMap::open(call.machine, call.notes.clone(), OnSigterm::Kill)?.check(wanted)?,
        Backend::Nftables => NftPortMap::open()?.check(wanted)?,
    })
}
