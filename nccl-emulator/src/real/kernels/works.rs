//! The decoded works of a batch: the requests of a launch to a channel.

use super::asked::Field;
use super::block::{Stop, Trouble};
use super::functions::Protocol;
use super::layout::Layout;

/// A collective, or a channel's part of one (`ncclDevWorkColl`).
#[derive(Debug, Clone)]
pub(super) struct Collective {
    pub(super) channel_low: u64,
    channel_high: u64,
    pub(super) argument_is_pointer: bool,
    pub(super) argument: u64,
    pub(super) registered: bool,
    pub(super) net_registered: bool,
    pub(super) direct: u64,
    pub(super) one_rank_per_node: bool,
    pub(super) profiled: bool,
    pub(super) root: i64,
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) send_offset: u64,
    pub(super) recv_offset: u64,
    /// Tables of the peers' mappings of the registered buffers.
    pub(super) send_remote: u64,
    pub(super) recv_remote: u64,
    counts: [i64; 3],
    grains: [i64; 3],
}

/// A channel's share of a collective, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    /// The elements of all channels.
    pub(super) total: i64,
    /// The offset of the share.
    pub(super) offset: i64,
    pub(super) count: i64,
    pub(super) chunk: i64,
}

impl Collective {
    pub(super) fn decode(layout: &Layout, bytes: &[u8]) -> Self {
        let fields = &layout.coll;
        let get = |field: Field| field.get(bytes);
        let set = |field: Field| field.get(bytes) != 0;
        Self {
            channel_low: get(fields.channel_low),
            channel_high: get(fields.channel_high),
            argument_is_pointer: set(fields.argument_is_pointer),
            argument: get(fields.argument),
            registered: set(fields.registered),
            net_registered: set(fields.net_registered),
            direct: get(fields.direct),
            one_rank_per_node: set(fields.one_rank_per_node),
            profiled: fields.profiled.is_some_and(set),
            root: fields.root.signed(bytes),
            input: get(fields.send_buffer),
            output: get(fields.recv_buffer),
            send_offset: get(fields.send_offset),
            recv_offset: get(fields.recv_offset),
            send_remote: get(fields.send_remote),
            recv_remote: get(fields.recv_remote),
            counts: [fields.count_low, fields.count_mid, fields.count_high]
                .map(|field| get(field) as i64),
            grains: [fields.grains_low, fields.grains_mid, fields.grains_high]
                .map(|field| get(field) as i64),
        }
    }

    /// Returns the share of a channel: the first and the last channel may have other shares than those between them.
    pub(super) fn share(
        &self,
        channel: usize,
        protocol: Protocol,
        element: usize,
    ) -> Result<Share, Stop> {
        let (low, high) = (self.channel_low as i64, self.channel_high as i64);
        let channel = channel as i64;
        if channel < low || channel > high {
            let (field, value) = ("channels without channel", channel as u64);
            return Err(Trouble::Work { field, value }.into());
        }
        let [count_low, count_mid, count_high] = self.counts;
        // -1 for a single channel, whose middle count is 0.
        let between = high - low - 1;
        let (offset, part) = if channel == low {
            (0, 0)
        } else if channel == high {
            (count_low + between * count_mid, 2)
        } else {
            (count_low + (channel - low - 1) * count_mid, 1)
        };
        let count = self.counts[part];
        let chunk = self.grains[part] * (protocol.grain() / element) as i64;
        if count < 0 || (count > 0 && chunk <= 0) {
            let (field, value) = ("chunks of", chunk as u64);
            return Err(Trouble::Work { field, value }.into());
        }
        Ok(Share {
            total: count_low + count_mid * between + count_high,
            offset,
            count,
            chunk,
        })
    }
}

/// One direction of a Send/Recv.
#[derive(Debug, Clone)]
pub(super) struct Transfer {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) peer: i64,
    channels: u64,
    pub(super) chunk: u64,
    pub(super) ll: bool,
    pub(super) net_registered: bool,
    pub(super) ipc_registered: bool,
}

/// A send and a receive (`ncclDevWorkP2p`).
#[derive(Debug, Clone)]
pub(super) struct P2p {
    pub(super) send: Transfer,
    pub(super) receive: Transfer,
    channels: u64,
    pub(super) channel_base: u64,
    pub(super) profiled: bool,
}

impl P2p {
    pub(super) fn decode(layout: &Layout, bytes: &[u8]) -> Self {
        let fields = &layout.p2p;
        let get = |field: Field| field.get(bytes);
        let set = |field: Field| field.get(bytes) != 0;
        Self {
            send: Transfer {
                address: get(fields.send_address),
                bytes: get(fields.send_bytes),
                peer: fields.send_rank.signed(bytes),
                channels: get(fields.send_channels),
                chunk: chunk_size(get(fields.send_chunk)),
                ll: set(fields.send_ll),
                net_registered: set(fields.send_net_registered),
                ipc_registered: set(fields.send_ipc_registered),
            },
            receive: Transfer {
                address: get(fields.recv_address),
                bytes: get(fields.recv_bytes),
                peer: fields.recv_rank.signed(bytes),
                channels: get(fields.recv_channels),
                chunk: chunk_size(get(fields.recv_chunk)),
                ll: set(fields.recv_ll),
                net_registered: set(fields.recv_net_registered),
                ipc_registered: set(fields.recv_ipc_registered),
            },
            channels: get(fields.channels),
            channel_base: get(fields.channel_base),
            profiled: fields.profiled.is_some_and(set),
        }
    }

    /// Returns a channel's part of a transfer, if it has one. Until 2.27 the parts are assigned to channels in bit-reversed
    /// order.
    pub(super) fn part(
        &self,
        transfer: &Transfer,
        channel: usize,
        reversed: bool,
    ) -> Result<Option<Transfer>, Stop> {
        if !self.channels.is_power_of_two() {
            let (field, value) = ("point-to-point channels", self.channels);
            return Err(Trouble::Work { field, value }.into());
        }
        let mask = self.channels - 1;
        let delta = (channel as u64).wrapping_sub(self.channel_base) & mask;
        let part = match (reversed, mask.count_ones()) {
            (false, _) | (true, 0) => delta,
            (true, bits) => delta.reverse_bits() >> (64 - bits),
        };
        if part >= transfer.channels {
            return Ok(None);
        }
        let size = transfer
            .bytes
            .div_ceil(transfer.channels)
            .next_multiple_of(4096);
        let begin = transfer.bytes.min(part * size);
        let end = transfer.bytes.min((part + 1) * size);
        Ok(Some(Transfer {
            address: transfer.address.wrapping_add(begin),
            bytes: end - begin,
            ..transfer.clone()
        }))
    }
}

/// Decodes a chunk size of eight bits: an exponent and three bits of mantissa.
fn chunk_size(code: u64) -> u64 {
    let (exponent, mantissa) = (code >> 3, code & 7);
    match exponent {
        0 => mantissa,
        _ => (mantissa | 8) << (exponent - 1),
    }
}

/// One broadcast of a batch (`ncclDevWorkBcast`).
#[derive(Debug, Clone)]
pub(super) struct Broadcast {
    /// The distance of this rank from the root along the ring.
    pub(super) depth: i64,
    pub(super) chunk: i64,
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) bytes: i64,
    pub(super) done: i64,
}

impl Broadcast {
    /// Returns `None` if the library has no such works.
    pub(super) fn decode(layout: &Layout, bytes: &[u8]) -> Option<Self> {
        let fields = layout.bcast.as_ref()?;
        Some(Self {
            depth: fields.ring_depth.signed(bytes),
            chunk: fields.chunk.signed(bytes),
            input: fields.send_buffer.get(bytes),
            output: fields.recv_buffer.get(bytes),
            bytes: fields.bytes.signed(bytes),
            done: fields.done.signed(bytes),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(bytes: u64, channels: u64) -> Transfer {
        Transfer {
            address: 0x1000,
            bytes,
            peer: 0,
            channels,
            chunk: 1,
            ll: false,
            net_registered: false,
            ipc_registered: false,
        }
    }

    #[test]
    fn the_parts_of_a_transfer_cover_it_once_whatever_the_order_of_channels() {
        for reversed in [false, true] {
            for (bytes, parts) in [(0, 1), (1, 4), (4096, 4), (100_000, 3), (1 << 20, 8)] {
                let all = transfer(bytes, parts);
                let work = P2p {
                    send: all.clone(),
                    receive: all.clone(),
                    channels: 8,
                    channel_base: 5,
                    profiled: false,
                };
                let mut covered: Vec<_> = (0..8)
                    .filter_map(|channel| work.part(&all, channel, reversed).unwrap())
                    .map(|part| (part.address, part.bytes))
                    .collect();
                assert_eq!(covered.len() as u64, parts);
                covered.sort_unstable();
                covered.retain(|&(_, bytes)| bytes > 0);
                let mut at = 0x1000;
                for (address, bytes) in covered {
                    assert_eq!(address, at);
                    at += bytes;
                }
                assert_eq!(at, 0x1000 + bytes);
            }
        }
    }

    #[test]
    fn channels_follow_each_other_since_2_28_and_by_reversed_bits_before() {
        let all = transfer(1 << 20, 8);
        let work = P2p {
            send: all.clone(),
            receive: all.clone(),
            channels: 8,
            channel_base: 0,
            profiled: false,
        };
        let begins = |channel, reversed| {
            let part = work.part(&all, channel, reversed).unwrap().unwrap();
            (part.address - 0x1000) / (1 << 17)
        };
        assert_eq!((begins(1, false), begins(6, false)), (1, 6));
        assert_eq!((begins(1, true), begins(6, true)), (4, 3));
    }

    #[test]
    fn chunk_sizes_are_decoded() {
        assert_eq!(
            [0, 7, 8, 9, 16, 0xff].map(chunk_size),
            [0, 7, 8, 9, 16, 15 << 30]
        );
    }
}
