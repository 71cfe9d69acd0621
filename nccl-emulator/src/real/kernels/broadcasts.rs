//! Batches of broadcasts around a ring, one from each of several roots (AllGatherV, 2.29 and later): a chunk of each in turn.

use super::arithmetic::Arithmetic;
use super::block::{Block, Stop, Trouble};
use super::connection::Registration;
use super::functions::Protocol;
use super::primitives::{Operation, Primitives, Setup, Slicing};
use super::works::Broadcast;

/// Runs a channel's part of a batch.
pub(super) async fn run(
    block: &Block,
    protocol: Protocol,
    mut works: Vec<Broadcast>,
) -> Result<(), Stop> {
    let setup = Setup {
        protocol,
        arithmetic: Arithmetic::BYTES,
        slicing: Slicing::SINGLE,
        step_elements: None,
        offload: false,
        p2p: false,
        receive: Registration::default(),
        send: Registration::default(),
        work: None,
        input: 0,
        output: 0,
    };
    let last = block.comm.ranks as i64 - 1;
    let channel = &block.channel;
    let mut ring = Primitives::open(block, setup, &[channel.prev], &[channel.next]).await?;
    while works.iter().any(|work| work.bytes > 0) {
        for work in &mut works {
            let n = work.bytes.min(work.chunk);
            if n <= 0 {
                if work.bytes > 0 {
                    let (field, value) = ("chunks of", work.chunk as u64);
                    return Err(Trouble::Work { field, value }.into());
                }
                continue;
            }
            ring.setup.input = work.input;
            ring.setup.output = work.output;
            let at = work.done;
            ring.run(match work.depth {
                0 if work.input == work.output => Operation::send(at, at, n),
                0 => Operation::copy_send(at, at, n),
                depth if depth == last => Operation::receive(at, n),
                _ => Operation::receive_copy_send(at, n),
            })
            .await?;
            work.bytes -= n;
            work.done += n;
        }
    }
    ring.close().await
}
