//! The primitives of NCCL's algorithms: receive, reduce, copy and send a chunk, in any combination.
//!
//! An algorithm opens [`Primitives`] over its connections, runs [`Operation`]s and closes them; closing stores the connections'
//! steps for the next kernel. The protocol, `simple` or `lines`, determines the transfer itself.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::arithmetic::Arithmetic;
use super::block::{Block, STEPS, Stop, Trouble, Wait};
use super::connection::{Direct, End, Registration};
use super::functions::Protocol;
use super::memory::{self, View};
use super::works::Collective;

/// A buffer of the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Buffer {
    Input,
    Output,
}

/// One operation on a chunk. Indexes and counts are in elements; a negative count is an empty chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation {
    pub(super) receive: bool,
    pub(super) send: bool,
    pub(super) source: Option<Buffer>,
    pub(super) destination: Option<Buffer>,
    pub(super) source_index: i64,
    pub(super) destination_index: i64,
    pub(super) count: i64,
    /// The result includes all ranks.
    pub(super) last: bool,
    /// Registered buffers may be used, with protocol Simple.
    pub(super) direct_receive: bool,
    pub(super) direct_send: bool,
}

impl Operation {
    fn new(source_index: i64, destination_index: i64, count: i64) -> Self {
        Self {
            receive: false,
            send: false,
            source: None,
            destination: None,
            source_index,
            destination_index,
            count,
            last: false,
            direct_receive: false,
            direct_send: false,
        }
    }

    /// Sends from the input. `output` is the index in the peer's buffer, used if the chunk is written into that buffer directly.
    pub(super) fn send(input: i64, output: i64, count: i64) -> Self {
        Self {
            send: true,
            source: Some(Buffer::Input),
            ..Self::new(input, output, count)
        }
    }

    /// Sends from the input and copies to the output.
    pub(super) fn copy_send(input: i64, output: i64, count: i64) -> Self {
        Self {
            destination: Some(Buffer::Output),
            ..Self::send(input, output, count)
        }
    }

    /// Receives into the output.
    pub(super) fn receive(output: i64, count: i64) -> Self {
        Self {
            receive: true,
            destination: Some(Buffer::Output),
            ..Self::new(output, output, count)
        }
    }

    /// Receives into the output and sends on.
    pub(super) fn receive_copy_send(output: i64, count: i64) -> Self {
        Self {
            send: true,
            ..Self::receive(output, count)
        }
    }

    /// Receives, reduces with the input, and sends.
    pub(super) fn receive_reduce_send(index: i64, count: i64) -> Self {
        Self {
            receive: true,
            ..Self::send(index, index, count)
        }
    }

    /// Receives and reduces with the input into the output.
    pub(super) fn receive_reduce_copy(input: i64, output: i64, count: i64) -> Self {
        Self {
            receive: true,
            source: Some(Buffer::Input),
            destination: Some(Buffer::Output),
            last: true,
            ..Self::new(input, output, count)
        }
    }

    /// Receives and reduces with the input into the output, and sends the result.
    pub(super) fn receive_reduce_copy_send(index: i64, count: i64) -> Self {
        Self {
            send: true,
            ..Self::receive_reduce_copy(index, index, count)
        }
    }

    /// The same with registered buffers, if there are any.
    pub(super) fn direct(self) -> Self {
        Self {
            direct_receive: self.receive,
            direct_send: self.send,
            ..self
        }
    }
}

/// How protocol Simple divides a chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slicing {
    pub(super) slices: i64,
    pub(super) steps: u64,
}

impl Slicing {
    /// Chunks of one slice of one step.
    pub(super) const SINGLE: Self = Self {
        slices: 1,
        steps: 1,
    };
    /// The slicing of most collectives: a chunk is half of a connection's buffers.
    pub(super) const CHUNK: Self = Self {
        slices: 2,
        steps: 2,
    };
}

/// The parameters of primitives.
pub(super) struct Setup<'a> {
    pub(super) protocol: Protocol,
    pub(super) arithmetic: Arithmetic,
    pub(super) slicing: Slicing,
    /// The elements of a step, if they differ from the size of the connection's buffers.
    pub(super) step_elements: Option<i64>,
    /// The kernel only updates counters and sizes; the network moves the data.
    pub(super) offload: bool,
    pub(super) p2p: bool,
    pub(super) receive: Registration,
    pub(super) send: Registration,
    /// The collective whose buffers are registered.
    pub(super) work: Option<&'a Collective>,
    pub(super) input: u64,
    pub(super) output: u64,
}

/// The open ends of an algorithm.
pub(super) struct Primitives<'a> {
    pub(super) block: &'a Block,
    pub(super) setup: Setup<'a>,
    pub(super) receives: Vec<End>,
    pub(super) sends: Vec<End>,
    /// Views of connection buffers, kept for reuse.
    views: Vec<Arc<View>>,
    /// Staged data, for protocols with flags.
    pub(super) staged: Vec<Vec<u8>>,
}

impl<'a> Primitives<'a> {
    /// Opens connections with the peers, up to the first -1.
    pub(super) async fn open(
        block: &'a Block,
        setup: Setup<'a>,
        receive_from: &[i64],
        send_to: &[i64],
    ) -> Result<Self, Stop> {
        let simple = setup.protocol == Protocol::Simple;
        let round = match simple {
            true => setup.slicing.slices as u64 * setup.slicing.steps,
            false => 1,
        };
        let none = Registration::default();
        let index = usize::from(setup.p2p);
        let open = |peers: &[i64], send: bool| -> Result<Vec<End>, Stop> {
            let registration = match (simple, send) {
                (false, _) => none,
                (true, true) => setup.send,
                (true, false) => setup.receive,
            };
            peers
                .iter()
                .take_while(|&&peer| peer != -1)
                .map(|&peer| End::open(block, peer, send, index, registration, setup.p2p, round))
                .collect()
        };
        let (receives, sends) = (open(receive_from, false)?, open(send_to, true)?);
        let mut primitives = Self {
            block,
            setup,
            receives,
            sends,
            views: Vec::new(),
            staged: Vec::new(),
        };
        if simple {
            for end in &primitives.receives {
                // Gives back to the sender the steps that were skipped by rounding up.
                end.store_head()?;
                if end.net {
                    end.store_size(block, end.step, 0)?;
                }
            }
            primitives.exchange(receive_from.is_empty()).await?;
        }
        Ok(primitives)
    }

    /// Runs one operation.
    pub(super) async fn run(&mut self, operation: Operation) -> Result<(), Stop> {
        match self.setup.protocol {
            Protocol::Simple => self.simple(operation).await,
            Protocol::Ll | Protocol::Ll128 => self.lines(operation).await,
        }
    }

    /// Stores the connections' steps, and waits until registered buffers may be reused.
    pub(super) async fn close(self) -> Result<(), Stop> {
        let Self {
            block,
            receives,
            sends,
            setup,
            ..
        } = self;
        for end in receives.iter().chain(&sends) {
            end.save(block)?;
        }
        for end in &sends {
            let peer = end.peer;
            if end.net {
                // The proxy sends from the user's buffer, which the next kernel may overwrite.
                let step = end.step.saturating_sub(setup.slicing.steps);
                block
                    .wait(Wait::Release { peer }, || Ok(end.size(block, step)? == -1))
                    .await?;
            }
            if setup.p2p && end.direct == Direct::Read {
                block
                    .wait(Wait::Release { peer }, || Ok(end.tail()? <= end.head()?))
                    .await?;
            }
        }
        Ok(())
    }

    /// Returns the address of a peer's mapping of this rank's buffer.
    fn offered(&self, end: &End, send_only: bool) -> Result<u64, Stop> {
        let Setup { input, output, .. } = self.setup;
        let Some(work) = self.setup.work else {
            return Ok(if send_only { input } else { output });
        };
        let comm = &self.block.comm;
        let memory = self.block.memory();
        let local = match comm.cross_clique {
            true => end.peer as u64,
            false => {
                let mut local = [0; 4];
                let at = comm.rank_to_local + 4 * end.peer as u64;
                memory::view(memory, at, 4)?.read(0, &mut local)?;
                u64::from(u32::from_le_bytes(local))
            }
        };
        let (offset, table) = match send_only {
            true => (work.send_offset, work.send_remote),
            false => (work.recv_offset, work.recv_remote),
        };
        Ok(memory::load_address(memory, table + 8 * local)?.wrapping_add(offset))
    }

    /// Exchanges the addresses of registered buffers with the peers. The side that offers an address goes first, since its peer
    /// waits for it.
    async fn exchange(&mut self, send_only: bool) -> Result<(), Stop> {
        let offers = |end: &End| match end.direct {
            Direct::No => false,
            Direct::Write => !end.send,
            Direct::Read => end.send,
        };
        let block = self.block;
        let mut buffers = Vec::new();
        for end in self.receives.iter().chain(&self.sends) {
            let peer = end.peer;
            if end.direct == Direct::No || !offers(end) {
                buffers.push(0);
                continue;
            }
            let from_input = end.send && send_only;
            let offered = self.offered(end, from_input)?;
            buffers.push(match from_input {
                true => self.setup.input,
                false => self.setup.output,
            });
            let Some(slot) = &end.slot else { continue };
            // The peer first reads the previous address.
            let free = || Ok(slot.word(0)?.load(Ordering::Acquire) == 0);
            block.wait(Wait::Exchange { peer }, free).await?;
            slot.word(0)?.store(offered, Ordering::Release);
            block.meter().progress();
        }
        for (end, buffer) in self.receives.iter_mut().chain(&mut self.sends).zip(buffers) {
            end.direct_buffer = buffer;
            let peer = end.peer;
            if end.direct == Direct::No || offers(end) {
                continue;
            }
            let Some(slot) = &end.slot else {
                return Err(Trouble::NoBuffer { peer }.into());
            };
            let there = || Ok(slot.word(0)?.load(Ordering::Acquire) != 0);
            block.wait(Wait::Exchange { peer }, there).await?;
            end.direct_buffer = slot.word(0)?.swap(0, Ordering::AcqRel);
            block.meter().progress();
        }
        Ok(())
    }

    /// Returns an address in a user's buffer.
    pub(super) fn user(&self, buffer: Buffer, index: i64) -> u64 {
        let base = match buffer {
            Buffer::Input => self.setup.input,
            Buffer::Output => self.setup.output,
        };
        let element = self.setup.arithmetic.element() as i64;
        base.wrapping_add_signed(index.wrapping_mul(element))
    }

    /// Takes a view of an end's connection buffers, so that later steps need no further lookup.
    pub(super) fn keep_buffers(&mut self, address: u64, length: usize) -> Result<(), Stop> {
        if !self.views.iter().any(|view| view.covers(address, length)) {
            let view = memory::view(self.block.memory(), address, length)?;
            self.views.push(Arc::new(view));
        }
        Ok(())
    }

    /// Returns a view of device memory.
    pub(super) fn resolve(&self, address: u64, length: usize) -> Result<Arc<View>, Stop> {
        match self.views.iter().find(|view| view.covers(address, length)) {
            Some(view) => Ok(view.clone()),
            None => Ok(Arc::new(memory::view(
                self.block.memory(),
                address,
                length,
            )?)),
        }
    }

    /// Returns an end's own buffers; `None` if a proxy may place slots outside of them.
    pub(super) fn own_buffers(&self, end: &End) -> Option<(u64, usize)> {
        match self.setup.protocol {
            Protocol::Simple if end.has_fifo() => None,
            Protocol::Simple => Some((end.buffers[2], end.step_size * STEPS as usize)),
            other => Some((
                end.buffers[other.index()],
                self.block.comm.buffers[other.index()],
            )),
        }
    }
}

/// Returns `a / b`, rounded up.
pub(super) fn div_up(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}
