//! Each block goes straight from sender to receiver.

use super::{Exchange, Message, Part, Payload, Place, Region, Schedule, Step};

/// Pieces of messages begin at multiples of so many bytes of their block, where its elements allow it.
const ALIGNMENT: usize = 16;

/// NCCL's own call for each payload, all of which are uniform.
pub(crate) fn native(exchange: Exchange<'_>) -> Schedule {
    let native = exchange.payloads().filter_map(|(number, payload)| {
        let count = payload.uniform.filter(|count| *count > 0)?;
        Some((number, count))
    });
    let step = Step {
        native: native.collect(),
        ..Step::default()
    };
    Schedule::of(vec![step], 0)
}

/// Everything in one group.
pub(crate) fn grouped(exchange: Exchange<'_>) -> Schedule {
    chunked(exchange, 1)
}

/// Every block in so many pieces, a group for each piece of all blocks.
pub(crate) fn chunked(exchange: Exchange<'_>, pieces: usize) -> Schedule {
    let steps = (0..pieces).map(|piece| {
        let mut step = Step::default();
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

/// Groups of so many peers. In round `r` the ranks `i` and `j` with `i + j = r`, modulo the number of ranks, exchange
/// their blocks: so every rank has one peer in each, the same that has it.
pub(crate) fn pairwise(exchange: Exchange<'_>, width: usize) -> Schedule {
    let rounds: Vec<usize> = (0..exchange.ranks).collect();
    let steps = rounds.chunks(width).map(|rounds| {
        let mut step = Step::default();
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

/// Whom this rank meets in a round; itself in one or two.
pub(super) fn partner(exchange: Exchange<'_>, round: usize) -> usize {
    (round + exchange.ranks - exchange.rank) % exchange.ranks
}

/// What goes to `peer` and what comes from it.
fn both(
    step: &mut Step,
    (number, payload): (usize, &Payload),
    peer: usize,
    piece: impl Fn(Part) -> Part,
) {
    let message = |sends, region, part: Part| Message {
        sends,
        at: Place {
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

/// Sender and receiver come to the same pieces, because both know nothing but the length.
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
