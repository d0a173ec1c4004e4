//! The code that several plugins share.
//!
//! - [`main!`]: the whole `main.rs` of a plugin. [`process`]: the start of a plugin's process.
//! - [`logging`]: the log, if `CNI_LOG` asks for one.
//! - [`keys`]: configuration keys that several plugins have.
//! - [`container`]: the container's namespace and interface, for chained plugins.
//! - [`folder`]: a folder with a file for each attachment.
//! - [`interface`]: the code shared by all plugins that create an interface.
//! - [`identity`]: whether CNI_IFNAME belongs to the attachment, for plugins that create none.
//! - [`record`]: what a plugin stores about an attachment on the host.

#![forbid(unsafe_code)]

pub mod container;
pub mod folder;
pub mod identity;
pub mod interface;
pub mod keys;
pub mod logging;
pub mod process;
pub mod record;

pub use interface::{Interface, InterfacePlugin};

#[doc(hidden)]
pub use cni_linux::Arena;

/// Expands to a plugin's function `main` and its global allocator.
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
