//! The protocols LL and LL128: flags travel with the data, so that a receiver needs no counter.
//!
//! LL writes lines of 16 bytes: twice 4 bytes of data and a flag, each pair stored as one word. LL128 writes lines of 128
//! bytes, of which the last 8 are the flag; the order of the data inside a line matters only to the two ends. The flag is the
//! step plus one. An operation takes one step.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::block::{Block, STEPS, Stop, Trouble, Wait};
use super::connection::End;
use super::functions::Protocol;
use super::memory::{View, Violation};
use super::primitives::{Buffer, Operation, Primitives};

/// The data bytes staged between two checks of the budget: whole groups of lines of both protocols.
const PIECE: usize = 32 * 1920;
/// Steps whose slots are filled completely, because the 32 bits of LL's flag wrap around.
const CLEAN: u64 = 0x7fff_fff8;

/// The layout of lines.
#[derive(Clone, Copy)]
enum Lines {
    /// One line of 16 bytes for 8 of data.
    Ll,
    /// Groups of 16 lines of 128 bytes, for 1920 bytes of data: one write of a warp.
    Ll128,
}

impl Lines {
    /// Returns the data bytes of a unit.
    fn data(self) -> usize {
        match self {
            Self::Ll => 8,
            Self::Ll128 => 1920,
        }
    }

    /// Returns the bytes of a unit in the buffer.
    fn wire(self) -> usize {
        match self {
            Self::Ll => 16,
            Self::Ll128 => 2048,
        }
    }

    fn wire_bytes(self, data: usize) -> usize {
        data.div_ceil(self.data()) * self.wire()
    }

    fn flag(self, step: u64) -> u64 {
        match self {
            Self::Ll => (step + 1) & 0xffff_ffff,
            Self::Ll128 => step + 1,
        }
    }

    /// Writes one unit.
    fn store(self, view: &View, at: usize, data: &[u8], flag: u64) -> Result<(), Violation> {
        match self {
            Self::Ll => {
                for word in 0..2 {
                    let mut half = [0; 4];
                    let part = data.get(4 * word..).unwrap_or(&[]);
                    let n = part.len().min(4);
                    half[..n].copy_from_slice(&part[..n]);
                    let value = u64::from(u32::from_le_bytes(half)) | flag << 32;
                    // Data and flag are in one word, so no ordering is needed.
                    view.word(at + 8 * word)?.store(value, Ordering::Relaxed);
                }
            }
            Self::Ll128 => {
                for line in 0..16 {
                    let part = data.get(120 * line..).unwrap_or(&[]);
                    view.write(at + 128 * line, &part[..part.len().min(120)])?;
                    // Release ordering: the line's data before its flag.
                    view.word(at + 128 * line + 120)?
                        .store(flag, Ordering::Release);
                }
            }
        }
        Ok(())
    }

    /// Whether a unit has arrived.
    fn arrived(self, view: &View, at: usize, flag: u64) -> Result<bool, Violation> {
        match self {
            Self::Ll => {
                let there = |word: usize| -> Result<bool, Violation> {
                    Ok(view.word(at + 8 * word)?.load(Ordering::Acquire) >> 32 == flag)
                };
                Ok(there(0)? && there(1)?)
            }
            Self::Ll128 => {
                for line in 0..16 {
                    // Acquire ordering: the line's flag before its data.
                    let word = view.word(at + 128 * line + 120)?;
                    if word.load(Ordering::Acquire) != flag {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }

    /// Reads a unit that has arrived.
    fn load(self, view: &View, at: usize, data: &mut [u8]) -> Result<(), Violation> {
        match self {
            Self::Ll => {
                for (word, part) in data.chunks_mut(4).enumerate() {
                    let value = view.word(at + 8 * word)?.load(Ordering::Relaxed) as u32;
                    let n = part.len();
                    part.copy_from_slice(&value.to_le_bytes()[..n]);
                }
            }
            Self::Ll128 => {
                for (line, part) in data.chunks_mut(120).enumerate() {
                    view.read(at + 128 * line, part)?;
                }
            }
        }
        Ok(())
    }
}

/// The slot of an end's present step.
struct Slot {
    view: Arc<View>,
    /// The offset of the slot in the view.
    at: usize,
    flag: u64,
}

impl Primitives<'_> {
    pub(super) async fn lines(&mut self, operation: Operation) -> Result<(), Stop> {
        let block = self.block;
        let protocol = self.setup.protocol;
        let lines = match protocol {
            Protocol::Ll128 => Lines::Ll128,
            _ => Lines::Ll,
        };
        let arithmetic = self.setup.arithmetic;
        let element = arithmetic.element();
        let count = usize::try_from(operation.count).unwrap_or(0);
        let bytes = count * element;
        let step_bytes = block.comm.slot(protocol);
        if lines.wire_bytes(bytes) > step_bytes {
            return Err(Trouble::Chunk {
                protocol,
                bytes: lines.wire_bytes(bytes),
                step: step_bytes,
            }
            .into());
        }
        if operation.send {
            for end in &self.sends {
                end.wait_room(block, end.step + 1).await?;
                let size = match clean(protocol, end.step) {
                    true => step_bytes,
                    false => lines.wire_bytes(bytes),
                };
                end.store_size(block, end.step, size as i64)?;
            }
        }
        let from = self.slots(operation.receive, false, lines, step_bytes)?;
        let to = self.slots(operation.send, true, lines, step_bytes)?;
        let source = operation
            .source
            .map(|buffer| self.user(buffer, operation.source_index));
        let destination = operation
            .destination
            .map(|buffer| self.user(buffer, operation.destination_index));
        let own = operation.source == Some(Buffer::Input);

        let inputs = from.len() + usize::from(source.is_some());
        let mut staged = std::mem::take(&mut self.staged);
        staged.resize_with(inputs + 1, Vec::new);
        let mut at = 0;
        while at < bytes {
            let n = (bytes - at).min(PIECE);
            block.meter().grant(n).await;
            for buffer in &mut staged {
                buffer.resize(n, 0);
            }
            let (result, inputs) = match staged.split_first_mut() {
                Some(split) => split,
                None => break,
            };
            let mut unfilled = inputs.iter_mut();
            if let Some(address) = source
                && let Some(first) = unfilled.next()
            {
                let address = address.wrapping_add(at as u64);
                let view = self.resolve(address, n)?;
                view.read_address(address, first)?;
                view.still_valid()?;
            }
            for ((slot, end), buffer) in from.iter().zip(&self.receives).zip(unfilled) {
                receive(block, lines, slot, end, at, buffer).await?;
            }
            let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
            // SAFETY: every staged buffer has `n` bytes, and `n` is a whole number of elements.
            unsafe {
                let outputs = [result.as_mut_ptr()];
                arithmetic.apply(&pointers, &outputs, n / element, own, operation.last);
            }
            for slot in &to {
                send(lines, slot, at, result)?;
            }
            if let Some(address) = destination {
                let view = self.resolve(address.wrapping_add(at as u64), n)?;
                view.write_address(address.wrapping_add(at as u64), result)?;
                view.still_valid()?;
            }
            at += n;
        }
        self.staged = staged;
        for (slot, end) in to.iter().zip(&self.sends) {
            if clean(protocol, end.step) {
                for at in (lines.wire_bytes(bytes)..step_bytes).step_by(lines.wire()) {
                    lines.store(&slot.view, slot.at + at, &[], slot.flag)?;
                }
            }
        }
        for slot in from.iter().chain(&to) {
            slot.view.still_valid()?;
        }
        for end in self.receives.iter_mut().filter(|_| operation.receive) {
            end.step += 1;
            end.store_head()?;
        }
        for end in self.sends.iter_mut().filter(|_| operation.send) {
            end.step += 1;
            // The counter notifies a proxy; with LL the proxy checks the flags instead.
            if protocol == Protocol::Ll128 && end.has_fifo() {
                end.store_tail()?;
            }
        }
        block.meter().progress();
        Ok(())
    }

    fn slots(
        &mut self,
        used: bool,
        send: bool,
        lines: Lines,
        step_bytes: usize,
    ) -> Result<Vec<Slot>, Stop> {
        if !used {
            return Ok(Vec::new());
        }
        let count = if send { &self.sends } else { &self.receives }.len();
        let mut slots = Vec::with_capacity(count);
        for index in 0..count {
            let end = if send {
                &self.sends[index]
            } else {
                &self.receives[index]
            };
            let step = end.step;
            let Some((address, length)) = self.own_buffers(end) else {
                continue;
            };
            self.keep_buffers(address, length)?;
            slots.push(Slot {
                view: self.resolve(address, length)?,
                at: (step % STEPS) as usize * step_bytes,
                flag: lines.flag(step),
            });
        }
        Ok(slots)
    }
}

/// Returns whether the step's slot is filled completely.
fn clean(protocol: Protocol, step: u64) -> bool {
    protocol == Protocol::Ll && step & CLEAN == CLEAN
}

/// Receives the bytes of a chunk from `at` on.
async fn receive(
    block: &Block,
    lines: Lines,
    slot: &Slot,
    end: &End,
    at: usize,
    into: &mut [u8],
) -> Result<(), Stop> {
    let (peer, step) = (end.peer, end.step + 1);
    let mut unit = slot.at + at / lines.data() * lines.wire();
    for data in into.chunks_mut(lines.data()) {
        let arrived = || lines.arrived(&slot.view, unit, slot.flag);
        if !arrived()? {
            block.wait(Wait::Data { peer, step }, arrived).await?;
        }
        lines.load(&slot.view, unit, data)?;
        unit += lines.wire();
    }
    Ok(())
}

fn send(lines: Lines, slot: &Slot, at: usize, from: &[u8]) -> Result<(), Violation> {
    let mut unit = slot.at + at / lines.data() * lines.wire();
    for data in from.chunks(lines.data()) {
        lines.store(&slot.view, unit, data, slot.flag)?;
        unit += lines.wire();
    }
    Ok(())
}
