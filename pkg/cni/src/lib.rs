//! The CNI protocol, without the kernel.
//!
//! Modules, from the wire inwards:
//!
//! - [`json`]: one JSON document as Go's decoder reads it (keys of structures match
//!   case-insensitively, `null` is the default, the last duplicate wins).
//! - [`attachment`]: which attachment, and the names and aliases of its links.
//! - [`version`], [`ident`], [`args`]: specification versions, identifiers, `CNI_ARGS`.
//! - [`config`]: the network configuration every plugin receives; [`result`]: the result every
//!   plugin returns, one type in the newest shape, converted where it is read and written.
//! - [`error`]: an error with its CNI code; [`mod@file`]: files that a person has put there;
//!   [`hash`]: the hash in names.
//! - [`skel`]: the skeleton that drives a plugin; [`rollback`]: what it undoes when an ADD fails;
//!   [`delegate`]: running another plugin (IPAM).
//! - [`steps`]: the log lines of a call.
//! - [`machine`]: the few things the protocol needs of the operating system, as a value handed in
//!   by `main`.
//! - [`release`]: which release of this project a program is; [`time`]: times formatted for people.
//!
//! This crate never touches the kernel's network state, holds no unsafe code and needs no
//! privilege. What does is `cni-linux`, which depends on this crate and never the reverse.

pub mod args;
pub mod attachment;
pub mod cidr;
pub mod config;
pub mod delegate;
pub mod error;
pub mod file;
pub mod hash;
pub mod ident;
pub mod json;
pub mod machine;
pub mod release;
pub mod result;
pub mod rollback;
pub mod skel;
pub mod steps;
pub mod time;
pub mod version;

pub use attachment::AttachmentId;
pub use cidr::Cidr;
pub use error::{Code, Error, Result};
pub use rollback::Rollback;
