//! Messages that the drivers of members send to each other, through the machines.

use std::sync::Arc;

use nccl_base::wire::{self, Broken, bytes};
use serde::{Deserialize, Serialize};

use crate::coordinator_message::CoordinatorMessage;
use crate::departure::{Failure, ProcessEnd};
use crate::proto::MemberId;
use crate::request::Request;

/// To the coordinator: a request of the session of a generation, with the number used for its answer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NumberedRequest {
    pub(crate) generation: u64,
    pub(crate) id: u64,
    pub(crate) request: Request,
}

/// How a request was transmitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestHead {
    /// Whether the coordinator may have received the request before.
    pub(crate) is_repeated: bool,
    /// The session waits for no answer to a change of the store with a smaller number; with an exchange other than of
    /// ends, or a message of a channel, for no answer to a request of the same kind either. The value is set when the
    /// request is sent, so each repetition carries a current one. 0 states nothing.
    pub(crate) settled: u64,
}

impl RequestHead {
    const LENGTH: usize = 9;

    /// That of a request that the coordinator may have received before.
    pub(crate) fn repeated() -> Self {
        Self {
            is_repeated: true,
            ..Self::default()
        }
    }

    fn encode(self) -> [u8; Self::LENGTH] {
        let mut bytes = [u8::from(self.is_repeated); Self::LENGTH];
        bytes[1..].copy_from_slice(&self.settled.to_le_bytes());
        bytes
    }
}

impl NumberedRequest {
    pub(crate) fn encode(&self, head: RequestHead) -> Arc<[u8]> {
        [&head.encode(), &wire::encode(self)[..]].concat().into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<(RequestHead, Self), Broken> {
        const SHORT: Broken = Broken("a request without a head");
        let (is_repeated, rest) = bytes.split_first().ok_or(SHORT)?;
        let (settled, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let head = RequestHead {
            is_repeated: *is_repeated != 0,
            settled: u64::from_le_bytes(*settled),
        };
        Ok((head, wire::decode(rest)?))
    }
}

/// Returns an encoded request with another head.
pub(crate) fn with_head(bytes: &[u8], head: RequestHead) -> Arc<[u8]> {
    let rest = bytes.get(RequestHead::LENGTH..).unwrap_or_default();
    [&head.encode(), rest].concat().into()
}

/// To all members, in one order for all.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum BroadcastContent {
    Announced {
        generation: u64,
        topic: String,
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// The sender has failed, and stays only for the ends of its communicators.
    Failed { generation: u64, why: Failure },
    /// The launcher of these members' processes is connected and will report how they end.
    Watched(Vec<MemberId>),
    /// How the process that started this member ended, as its launcher reports. This proves nothing about the member;
    /// it is added to the report of the member's end once that end is proven.
    Exit { member: MemberId, end: ProcessEnd },
}

/// To one member.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DirectContent {
    pub(crate) generation: u64,
    pub(crate) topic: String,
    #[serde(with = "bytes")]
    pub(crate) bytes: Vec<u8>,
}

/// Encodes a reply of the coordinator: an answer or an unsolicited message, encoded once for all receivers.
pub(crate) fn encode_reply(generation: u64, id: u64, payload: &[u8]) -> Arc<[u8]> {
    let mut bytes = Vec::with_capacity(16 + payload.len());
    bytes.extend_from_slice(&generation.to_le_bytes());
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes.into()
}

pub(crate) fn decode_reply(reply: &[u8]) -> Result<(u64, u64, CoordinatorMessage), Broken> {
    const SHORT: Broken = Broken("a reply without a head");
    let (generation, rest) = reply.split_first_chunk().ok_or(SHORT)?;
    let (id, payload) = rest.split_first_chunk().ok_or(SHORT)?;
    let incoming = wire::decode(payload)?;
    Ok((
        u64::from_le_bytes(*generation),
        u64::from_le_bytes(*id),
        incoming,
    ))
}
