//! How the members of a generation are encoded: of host, address and kernel, each member contains only what differs
//! from the previous member. Most members run on the same host as the previous one, and each member receives this list
//! of all members.

use std::fmt;

use nccl_base::wire::Clean as _;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::id::{MemberId, ProcessInfo};

/// The maximum preallocation for a length that another process states.
const ROOM: usize = 1024;

/// The maximum length of a member's text in bytes: each text may repeat the previous one and add to it.
const LONGEST: usize = 4096;

/// A text: the length of the prefix shared with the previous text, and the rest.
#[derive(Serialize, Deserialize)]
struct Text<'a> {
    shared: u32,
    #[serde(borrow)]
    rest: &'a str,
}

impl<'a> Text<'a> {
    fn new(text: &'a str, before: &str) -> Self {
        let pairs = text.char_indices().zip(before.chars());
        let differs = pairs.into_iter().find(|((_, own), other)| own != other);
        let shared = match differs {
            Some(((at, _), _)) => at,
            None => text.len().min(before.len()),
        };
        Self {
            shared: shared as u32,
            rest: &text[shared..],
        }
    }

    fn restore<E: Error>(&self, before: &str) -> Result<String, E> {
        let shared = before.get(..self.shared as usize);
        let shared = shared.ok_or_else(|| E::custom("a text that shares what there is not"))?;
        if shared.len() + self.rest.len() > LONGEST {
            return Err(E::custom("a text that is too long"));
        }
        Ok([shared, self.rest].concat())
    }
}

/// A [`ProcessInfo`], encoded relative to the previous one.
#[derive(Serialize, Deserialize)]
struct EncodedPeer<'a> {
    id: MemberId,
    #[serde(borrow)]
    host: Text<'a>,
    pid: u32,
    start_time: u64,
    /// `None` if equal to that of the previous member.
    kernel: Option<u64>,
    #[serde(borrow)]
    at: Text<'a>,
    launcher_rank: Option<u32>,
    observed: bool,
    tolerates_unreachable: bool,
}

/// The texts and the kernel of the previous member.
#[derive(Default)]
struct Before<'a> {
    host: &'a str,
    at: &'a str,
    kernel: u64,
}

impl<'a> Before<'a> {
    fn of(process: Option<&'a ProcessInfo>) -> Self {
        process.map_or_else(Self::default, |process| Self {
            host: &process.host,
            at: &process.at,
            kernel: process.kernel,
        })
    }
}

pub(super) fn serialize<S: Serializer>(
    processes: &[ProcessInfo],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let entry = |index: usize| {
        let process = &processes[index];
        let before = Before::of(index.checked_sub(1).map(|index| &processes[index]));
        EncodedPeer {
            id: process.id,
            host: Text::new(&process.host, before.host),
            pid: process.pid,
            start_time: process.start_time,
            kernel: (process.kernel != before.kernel).then_some(process.kernel),
            at: Text::new(&process.at, before.at),
            launcher_rank: process.launcher_rank,
            observed: process.observed,
            tolerates_unreachable: process.tolerates_unreachable,
        }
    };
    serializer.collect_seq((0..processes.len()).map(entry))
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<ProcessInfo>, D::Error> {
    deserializer.deserialize_seq(Peers)
}

struct Peers;

impl<'de> Visitor<'de> for Peers {
    type Value = Vec<ProcessInfo>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of members")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Vec<ProcessInfo>, A::Error> {
        let mut processes: Vec<ProcessInfo> =
            Vec::with_capacity(entries.size_hint().unwrap_or(0).min(ROOM));
        while let Some(entry) = entries.next_element::<EncodedPeer<'de>>()? {
            let before = Before::of(processes.last());
            let mut process = ProcessInfo {
                id: entry.id,
                host: entry.host.restore(before.host)?,
                pid: entry.pid,
                start_time: entry.start_time,
                kernel: entry.kernel.unwrap_or(before.kernel),
                at: entry.at.restore(before.at)?,
                launcher_rank: entry.launcher_rank,
                observed: entry.observed,
                tolerates_unreachable: entry.tolerates_unreachable,
            };
            process.host.clean();
            processes.push(process);
        }
        Ok(processes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct List(#[serde(with = "super")] Vec<ProcessInfo>);

    fn process_info(slot: u32, host: &str, at: &str) -> ProcessInfo {
        ProcessInfo {
            id: MemberId {
                slot,
                incarnation: u64::MAX - u64::from(slot),
            },
            host: host.to_owned(),
            pid: 4_000_000 + slot,
            start_time: 123_456_789,
            kernel: 0x1234_5678_9abc_def0,
            at: at.to_owned(),
            launcher_rank: Some(slot),
            observed: slot.is_multiple_of(2),
            tolerates_unreachable: slot.is_multiple_of(3),
        }
    }

    #[test]
    fn texts_that_begin_alike_end_alike_or_have_no_character_in_common_come_back() {
        let texts = ["", "nöde-1", "nöde-12", "nöd", "nüde", "\u{1f600}", "", "x"];
        let processes = (0..).zip(texts);
        let list = List(
            processes
                .map(|(slot, text)| process_info(slot, text, text))
                .collect(),
        );
        let bytes = nccl_base::wire::encode(&list);
        assert_eq!(nccl_base::wire::decode::<List>(&bytes).unwrap(), list);
    }

    #[test]
    fn a_member_on_the_host_of_the_one_before_takes_less_than_40_bytes() {
        let list = |ranks: u32| {
            let at = |rank| format!("/run/user/1000/job-1234567/rendezvous.sock.{rank}");
            let processes = (0..ranks)
                .map(|rank| process_info(rank, "node-0017.cluster.example.org", &at(rank)));
            nccl_base::wire::encode(&List(processes.collect())).len()
        };
        let each = (list(1024) - list(1)).div_ceil(1023);
        assert!(each < 40, "{each} bytes");
    }

    #[test]
    fn a_text_that_repeats_more_than_there_is_or_half_a_character_or_grows_too_long_is_refused() {
        let entry = |host: &str, shared: u32, rest: &'static str| {
            let known = List(vec![process_info(0, host, "")]);
            let mut bytes = nccl_base::wire::encode(&known);
            // Two members instead of one.
            bytes[0] = 2;
            let next = EncodedPeer {
                id: known.0[0].id,
                host: Text { shared, rest },
                pid: 1,
                start_time: 1,
                kernel: None,
                at: Text {
                    shared: 0,
                    rest: "",
                },
                launcher_rank: None,
                observed: false,
                tolerates_unreachable: true,
            };
            bytes.extend(nccl_base::wire::encode(&next));
            nccl_base::wire::decode::<List>(&bytes)
        };
        assert!(entry("host", 4, "-1").is_ok());
        assert!(entry("host", 5, "").is_err());
        assert!(entry("höst", 2, "").is_err());
        assert!(entry(&"h".repeat(LONGEST), LONGEST as u32, "").is_ok());
        assert!(entry(&"h".repeat(LONGEST), LONGEST as u32, "h").is_err());
    }
}
