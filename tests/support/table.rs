//! Tables of which every row is tried, and that a page has.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Tries all rows, some at the same time; why some failed.
pub fn try_all(
    rows: usize,
    together: usize,
    attempt: impl Fn(usize) -> Result<(), String> + Sync,
) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let tries = || {
        let mut failures = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= rows {
                return failures;
            }
            failures.extend(attempt(index).err());
        }
    };
    std::thread::scope(|scope| {
        let tries: Vec<_> = (0..together).map(|_| scope.spawn(tries)).collect();
        let failures = tries.into_iter().map(|tries| tries.join());
        failures
            .flat_map(|failures| failures.expect("no panic"))
            .collect()
    })
}

/// What is between these two lines of a page is a test's own.
const BEGIN: &str = "<!-- table: begin -->\n";
const END: &str = "<!-- table: end -->\n";

/// Looks whether the page has this table; with `NCCL_TEST_WRITE`, writes it there.
///
/// # Panics
/// When the page has another one, or none.
pub fn written_or_same(path: &str, table: &str) {
    let page = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let parts = page.split_once(BEGIN).and_then(|(before, rest)| {
        let (found, after) = rest.split_once(END)?;
        Some((before, found, after))
    });
    let (before, found, after) = parts.unwrap_or_else(|| panic!("{path} has no place for it"));
    if found == table {
        return;
    }
    if std::env::var_os("NCCL_TEST_WRITE").is_some() {
        let page = format!("{before}{BEGIN}{table}{END}{after}");
        std::fs::write(path, page).unwrap_or_else(|error| panic!("{path}: {error}"));
        return;
    }
    let differing = table
        .lines()
        .filter(|line| !found.lines().any(|other| other == *line))
        .chain(
            found
                .lines()
                .filter(|line| !table.lines().any(|other| other == *line)),
        );
    let differing: Vec<_> = differing.collect();
    panic!(
        "{path} has another table (`cargo xtask fault-table` writes it):\n{}",
        differing.join("\n")
    );
}

/// Compares what is said with what a page quotes in the row that begins with `fault`: where the quote has `…`, anything may
/// stand.
pub fn is_as_quoted(page: &str, fault: &str, said: &str) {
    let row = page
        .lines()
        .find(|line| line.starts_with(&format!("| {fault} |")));
    let quote = row.and_then(|row| row.split('`').nth(1));
    let quote = quote.unwrap_or_else(|| panic!("the page quotes nothing for {fault:?}"));
    let mut rest = said;
    for piece in quote.split('…').map(str::trim) {
        let at = rest.find(piece);
        let at = at.unwrap_or_else(|| panic!("{piece:?} is quoted, and this was said: {said}"));
        rest = &rest[at + piece.len()..];
    }
}
