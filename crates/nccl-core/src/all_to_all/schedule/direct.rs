//! Each block goes straight from sender to receiver.

use super::{BufferLocation, Exchange, Message, Part, Payload, Region, Schedule, ScheduleStep};

/// Pieces of messages begin at multiples of this many bytes of their block, where the elements allow it.
const ALIGNMENT: usize = 16;

/// Uses `ncclAlltoAll` for each payload; all payloads are uniform.
pub(crate) fn native(exchange: Exchange<'_>) -> Schedule {
    let native = exchange.payloads().filter_map(|(number, payload)| {
        let count = payload.uniform.filter(|count| *count > 0)?;
        Some((number, count))
    });
    let step = ScheduleStep {
        native: native.collect(),
        ..ScheduleStep::default()
    };
    Schedule::of(vec![step], 0)
}

/// Sends everything in one group.
pub(crate) fn grouped(exchange: Exchange<'_>) -> Schedule {
    chunked(exchange, 1)
}

/// Divides every block into pieces, with one group for each piece of all blocks.
pub(crate) fn chunked(exchange: Exchange<'_>, pieces: usize) -> Schedule {
    let steps = (0..pieces).map(|piece| {
        let mut step = ScheduleStep::default();
        for peer in 0..exchange.ranks {
            for (number, payload) in exchange.payloads() {
                let piece = |part: Part| piece_of(part, piece, pieces, payload.size);
                both(&mut step, (number, payload), peer, piece);
            }
        }
        step
    });
    Schedule::of(steps.collect(), 0)
}

/// Makes groups of `width` peers. In round `r` the ranks `i` and `j` with `i + j = r`, modulo the number of ranks, exchange
/// their blocks: so in each round every rank has one peer, which has this rank as its peer.
pub(crate) fn pairwise(exchange: Exchange<'_>, width: usize) -> Schedule {
    let rounds: Vec<usize> = (0..exchange.ranks).collect();
    let steps = rounds.chunks(width).map(|rounds| {
        let mut step = ScheduleStep::default();
        for round in rounds {
            let peer = partner(exchange, *round);
            for (number, payload) in exchange.payloads() {
                both(&mut step, (number, payload), peer, |part| part);
            }
        }
        step
    });
    Schedule::of(steps.collect(), 0)
}

/// Returns the peer of this rank in a round; the rank itself in one or two rounds.
pub(super) fn partner(exchange: Exchange<'_>, round: usize) -> usize {
    (round + exchange.ranks - exchange.rank) % exchange.ranks
}

/// Adds the messages to and from `peer`.
fn both(
    step: &mut ScheduleStep,
    (number, payload): (usize, &Payload),
    peer: usize,
    piece: impl Fn(Part) -> Part,
) {
    let message = |sends, region, part: Part| Message {
        sends,
        at: BufferLocation {
            region,
            offset: part.offset * payload.size,
        },
        count: part.count,
        payload: number,
        peer,
    };
    step.message(message(
        true,
        Region::Send(number),
        piece(payload.send[peer]),
    ));
    step.message(message(
        false,
        Region::Recv(number),
        piece(payload.recv[peer]),
    ));
}

/// Returns a piece of a part. It depends only on the length, so that sender and receiver get the same pieces.
fn piece_of(part: Part, piece: usize, pieces: usize, size: usize) -> Part {
    let grain = (ALIGNMENT / size).max(1);
    let bound = |piece: usize| match piece == pieces {
        true => part.count,
        // Wide enough for any count that memory can hold.
        false => (part.count as u128 * piece as u128 / pieces as u128) as usize / grain * grain,
    };
    let (begin, end) = (bound(piece), bound(piece + 1));
    Part {
        offset: part.offset + begin,
        count: end - begin,
    }
}
