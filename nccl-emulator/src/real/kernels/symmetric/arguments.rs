//! The decoded arguments of a launch.

use super::super::asked::Field;
use super::super::functions::Reason;
use super::address::{Buffer, Team};
use super::layout::{self, Layout};
use super::names::Kernel;
use super::profile::Profile;
use super::works::{Range, Work};

/// The threads of a block in the algorithms over lines, regardless of the launch's block size.
pub(super) const THREADS: usize = 512;
/// The number of blocks that a communicator's buffer has room for in 2.27.
const OLD_BLOCKS: u64 = 64;
/// Bytes of the longest element that lines are made for in 2.27, with the most of them.
const OLD_LINES: u64 = 512 * 64;

/// An array in the communicator's buffer, with one entry for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PerBlock {
    first: u64,
    step: u64,
}

impl PerBlock {
    pub(super) fn at(self, block: usize) -> u64 {
        self.first + self.step * block as u64
    }
}

/// The communicator's buffer, which every rank maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shared {
    pub(super) buffer: Buffer,
    /// How often each block's barrier was passed.
    pub(super) barrier_epochs: PerBlock,
    /// The arrivals of peers: a word of 4 bytes for each rank.
    pub(super) inboxes: PerBlock,
    /// How often each block's lines were used.
    pub(super) line_epochs: PerBlock,
    /// Each block's lines, for even and then for odd epochs.
    pub(super) lines: PerBlock,
    /// The bytes of the lines of one parity.
    pub(super) lines_length: u64,
}

/// A launch of a kernel over symmetric memory.
#[derive(Debug)]
pub(in super::super) struct Launch {
    pub(super) kernel: Kernel,
    pub(super) team: Team,
    pub(super) shared: Shared,
    pub(super) abort_flag: u64,
    pub(super) works: Vec<Work>,
    /// The end of each channel's part; empty if every block has a part of the only work (2.27).
    pub(super) ranges: Vec<Range>,
    pub(super) blocks: usize,
    pub(super) profile: Option<Profile>,
}

fn needs(parameters: &[u8], needed: usize) -> Result<(), Reason> {
    let found = parameters.len();
    if found < needed {
        return Err(Reason::Parameters { needed, found });
    }
    Ok(())
}

fn team(parameters: &[u8], rank: Field, ranks: Field) -> Result<Team, Reason> {
    let (rank, ranks) = (rank.get(parameters), ranks.get(parameters));
    if rank >= ranks {
        return Err(Reason::Rank { rank, ranks });
    }
    Ok(Team {
        rank: rank as usize,
        ranks: ranks as usize,
    })
}

impl Launch {
    pub(in super::super) fn decode(
        layout: &Layout,
        kernel: Kernel,
        blocks: usize,
        parameters: &[u8],
    ) -> Result<Self, Reason> {
        kernel.interpreted()?;
        match layout {
            Layout::Windows {
                arguments,
                range,
                work,
                phases,
                ..
            } => {
                let fields = arguments;
                needs(parameters, fields.size)?;
                let get = |field: Field| field.get(parameters);
                let optional =
                    |field: Option<Field>| field.map_or(0, |field| field.get(parameters));
                let team = team(parameters, fields.rank, fields.ranks)?;
                let (team_rank, team_ranks) = (get(fields.team_rank), get(fields.team_ranks));
                if (team_rank, team_ranks) != (team.rank as u64, team.ranks as u64) {
                    let ranks = team.ranks as u64;
                    return Err(Reason::Team { team_ranks, ranks });
                }
                let channels = get(fields.channels) as usize;
                if blocks > channels {
                    let (channels, blocks) = (channels as u32, blocks as u32);
                    return Err(Reason::Grid { channels, blocks });
                }
                let mut at = fields.size.next_multiple_of(16);
                let mode = optional(fields.profiler_mode);
                let mut profile = None;
                if mode != 0 {
                    let end = at + 8 * channels;
                    needs(parameters, end)?;
                    if kernel.profiled {
                        profile = Some(Profile::new(
                            mode,
                            [
                                fields.work_started,
                                fields.work_completed,
                                fields.work_phases,
                            ]
                            .map(optional),
                            phases.as_ref(),
                            &parameters[at..end],
                        ));
                    }
                    at = end.next_multiple_of(16);
                }
                let end = at + channels * range.size;
                needs(parameters, end)?;
                let ranges: Vec<_> = parameters[at..end]
                    .chunks_exact(range.size)
                    .map(|bytes| Range {
                        work: range.work.get(bytes) as usize,
                        fraction: range.fraction.get(bytes),
                    })
                    .collect();
                let at = at + (channels * range.size).next_multiple_of(16);
                let last = ranges[..blocks].iter().map(|range| range.work).max();
                let end = at + (last.unwrap_or(0) + 1) * work.size;
                needs(parameters, end)?;
                let works = parameters[at..end]
                    .chunks_exact(work.size)
                    .map(|bytes| Work::decode(work, bytes))
                    .collect();
                Ok(Self {
                    kernel,
                    team,
                    shared: Shared::windows(fields, parameters, team),
                    abort_flag: optional(fields.abort_flag),
                    works,
                    ranges,
                    blocks,
                    profile,
                })
            }
            Layout::Flat { arguments, base } => {
                let fields = arguments;
                needs(parameters, fields.size)?;
                let team = team(parameters, fields.rank, fields.ranks)?;
                Ok(Self {
                    kernel,
                    team,
                    shared: Shared::flat(fields, base, parameters, team),
                    abort_flag: 0,
                    works: vec![Work::old(fields, parameters)],
                    ranges: Vec::new(),
                    blocks,
                    profile: None,
                })
            }
        }
    }
}

impl Shared {
    fn windows(fields: &layout::Arguments, parameters: &[u8], team: Team) -> Self {
        /// The unit of a handle in bytes.
        const UNIT: u64 = 128;
        /// The bytes of a line.
        const LINE: u64 = 16;
        let get = |field: Field| field.get(parameters);
        let (barrier, barriers) = (UNIT * get(fields.barrier), get(fields.barriers));
        let (lines, slots) = (UNIT * get(fields.lines), get(fields.slots));
        // The barrier's memory: words for multicast epochs, for epochs and for multicast inboxes, then the inboxes. A block's
        // lines: one line with the epoch, then the lines.
        let step = LINE * (1 + 2 * slots);
        Self {
            buffer: Buffer::flat(get(fields.base), get(fields.stride), team.rank),
            barrier_epochs: PerBlock {
                first: barrier + 4 * barriers,
                step: 4,
            },
            inboxes: PerBlock {
                first: barrier + 12 * barriers,
                step: 4 * team.ranks as u64,
            },
            line_epochs: PerBlock { first: lines, step },
            lines: PerBlock {
                first: lines + LINE,
                step,
            },
            lines_length: LINE * slots,
        }
    }

    fn flat(
        fields: &layout::OldArguments,
        base: &layout::OldBase,
        parameters: &[u8],
        team: Team,
    ) -> Self {
        let ranks = team.ranks as u64;
        let inboxes = base.size as u64;
        let lines_length = 2 * (THREADS as u64 * 8 * ranks).max(OLD_LINES);
        let (own, stride) = (fields.base.get(parameters), fields.stride.get(parameters));
        Self {
            buffer: Buffer::new(own, stride, team.rank),
            barrier_epochs: PerBlock {
                first: base.barrier_epochs.offset as u64,
                step: 4,
            },
            inboxes: PerBlock {
                first: inboxes,
                step: 4 * ranks,
            },
            line_epochs: PerBlock {
                first: base.lines_epochs.offset as u64,
                step: 4,
            },
            lines: PerBlock {
                first: inboxes + (4 * OLD_BLOCKS * ranks).next_multiple_of(16),
                step: 2 * lines_length,
            },
            lines_length,
        }
    }
}
