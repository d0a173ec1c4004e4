//! bridge: a container on a layer-2 or layer-3 network, asked of the kernel and not only of the
//! result.

mod addressing;
pub(crate) mod chained;
mod check;
mod del;
mod dummy;
mod elsewhere;
mod failure;
mod gateway;
mod link;
mod mac;
mod neighbours;
mod routes;
mod spoofing;
mod trunk;
mod versions;
mod vlan;
