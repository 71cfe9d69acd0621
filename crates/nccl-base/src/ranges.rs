//! Ranks in a short form.

/// Formats ranks: `0-2,5` for 0, 1, 2 and 5.
#[doc(hidden)]
pub fn ranges(ranks: &[usize]) -> String {
    let mut text = String::new();
    let mut rest = ranks;
    while let Some((&first, _)) = rest.split_first() {
        let length = rest
            .iter()
            .zip(first..)
            .take_while(|(rank, next)| **rank == *next)
            .count();
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(&first.to_string());
        if length > 1 {
            text.push_str(&format!("-{}", first + length - 1));
        }
        rest = &rest[length..];
    }
    text
}
