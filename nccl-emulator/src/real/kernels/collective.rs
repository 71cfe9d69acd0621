//! The algorithms ring and tree, on top of the primitives.

use super::arithmetic::Arithmetic;
use super::block::{Block, Stop};
use super::connection::Registration;
use super::executor::{Part, Together};
use super::functions::{Algorithm, Collective as Kind, Function, Protocol};
use super::memory;
use super::pat;
use super::primitives::{Operation, Primitives, Setup, Slicing, div_up};
use super::task::Task;
use super::works::{Collective, Share};

/// The largest chunk that the network sends from a registered buffer.
pub(super) const LARGEST_NET: i64 = 1 << 30;

/// Runs a channel's share of a collective.
pub(super) async fn run(block: &Block, function: Function, work: &Collective) -> Result<(), Stop> {
    let arithmetic = match function.reduction {
        None => Arithmetic::BYTES,
        Some((operator, ty)) => {
            let argument = match work.argument_is_pointer {
                false => work.argument,
                true => {
                    let mut word = [0; 8];
                    let size = Arithmetic::argument_size(operator, ty);
                    let view = memory::view(block.memory(), work.argument, size)?;
                    view.read(0, &mut word[..size])?;
                    u64::from_le_bytes(word)
                }
            };
            Arithmetic::new(operator, ty, argument)?
        }
    };
    let share = work.share(block.channel_id, function.protocol, arithmetic.element())?;
    let task = Task {
        block,
        function,
        work,
        arithmetic,
        share,
    };
    match (function.collective, function.algorithm) {
        (Kind::AllReduce, Algorithm::Tree) => task.tree_all_reduce().await,
        (_, Algorithm::Pat) => pat::run(&task).await,
        (Kind::AllReduce, _) => task.ring_all_reduce().await,
        (Kind::AllGather, _) => task.ring_all_gather().await,
        (Kind::ReduceScatter, _) => task.ring_reduce_scatter().await,
        (Kind::Reduce, _) => task.ring_reduce().await,
        (Kind::Broadcast, _) => task.ring_broadcast().await,
        // Batches of these have works of their own kind.
        (Kind::SendRecv | Kind::AllGatherV, _) => Ok(()),
    }
}

impl<'a> Task<'a> {
    /// Returns the setup of the primitives, for an algorithm that uses registered buffers directly or not.
    fn setup(&self, slicing: Slicing, direct: bool) -> Setup<'a> {
        let registration = match direct {
            true => Registration {
                ipc: self.work.registered,
                net: self.work.net_registered,
                direct: self.work.direct,
            },
            false => Registration::default(),
        };
        Setup {
            protocol: self.function.protocol,
            arithmetic: self.arithmetic,
            slicing,
            step_elements: None,
            offload: false,
            p2p: false,
            receive: registration,
            send: registration,
            work: Some(self.work),
            input: self.work.input,
            output: self.work.output,
        }
    }

    async fn ring(&self, setup: Setup<'a>) -> Result<Primitives<'a>, Stop> {
        let channel = &self.block.channel;
        Primitives::open(self.block, setup, &[channel.prev], &[channel.next]).await
    }

    /// Returns the chunks of the share: their offset in the buffers and their count.
    fn chunks(&self, chunk: i64) -> impl Iterator<Item = (i64, i64)> + Send + use<> {
        let Share { offset, count, .. } = self.share;
        (0..count)
            .step_by(usize::try_from(chunk).unwrap_or(1).max(1))
            .map(move |at| (offset + at, chunk.min(count - at)))
    }

    fn ranks(&self) -> i64 {
        self.block.comm.ranks as i64
    }

    /// Returns the rank `back` positions before this rank in the ring.
    fn before(&self, back: i64) -> Result<i64, Stop> {
        self.block
            .ring_rank((self.ranks() - back).rem_euclid(self.ranks()) as usize)
    }

    async fn ring_all_reduce(&self) -> Result<(), Stop> {
        let ranks = self.ranks();
        let slicing = self.slicing();
        let mut ring = self.ring(self.setup(slicing, true)).await?;
        let Share {
            offset,
            count,
            chunk: full,
            ..
        } = self.share;
        let index = self.block.channel.ring_index as i64;
        let mut at = 0;
        while at < count {
            let rest = count - at;
            let chunk = match rest < ranks * full {
                true => {
                    let unit = (16 / self.arithmetic.element() as i64).max(1);
                    div_up(div_up(rest, ranks), unit) * unit
                }
                false => full,
            };
            // The offset and count of the chunk that started `back` ranks earlier.
            let part = |back: i64| {
                let begin = (index - back).rem_euclid(ranks) * chunk;
                (offset + at + begin, chunk.min(rest - begin))
            };
            let (begin, n) = part(1);
            ring.run(Operation::send(begin, begin, n).direct()).await?;
            for back in 2..ranks {
                let (begin, n) = part(back);
                ring.run(Operation::receive_reduce_send(begin, n).direct())
                    .await?;
            }
            let (begin, n) = part(0);
            ring.run(Operation::receive_reduce_copy_send(begin, n).direct())
                .await?;
            for back in 1..ranks - 1 {
                let (begin, n) = part(back);
                ring.run(Operation::receive_copy_send(begin, n).direct())
                    .await?;
            }
            let (begin, n) = part(-1);
            ring.run(Operation::receive(begin, n).direct()).await?;
            at += ranks * full;
        }
        ring.close().await
    }

    async fn ring_all_gather(&self) -> Result<(), Stop> {
        let offload = self.offload();
        let mut setup = self.setup(self.slicing(), true);
        let mut chunk = self.share.chunk;
        if offload {
            setup.slicing = Slicing::SINGLE;
            setup.step_elements = Some(LARGEST_NET);
            setup.offload = true;
            chunk = LARGEST_NET;
        }
        let ranks = self.ranks();
        let total = self.share.total;
        let own = self.before(0)? * total;
        let mut ring = self.ring(setup).await?;
        for (begin, n) in self.chunks(chunk) {
            let output = begin + own;
            let in_place = ring.user(super::primitives::Buffer::Input, begin)
                == ring.user(super::primitives::Buffer::Output, output);
            let first = match in_place || offload {
                true => Operation::send(begin, output, n),
                false => Operation::copy_send(begin, output, n),
            };
            ring.run(first.direct()).await?;
            for back in 1..ranks - 1 {
                let begin = begin + self.before(back)? * total;
                ring.run(Operation::receive_copy_send(begin, n).direct())
                    .await?;
            }
            let begin = begin + self.before(ranks - 1)? * total;
            ring.run(Operation::receive(begin, n).direct()).await?;
        }
        if offload {
            let from = self.work.input.wrapping_add_signed(self.share.offset);
            let to = self
                .work
                .output
                .wrapping_add_signed(self.share.offset + own);
            ring.copy(from, to, self.share.count).await?;
        }
        ring.close().await
    }

    async fn ring_reduce_scatter(&self) -> Result<(), Stop> {
        let ranks = self.ranks();
        let total = self.share.total;
        let mut ring = self.ring(self.setup(self.slicing(), false)).await?;
        for (begin, n) in self.chunks(self.share.chunk) {
            let first = begin + self.before(1)? * total;
            ring.run(Operation::send(first, first, n)).await?;
            for back in 2..ranks {
                let begin = begin + self.before(back)? * total;
                ring.run(Operation::receive_reduce_send(begin, n)).await?;
            }
            let input = begin + self.before(0)? * total;
            ring.run(Operation::receive_reduce_copy(input, begin, n))
                .await?;
        }
        ring.close().await
    }

    async fn ring_reduce(&self) -> Result<(), Stop> {
        let previous = self.before(1)?;
        let mut ring = self.ring(self.setup(Slicing::SINGLE, false)).await?;
        for (begin, n) in self.chunks(self.share.chunk) {
            ring.run(if previous == self.work.root {
                Operation::send(begin, begin, n)
            } else if self.block.comm.rank as i64 == self.work.root {
                Operation::receive_reduce_copy(begin, begin, n)
            } else {
                Operation::receive_reduce_send(begin, n)
            })
            .await?;
        }
        ring.close().await
    }

    async fn ring_broadcast(&self) -> Result<(), Stop> {
        let offload = self.offload();
        let root = self.work.root;
        let (own, next) = (self.before(0)?, self.before(self.ranks() - 1)?);
        let in_place = self.work.input == self.work.output;
        let mut ring = self.ring(self.setup(Slicing::SINGLE, true)).await?;
        for (begin, n) in self.chunks(self.share.chunk) {
            let operation = if own == root && (in_place || offload) {
                Operation::send(begin, begin, n)
            } else if own == root {
                Operation::copy_send(begin, begin, n)
            } else if next == root {
                Operation::receive(begin, n)
            } else {
                Operation::receive_copy_send(begin, n)
            };
            ring.run(operation.direct()).await?;
        }
        if offload && own == root {
            let shift = |base: u64| base.wrapping_add_signed(self.share.offset);
            let (from, to) = (shift(self.work.input), shift(self.work.output));
            ring.copy(from, to, self.share.count).await?;
        }
        ring.close().await
    }

    async fn tree_all_reduce(&self) -> Result<(), Stop> {
        let (up, down) = (self.block.channel.up, self.block.channel.down);
        let leaf = down[0] == -1;
        if up == -1 {
            // The root has at most two children.
            let down = &down[..2];
            let setup = self.setup(Slicing::SINGLE, true);
            let mut tree = Primitives::open(self.block, setup, down, down).await?;
            for (begin, n) in self.chunks(self.share.chunk) {
                tree.run(Operation::receive_reduce_copy_send(begin, n).direct())
                    .await?;
            }
            return tree.close().await;
        }
        let reduce: Part<'_, Stop> = Box::pin(async {
            let setup = self.setup(Slicing::SINGLE, true);
            let mut tree = Primitives::open(self.block, setup, &down, &[up]).await?;
            for (begin, n) in self.chunks(self.share.chunk) {
                let operation = match leaf {
                    true => Operation::send(begin, begin, n),
                    false => Operation::receive_reduce_send(begin, n),
                };
                tree.run(operation.direct()).await?;
            }
            tree.close().await
        });
        let broadcast: Part<'_, Stop> = Box::pin(async {
            let setup = self.setup(Slicing::SINGLE, true);
            let mut tree = Primitives::open(self.block, setup, &[up], &down).await?;
            for (begin, n) in self.chunks(self.share.chunk) {
                let operation = match leaf {
                    true => Operation::receive(begin, n),
                    false => Operation::receive_copy_send(begin, n),
                };
                tree.run(operation.direct()).await?;
            }
            tree.close().await
        });
        Together::new(vec![reduce, broadcast]).await
    }

    fn slicing(&self) -> Slicing {
        match self.function.protocol {
            Protocol::Simple => Slicing::CHUNK,
            _ => Slicing::SINGLE,
        }
    }

    /// Returns whether the network moves all data, so that the kernel only updates counters.
    fn offload(&self) -> bool {
        self.function.protocol == Protocol::Simple
            && self.work.one_rank_per_node
            && self.work.net_registered
    }
}
