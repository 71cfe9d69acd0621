//! Two ranks that work together: data, order, and communicators derived from theirs.

mod data;
mod lives;
mod messages;

use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};

use super::super::{Facts, Program};
use crate::raw::{Rank, Result};

const fn program(
    name: &'static str,
    about: &'static str,
    body: fn(&Rank, &Facts) -> Result,
) -> Program {
    Program::ranks(2, name, about, body)
}

pub(super) const PROGRAMS: &[Program] = &[
    program(
        "shared-device-refused",
        "two ranks on one device without leave",
        lives::shared_device,
    )
    .with(&[("NCCL_MULTI_RANK_GPU_ENABLE", "0")]),
    program(
        "shared-device",
        "two ranks on one device",
        lives::shared_device,
    ),
    program(
        "late-rank",
        "init waits for a rank that comes late",
        lives::late_rank,
    ),
    program(
        "reductions",
        "what all-reduce makes of whole numbers, overflow and NaN",
        data::reductions,
    ),
    program("in-place", "all-reduce in place", data::in_place),
    program(
        "message-order",
        "several messages to one peer, in and out of a group",
        messages::message_order,
    ),
    program(
        "message-without-bytes",
        "a message without bytes, and who waits for it",
        messages::without_bytes,
    ),
    program(
        "sizes-differ",
        "a receive longer than its send",
        messages::sizes_differ,
    ),
    program(
        "small-send",
        "whether a small send ends before its receive is there",
        messages::small_send,
    ),
    program(
        "first-use-blocks",
        "the first message to a peer that is not there, blocking",
        messages::first_use,
    ),
    program(
        "in-progress",
        "what a non-blocking communicator allows while it works",
        messages::in_progress,
    ),
    program(
        "collective-and-messages",
        "a collective and messages in one group",
        messages::collective_and_messages,
    ),
    program(
        "two-streams",
        "a group with operations on two streams",
        messages::two_streams,
    ),
    program(
        "group-drops-all",
        "a group with one operation that is refused",
        messages::group_drops_all,
    ),
    program(
        "simulate-operations",
        "ncclGroupSimulateEnd with operations",
        messages::simulate_operations,
    ),
    program("all-to-all", "ncclAlltoAll", data::all_to_all),
    program(
        "other-collectives",
        "collectives but all-reduce and all-to-all",
        data::other_collectives,
    ),
    program("split", "ncclCommSplit", lives::split),
    program(
        "split-blocking-child",
        "a blocking child of a non-blocking parent",
        lives::split_blocking_child,
    ),
    program("shrink", "ncclCommShrink", lives::shrink),
    program(
        "window",
        "ncclCommWindowRegister on a device that ranks share",
        lives::window,
    ),
    program(
        "capture",
        "an all-reduce while its stream is captured",
        lives::capture,
    ),
    program(
        "destroy-only",
        "destroy without finalize, all ranks",
        lives::destroy_only,
    ),
    program(
        "finalize-one",
        "finalize on one rank alone",
        lives::finalize_one,
    ),
];

const INT: (Kind, Op) = (Kind::ncclInt32, Op::ncclSum);

fn ints(values: &[i32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}
