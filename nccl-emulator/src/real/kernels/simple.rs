//! Protocol Simple: data first, then a step counter. Large chunks are divided into slices; registered buffers are used
//! directly.

use super::block::{Stop, Trouble};
use super::connection::{Direct, End};
use super::primitives::{Buffer, Operation, Primitives, div_up};

/// The bytes copied or reduced between two checks of the budget.
const PIECE: usize = 128 << 10;

/// A slice within its chunk.
#[derive(Clone, Copy)]
struct Slice {
    /// The first element, from the chunk's beginning.
    offset: i64,
    count: i64,
    /// Whether the kernel itself moves the data.
    moved: bool,
}

impl Primitives<'_> {
    pub(super) async fn simple(&mut self, operation: Operation) -> Result<(), Stop> {
        let block = self.block;
        let element = self.setup.arithmetic.element() as i64;
        let slicing = self.setup.slicing;
        let steps = slicing.steps;
        let step_elements = self.setup.step_elements.unwrap_or_else(|| {
            block.comm.slot(super::functions::Protocol::Simple) as i64 / element
        });
        let count = operation.count.max(0);
        let smallest = step_elements * steps as i64 / 32;
        let mut size = (div_up(count, 16 * slicing.slices) * 16).max(smallest);
        let mut offset = 0;
        for _ in 0..slicing.slices {
            size = size.min(count - offset);
            let slice = Slice {
                offset,
                count: size,
                moved: offset < count && !self.setup.offload,
            };
            if operation.receive {
                for end in &self.receives {
                    end.wait_data(block, steps).await?;
                }
            }
            if operation.send {
                for end in &self.sends {
                    end.wait_room(block, end.step + steps).await?;
                    end.store_size(block, end.step, size * element)?;
                }
            }
            if slice.moved {
                self.move_slice(operation, slice).await?;
            }
            let receives = self.receives.iter_mut().filter(|_| operation.receive);
            for end in receives {
                end.step += steps;
                end.store_head()?;
            }
            for end in self.sends.iter_mut().filter(|_| operation.send) {
                end.step += steps;
                end.store_tail()?;
            }
            block.meter().progress();
            offset += size;
        }
        Ok(())
    }

    /// Returns the address of an end's part of a slice; `None` if the network or the peer moves the data.
    fn place(&self, end: &End, operation: Operation, slice: Slice) -> Result<Option<u64>, Stop> {
        let direct = match end.send {
            true => operation.direct_send,
            false => operation.direct_receive,
        };
        let shift = |base: u64, index: i64| {
            let element = self.setup.arithmetic.element() as i64;
            base.wrapping_add_signed((index + slice.offset).wrapping_mul(element))
        };
        let (source, destination) = (operation.source_index, operation.destination_index);
        let output = self.setup.output;
        if end.net && direct {
            return Ok(match (self.setup.p2p, end.send) {
                (true, _) => None,
                (false, true) if !operation.receive => None,
                (false, true) => Some(shift(output, destination)),
                (false, false) => Some(shift(output, source)),
            });
        }
        if let Some(offset) = end.offset(self.block, end.step)? {
            return Ok(Some(end.buffers[2].wrapping_add(offset)));
        }
        Ok(match (end.direct, end.send) {
            (Direct::Write, _) if direct => Some(shift(end.direct_buffer, destination)),
            // The peer reads this rank's buffer.
            (Direct::Read, true) if direct => None,
            (Direct::Read, false) if direct => Some(shift(end.direct_buffer, source)),
            _ => Some(end.slot_address(self.block, end.step)?),
        })
    }

    async fn move_slice(&mut self, operation: Operation, slice: Slice) -> Result<(), Stop> {
        let user = |buffer: Option<Buffer>, index: i64| {
            buffer.map(|buffer| self.user(buffer, index + slice.offset))
        };
        // As in NCCL, the user's buffer comes first; `None` is a buffer that the kernel does not access.
        let mut sources: Vec<Option<u64>> = Vec::with_capacity(4);
        let mut destinations: Vec<Option<u64>> = Vec::with_capacity(4);
        sources.extend(user(operation.source, operation.source_index).map(Some));
        destinations.extend(user(operation.destination, operation.destination_index).map(Some));
        let (own_source, own_destination) = (sources.len(), destinations.len());
        if operation.receive {
            for end in &self.receives {
                sources.push(self.place(end, operation, slice)?);
            }
        }
        if operation.send {
            for end in &self.sends {
                destinations.push(self.place(end, operation, slice)?);
            }
        }
        for index in 0..self.receives.len() + self.sends.len() {
            let (here, at) = match index.checked_sub(self.receives.len()) {
                None => (operation.receive, &self.receives[index]),
                Some(index) => (operation.send, &self.sends[index]),
            };
            if let Some((address, length)) = self.own_buffers(at).filter(|_| here)
                && at.direct == Direct::No
                && !at.net
            {
                self.keep_buffers(address, length)?;
            }
        }
        let first = (
            sources.first().copied().flatten(),
            destinations.first().copied().flatten(),
        );
        let own = operation.source == Some(Buffer::Input);
        match first {
            // The peer has written into the output: only forwarded data is left to copy.
            (source, destination)
                if operation.direct_receive && own_source == 0 && source == destination =>
            {
                let on = destinations.split_off(own_destination.min(destinations.len()));
                let on: Vec<_> = on
                    .into_iter()
                    .filter(|to| to.is_some() && *to != source)
                    .collect();
                match source {
                    Some(source) if own_destination == 1 && !on.is_empty() => {
                        self.combine(&[Some(source)], &on, slice.count, false, false)
                            .await
                    }
                    _ => Ok(()),
                }
            }
            (Some(_), Some(_)) => {
                // The network or the peer reads the sent data from the output.
                if own_destination == 1 && destinations.get(1) == Some(&None) {
                    destinations.truncate(1);
                }
                self.combine(&sources, &destinations, slice.count, own, operation.last)
                    .await
            }
            // Nothing to move: the network or the peer reads the input, or fills the output.
            _ => Ok(()),
        }
    }

    /// Combines sources into every destination.
    async fn combine(
        &self,
        sources: &[Option<u64>],
        destinations: &[Option<u64>],
        count: i64,
        own: bool,
        last: bool,
    ) -> Result<(), Stop> {
        let missing = || {
            let peer = self.receives.iter().chain(&self.sends).next();
            let peer = peer.map_or(self.block.comm.rank, |end| end.peer);
            Stop::from(Trouble::NoBuffer { peer })
        };
        let all = |places: &[Option<u64>]| -> Result<Vec<u64>, Stop> {
            places
                .iter()
                .map(|place| place.ok_or_else(missing))
                .collect()
        };
        let (sources, destinations) = (all(sources)?, all(destinations)?);
        let arithmetic = self.setup.arithmetic;
        let element = arithmetic.element();
        let mut at = 0;
        let count = usize::try_from(count).unwrap_or(0);
        while at < count {
            let n = (count - at).min(PIECE / element);
            let bytes = n * element;
            self.block.meter().grant(bytes).await;
            let resolve = |places: &[u64]| -> Result<Vec<_>, Stop> {
                places
                    .iter()
                    .map(|&place| {
                        let place = place.wrapping_add((at * element) as u64);
                        Ok((self.resolve(place, bytes)?, place))
                    })
                    .collect()
            };
            let (from, to) = (resolve(&sources)?, resolve(&destinations)?);
            {
                let mut inputs: Vec<*const u8> = Vec::with_capacity(from.len());
                for (view, place) in &from {
                    inputs.push(view.at_address(*place, bytes)?);
                }
                let mut outputs = Vec::with_capacity(to.len());
                for (view, place) in &to {
                    outputs.push(view.at_address(*place, bytes)?);
                }
                // SAFETY: every pointer is that of a view of `bytes` bytes, which `from` and `to` keep.
                unsafe { arithmetic.apply(&inputs, &outputs, n, own, last) };
            }
            for (view, _) in from.iter().chain(&to) {
                view.still_valid()?;
            }
            at += n;
        }
        Ok(())
    }

    /// Copies a range between buffers of the user.
    pub(super) async fn copy(&self, from: u64, to: u64, count: i64) -> Result<(), Stop> {
        match from == to {
            true => Ok(()),
            false => {
                self.combine(&[Some(from)], &[Some(to)], count, false, false)
                    .await
            }
        }
    }
}
