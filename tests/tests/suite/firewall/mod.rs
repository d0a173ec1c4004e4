//! `firewall`: packets of containers pass the node's filter, bridges are isolated, and DEL leaves
//! nothing.

mod egress;
mod firewalld;
mod killed;
mod life;
mod mapped_ports;
mod operator;
mod packets;
mod shapes;
mod storm;
mod swaps;
mod world;
