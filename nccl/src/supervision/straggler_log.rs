//! Log events for ranks that have not entered an operation.

use std::sync::atomic::{AtomicU64, Ordering};

use nccl_base::time::millis;

use crate::stats;
use nccl_base::fault::{Roster, short_key};
use nccl_control::{LateRank, StragglerReport};

/// Logs ranks that have not entered an operation, or have entered it late, as reported to rank `on_rank` of the world; `logged`
/// counts the reported stragglers. Logs each of the first 16, then each at a power of two. The reporter logs at level warn, or
/// info once a rank has entered; the others at debug.
pub(crate) fn log_stragglers(
    report: &StragglerReport,
    roster: &Roster,
    on_rank: usize,
    logged: &AtomicU64,
) {
    let subject = &report.subject;
    let comm_key = short_key(&subject.key);
    let is_reporter = report.reporter == on_rank;
    for one in &report.late {
        let LateRank {
            communicator_rank,
            host,
            pid,
            behind,
            has_entered,
            answers,
            phase,
            last,
            ..
        } = one;
        let (behind_ms, more) = (millis(*behind), report.more);
        let world_ranks = roster.world_ranks();
        let world_rank = roster.world_rank(*communicator_rank);
        let launcher_rank = roster.launcher_rank(*communicator_rank);
        let who = format!(
            "rank {communicator_rank} ({}{host}, pid {pid})",
            roster.others(*communicator_rank)
        );
        let named = roster.named(&subject.name);
        if *has_entered {
            macro_rules! log {
                ($level:ident) => {
                    tracing::$level!(
                        name: "nccl.straggler.entered",
                        target: "nccl",
                        comm = &*subject.name,
                        comm_key,
                        world_ranks,
                        op = %subject.kind,
                        seq = subject.sequence,
                        rank = communicator_rank,
                        world_rank,
                        launcher_rank,
                        host,
                        pid,
                        behind_ms,
                        on_rank,
                        "{who} has entered {} #{} on {named} at last, {behind_ms} ms behind",
                        subject.kind,
                        subject.sequence,
                    )
                };
            }
            match is_reporter {
                true => log!(info),
                false => log!(debug),
            }
            continue;
        }
        stats::STRAGGLERS.count();
        let count = logged.fetch_add(1, Ordering::Relaxed) + 1;
        if count > 16 && !count.is_power_of_two() {
            continue;
        }
        let what = match answers {
            true => "has not entered",
            false => "does not answer, and may not have entered",
        };
        macro_rules! log {
            ($level:ident) => {
                tracing::$level!(
                    name: "nccl.straggler",
                    target: "nccl",
                    comm = &*subject.name,
                    comm_key,
                    world_ranks,
                    op = %subject.kind,
                    seq = subject.sequence,
                    rank = communicator_rank,
                    world_rank,
                    launcher_rank,
                    host,
                    pid,
                    behind_ms,
                    phase,
                    last,
                    answers,
                    more,
                    on_rank,
                    count,
                    "{who} {what} {} #{} on {named}, in which others have waited for {behind_ms} ms",
                    subject.kind,
                    subject.sequence,
                )
            };
        }
        match is_reporter {
            true => log!(warn),
            false => log!(debug),
        }
    }
}
