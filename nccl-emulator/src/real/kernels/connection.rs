//! One end of a connection: step counters, buffers, and the exchange of addresses.
//!
//! The sender writes a step's slot and raises `tail`; the receiver reads the slot and raises `head`. A proxy that carries steps
//! over the network gets their sizes through the connection's FIFO, in which it may also set the position of a step's slot.

use std::sync::atomic::Ordering;

use super::block::{Block, STEPS, Stop, Trouble, Wait};
use super::memory::{self, View, Violation};

/// `NCCL_P2P_WRITE` of a connection's flags.
const P2P_WRITE: u64 = 0x01;
/// `NCCL_P2P_READ`.
const P2P_READ: u64 = 0x02;
/// `NCCL_DIRECT_NIC`: the network reads and writes registered user buffers.
const DIRECT_NIC: u64 = 0x04;
/// `NCCL_NVLS_MIN_POLL`.
const NVLS_MIN_POLL: u64 = 0x80;
/// `NCCL_NET_DEVICE_UNPACK`: packets that the kernel itself unpacks.
const NET_DEVICE_UNPACK: u64 = 1;
/// `NCCL_MODE_OFFSET` of a step in the FIFO.
const MODE_OFFSET: u32 = 1;

/// How an end uses a registered buffer of its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direct {
    /// The data goes through the connection's buffers.
    No,
    /// The sender writes into the receiver's buffer.
    Write,
    /// The receiver reads from the sender's buffer.
    Read,
}

/// The registered buffers of an operation.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Registration {
    /// Registered with peers that map them.
    pub(super) ipc: bool,
    /// Registered with the network.
    pub(super) net: bool,
    /// The `direct` field of a collective's work.
    pub(super) direct: u64,
}

/// One end of a connection.
pub(super) struct End {
    pub(super) peer: usize,
    pub(super) send: bool,
    info: View,
    /// The addresses of the buffers (`buffs`), by protocol.
    pub(super) buffers: [u64; 3],
    tail: Option<View>,
    head: Option<View>,
    pub(super) step_size: usize,
    /// The place where addresses are exchanged.
    pub(super) slot: Option<View>,
    fifo: Option<View>,
    pub(super) step: u64,
    pub(super) direct: Direct,
    /// The network uses the user's buffer.
    pub(super) net: bool,
    /// The peer's buffer, or this rank's buffer that the peer uses.
    pub(super) direct_buffer: u64,
}

fn optional(block: &Block, address: u64, length: usize) -> Result<Option<View>, Violation> {
    match address {
        0 => Ok(None),
        address => Ok(Some(memory::view(block.memory(), address, length)?)),
    }
}

impl End {
    /// Opens the end at `peer`. A kernel of protocol Simple starts at a multiple of `round` steps.
    pub(super) fn open(
        block: &Block,
        peer: i64,
        send: bool,
        index: usize,
        registration: Registration,
        p2p: bool,
        round: u64,
    ) -> Result<Self, Stop> {
        let layout = block.layout();
        let fields = &layout.connection;
        let address = block.connection(peer, send, index)?;
        let info = memory::view(block.memory(), address, fields.size)?;
        let mut bytes = vec![0; fields.size];
        info.read(0, &mut bytes)?;
        let peer = peer as usize;
        let flags = fields.flags.get(&bytes);
        let refuse = |feature| Stop::from(Trouble::Connection { peer, feature });
        if flags & NVLS_MIN_POLL != 0 {
            return Err(refuse("NVLink multicast"));
        }
        let device = fields.net_device_type.map_or(0, |field| field.get(&bytes));
        if !send && device == NET_DEVICE_UNPACK {
            return Err(refuse("a network device that needs unpacking"));
        }
        let peer_reads_or_writes = registration.ipc && flags & (P2P_READ | P2P_WRITE) != 0;
        let direct = match (peer_reads_or_writes, p2p) {
            (false, _) => Direct::No,
            (true, true) if flags & P2P_WRITE != 0 => Direct::Write,
            (true, true) => Direct::Read,
            (true, false) if registration.direct & P2P_READ != 0 => Direct::Read,
            (true, false) => Direct::Write,
        };
        let buffer = |index| fields.buffers.element(index, 8).get(&bytes);
        let fifo = fields.fifo.get(&bytes);
        let end = Self {
            peer,
            send,
            buffers: [buffer(0), buffer(1), buffer(2)],
            tail: optional(block, fields.tail.get(&bytes), 8)?,
            head: optional(block, fields.head.get(&bytes), 8)?,
            step_size: fields.step_size.get(&bytes) as usize,
            slot: match direct {
                Direct::No => None,
                _ => optional(block, fields.pointer_exchange.get(&bytes), 8)?,
            },
            fifo: optional(block, fifo, layout.fifo.size * STEPS as usize)?,
            step: fields.step.get(&bytes).next_multiple_of(round),
            direct,
            net: registration.net && flags & DIRECT_NIC != 0,
            direct_buffer: 0,
            info,
        };
        Ok(end)
    }

    fn counter<'a>(
        &self,
        view: &'a Option<View>,
    ) -> Result<&'a std::sync::atomic::AtomicU64, Violation> {
        match view {
            Some(view) => view.word(0),
            None => Err(Violation {
                address: 0,
                length: 8,
                cause: memory::Cause::Null,
            }),
        }
    }

    pub(super) fn tail(&self) -> Result<u64, Violation> {
        Ok(self.counter(&self.tail)?.load(Ordering::Acquire))
    }

    pub(super) fn head(&self) -> Result<u64, Violation> {
        Ok(self.counter(&self.head)?.load(Ordering::Acquire))
    }

    /// Publishes the data up to the present step. Release ordering: the data before the counter.
    pub(super) fn store_tail(&self) -> Result<(), Violation> {
        self.counter(&self.tail)?
            .store(self.step, Ordering::Release);
        Ok(())
    }

    /// Gives the earlier steps back to the sender. Release ordering: the reads before the counter.
    pub(super) fn store_head(&self) -> Result<(), Violation> {
        self.counter(&self.head)?
            .store(self.step, Ordering::Release);
        Ok(())
    }

    /// Stores the present step for the next kernel.
    pub(super) fn save(&self, block: &Block) -> Result<(), Violation> {
        let step = self.info.word(block.layout().connection.step.offset)?;
        step.store(self.step, Ordering::Release);
        Ok(())
    }

    /// Waits until the data of `steps` steps have arrived.
    pub(super) async fn wait_data(&self, block: &Block, steps: u64) -> Result<(), Stop> {
        let (peer, step) = (self.peer, self.step + steps);
        block
            .wait(Wait::Data { peer, step }, || Ok(self.tail()? >= step))
            .await
    }

    /// Waits until there is room for the steps before `step`.
    pub(super) async fn wait_room(&self, block: &Block, step: u64) -> Result<(), Stop> {
        let peer = self.peer;
        block
            .wait(Wait::Room { peer, step }, || {
                // A proxy that does not grant room yet sets the counter to minus eight.
                Ok(self.head()?.wrapping_add(STEPS) >= step)
            })
            .await
    }

    fn entry(&self, block: &Block, step: u64) -> usize {
        block.layout().fifo.size * (step % STEPS) as usize
    }

    pub(super) fn has_fifo(&self) -> bool {
        self.fifo.is_some()
    }

    /// Tells the proxy the size of a step.
    pub(super) fn store_size(&self, block: &Block, step: u64, bytes: i64) -> Result<(), Violation> {
        if let Some(fifo) = &self.fifo {
            let at = self.entry(block, step) + block.layout().fifo.bytes.offset;
            fifo.signed(at)?.store(bytes, Ordering::Release);
        }
        Ok(())
    }

    /// Returns the size of a step that the proxy has stored.
    pub(super) fn size(&self, block: &Block, step: u64) -> Result<i64, Violation> {
        match &self.fifo {
            Some(fifo) => {
                let at = self.entry(block, step) + block.layout().fifo.bytes.offset;
                Ok(fifo.signed(at)?.load(Ordering::Acquire))
            }
            None => Ok(-1),
        }
    }

    /// Returns the position of a step's slot from the beginning of the buffers, if the proxy has set it.
    pub(super) fn offset(&self, block: &Block, step: u64) -> Result<Option<u64>, Violation> {
        let Some(fifo) = &self.fifo else {
            return Ok(None);
        };
        let (at, fields) = (self.entry(block, step), &block.layout().fifo);
        if fifo
            .half_word(at + fields.mode.offset)?
            .load(Ordering::Acquire)
            != MODE_OFFSET
        {
            return Ok(None);
        }
        let at = at + fields.offset.offset;
        Ok(Some(if fields.offset.size == 8 {
            fifo.word(at)?.load(Ordering::Acquire)
        } else {
            i64::from(fifo.half_word(at)?.load(Ordering::Acquire) as i32) as u64
        }))
    }

    /// Returns the address of a step's slot of protocol Simple.
    pub(super) fn slot_address(&self, block: &Block, step: u64) -> Result<u64, Violation> {
        let base = self.buffers[2];
        Ok(match self.offset(block, step)? {
            Some(offset) => base.wrapping_add(offset),
            None => base.wrapping_add((step % STEPS) * self.step_size as u64),
        })
    }
}
