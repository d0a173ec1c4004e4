//! The release of this project, as every plugin and tool prints it.
//!
//! The version is the workspace's. The commit is the value of `CNI_BUILD_COMMIT` during the build,
//! which `scripts/build` sets. A build by cargo alone has no commit.

use std::sync::LazyLock;

/// The release of the Go plugins that these plugins replace.
const GO_RELEASE: &str = "1.9.1";

/// Returns the version, with the commit if the build had one: `0.1.0 (commit 1a2b3c4d5e6f)` or
/// `0.1.0`.
pub fn release() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| text(env!("CARGO_PKG_VERSION"), option_env!("CNI_BUILD_COMMIT")));
    &TEXT
}

/// Returns the line by which a plugin states its version: `CNI bridge plugin v1.9.1+rust.0.1.0`.
///
/// Nomad and nerdctl parse this line as a semantic version and compare it with releases of the Go
/// plugins. So the version is the Go release, and the own version is build metadata, which
/// comparisons ignore. A pre-release (`1.9.1-rust`) would not satisfy `>= 1.1.0` in Nomad. nerdctl
/// parses the whole rest of the line, so nothing may follow the version.
pub fn version_line(plugin: &str) -> String {
    format!("CNI {plugin} plugin v{GO_RELEASE}+rust.{}", env!("CARGO_PKG_VERSION"))
}

/// Formats a version and a commit. An empty commit counts as none.
fn text(version: &str, commit: Option<&str>) -> String {
    match commit.filter(|commit| !commit.is_empty()) {
        Some(commit) => format!("{version} (commit {commit})"),
        None => version.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_is_printed_where_it_is_known() {
        assert_eq!(text("1.2.3", Some("1a2b3c4d5e6f")), "1.2.3 (commit 1a2b3c4d5e6f)");
        assert_eq!(text("1.2.3", Some("")), "1.2.3");
        assert_eq!(text("1.2.3", None), "1.2.3");
        assert!(release().starts_with(env!("CARGO_PKG_VERSION")));
    }
}
