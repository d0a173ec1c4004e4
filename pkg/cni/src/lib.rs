//! The CNI protocol.
//!
//! Modules:
//!
//! - [`json`]: JSON, decoded by the rules of Go's `encoding/json`.
//! - [`attachment`]: the identity of an attachment, and the names and aliases of its links.
//! - [`version`], [`ident`], [`args`], [`cidr`]: specification versions, identifiers, `CNI_ARGS`,
//!   addresses with a prefix length.
//! - [`config`]: the network configuration that a plugin receives; [`result`]: the result that it
//!   returns, as one type for all versions.
//! - [`error`]: errors with a CNI code; [`mod@file`]: files that an operator has named; [`hash`]:
//!   the hash from which names are derived.
//! - [`skel`]: the skeleton that runs a plugin; [`rollback`]: the undos of an ADD; [`delegate`]:
//!   running another plugin (IPAM).
//! - [`steps`]: the log lines of a call.
//! - [`machine`]: the operations of the operating system that the protocol needs, as a trait.
//! - [`release`]: the release of this project; [`time`]: the format of times; [`text`]: cuts texts.
//!
//! This crate has no unsafe code, needs no privilege and never changes the kernel's network state:
//! that is the task of `cni-linux`, which depends on this crate.

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
pub mod text;
pub mod time;
pub mod version;

pub use attachment::AttachmentId;
pub use cidr::Cidr;
pub use error::{Code, Error, Result};
pub use rollback::Rollback;
