//! Facts about the build for a benchmark's header and a bug report.

/// Facts that `build.rs` found when this package was compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildInfo {
    /// The version of the workspace.
    pub version: &'static str,
    /// The git commit, with `-modified` if files differed from it; empty outside a repository.
    pub commit: &'static str,
    /// The compiler, as `rustc 1.88.0 (…)`.
    pub rustc: &'static str,
    /// The profile's directory name, `release` or `debug` (or a custom profile's).
    pub profile: &'static str,
    /// The target triple.
    pub target: &'static str,
    /// `-C target-cpu` and the like, from `RUSTFLAGS`; empty where there are none.
    pub flags: &'static str,
}

/// The facts of this build.
pub const BUILD: BuildInfo = BuildInfo {
    version: env!("CARGO_PKG_VERSION"),
    commit: env!("NCCL_TOOLS_COMMIT"),
    rustc: env!("NCCL_TOOLS_RUSTC"),
    profile: env!("NCCL_TOOLS_PROFILE"),
    target: env!("NCCL_TOOLS_TARGET"),
    flags: env!("NCCL_TOOLS_RUSTFLAGS"),
};

impl BuildInfo {
    /// All facts on one line.
    ///
    /// ```
    /// assert!(nccl_tools::build_info::BUILD.line().starts_with("nccl-tools "));
    /// ```
    #[must_use]
    pub fn line(&self) -> String {
        let commit = if self.commit.is_empty() {
            "no commit known"
        } else {
            self.commit
        };
        let mut line = format!(
            "nccl-tools {} ({commit}), {}, {}, {}",
            self.version, self.rustc, self.profile, self.target
        );
        if !self.flags.is_empty() {
            line.push_str(&format!(", {}", self.flags));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_compiler_profile_and_target() {
        let line = BUILD.line();
        for part in ["rustc ", BUILD.profile, "linux"] {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }
        assert!(!BUILD.profile.is_empty());
    }

    #[test]
    fn a_build_outside_a_repository_says_so() {
        let line = BuildInfo {
            commit: "",
            ..BUILD
        }
        .line();
        assert!(line.contains("no commit known"), "{line}");
    }
}
