//! The root of the repository: Cargo runs benchmarks in the directory of their package.

use std::path::Path;

/// The root of the workspace, to which paths on the command line are relative.
pub(crate) fn root() -> &'static Path {
    let benches = Path::new(env!("CARGO_MANIFEST_DIR"));
    benches.parent().unwrap_or(benches)
}
