//! Reads the tables of the page in the docs.

pub(super) const PAGE: &str = include_str!("../../docs/observability.md");

/// The words in backquotes.
pub(super) fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The rows of the page's tables whose first cell is a name with this beginning, cell by cell.
pub(super) fn rows(beginning: &str) -> Vec<Vec<&'static str>> {
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| "));
    rows.filter(|row| row.starts_with(&format!("`{beginning}")))
        .map(|row| row.split(" | ").flat_map(|cell| cell.split("| ")).collect())
        .collect()
}
