//! What every plugin has around its verbs.
//!
//! - [`main!`]: the whole `main.rs` of a plugin. [`process`]: the start of a plugin's process.
//! - [`logging`]: where the log goes, if one is asked for.

#![forbid(unsafe_code)]

pub mod logging;
pub mod process;

#[doc(hidden)]
pub use cni_linux::Arena;

/// Expands to the `main` of a plugin's binary, and to its allocator.
///
/// ```no_run
/// # #[derive(Debug)]
/// # struct Nothing;
/// # impl cni::skel::Plugin for Nothing {
/// #     fn name(&self) -> &'static str { "nothing" }
/// #     fn add<'a>(&self, _: &'a cni::skel::Call<'_>) -> cni::Result<cni::skel::Added<'a>> { unimplemented!() }
/// #     fn check(&self, _: &cni::skel::Call<'_>) -> cni::Result<()> { Ok(()) }
/// #     fn del(&self, _: &cni::skel::Call<'_>) -> cni::Result<()> { Ok(()) }
/// #     fn gc(&self, _: &cni::skel::Call<'_>, _: &cni::config::ValidAttachments) -> cni::Result<()> { Ok(()) }
/// #     fn status(&self, _: &cni::skel::Call<'_>) -> cni::Result<()> { Ok(()) }
/// # }
/// cni_plugin::main!(Nothing);
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
