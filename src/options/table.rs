//! The table of options: one line each, used for parsing and `--help`.

/// The options of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Threads,
    Gpus,
    MinBytes,
    MaxBytes,
    StepBytes,
    StepFactor,
    Iterations,
    Aggregate,
    WarmUp,
    Cycles,
    ParallelInit,
    Check,
    Op,
    DataType,
    Root,
    Blocking,
    NullStream,
    Timeout,
    Graph,
    CpuTime,
    Timestamps,
    OutputFile,
    Average,
    Register,
    CtaPolicy,
    Device,
    DeviceCtas,
    Memory,
    Unalign,
    PerIteration,
    PerIterationSkip,
    Help,
    Ranks,
    Spawn,
    BindTo,
    MemcpyRatio,
    Algorithm,
    RanksPerNode,
    Plot,
}

/// One option: its name here, nccl-tests' letter (`None` for options of this program), the long name, the name of its
/// value (empty: it takes none), and its description.
pub(crate) struct Entry {
    pub(crate) name: Name,
    pub(crate) letter: Option<char>,
    pub(crate) long: &'static str,
    pub(crate) value: &'static str,
    pub(crate) help: &'static str,
}

macro_rules! table {
    ($($name:ident $letter:expr, $long:literal, $value:literal, $help:literal;)*) => {
        &[$(Entry {
            name: Name::$name, letter: $letter, long: $long, value: $value, help: $help,
        }),*]
    };
}

pub(crate) const TABLE: &[Entry] = table! {
    MinBytes Some('b'), "minbytes", "SIZE", "first size: bytes per rank, with K, M or G (1K)";
    MaxBytes Some('e'), "maxbytes", "SIZE", "last size (16M)";
    StepFactor Some('f'), "stepfactor", "N", "multiply sizes by N (2, unless -i is given)";
    StepBytes Some('i'), "stepbytes", "SIZE", "add SIZE to sizes; -f wins";
    Iterations Some('n'), "iters", "N", "timed iterations per size (20)";
    WarmUp Some('w'), "warmup_iters", "N", "untimed iterations per size, before all (1)";
    Aggregate Some('m'), "agg_iters", "N", "operations grouped into one iteration (1)";
    Cycles Some('N'), "run_cycles", "N", "repeat the whole sweep; 0: forever (1)";
    Check Some('c'), "check", "N", "verified calls per size; 0: none (1)";
    DataType Some('d'), "datatype", "TYPE", "int8 … uint64, half, float, double, bfloat16, \
        f8e4m3, f8e5m2, or all (float)";
    Blocking Some('z'), "blocking", "0-3", "after each iteration 1: wait and barrier, \
        2: wait, 3: wait and untimed barrier (0)";
    CpuTime Some('C'), "report_cputime", "0/1", "print the host's time to enqueue (0)";
    Average Some('a'), "average", "0-3", "time over ranks: 0 rank 0, 1 mean, 2 min, 3 max (1)";
    OutputFile Some('J'), "output_file", "FILE", "also write JSON; FILE ends in .json";
    Timestamps Some('S'), "report_timestamps", "0/1", "end each row with the time (0)";
    Timeout Some('T'), "timeout", "SECONDS", "give up on an operation after this long (60)";
    PerIteration Some('I'), "per_iter_timing", "0/1", "time each iteration by CUDA events (0)";
    PerIterationSkip Some('K'), "per_iter_skip", "N", "leave the first N out of -I's summary (0)";
    Memory Some('M'), "memory", "0/1", "print how much GPU memory was used (0)";
    Unalign Some('u'), "unalign", "N", "start buffers N elements off alignment (0)";
    NullStream Some('y'), "stream_null", "0/1", "use the default stream (0)";
    Threads Some('t'), "nthreads", "N", "ranks as threads of one process: as --ranks N \
        --spawn threads";
    Gpus Some('g'), "ngpus", "N", "ranks, one per GPU; times -t";
    ParallelInit Some('p'), "parallel_init", "0/1", "changes only the header: ranks always \
        start in parallel";
    Op Some('o'), "op", "OP", "sum, prod, max, min, avg or all, where something is reduced (sum)";
    Root Some('r'), "root", "N", "accepted: nothing here has a root";
    Register Some('R'), "local_register", "0-2", "register the buffers: 1 each rank its own, \
        2 as symmetric windows (0)";
    CtaPolicy Some('x'), "cta_policy", "0-2", "CTA policy: 0 default, 1 efficiency, 2 zero (unset)";
    Graph Some('G'), "cudagraph", "N", "capture the iterations once as a CUDA graph and launch it N times; \
        0: no graph (0)";
    Device Some('D'), "device_implementation", "0", "own kernels: not available";
    DeviceCtas Some('V'), "device_cta_count", "N", "accepted: belongs to -D";
    Ranks None, "ranks", "N", "number of ranks (one per GPU, or 4 emulated ones)";
    Spawn None, "spawn", "HOW", "processes or threads (processes)";
    BindTo None, "bind_to", "WHAT", "processes to a core each: core or none (core on the emulator, given the cores)";
    MemcpyRatio None, "memcpy_ratio", "0/1", "compare with an interleaved memcpy (1; 0 with -G)";
    Algorithm None, "algo", "NAMES", "ways to measure, with commas, or all (auto)";
    RanksPerNode None, "ranks_per_node", "N", "take every N ranks for a node, for ways that differ between nodes (by hosts)";
    Plot None, "plot", "FILE", "also draw bandwidth and latency; FILE ends in .svg";
    Help Some('h'), "help", "", "print this";
};

/// The entry of a letter.
pub(crate) fn by_letter(letter: char) -> Option<&'static Entry> {
    TABLE.iter().find(|entry| entry.letter == Some(letter))
}

/// The entry of a long name, or of an unambiguous prefix, as `getopt_long` allows; `-` and `_` are the same.
///
/// # Errors
/// The names with this prefix, none or several.
pub(crate) fn by_long(name: &str) -> Result<&'static Entry, Vec<&'static str>> {
    let name = name.replace('-', "_");
    if let Some(entry) = TABLE.iter().find(|entry| entry.long == name) {
        return Ok(entry);
    }
    let candidates: Vec<_> = TABLE
        .iter()
        .filter(|entry| !name.is_empty() && entry.long.starts_with(&name))
        .collect();
    match candidates[..] {
        [entry] => Ok(entry),
        _ => Err(candidates.iter().map(|entry| entry.long).collect()),
    }
}

impl Entry {
    /// The option as a user writes it, for messages.
    pub(crate) fn spelled(&self) -> String {
        match self.letter {
            Some(letter) => format!("-{letter}"),
            None => format!("--{}", self.long),
        }
    }
}
