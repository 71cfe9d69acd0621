//! Send/Recv: the works of a batch run concurrently, and so do both directions of each.

use super::arithmetic::Arithmetic;
use super::block::{Block, Stop};
use super::collective::LARGEST_NET;
use super::connection::Registration;
use super::executor::{Part, Together};
use super::functions::Protocol;
use super::primitives::{Operation, Primitives, Setup, Slicing};
use super::works::{P2p, Transfer};

use nccl_sys::Version;

/// Runs a channel's parts of a batch.
pub(super) async fn run(block: &Block, works: &[P2p]) -> Result<(), Stop> {
    let reversed = block.context.release < Version::new(2, 28, 0);
    let mut parts: Vec<Part<'_, Stop>> = Vec::new();
    for work in works {
        let channel = block.channel_id;
        let send = work.part(&work.send, channel, reversed)?;
        let receive = work.part(&work.receive, channel, reversed)?;
        // A rank's message to itself is copied.
        if work.send.peer == block.comm.rank as i64 {
            if let (Some(send), Some(receive)) = (send, receive) {
                parts.push(Box::pin(copy(block, send, receive)));
            }
            continue;
        }
        if let Some(send) = send {
            parts.push(Box::pin(transfer(block, send, true)));
        }
        if let Some(receive) = receive {
            parts.push(Box::pin(transfer(block, receive, false)));
        }
    }
    Together::new(parts).await
}

fn setup(block: &Block, transfer: &Transfer, send: bool) -> Setup<'static> {
    let registration = Registration {
        ipc: transfer.ipc_registered,
        net: transfer.net_registered,
        direct: 0,
    };
    let none = Registration::default();
    let large = large(block, transfer);
    Setup {
        protocol: if transfer.ll {
            Protocol::Ll
        } else {
            Protocol::Simple
        },
        arithmetic: Arithmetic::BYTES,
        slicing: Slicing::SINGLE,
        step_elements: Some(if large {
            LARGEST_NET
        } else {
            block.comm.p2p_chunk as i64
        }),
        offload: false,
        p2p: true,
        receive: if send { none } else { registration },
        send: if send { registration } else { none },
        work: None,
        input: if send { transfer.address } else { 0 },
        output: if send { 0 } else { transfer.address },
    }
}

/// Returns whether chunks may exceed the size of a step, which is the case for registered buffers.
fn large(block: &Block, transfer: &Transfer) -> bool {
    transfer.net_registered || (transfer.ipc_registered && block.comm.all_nvlink)
}

async fn transfer(block: &Block, transfer: Transfer, send: bool) -> Result<(), Stop> {
    let chunk = match large(block, &transfer) {
        true => LARGEST_NET as u64,
        false => transfer.chunk.max(1),
    };
    let setup = setup(block, &transfer, send);
    let peer = [transfer.peer];
    let (from, to): (&[i64], &[i64]) = match send {
        true => (&[], &peer),
        false => (&peer, &[]),
    };
    let mut connection = Primitives::open(block, setup, from, to).await?;
    let mut at = 0;
    loop {
        // An empty message also takes a step.
        let n = chunk.min(transfer.bytes - at);
        let operation = match send {
            true => Operation::send(at as i64, at as i64, n as i64),
            false => Operation::receive(at as i64, n as i64),
        };
        connection.run(operation.direct()).await?;
        at += n;
        if at >= transfer.bytes {
            break;
        }
    }
    connection.close().await
}

async fn copy(block: &Block, send: Transfer, receive: Transfer) -> Result<(), Stop> {
    let setup = setup(block, &send, true);
    let copy = Primitives::open(block, setup, &[], &[]).await?;
    copy.copy(send.address, receive.address, send.bytes as i64)
        .await?;
    copy.close().await
}
