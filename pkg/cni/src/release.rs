//! Which release of this project a program is: what every plugin and tool says of itself.
//!
//! The version is the workspace's. The commit comes from `CNI_BUILD_COMMIT` in the environment of
//! the build, which `scripts/build` sets; a build by bare cargo has none and does not pretend to.

use std::sync::LazyLock;

/// The version, and the commit where the build knew it: `0.1.0 (commit 1a2b3c4d5e6f)`, `0.1.0`.
pub fn release() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| text(env!("CARGO_PKG_VERSION"), option_env!("CNI_BUILD_COMMIT")));
    &TEXT
}

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
