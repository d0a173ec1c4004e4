//! bridge: a container on a layer-2 or layer-3 network. The tests check the kernel's state, not
//! only the result.

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
mod settings;
mod spoofing;
mod trunk;
mod versions;
mod vlan;
