//! The positions of the fields in the arguments of kernels over symmetric memory.

use super::super::asked::{Asked, Field, Mismatch, Types, fields};

fields! {
    /// `ncclSymkDevWorkArgs`: the communicator, and the number of channels in the list that follows.
    Arguments {
        rank = "kcomm.devComm.rank" half,
        ranks = "kcomm.devComm.nRanks" half,
        team_rank = "kcomm.devComm.lsaRank" half,
        team_ranks = "kcomm.devComm.lsaSize" half,
        base = "kcomm.devComm.resourceWindow_inlined.lsaFlatBase" word,
        stride = "kcomm.devComm.resourceWindow_inlined.stride4G" half,
        barrier = "kcomm.devComm.lsaBarrier.bufHandle" half,
        barriers = "kcomm.devComm.lsaBarrier.nBarriers" half,
        abort_flag = "kcomm.devComm.abortFlag" optional,
        lines = "kcomm.lsaLLA2A.bufHandle" half,
        slots = "kcomm.lsaLLA2A.nSlots" half,
        /// Since 2.32, like the two below.
        work_started = "kcomm.workStarted" optional,
        work_completed = "kcomm.workCompleted" optional,
        work_phases = "kcomm.workPhases" optional,
        channels = "nMaxChannels" half,
        /// Since 2.32.
        profiler_mode = "profilerMode" optional,
    }
}

fields! {
    /// `ncclSymkChannelWorkRange`: the end of a channel's part of the works.
    Range {
        work = "workHi" number,
        fraction = "fracHi" number,
    }
}

fields! {
    /// `ncclSymkDevWork`.
    Work {
        argument = "redOpArg" word,
        elements = "nElts" word,
        input_window = "inputWin" word,
        output_window = "outputWin" word,
        input_offset = "inputOff" word,
        output_offset = "outputOff" word,
        first_channel = "sChannelId" number,
        channels = "nChannels" number,
    }
}

fields! {
    /// `ncclWindow_vidmem`: the mappings of a window.
    Window {
        base = "lsaFlatBase" word,
        rank = "lsaRank" half,
        stride = "stride4G" half,
    }
}

fields! {
    /// `ncclDevProfilerPhases`.
    Phases {
        counter = "data.counter" word,
        times = "data.timestamps" number,
    }
}

fields! {
    /// `ncclSymDevArgs`: the only work of a launch of 2.27.
    OldArguments {
        base = "comm.base" word,
        stride = "comm.stride4G" half,
        ranks = "comm.nRanks" half,
        rank = "comm.rank" half,
        argument = "redOpArg" word,
        elements = "nElts" word,
        input = "input" word,
        output = "output" word,
    }
}

fields! {
    /// `ncclSymDevBase`: the communicator's shared buffer in 2.27.
    OldBase {
        lines_epochs = "llEpoch" number,
        barrier_epochs = "barEpochUc" number,
    }
}

/// The layouts of one release.
#[derive(Debug, Clone)]
pub(in super::super) enum Layout {
    /// 2.28 and later.
    Windows {
        arguments: Box<Arguments>,
        range: Range,
        work: Box<Work>,
        window: Window,
        phases: Option<Phases>,
    },
    /// 2.27.
    Flat {
        arguments: OldArguments,
        base: OldBase,
    },
}

impl Layout {
    /// Returns `None` if the release has no kernels over symmetric memory.
    pub(in super::super) fn new(types: &dyn Types) -> Result<Option<Self>, Mismatch> {
        if types.size_of("ncclSymkDevWorkArgs").is_ok() {
            return Ok(Some(Self::Windows {
                arguments: Box::new(Arguments::ask(types, "ncclSymkDevWorkArgs")?),
                range: Range::ask(types, "ncclSymkChannelWorkRange")?,
                work: Box::new(Work::ask(types, "ncclSymkDevWork")?),
                window: Window::ask(types, "ncclWindow_vidmem")?,
                phases: match types.size_of("ncclDevProfilerPhases") {
                    Ok(_) => Some(Phases::ask(types, "ncclDevProfilerPhases")?),
                    Err(_) => None,
                },
            }));
        }
        if types.size_of("ncclSymDevArgs").is_ok() {
            return Ok(Some(Self::Flat {
                arguments: OldArguments::ask(types, "ncclSymDevArgs")?,
                base: OldBase::ask(types, "ncclSymDevBase")?,
            }));
        }
        Ok(None)
    }
}
