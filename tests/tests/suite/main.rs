//! The conformance suite: tests real executables for what runtimes, administrators and nodes rely
//! on.
//!
//! One file per subject. `CNI_BIN_DIR` names the plugins under test. A skipped test prints the
//! reason to stderr.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

mod advertisements;
mod bandwidth;
mod bond;
mod bridge;
mod check_week;
mod cluster_local;
mod cnitool;
mod conventions;
mod delegation;
mod dhcp;
mod dns;
mod dummy;
mod examples;
mod files;
mod firewall;
mod flannel;
mod full_node;
mod gc;
mod gc_costs;
mod gws;
mod host_device;
mod host_local;
mod install;
mod interface_names;
mod ipam_static;
mod keeps_going;
mod loopback;
mod masquerade;
mod mixed;
mod modes;
mod operator;
mod paths;
mod portmap;
mod programs;
mod protocol;
mod ptp;
mod reused_netns;
mod rights;
mod route_override;
mod sbr;
mod seccomp;
mod second_default;
mod signals;
mod slaac;
mod stacked;
mod status;
mod storm;
mod tap;
mod tuning;
mod vrf;
