//! The wire: environment, configuration, versions, errors. The same for every plugin.

mod args;
mod codes;
mod configuration;
mod environment;
mod guard;
mod json;
mod versions;
