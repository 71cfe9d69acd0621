//! Texts for calls, ranks and clocks.

use std::fmt::Write as _;
use std::time::Duration;

use crate::operation::OperationKind;
use nccl_core::recorder::{Call, CallSpan, CallState, RecordedOperation, Recording};
use nccl_core::recorder::{Clock, ClockSource};

/// `rank 3 (launcher rank 4, node-a, pid 4021)`; `launched` is the part `launcher rank 4, `, or empty.
pub(super) fn who(rank: usize, launched: &str, host: Option<&str>, pid: Option<u32>) -> String {
    match (host, pid) {
        (Some(host), Some(pid)) => format!("rank {rank} ({launched}{host}, pid {pid})"),
        (Some(host), None) => format!("rank {rank} ({host})"),
        (None, Some(pid)) => format!("rank {rank} (pid {pid})"),
        (None, None) => format!("rank {rank}"),
    }
}

/// `all_reduce #42`
pub(super) fn title(call: &Call) -> String {
    format!("{} #{}", call.kind, call.sequence)
}

/// `send 4096 × bf16 to rank 3, message 17`
pub(super) fn operation(operation: &RecordedOperation) -> String {
    let RecordedOperation {
        kind,
        count,
        data_type,
        peer,
        message,
        root,
        reduction,
        ..
    } = operation;
    let mut text = match kind {
        OperationKind::Signal => format!("{kind}"),
        OperationKind::WaitSignal => format!("{kind} for {count}"),
        _ => format!("{kind} {count} × {data_type}"),
    };
    // Writing to a string does not fail.
    if let Some(peer) = peer {
        let way = match kind {
            OperationKind::Recv | OperationKind::WaitSignal => "from",
            _ => "to",
        };
        let _ = write!(text, " {way} rank {peer}");
    }
    if let Some(message) = message {
        let _ = write!(text, ", message {message}");
    }
    if let Some(root) = root {
        let _ = write!(text, ", root {root}");
    }
    if let Some(reduction) = reduction {
        let _ = write!(text, ", {reduction}");
    }
    text
}

/// How far a call has come.
pub(super) fn state(state: CallState) -> &'static str {
    match state {
        CallState::Issuing => "NCCL was called and has not returned",
        CallState::Issued => "issued, and not known to be done",
        CallState::Done => "done",
        CallState::Failed => "failed",
        // `Aborted`: the crates are of one release.
        _ => "aborted before it was done",
    }
}

/// Whether the call has not ended.
pub(super) fn is_open(state: CallState) -> bool {
    !matches!(state, CallState::Done | CallState::Failed)
}

/// Operations listed of one call.
const LISTED: usize = 24;

/// The whole fingerprint, in lines.
pub(super) fn fingerprint(recording: &Recording, call: &Call) -> String {
    let mut text = format!(
        "{} on \"{}\": {}",
        title(call),
        recording.name,
        state(call.state)
    );
    let _ = write!(
        text,
        "\n{} of {}, generation {}, key {}, stream {:#x}",
        recording.roster().who(&[recording.rank]),
        recording.world_size,
        recording.generation,
        recording.key.as_deref().unwrap_or("unknown"),
        call.stream
    );
    let _ = write!(
        text,
        "\nissued {} after the process's origin",
        span(call.since)
    );
    if let Some(done) = call.done {
        let took = span(done.saturating_sub(call.since));
        let _ = write!(text, "; known to be done {took} later");
    }
    if let Some(span) = &call.span {
        let _ = write!(text, "\nin {}", in_span(span));
    }
    if let Some(inside) = &call.inside_nccl {
        let _ = write!(text, "\ninside NCCL, {inside}");
    }
    for one in call.operations.iter().take(LISTED) {
        let _ = write!(text, "\n  {}", operation(one));
    }
    if call.operations.len() > LISTED {
        let _ = write!(text, "\n  … and {} more", call.operations.len() - LISTED);
    }
    if call.missing > 0 {
        let _ = write!(
            text,
            "\n  {} operations are overwritten, or were not called yet",
            call.missing
        );
    }
    text
}

/// `span "step", number 0x1: step=17`
pub(super) fn in_span(span: &CallSpan) -> String {
    let CallSpan {
        id, name, about, ..
    } = span;
    match about {
        Some(about) => format!("span {name:?}, number {id:#x}: {about}"),
        None => format!("span {name:?}, number {id:#x}"),
    }
}

/// How a clock was corrected.
pub(super) fn clock(clock: &Clock) -> String {
    let offset = || {
        let size = span(Duration::from_nanos(clock.offset_ns.unsigned_abs()));
        match clock.offset_ns < 0 {
            true => format!("−{size}"),
            false => format!("+{size}"),
        }
    };
    let uncertain = match clock.uncertainty_ns {
        Some(limit) => format!(" ± {}", span(Duration::from_nanos(limit))),
        None => String::from(", by how much that is wrong is not known"),
    };
    match clock.source {
        ClockSource::Reference => String::from("the clock of this page"),
        ClockSource::RoundTrip => format!("corrected by {}{uncertain} (round trips)", offset()),
        ClockSource::SameMachine => {
            String::from("the same machine's clock as that of this page, uncorrected")
        }
        // `Wall`: the crates are of one release.
        _ => String::from(
            "another machine's clock on the wall, uncorrected: arrows and order between machines may be wrong",
        ),
    }
}

/// A duration with about three digits.
pub(super) fn span(span: Duration) -> String {
    let nanoseconds = span.as_nanos();
    let (unit, digits) = match nanoseconds {
        0..1_000 => return format!("{nanoseconds} ns"),
        1_000..1_000_000 => ("µs", nanoseconds as f64 / 1e3),
        1_000_000..1_000_000_000 => ("ms", nanoseconds as f64 / 1e6),
        _ => ("s", nanoseconds as f64 / 1e9),
    };
    match digits {
        ..10.0 => format!("{digits:.2} {unit}"),
        10.0..100.0 => format!("{digits:.1} {unit}"),
        _ => format!("{digits:.0} {unit}"),
    }
}
