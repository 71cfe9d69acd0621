//! Comparison of the operations that the ranks are about to capture.
//!
//! NCCL does not compare operations: ranks whose graphs differ wait for each other for ever, some in the capture, where
//! they connect, and some in a replay. So the connected ranks of a communicator compare what they recorded, before NCCL
//! is called:
//!
//! 1. each rank sends a digest of its collectives, and for each peer one digest of its messages to, and one of those
//!    from, that peer. If all collectives are the same, and each rank receives what the other one sends, the comparison
//!    is done;
//! 2. otherwise each rank sends its operations, and all ranks derive the same sentence about the first difference.
//!
//! The cost is one exchange, whose size grows with the peers and not with the operations. A rank whose closure
//! failed takes part as well, so that the other ranks get the reason instead of waiting.
//!
//! Not compared: the grouping of operations, and the order of messages against collectives, because NCCL
//! accepts some sequences that look different.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use crate::digest;
use crate::op::{Descriptor, Function};
use nccl_base::wire::{self, Broken, clean};
use serde::{Deserialize, Serialize};

/// The maximum number of operations that a rank sends when captures differ.
const MOST: usize = 4096;

/// A rank's part of the first exchange: its digests, or why it captures nothing.
#[derive(Serialize, Deserialize)]
enum DigestPart {
    Ready(OperationDigest),
    Failed(#[serde(deserialize_with = "clean")] String),
}

#[derive(Serialize, Deserialize)]
struct OperationDigest {
    collectives: digest::Digest,
    /// The digests of what is sent to each peer, and received from it.
    messages: BTreeMap<usize, [digest::Digest; 2]>,
}

/// Operations, and where among them each part but the last ends: parts are launched separately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operations<'o> {
    pub(crate) entries: &'o [Descriptor],
    pub(crate) ends: &'o [usize],
}

impl<'o> Operations<'o> {
    /// Operations of one part.
    pub(crate) fn undivided(entries: &'o [Descriptor]) -> Self {
        Self { entries, ends: &[] }
    }
}

/// Encodes a rank's part of the first exchange.
pub(crate) fn digest(operations: Result<Operations<'_>, String>) -> Vec<u8> {
    wire::encode(&match operations {
        Ok(operations) => DigestPart::Ready(OperationDigest::of(operations)),
        Err(reason) => DigestPart::Failed(reason),
    })
}

/// The result of comparing the digests of all ranks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DigestComparison {
    Same,
    /// The second exchange shows the difference.
    Different,
    /// The rank that captures nothing, and the reason.
    Failed(usize, String),
    /// A rank is gone.
    Departed(usize),
}

impl OperationDigest {
    fn of(Operations { entries, ends }: Operations<'_>) -> Self {
        let mut collectives = Vec::new();
        let mut messages: BTreeMap<usize, [Vec<(usize, u64)>; 2]> = BTreeMap::new();
        for (at, entry) in entries.iter().enumerate() {
            let part = ends.iter().filter(|&&end| end <= at).count();
            if let Some(peer) = entry.peer().filter(|_| entry.is_message()) {
                let side = usize::from(entry.function() == Function::Recv);
                messages.entry(peer).or_default()[side].push((part, entry.bytes()));
            } else if entry.is_collective() {
                collectives.push((part, entry));
            }
        }
        let messages = messages.into_iter();
        Self {
            collectives: digest::digest(&wire::encode(&(ends.len(), collectives))),
            messages: messages
                .map(|(peer, sides)| (peer, sides.map(|side| of_side(&side))))
                .collect(),
        }
    }

    fn side(&self, peer: usize, side: usize) -> digest::Digest {
        match self.messages.get(&peer) {
            Some(sides) => sides[side],
            None => of_side(&[]),
        }
    }
}

/// The digest of the parts and lengths of messages.
fn of_side(lengths: &[(usize, u64)]) -> digest::Digest {
    digest::digest(&wire::encode(lengths))
}

/// Compares the parts of the first exchange.
pub(crate) fn compare(parts: &[Vec<u8>]) -> Result<DigestComparison, Broken> {
    let mut digests = Vec::with_capacity(parts.len());
    for (rank, part) in parts.iter().enumerate() {
        if part.is_empty() {
            return Ok(DigestComparison::Departed(rank));
        }
        match wire::decode(part)? {
            DigestPart::Failed(reason) => return Ok(DigestComparison::Failed(rank, reason)),
            DigestPart::Ready(digest) => digests.push(digest),
        }
    }
    let same = |digest: &OperationDigest| digest.collectives == digests[0].collectives;
    let meets = |(rank, digest): (usize, &OperationDigest)| {
        digest.messages.iter().all(|(&peer, [sent, received])| {
            digests.get(peer).is_some_and(|other| {
                other.side(rank, 1) == *sent && other.side(rank, 0) == *received
            })
        })
    };
    let same = digests.iter().all(same) && digests.iter().enumerate().all(meets);
    Ok(if same {
        DigestComparison::Same
    } else {
        DigestComparison::Different
    })
}

/// Encodes a rank's part of the second exchange.
pub(crate) fn encode(Operations { entries, ends }: Operations<'_>) -> Vec<u8> {
    let told = &entries[..entries.len().min(MOST)];
    wire::encode(&(entries.len(), told, &ends[..ends.len().min(MOST)]))
}

/// What the ranks did with the operations that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperationUse {
    Called,
    Captured,
    /// They are in the rank's plan of an all-to-all.
    InPlan,
}

impl OperationUse {
    /// The text for a rank without operations.
    pub(super) fn nothing(self) -> &'static str {
        match self {
            Self::Called => "called nothing",
            Self::Captured => "captured nothing",
            Self::InPlan => "made none",
        }
    }
}

impl fmt::Display for OperationUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Called => "called",
            Self::Captured => "captured",
            Self::InPlan => "has",
        })
    }
}

/// The operations of a rank, as far as they were sent.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct OperationList {
    total: usize,
    entries: Vec<Descriptor>,
    ends: Vec<usize>,
}

impl OperationList {
    /// The number of operations of each part.
    fn sizes(&self) -> String {
        let ends = self.ends.iter().chain([&self.total]);
        let begins = [0].iter().chain(&self.ends);
        let sizes = ends
            .zip(begins)
            .map(|(end, begin)| end.saturating_sub(*begin));
        sizes
            .map(|size| size.to_string())
            .collect::<Vec<_>>()
            .join(" + ")
    }
}

pub(crate) fn decode(bytes: &[u8]) -> Result<OperationList, Broken> {
    wire::decode(bytes)
}

/// Describes the first difference, with the same sentence on all ranks; `name` returns the names of ranks.
pub(crate) fn difference(
    all: &[OperationList],
    done: OperationUse,
    name: impl Fn(&[usize]) -> String,
) -> String {
    collective(all, done, &name)
        .or_else(|| message(all, &name))
        .or_else(|| division(all, done, &name))
        .unwrap_or_else(|| format!("in what comes after the first {MOST} operations"))
}

/// Selects operations, each with its place among all operations of its rank, from 1.
fn pick(
    listed: &OperationList,
    wanted: impl Fn(&Descriptor) -> bool,
) -> impl Iterator<Item = (usize, &Descriptor)> {
    (1..)
        .zip(&listed.entries)
        .filter(move |(_, entry)| wanted(entry))
}

/// Describes parts that differ, of operations that do not.
fn division(
    all: &[OperationList],
    done: OperationUse,
    name: &impl Fn(&[usize]) -> String,
) -> Option<String> {
    if all.iter().all(|list| list.ends.is_empty()) {
        return None;
    }
    let first = &all[0].ends;
    if all
        .iter()
        .all(|list| list.ends == *first && list.total == all[0].total)
    {
        return Some(format!("messages are in other parts of what they {done}"));
    }
    let parts = all.iter().enumerate();
    let parts = parts.map(|(rank, list)| format!("{} into {}", name(&[rank]), list.sizes()));
    Some(format!(
        "the ranks divide the operations that they {done} differently: {}",
        parts.collect::<Vec<_>>().join(", ")
    ))
}

fn collective(
    all: &[OperationList],
    done: OperationUse,
    name: &impl Fn(&[usize]) -> String,
) -> Option<String> {
    let of = |listed| -> Vec<(usize, Descriptor)> {
        let own = pick(listed, Descriptor::is_collective);
        own.map(|(at, entry)| (at, *entry)).collect()
    };
    let lists: Vec<_> = all.iter().map(of).collect();
    let longest = lists.iter().map(Vec::len).max()?;
    let what = |rank: usize, at: usize| lists[rank].get(at).map(|(_, entry)| *entry);
    let at = (0..longest).find(|&at| (1..all.len()).any(|rank| what(rank, at) != what(0, at)))?;
    // Groups ranks with the same operation: the largest group first, and of equal ones that of the lower rank.
    let mut parties: Vec<(Option<Descriptor>, Vec<usize>)> = Vec::new();
    for rank in 0..all.len() {
        match parties
            .iter_mut()
            .find(|(entry, _)| *entry == what(rank, at))
        {
            Some((_, ranks)) => ranks.push(rank),
            None => parties.push((what(rank, at), vec![rank])),
        }
    }
    parties.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    let (usual, _) = parties.remove(0);
    let mut text = String::new();
    for (entry, ranks) in &parties {
        let who = name(ranks);
        let before = if text.is_empty() { "" } else { "; " };
        let _ = match (entry, ranks[..].first()) {
            (Some(entry), Some(&rank)) => {
                let place = lists[rank][at].0;
                write!(
                    text,
                    "{before}{who} {done} {entry} as operation {place} of {}",
                    all[rank].total
                )
            }
            (_, rank) => {
                let total = rank.map_or(0, |&rank| lists[rank].len());
                write!(text, "{before}{who} {done} only {total} collectives")
            }
        };
    }
    let _ = match usual {
        Some(entry) => write!(text, "; the others {entry}"),
        None => write!(text, "; the others {done} no collective there"),
    };
    Some(text)
}

fn message(all: &[OperationList], name: &impl Fn(&[usize]) -> String) -> Option<String> {
    let side = |rank: usize, function, peer| -> Vec<(usize, Descriptor)> {
        let wanted =
            move |entry: &Descriptor| entry.function() == function && entry.peer() == Some(peer);
        let own = all
            .get(rank)
            .into_iter()
            .flat_map(move |listed| pick(listed, wanted));
        own.map(|(at, entry)| (at, *entry)).collect()
    };
    let ranks = 0..all.len();
    let pairs = ranks
        .clone()
        .flat_map(|from| ranks.clone().map(move |to| (from, to)));
    for (from, to) in pairs {
        let sent = side(from, Function::Send, to);
        let received = side(to, Function::Recv, from);
        for at in 0..sent.len().max(received.len()) {
            let what = |entry: &(usize, Descriptor)| {
                let (at, entry) = entry;
                let (count, data_type) = (entry.count, entry.data_type());
                format!(
                    "{count} {data_type} ({} bytes, operation {at})",
                    entry.bytes()
                )
            };
            let number = at + 1;
            let (sender, receiver) = (name(&[from]), name(&[to]));
            match (sent.get(at), received.get(at)) {
                (Some(one), Some(other)) if one.1.bytes() == other.1.bytes() => {}
                (Some(one), Some(other)) => {
                    return Some(format!(
                        "of message {number} from {sender} to {receiver}, {} are sent and {} received",
                        what(one),
                        what(other)
                    ));
                }
                (Some(one), None) => {
                    return Some(format!(
                        "{sender} sends {} messages to {receiver}, which receives {} from it; the first that it \
                         does not receive is {}",
                        sent.len(),
                        received.len(),
                        what(one)
                    ));
                }
                (None, Some(other)) => {
                    return Some(format!(
                        "{receiver} receives {} messages from {sender}, which sends {} to it; the first that it \
                         does not send is {}",
                        received.len(),
                        sent.len(),
                        what(other)
                    ));
                }
                (None, None) => {}
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use nccl_sys::ncclRedOp_t;

    use super::*;
    use nccl_base::data_type::DataType;
    use nccl_base::fault::Roster;

    const F32: DataType = DataType::Float32;
    const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;

    fn reduces(count: usize) -> Descriptor {
        Descriptor::new(Function::AllReduce, count, F32, 0).reducing_with(SUM)
    }

    fn message_of(function: Function, count: usize, rank: i32) -> Descriptor {
        Descriptor::new(function, count, F32, rank)
    }

    /// The result on all ranks, by way of the bytes that they exchange.
    fn compared(all: &[&[Descriptor]]) -> Option<String> {
        let all = all.iter().copied().map(Operations::undivided);
        compared_in_parts(&all.collect::<Vec<_>>())
    }

    fn compared_in_parts(all: &[Operations<'_>]) -> Option<String> {
        let digests: Vec<_> = all.iter().map(|&one| digest(Ok(one))).collect();
        match compare(&digests).unwrap() {
            DigestComparison::Same => return None,
            DigestComparison::Different => {}
            other => panic!("{other:?}"),
        }
        let lists = all.iter().map(|&one| decode(&encode(one)).unwrap());
        let lists: Vec<_> = lists.collect();
        Some(difference(&lists, OperationUse::Captured, |ranks| {
            Roster::default().who(ranks)
        }))
    }

    #[test]
    fn the_reason_of_another_rank_moves_no_cursor() {
        let digests = [
            digest(Ok(Operations::default())),
            digest(Err("out of memory\u{1b}[2J".into())),
        ];
        let Ok(DigestComparison::Failed(1, reason)) = compare(&digests) else {
            panic!("rank 1 failed");
        };
        assert!(reason.starts_with("out of memory"), "{reason:?}");
        assert!(!reason.contains('\u{1b}'), "{reason:?}");
    }

    #[test]
    fn what_is_the_same_or_meets_is_no_difference() {
        assert_eq!(compared(&[&[], &[]]), None);
        let send = |to| message_of(Function::Send, 8, to);
        let receive = |from| message_of(Function::Recv, 8, from);
        let bytes = Descriptor::new(Function::Recv, 32, DataType::UInt8, 0);
        // The order of messages with different peers, and their types, may differ between ranks.
        let ring = compared(&[
            &[send(1), reduces(4), receive(2)],
            &[reduces(4), send(2), bytes],
            &[receive(1), send(0), reduces(4)],
        ]);
        assert_eq!(ring, None);
        assert_eq!(compared(&[&[send(0), receive(0)]]), None);
    }

    #[test]
    fn another_collective_is_named_with_who_has_it_and_where() {
        let text = compared(&[
            &[reduces(1), reduces(2048)],
            &[
                message_of(Function::Send, 1, 1),
                message_of(Function::Recv, 1, 1),
                reduces(1),
                reduces(1024),
            ],
            &[reduces(1), reduces(2048)],
        ]);
        assert_eq!(
            text.as_deref(),
            Some(
                "rank 1 captured all_reduce of 1024 f32 (sum) as operation 4 of 4; the others all_reduce of 2048 f32 (sum)"
            )
        );
        let text = compared(&[
            &[reduces(1)],
            &[reduces(1), reduces(2)],
            &[reduces(1), reduces(2)],
        ]);
        assert_eq!(
            text.as_deref(),
            Some("rank 0 captured only 1 collectives; the others all_reduce of 2 f32 (sum)")
        );
        for other in [
            Descriptor::new(Function::AllReduce, 1, F32, 0).reducing_with(ncclRedOp_t::ncclMax),
            Descriptor::new(Function::AllReduce, 1, DataType::Int32, 0).reducing_with(SUM),
            Descriptor::new(Function::AllGather, 1, F32, 0),
        ] {
            assert!(compared(&[&[reduces(1)], &[other]]).is_some(), "{other}");
        }
        let root = |rank| Descriptor::new(Function::Broadcast, 1, F32, rank);
        let text = compared(&[&[root(0)], &[root(1)], &[root(0)]]).unwrap();
        assert!(
            text.contains("rank 1 captured broadcast of 1 f32 with root 1"),
            "{text}"
        );
    }

    #[test]
    fn a_message_that_does_not_meet_its_like_is_named() {
        let (send, receive) = (Function::Send, Function::Recv);
        let text = compared(&[&[message_of(send, 8, 1)], &[message_of(receive, 4, 0)]]);
        assert_eq!(
            text.as_deref(),
            Some(
                "of message 1 from rank 0 to rank 1, 8 f32 (32 bytes, operation 1) are sent and 4 f32 (16 bytes, \
                 operation 1) received"
            )
        );
        let text = compared(&[&[message_of(send, 8, 1)], &[]]).unwrap();
        assert!(
            text.starts_with("rank 0 sends 1 messages to rank 1, which receives 0"),
            "{text}"
        );
        let text = compared(&[&[], &[message_of(receive, 8, 0)]]).unwrap();
        assert!(
            text.starts_with("rank 1 receives 1 messages from rank 0, which sends 0"),
            "{text}"
        );
        // In another order.
        let (a, b) = (message_of(send, 8, 1), message_of(send, 4, 1));
        let (c, d) = (message_of(receive, 4, 0), message_of(receive, 8, 0));
        assert!(compared(&[&[a, b], &[c, d]]).is_some());
        assert!(compared(&[&[a, b], &[d, c]]).is_none());
    }

    #[test]
    fn other_parts_of_the_same_operations_are_a_difference() {
        let (send, receive) = (Function::Send, Function::Recv);
        let sums = [reduces(1), reduces(1), reduces(1)];
        let divided = |entries, ends| Operations { entries, ends };
        let differing = compared_in_parts(&[divided(&sums, &[1]), divided(&sums, &[2])]);
        assert_eq!(
            differing.as_deref(),
            Some(
                "the ranks divide the operations that they captured differently: rank 0 into 1 + 2, rank 1 into 2 + 1"
            )
        );
        assert_eq!(
            compared_in_parts(&[divided(&sums, &[1]), divided(&sums, &[1])]),
            None
        );
        assert!(compared_in_parts(&[divided(&sums, &[3]), divided(&sums, &[])]).is_some());
        // A message that is sent by the first part and received by the second.
        let (sends, receives) = ([message_of(send, 8, 1)], [message_of(receive, 8, 0)]);
        assert!(compared_in_parts(&[divided(&sends, &[1]), divided(&receives, &[0])]).is_some());
        assert!(compared_in_parts(&[divided(&sends, &[0]), divided(&receives, &[0])]).is_none());
    }

    #[test]
    fn a_rank_that_captures_nothing_says_why_and_one_that_is_gone_says_nothing() {
        let failed = digest(Err(String::from("no memory")));
        let ready = digest(Ok(Operations::default()));
        assert_eq!(
            compare(&[ready.clone(), failed]),
            Ok(DigestComparison::Failed(1, String::from("no memory")))
        );
        assert_eq!(
            compare(&[ready, Vec::new()]),
            Ok(DigestComparison::Departed(1))
        );
        assert!(compare(&[vec![0, 1], vec![0]]).is_err());
    }
}
