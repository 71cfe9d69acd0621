//! The rank that usually entered last before the stall, from the times of the calls that all ranks have made.

use std::time::Duration;

use super::input::DiagnosisInput;

/// Maximum number of operations looked at.
const LAST: usize = 16;

/// Minimum number of operations, and minimum delay, of a pattern: fewer show nothing, and shorter delays come and go.
const FEWEST: usize = 4;
const LEAST: Duration = Duration::from_millis(10);

/// Returns a sentence if one rank entered last in most of the operations, by more than the time within which the
/// reports were made, because reports have ages of calls.
pub(super) fn usual_straggler(input: &DiagnosisInput<'_>) -> Option<String> {
    let first = input.reports.values().next()?;
    let collectives = first
        .calls
        .iter()
        .rev()
        .filter_map(|call| call.collective_index);
    let last_of = |collective_index: u64| {
        let ages = input.reports.values();
        let ages =
            ages.map(|report| Some((report.collective(collective_index)?.age_ms, report.rank)));
        let mut ages: Vec<_> = ages.collect::<Option<_>>()?;
        ages.sort_unstable();
        let [(age, rank), (before, _), ..] = ages[..] else {
            return None;
        };
        Some((rank, before - age))
    };
    let lasts: Vec<(usize, u64)> = collectives.filter_map(last_of).take(LAST).collect();
    let mut counts = std::collections::BTreeMap::<usize, Vec<u64>>::new();
    for (rank, by) in &lasts {
        counts.entry(*rank).or_default().push(*by);
    }
    let (rank, mut by) = counts.into_iter().max_by_key(|(_, by)| by.len())?;
    by.sort_unstable();
    let median = Duration::from_millis(by[by.len() / 2]);
    if lasts.len() < FEWEST
        || by.len() * 4 < lasts.len() * 3
        || median < LEAST
        || median <= input.slack
    {
        return None;
    }
    Some(format!(
        "{} had been the last to arrive in {} of the last {} operations of all ranks, by {median:?} (median)",
        input.roster.who(&[rank]),
        by.len(),
        lasts.len()
    ))
}
