//! GC: what bears this network's mark and belongs to no valid attachment.
//!
//! Links are known by their alias, spoof rules by their tag; what Go made bears neither and is removed only when its
//! interface is gone for sure. Masquerade rules name network and container in their comments, Go's too. IPAM gets the same request.

use cni::config::ValidAttachments;
use cni::delegate::Delegate;
use cni::skel::Call;
use cni::{Error, Result};
use cni_firewall::spoof::SpoofCheck;
use cni_linux::{Link, Mark, Netlink};

use crate::chained::{PortMark, give_back};
use crate::masquerade;

pub(crate) fn gc(call: &Call<'_>, valid: &ValidAttachments) -> Result<()> {
    let network = call.conf.name();
    let mut errors = Vec::new();
    errors.extend(links(network, valid).err());
    if !call.conf.ipam_type().is_empty() {
        let forwarded = Delegate::find(call, call.conf.ipam_type()).and_then(|ipam| ipam.gc());
        errors.extend(forwarded.err());
    }
    errors.extend(spoof_rules(network, valid).err());
    let valid: Vec<(&str, &str)> = valid.iter().collect();
    errors.extend(masquerade::open(call).gc(network, &valid).err().map(Error::from));
    match Error::join(errors) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn links(network: &str, valid: &ValidAttachments) -> Result<()> {
    let host = Netlink::open()?;
    let prefix = Mark::network_prefix(network);
    // Whole aliases are compared, so that a container ID too long for one is as good as any other.
    let valid: Vec<String> = valid.iter().map(|(id, ifname)| Mark::new(network, id, ifname).alias()).collect();
    let is_garbage = |mark: &str| mark.starts_with(&prefix) && !valid.iter().any(|alias| alias == mark);
    let mut errors = Vec::new();
    for link in host.list_links()? {
        let Link { index, alias: Some(alias), .. } = &link else { continue };
        let removed = match PortMark::parse(alias) {
            Some(port_mark) if is_garbage(&port_mark.mark) => give_back(&host, &link),
            None if is_garbage(alias) => host.purge_link(*index).map(drop),
            _ => Ok(()),
        };
        errors.extend(removed.err().map(Error::from));
    }
    match Error::join(errors) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn spoof_rules(network: &str, valid: &ValidAttachments) -> Result<()> {
    let mut spoof = match SpoofCheck::open() {
        Ok(spoof) => spoof,
        Err(error) if error.is_unsupported() => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let owners = spoof.list()?;
    if owners.is_empty() {
        return Ok(());
    }
    let host = Netlink::open()?;
    let names: Vec<String> = host.list_links()?.into_iter().map(|link| link.name).collect();
    let valid: Vec<(&str, &str)> = valid.iter().collect();
    let mut errors = Vec::new();
    for owner in owners {
        if owner.is_garbage(network, &valid, |name| names.iter().any(|link| link == name)) {
            errors.extend(spoof.purge_owner(&owner).err().map(Error::from));
        }
    }
    match Error::join(errors) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
