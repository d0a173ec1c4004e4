//! What every plugin has around its verbs.
//!
//! - [`main!`]: the whole `main.rs` of a plugin. [`process`]: the start of a plugin's process.
//! - [`logging`]: where the log goes, if one is asked for.
//! - [`keys`]: keys that several plugins have.
//! - [`interface`]: plugins that create an interface, as what is special about their link.

#![forbid(unsafe_code)]

pub mod interface;
pub mod keys;
pub mod logging;
pub mod process;

pub use interface::{Interface, InterfacePlugin};

#[doc(hidden)]
pub use cni_linux::Arena;

/// Expands to the `main` of a plugin's binary, and to its allocator.
///
/// ```text
/// cni_plugin::main!(plugin_portmap::Portmap);
/// ```
#[macro_export]
macro_rules! main {
    ($plugin:expr) => {
        #[global_allocator]
        static MEMORY: $crate::Arena = $crate::Arena::new();

        fn main() -> ::std::process::ExitCode {
            $crate::process::run(&$plugin)
        }
    };
}
