//! The bootstrap's messages.

use crate::transport::RankInfo;

/// The version of the messages, the segment and the pools. Emulators with different versions cannot
/// communicate.
const WIRE: u64 = u64::from_le_bytes(*b"nccemu\x00\x05");

/// Large enough for any message.
pub(super) const MAX_BYTES: usize = 2048;

/// A message between a rank and its root.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Message {
    /// A rank joins; the message carries its pool.
    Hello {
        magic: u64,
        ranks: i32,
        rank: i32,
        info: Box<RankInfo>,
    },
    /// All ranks have joined; the message carries the segment.
    Welcome { token: u64, pools: u32 },
    /// The message carries some pools.
    Pools,
    /// The rank has everything.
    Received,
    /// The ranks do not match.
    Refused { why: String },
    /// This root is not needed: the communicator has several ids.
    Dismissed { magic: u64 },
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = WIRE.to_ne_bytes().to_vec();
        match self {
            Self::Hello {
                magic,
                ranks,
                rank,
                info,
            } => {
                bytes.push(1);
                bytes.extend(magic.to_ne_bytes());
                bytes.extend(ranks.to_ne_bytes());
                bytes.extend(rank.to_ne_bytes());
                encode_info(&mut bytes, info);
            }
            Self::Welcome { token, pools } => {
                bytes.push(2);
                bytes.extend(token.to_ne_bytes());
                bytes.extend(pools.to_ne_bytes());
            }
            Self::Pools => bytes.push(3),
            Self::Received => bytes.push(4),
            Self::Refused { why } => {
                bytes.push(5);
                bytes.extend(why.bytes().take(MAX_BYTES - 64));
            }
            Self::Dismissed { magic } => {
                bytes.push(6);
                bytes.extend(magic.to_ne_bytes());
            }
        }
        bytes
    }

    /// Decodes a message. Returns `None` for bytes that this version did not write.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if u64::from_ne_bytes(reader.take()?) != WIRE {
            return None;
        }
        let [kind] = reader.take()?;
        let message = match kind {
            1 => Self::Hello {
                magic: u64::from_ne_bytes(reader.take()?),
                ranks: i32::from_ne_bytes(reader.take()?),
                rank: i32::from_ne_bytes(reader.take()?),
                info: Box::new(decode_info(&mut reader)?),
            },
            2 => Self::Welcome {
                token: u64::from_ne_bytes(reader.take()?),
                pools: u32::from_ne_bytes(reader.take()?),
            },
            3 => Self::Pools,
            4 => Self::Received,
            5 => Self::Refused {
                why: String::from_utf8_lossy(std::mem::take(&mut reader.0)).into_owned(),
            },
            6 => Self::Dismissed {
                magic: u64::from_ne_bytes(reader.take()?),
            },
            _ => return None,
        };
        reader.0.is_empty().then_some(message)
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }
}

fn encode_info(bytes: &mut Vec<u8>, info: &RankInfo) {
    // Field by field, in a pattern without `..`: a new field does not compile until it is sent.
    let RankInfo {
        pid,
        device,
        version,
        pool,
        started,
        pid_namespace,
        host_hash,
        process,
        bus_id,
        pool_token,
        uuid,
        ras_address,
        ras_ports,
    } = *info;
    bytes.extend(pid.to_ne_bytes());
    bytes.extend(device.to_ne_bytes());
    bytes.extend(version.to_ne_bytes());
    bytes.extend(pool.to_ne_bytes());
    for number in [
        started,
        pid_namespace,
        host_hash,
        process,
        bus_id as u64,
        pool_token[0],
        pool_token[1],
    ] {
        bytes.extend(number.to_ne_bytes());
    }
    bytes.extend(uuid);
    bytes.extend(ras_address.to_ne_bytes());
    bytes.extend(ras_ports.iter().flat_map(|port| port.to_ne_bytes()));
}

fn decode_info(reader: &mut Reader<'_>) -> Option<RankInfo> {
    Some(RankInfo {
        pid: u32::from_ne_bytes(reader.take()?),
        device: i32::from_ne_bytes(reader.take()?),
        version: i32::from_ne_bytes(reader.take()?),
        pool: u32::from_ne_bytes(reader.take()?),
        started: u64::from_ne_bytes(reader.take()?),
        pid_namespace: u64::from_ne_bytes(reader.take()?),
        host_hash: u64::from_ne_bytes(reader.take()?),
        process: u64::from_ne_bytes(reader.take()?),
        bus_id: i64::from_ne_bytes(reader.take()?),
        pool_token: [
            u64::from_ne_bytes(reader.take()?),
            u64::from_ne_bytes(reader.take()?),
        ],
        uuid: reader.take()?,
        ras_address: u32::from_ne_bytes(reader.take()?),
        ras_ports: [
            u16::from_ne_bytes(reader.take()?),
            u16::from_ne_bytes(reader.take()?),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire_and_garbage_does_not() {
        let info = RankInfo {
            pid: 7,
            bus_id: -3,
            uuid: [9; 16],
            pool_token: [1, 2],
            ras_ports: [3, 4],
            ..RankInfo::default()
        };
        let messages = [
            Message::Hello {
                magic: 1,
                ranks: 8,
                rank: 3,
                info: Box::new(info),
            },
            Message::Welcome { token: 5, pools: 2 },
            Message::Pools,
            Message::Received,
            Message::Refused {
                why: "rank 3 is there twice".to_owned(),
            },
            Message::Dismissed { magic: 4 },
        ];
        for message in messages {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Some(message.clone()));
            if !matches!(message, Message::Refused { .. }) {
                assert_eq!(Message::decode(&[bytes, vec![0]].concat()), None);
            }
        }
        assert_eq!(Message::decode(b"GET / HTTP/1.1"), None);
        assert_eq!(Message::decode(&[]), None);
    }
}
