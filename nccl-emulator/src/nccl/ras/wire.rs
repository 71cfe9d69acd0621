//! The messages between RAS threads: datagrams, and the answers to queries.
//!
//! Little-endian numbers, one after the other. A size in a message is never trusted beyond the received bytes.

use std::net::Ipv4Addr;

use super::peers::{Devices, Peer, ProcessId};
use super::report::{FUNCTIONS, Member, OfCommunicator, RankState, Report};

/// The beginning of every message. Emulators of different versions do not understand each other.
const MAGIC: u64 = u64::from_le_bytes(*b"nccras\x00\x01");

/// The size of a request for a report.
pub(super) const REQUEST: usize = 8;

/// The most bytes of a report.
pub(super) const LARGEST_REPORT: usize = 16 << 20;

/// The most processes in a datagram.
pub(super) const PEERS_PER_DATAGRAM: usize = 256;

/// Large enough for any datagram.
pub(super) const LARGEST_DATAGRAM: usize = 48 << 10;

/// A datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Datagram {
    pub(super) from: ProcessId,
    pub(super) content: Content,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Content {
    /// The sender is alive, and knows processes of this hash.
    KeepAlive { hash: u64 },
    /// Processes that the sender knows, and those that it considers dead.
    Peers {
        hash: u64,
        peers: Vec<Peer>,
        dead: Vec<ProcessId>,
    },
    /// A process does not respond, or does so again.
    Suspect {
        process: ProcessId,
        is_suspect: bool,
    },
    /// A process is considered dead.
    Dead { process: ProcessId },
}

impl Datagram {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.u64(self.from);
        match &self.content {
            Content::KeepAlive { hash } => {
                writer.u8(1);
                writer.u64(*hash);
            }
            Content::Peers { hash, peers, dead } => {
                writer.u8(2);
                writer.u64(*hash);
                writer.u32(peers.len() as u32);
                peers.iter().for_each(|peer| writer.peer(peer));
                writer.u32(dead.len() as u32);
                dead.iter().for_each(|&process| writer.u64(process));
            }
            Content::Suspect {
                process,
                is_suspect,
            } => {
                writer.u8(3);
                writer.u64(*process);
                writer.u8(u8::from(*is_suspect));
            }
            Content::Dead { process } => {
                writer.u8(4);
                writer.u64(*process);
            }
        }
        writer.0
    }

    /// Decodes a datagram; `None` for bytes that this version did not write.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes)?;
        let from = reader.u64()?;
        let content = match reader.u8()? {
            1 => Content::KeepAlive {
                hash: reader.u64()?,
            },
            2 => Content::Peers {
                hash: reader.u64()?,
                peers: reader.list(Reader::peer)?,
                dead: reader.list(Reader::u64)?,
            },
            3 => Content::Suspect {
                process: reader.u64()?,
                is_suspect: reader.u8()? != 0,
            },
            4 => Content::Dead {
                process: reader.u64()?,
            },
            _ => return None,
        };
        reader.end()?;
        Some(Self { from, content })
    }
}

/// Returns the request for a report.
pub(super) fn request() -> [u8; REQUEST] {
    MAGIC.to_le_bytes()
}

/// Encodes a report, after its size.
pub(super) fn encode_report(report: &Report) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.u64(report.process);
    writer.u32(report.communicators.len() as u32);
    for communicator in &report.communicators {
        writer.communicator(communicator);
    }
    let mut bytes = (writer.0.len() as u32).to_le_bytes().to_vec();
    bytes.extend(writer.0);
    bytes
}

/// Decodes a report without its size.
pub(super) fn decode_report(bytes: &[u8]) -> Option<Report> {
    let mut reader = Reader::new(bytes)?;
    let report = Report {
        process: reader.u64()?,
        communicators: reader.list(Reader::communicator)?,
    };
    reader.end()?;
    Some(report)
}

struct Writer(Vec<u8>);

impl Writer {
    fn new() -> Self {
        Self(MAGIC.to_le_bytes().to_vec())
    }

    fn u8(&mut self, number: u8) {
        self.0.push(number);
    }

    fn u16(&mut self, number: u16) {
        self.0.extend(number.to_le_bytes());
    }

    fn u32(&mut self, number: u32) {
        self.0.extend(number.to_le_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    fn peer(&mut self, peer: &Peer) {
        self.u64(peer.process);
        self.u32(peer.address.to_bits());
        self.u16(peer.gossip);
        self.u16(peer.query);
        self.u32(peer.pid);
        for word in peer.cuda.0.into_iter().chain(peer.nvml.0) {
            self.u64(word);
        }
    }

    fn communicator(&mut self, communicator: &OfCommunicator) {
        self.u64(communicator.hash);
        self.u64(communicator.host);
        self.u32(communicator.members.len() as u32);
        for member in &communicator.members {
            self.u64(member.process);
            self.u32(member.device as u32);
            self.u32(member.nvml as u32);
        }
        self.u32(communicator.ranks.len() as u32);
        for rank in &communicator.ranks {
            self.u32(rank.rank);
            rank.counts.iter().for_each(|&count| self.u64(count));
            self.u8(rank.init);
            self.u8(rank.error);
            let flags = [rank.is_finalized, rank.is_destroyed, rank.is_aborted];
            for flag in flags {
                self.u8(u8::from(flag));
            }
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Begins behind the magic number.
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let mut reader = Self(bytes);
        (reader.u64()? == MAGIC).then_some(reader)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// Reads a list, whose length comes first.
    fn list<T>(&mut self, item: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        // No capacity ahead: the number may be wrong.
        (0..self.u32()?).map(|_| item(self)).collect()
    }

    fn devices(&mut self) -> Option<Devices> {
        Some(Devices([
            self.u64()?,
            self.u64()?,
            self.u64()?,
            self.u64()?,
        ]))
    }

    fn peer(&mut self) -> Option<Peer> {
        Some(Peer {
            process: self.u64()?,
            address: Ipv4Addr::from_bits(self.u32()?),
            gossip: self.u16()?,
            query: self.u16()?,
            pid: self.u32()?,
            cuda: self.devices()?,
            nvml: self.devices()?,
        })
    }

    fn communicator(&mut self) -> Option<OfCommunicator> {
        let (hash, host) = (self.u64()?, self.u64()?);
        let members = self.list(|reader| {
            Some(Member {
                process: reader.u64()?,
                device: reader.u32()? as i32,
                nvml: reader.u32()? as i32,
            })
        })?;
        let ranks = self.list(Self::rank)?;
        // A rank that is no member would be counted twice.
        let is_member = |rank: &RankState| (rank.rank as usize) < members.len();
        ranks.iter().all(is_member).then_some(OfCommunicator {
            hash,
            host,
            members,
            ranks,
        })
    }

    fn rank(&mut self) -> Option<RankState> {
        let rank = self.u32()?;
        let mut counts = [0; FUNCTIONS.len()];
        for count in &mut counts {
            *count = self.u64()?;
        }
        Some(RankState {
            rank,
            counts,
            init: self.u8()?,
            error: self.u8()?,
            is_finalized: self.u8()? != 0,
            is_destroyed: self.u8()? != 0,
            is_aborted: self.u8()? != 0,
        })
    }

    fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(process: ProcessId) -> Peer {
        let mut cuda = Devices::default();
        cuda.add(70);
        Peer {
            process,
            address: Ipv4Addr::new(127, 3, 4, 5),
            gossip: 1,
            query: 2,
            pid: 3,
            cuda,
            nvml: Devices::default(),
        }
    }

    fn report() -> Report {
        let member = |process| Member {
            process,
            device: -1,
            nvml: 3,
        };
        let rank = RankState {
            rank: 1,
            counts: [1, 2, 3, 4, u64::MAX],
            init: 7,
            error: 6,
            is_finalized: true,
            is_destroyed: false,
            is_aborted: true,
        };
        let communicator = OfCommunicator {
            hash: 1,
            host: 2,
            members: vec![member(9), member(8)],
            ranks: vec![rank],
        };
        Report {
            process: 5,
            communicators: vec![communicator],
        }
    }

    #[test]
    fn messages_are_read_as_they_were_written_and_no_part_of_one_is_a_message() {
        let contents = [
            Content::KeepAlive { hash: 5 },
            Content::Peers {
                hash: 7,
                peers: vec![peer(1), peer(2)],
                dead: vec![4],
            },
            Content::Suspect {
                process: 1,
                is_suspect: true,
            },
            Content::Dead { process: 1 },
        ];
        for content in contents {
            let datagram = Datagram { from: 77, content };
            let bytes = datagram.encode();
            assert_eq!(Datagram::decode(&bytes), Some(datagram));
            for end in 0..bytes.len() {
                assert_eq!(Datagram::decode(&bytes[..end]), None);
            }
        }
        let bytes = encode_report(&report());
        assert_eq!(decode_report(&bytes[4..]), Some(report()));
        for end in 4..bytes.len() {
            assert_eq!(decode_report(&bytes[4..end]), None);
        }
    }

    #[test]
    fn bytes_of_any_kind_are_no_panic() {
        let mut random = fastrand::Rng::with_seed(1);
        let templates = [
            encode_report(&report())[4..].to_vec(),
            Datagram {
                from: 1,
                content: Content::Peers {
                    hash: 1,
                    peers: vec![peer(1)],
                    dead: vec![1],
                },
            }
            .encode(),
        ];
        for _ in 0..20_000 {
            let mut bytes = templates[random.usize(..2)].clone();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..bytes.len());
                bytes[at] = random.u8(..);
            }
            Datagram::decode(&bytes);
            decode_report(&bytes);
        }
    }

    #[test]
    fn a_datagram_of_the_most_processes_fits() {
        let peers = vec![peer(1); PEERS_PER_DATAGRAM];
        let dead = vec![1; PEERS_PER_DATAGRAM];
        let content = Content::Peers {
            hash: 1,
            peers,
            dead,
        };
        let bytes = Datagram { from: 1, content }.encode();
        assert!(bytes.len() <= LARGEST_DATAGRAM, "{}", bytes.len());
    }
}
