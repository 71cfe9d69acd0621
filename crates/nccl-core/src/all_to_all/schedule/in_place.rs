//! Blocks change places between pairs of ranks.
//!
//! NCCL's all-to-all is wrong when it writes where it reads: a block that arrives may replace one that has not been sent.
//! Here a rank meets few peers at a time, each of which meets it at the same time; what it sends them stays where it is
//! until what they send has arrived in memory beside it, and is moved there afterwards.

use super::direct::partner;
use super::{Exchange, Message, Move, Place, Region, Schedule, Step};

/// Of payloads that are all uniform, whose two buffers are one (`Region::Recv`), with `width` peers at a time.
pub(crate) fn in_place(exchange: Exchange<'_>, width: usize) -> Schedule {
    let mut scratch = 0;
    let mut steps = Vec::new();
    let mut arrived: Vec<Move> = Vec::new();
    let rounds: Vec<usize> = (0..exchange.ranks).collect();
    for rounds in rounds.chunks(width) {
        let mut step = Step {
            // Before their places are needed again.
            moves: std::mem::take(&mut arrived),
            ..Step::default()
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
                let home = Place {
                    region: Region::Recv(number),
                    offset: peer * block,
                };
                let beside_it = Place {
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
                // The next may be of another type.
                beside += block.next_multiple_of(SPACING);
            }
        }
        scratch = scratch.max(beside);
        steps.push(step);
    }
    steps.push(Step {
        moves: arrived,
        ..Step::default()
    });
    Schedule::of(steps, scratch)
}

/// Where any type may begin.
const SPACING: usize = 16;

/// Bytes beside the buffer for one peer.
pub(crate) fn beside(blocks: impl Iterator<Item = usize>) -> usize {
    blocks.map(|block| block.next_multiple_of(SPACING)).sum()
}
