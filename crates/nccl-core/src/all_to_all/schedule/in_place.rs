//! Exchanges blocks in place between pairs of ranks.
//!
//! NCCL's all-to-all is wrong in place: an arriving block may replace one that has not been sent. Here a rank exchanges blocks
//! with few peers at a time, each of which exchanges with this rank at the same time. A sent block stays in place until the
//! peer's block has arrived in the scratch memory, and is then replaced by a copy.

use super::direct::partner;
use super::{BufferLocation, Exchange, Message, Move, Region, Schedule, ScheduleStep};

/// Makes the schedule for uniform payloads, each with one buffer for both sides (`Region::Recv`), with `width` peers at a time.
pub(crate) fn in_place(exchange: Exchange<'_>, width: usize) -> Schedule {
    let mut scratch = 0;
    let mut steps = Vec::new();
    let mut arrived: Vec<Move> = Vec::new();
    let rounds: Vec<usize> = (0..exchange.ranks).collect();
    for rounds in rounds.chunks(width) {
        let mut step = ScheduleStep {
            // The scratch memory is emptied before it is used again.
            moves: std::mem::take(&mut arrived),
            ..ScheduleStep::default()
        };
        let mut beside = 0;
        for round in rounds {
            let peer = partner(exchange, *round);
            if peer == exchange.rank {
                continue;
            }
            for (number, payload) in exchange.payloads() {
                let Some(count) = payload.uniform.filter(|count| *count > 0) else {
                    continue;
                };
                let block = count * payload.size;
                let home = BufferLocation {
                    region: Region::Recv(number),
                    offset: peer * block,
                };
                let beside_it = BufferLocation {
                    region: Region::Scratch,
                    offset: beside,
                };
                for (sends, at) in [(true, home), (false, beside_it)] {
                    step.message(Message {
                        sends,
                        at,
                        count,
                        payload: number,
                        peer,
                    });
                }
                arrived.push(Move {
                    to: home,
                    from: beside_it,
                    width: block,
                    rows: 1,
                    to_pitch: block,
                    from_pitch: block,
                });
                // The next block may be of another type.
                beside += block.next_multiple_of(SPACING);
            }
        }
        scratch = scratch.max(beside);
        steps.push(step);
    }
    steps.push(ScheduleStep {
        moves: arrived,
        ..ScheduleStep::default()
    });
    Schedule::of(steps, scratch)
}

/// The alignment for every type.
const SPACING: usize = 16;

/// Returns the bytes of scratch for one peer.
pub(crate) fn beside(blocks: impl Iterator<Item = usize>) -> usize {
    blocks.map(|block| block.next_multiple_of(SPACING)).sum()
}
