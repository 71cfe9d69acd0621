//! Calls that do not return.

use super::*;

/// All ranks have entered the operation; one is still in the call, and the others' operations wait for it.
#[test]
fn the_one_rank_that_does_not_come_back_from_the_call_is_the_cause() {
    let aged = |table: &mut Table, ages: [u64; 3]| {
        for (report, age) in table.reports.values_mut().zip(ages) {
            report.calls[1].age_ms = age;
        }
    };
    let reports = (0..3).map(|rank| entered(rank, 2, false)).collect();
    let mut table = Table::of(reports);
    table.reports.get_mut(&1).unwrap().calls[1].state = EnteredCallState::Issuing;
    aged(&mut table, [2000, 1900, 2100]);
    let diagnosis = table.find_root_cause();
    let operation = String::from("all_reduce #2");
    assert_eq!(diagnosis.rank, 1);
    assert_eq!(diagnosis.cause.root, RootCause::StuckInside { operation });
    assert_eq!(diagnosis.cause.class, FaultClass::TimedOut);
    assert!(
        diagnosis.cause.text.contains("1.9 s"),
        "{:?}",
        diagnosis.cause
    );

    // Rank 1 has just entered.
    aged(&mut table, [2000, 100, 2100]);
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    // Two ranks that are in the call may wait for each other.
    aged(&mut table, [2000, 1900, 2100]);
    table.reports.get_mut(&2).unwrap().calls[1].state = EnteredCallState::Issuing;
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    // Also when rank 2 has just entered, and is what rank 1 waits for.
    aged(&mut table, [2000, 1900, 100]);
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    // Where no rank has returned from the call, all may.
    table.reports.get_mut(&0).unwrap().calls[1].state = EnteredCallState::Issuing;
    table.reports.remove(&2);
    table.hosts.pop();
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
}
