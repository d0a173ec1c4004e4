//! The protocol, the same for every plugin: environment, configuration, versions, errors.

mod args;
mod codes;
mod configuration;
mod environment;
mod guard;
mod json;
mod version_line;
mod versions;
