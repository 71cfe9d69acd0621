//! Unique ids, which NCCL creates without a GPU.

use std::ptr::null_mut;

use nccl_sys::ncclUniqueId;

use super::super::{Facts, Program};
use crate::nccl_call;
use crate::raw::Result;

const fn program(name: &'static str, about: &'static str, body: fn(&Facts) -> Result) -> Program {
    Program::library(name, about, body)
}

/// A malformed `NCCL_COMM_ID`.
const fn refused(
    name: &'static str,
    environment: &'static [(&'static str, &'static str)],
) -> Program {
    program(
        name,
        "ncclGetUniqueId with a malformed NCCL_COMM_ID",
        one_id,
    )
    .with(environment)
}

pub(super) const PROGRAMS: &[Program] = &[
    program("unique-id", "ncclGetUniqueId", two_ids),
    program(
        "unique-id-loopback",
        "ncclGetUniqueId with an interface that is there",
        two_ids,
    )
    .with(&[("NCCL_SOCKET_IFNAME", "lo")]),
    program(
        "unique-id-no-interface",
        "ncclGetUniqueId with an interface that is not there",
        one_id,
    )
    .with(&[("NCCL_SOCKET_IFNAME", "nosuchinterface")]),
    program(
        "comm-id",
        "NCCL_COMM_ID takes the place of the id",
        same_ids,
    )
    .with(&[("NCCL_COMM_ID", "127.0.0.1:23456")]),
    program(
        "comm-id-of-ipv6",
        "NCCL_COMM_ID takes the place of the id",
        same_ids,
    )
    .with(&[("NCCL_COMM_ID", "[::1]:23456")]),
    refused("comm-id-nonsense", &[("NCCL_COMM_ID", "nonsense")]),
    refused("comm-id-without-port", &[("NCCL_COMM_ID", "127.0.0.1")]),
    refused("comm-id-open-bracket", &[("NCCL_COMM_ID", "[::1")]),
    refused("comm-id-two-ports", &[("NCCL_COMM_ID", "127.0.0.1:1:2")]),
    refused("comm-id-empty", &[("NCCL_COMM_ID", "")]),
    program(
        "unique-id-after-a-refusal",
        "ncclGetUniqueId once more after NCCL_COMM_ID was refused",
        two_ids,
    )
    .with(&[("NCCL_COMM_ID", "nonsense")]),
];

fn two_ids(facts: &Facts) -> Result {
    let mut ids = [ncclUniqueId::default(); 2];
    for (index, id) in ids.iter_mut().enumerate() {
        facts.code(format!("id {index}"), nccl_call!(ncclGetUniqueId(id)));
    }
    facts.add("ids differ", ids[0].internal != ids[1].internal);
    // A socket address: its family, and the bytes behind it.
    let [low, high] = [ids[0].internal[8], ids[0].internal[9]].map(|byte| byte as u8);
    facts.add("address family", u16::from_le_bytes([low, high]));
    facts.add(
        "rest is zero",
        ids[0].internal[48..].iter().all(|&byte| byte == 0),
    );
    facts.code("null", nccl_call!(ncclGetUniqueId(null_mut())));
    Ok(())
}

/// Once only: old releases do not return from the call after a refusal.
fn one_id(facts: &Facts) -> Result {
    let mut id = ncclUniqueId::default();
    facts.code("id", nccl_call!(ncclGetUniqueId(&mut id)));
    facts.add(
        "it was left alone",
        id.internal == ncclUniqueId::default().internal,
    );
    Ok(())
}

fn same_ids(facts: &Facts) -> Result {
    let mut ids = [ncclUniqueId::default(); 2];
    for (index, id) in ids.iter_mut().enumerate() {
        facts.code(format!("id {index}"), nccl_call!(ncclGetUniqueId(id)));
    }
    // Processes with the same setting must create the same id on their own.
    facts.add("ids are the same", ids[0].internal == ids[1].internal);
    Ok(())
}
