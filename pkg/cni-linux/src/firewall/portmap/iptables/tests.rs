//! The iptables backend against the real kernel, in both variants.
