//! The kernels of NCCL's diagnostics (`NCCL_RUN_DIAGNOSTICS`, 2.32 and later), which test the links between GPUs: each rank has
//! a slot for each of its peers, into which the peer writes a pattern, and from which it reads another pattern.

use std::sync::atomic::Ordering;

use super::block::{Context, Stop};
use super::diagnostics_layout::Layout;
use super::functions::Reason;
use super::memory;

/// The kinds of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Clears this rank's slots, and stores in each the pattern that its peer will read.
    Init,
    /// Writes to slots of peers.
    Write,
    /// Verifies on the device what peers wrote.
    Verify,
    /// Reads from slots of peers.
    Read,
}

/// The pattern that a rank writes to a peer's slot.
const WRITTEN: u64 = 1 << 62;
/// The pattern that a rank finds in its slot of a peer.
const FOUND: u64 = 1 << 63;

/// Returns a pattern that contains both ranks, with 31 bits each.
fn pattern(kind: u64, high: u32, low: u32) -> u64 {
    const RANK: u64 = (1 << 31) - 1;
    kind | (u64::from(high) & RANK) << 31 | u64::from(low) & RANK
}

impl Kernel {
    /// Parses the unmangled name of a kernel.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        match name {
            "diagP2pInitSlotsKernel" => Some(Self::Init),
            "diagP2pRemoteWriteKernel" => Some(Self::Write),
            "diagP2pVerifyWritesKernel" => Some(Self::Verify),
            "diagP2pRemoteReadKernel" => Some(Self::Read),
            _ => None,
        }
    }

    /// Returns offset and size of each parameter.
    pub(crate) fn parameters(self) -> Vec<(usize, usize)> {
        match self {
            // Slots, the peers' ranks, their number, and this rank.
            Self::Init => vec![(0, 8), (8, 8), (16, 4), (20, 4)],
            // Accesses or slots, and their number.
            Self::Write | Self::Verify => vec![(0, 8), (8, 4)],
            // Accesses, their number, and a word for each.
            Self::Read => vec![(0, 8), (8, 4), (16, 8)],
        }
    }
}

/// A launch of one of the kernels.
#[derive(Debug, Clone)]
pub(super) struct Launch {
    kernel: Kernel,
    layout: Layout,
    parameters: Vec<u8>,
}

impl Launch {
    pub(super) fn decode(
        layout: &Layout,
        kernel: Kernel,
        parameters: Vec<u8>,
    ) -> Result<Self, Reason> {
        let end = |&(at, size): &(usize, usize)| at + size;
        let needed = kernel.parameters().last().map_or(0, end);
        let found = parameters.len();
        if found < needed {
            return Err(Reason::Parameters { needed, found });
        }
        Ok(Self {
            kernel,
            layout: layout.clone(),
            parameters,
        })
    }

    fn word(&self, at: usize) -> u64 {
        let bytes = self.parameters.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    fn half(&self, at: usize) -> u32 {
        let bytes = self.parameters.get(at..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }

    pub(super) async fn run(self, context: &Context) -> Result<(), Stop> {
        let device = context.memory.as_ref();
        let Layout { slot, access } = &self.layout;
        let count = match self.kernel {
            Kernel::Init => self.half(16),
            _ => self.half(8),
        };
        for at in 0..u64::from(count) {
            context.meter.grant(slot.size).await;
            if self.kernel == Kernel::Init {
                let peers = memory::view(device, self.word(8) + 4 * at, 4)?;
                let peer = peers.half_word(0)?.load(Ordering::Relaxed);
                let own = memory::view(device, self.word(0) + at * slot.size as u64, slot.size)?;
                own.word(slot.written.offset)?.store(0, Ordering::Relaxed);
                own.word(slot.verified.offset)?.store(0, Ordering::Relaxed);
                let found = pattern(FOUND, self.half(20), peer);
                own.word(slot.pattern.offset)?
                    .store(found, Ordering::Release);
                continue;
            }
            if self.kernel == Kernel::Verify {
                let own = memory::view(device, self.word(0) + at * slot.size as u64, slot.size)?;
                let written = own.word(slot.written.offset)?.load(Ordering::Acquire);
                own.word(slot.verified.offset)?
                    .store(written, Ordering::Release);
                continue;
            }
            let bytes = memory::load(device, self.word(0) + at * access.size as u64, access.size)?;
            let (source, destination) = (
                access.source.get(&bytes) as u32,
                access.destination.get(&bytes) as u32,
            );
            let place = access.slots.get(&bytes) + access.index.get(&bytes) * slot.size as u64;
            let remote = memory::view(device, place, slot.size)?;
            if self.kernel == Kernel::Write {
                let written = pattern(WRITTEN, source, destination);
                remote
                    .word(slot.written.offset)?
                    .store(written, Ordering::Release);
            } else {
                let found = remote.word(slot.pattern.offset)?.load(Ordering::Acquire);
                let to = memory::view(device, self.word(16) + 8 * at, 8)?;
                to.word(0)?.store(found, Ordering::Release);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::asked::Field;
    use super::super::diagnostics_layout::{Access, Slot};
    use super::*;

    #[test]
    fn patterns_name_both_ranks() {
        assert_eq!(pattern(WRITTEN, 0, 1), 0x4000_0000_0000_0001);
        assert_eq!(pattern(WRITTEN, 1, 0), 0x4000_0000_8000_0000);
        assert_eq!(pattern(FOUND, 2, 3), 0x8000_0001_0000_0003);
    }

    #[test]
    fn a_launch_whose_parameters_are_too_short_is_refused() {
        let field = |offset, size| Field {
            offset,
            size,
            bits: None,
        };
        let layout = Layout {
            slot: Slot {
                size: 24,
                written: field(0, 8),
                verified: field(8, 8),
                pattern: field(16, 8),
            },
            access: Access {
                size: 24,
                slots: field(0, 8),
                source: field(8, 4),
                destination: field(12, 4),
                index: field(16, 4),
            },
        };
        let refused = Launch::decode(&layout, Kernel::Init, vec![0; 23]).unwrap_err();
        let (needed, found) = (24, 23);
        assert_eq!(refused, Reason::Parameters { needed, found });
        assert!(Launch::decode(&layout, Kernel::Write, vec![0; 12]).is_ok());
    }
}
