//! The nft backend against the real kernel.
