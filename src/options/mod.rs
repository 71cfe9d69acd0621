//! The command line: nccl-tests' options, and a few of our own.
//!
//! Letters, long names and values mean the same as in nccl-tests 2.19.6. Differences: the default sizes (1 KiB to 16
//! MiB, doubled, instead of 32 MiB alone), the default of `-T` (a run that hangs ends), and that an invalid value is
//! refused in one sentence instead of being replaced by a default.

mod combine;
mod number;
mod table;
mod usage;
mod value;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use nccl::ReduceOp;
use table::{Entry, Name};
pub use usage::usage;
use value::Value;

use crate::algorithm::Algorithm;
use crate::element::{self, Element};
use crate::failure::Failure;
use crate::program::Program;
use crate::sizes::{Step, Sweep};

/// When the host waits during a measurement (`-z`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocking {
    /// Once, at the end.
    Never,
    /// After each operation, for all ranks.
    WaitAndBarrier,
    /// After each operation, for this rank's own.
    Wait,
    /// After each iteration, for all ranks; waiting for the others is not counted.
    WaitAndUntimedBarrier,
}

/// How the times of the ranks are combined (`-a`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// The time of rank 0.
    RankZero,
    /// The mean.
    Mean,
    /// The shortest.
    Min,
    /// The longest.
    Max,
}

/// The algorithms to measure (`--algo`).
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Algorithms {
    /// Unset: the program's first, if it has several.
    #[default]
    Default,
    /// These, in this order.
    Named(Vec<&'static Algorithm>),
    /// All that the library supports.
    All,
}

/// How buffers are registered with NCCL (`-R`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// Not at all.
    No,
    /// By each rank (`ncclCommRegister`).
    Local,
    /// By all ranks together, as a symmetric window (`ncclCommWindowRegister`).
    Window,
}

/// How the ranks are run (`--spawn`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spawn {
    /// A process each.
    Processes,
    /// Threads of this process.
    Threads,
}

/// Where the process of a rank may run (`--bind_to`), in the words of `mpirun`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindTo {
    /// On one core, which no other rank of the host has.
    Core,
    /// On any core.
    None,
}

/// The options of the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// `-b`, `-e`, `-f` and `-i`.
    pub sweep: Sweep,
    /// `-n`
    pub iterations: u32,
    /// `-w`
    pub warm_up: u32,
    /// `-m`
    pub aggregate: u32,
    /// `-N`; `None`: forever.
    pub cycles: Option<u32>,
    /// `-c`
    pub checks: u32,
    /// `-d`; `None`: all of them.
    pub element: Option<Element>,
    /// `-z`
    pub blocking: Blocking,
    /// `-a`
    pub average: Average,
    /// `-C`
    pub cpu_time: bool,
    /// `-S`
    pub timestamps: bool,
    /// `-J`
    pub output_file: Option<PathBuf>,
    /// `-T`
    pub timeout: Duration,
    /// `-I`
    pub per_iteration: bool,
    /// `-K`
    pub per_iteration_skip: u32,
    /// `-M`
    pub memory: bool,
    /// `-u`
    pub unalign: u32,
    /// `-y`
    pub null_stream: bool,
    /// `-p`
    pub parallel_init: bool,
    /// `-x`
    pub cta_policy: Option<u32>,
    /// `-t`, for the header.
    pub threads: u32,
    /// `-g`, for the header.
    pub gpus: u32,
    /// `--ranks`, or the product of `-t` and `-g` where one of them was given.
    pub ranks: Option<usize>,
    /// `--bind_to`; `None` if unset.
    pub bind_to: Option<BindTo>,
    /// `--spawn`, or threads with `-t`; `None` if neither is set.
    pub spawn: Option<Spawn>,
    /// `--memcpy_ratio`
    pub memcpy_ratio: bool,
    /// `-o`; none for a program whose rows have no operator.
    pub operators: Vec<ReduceOp>,
    /// `-G`; 0: no graphs.
    pub graph: u32,
    /// `-R`
    pub register: Register,
    /// `--algo`
    pub algorithms: Algorithms,
    /// `--ranks_per_node`
    pub ranks_per_node: Option<usize>,
    /// `--plot`
    pub plot: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sweep: Sweep {
                min: 1 << 10,
                max: 16 << 20,
                step: Step::Factor(2),
            },
            iterations: 20,
            warm_up: 1,
            aggregate: 1,
            cycles: Some(1),
            checks: 1,
            element: Some(element::FLOAT),
            blocking: Blocking::Never,
            average: Average::Mean,
            cpu_time: false,
            timestamps: false,
            output_file: None,
            timeout: DEFAULT_TIMEOUT,
            per_iteration: false,
            per_iteration_skip: 0,
            memory: false,
            unalign: 0,
            null_stream: false,
            parallel_init: false,
            cta_policy: None,
            threads: 1,
            gpus: 1,
            ranks: None,
            bind_to: None,
            spawn: None,
            memcpy_ratio: true,
            operators: Vec::new(),
            graph: 0,
            register: Register::No,
            algorithms: Algorithms::Default,
            ranks_per_node: None,
            plot: None,
        }
    }
}

/// How long one operation may take without `-T`.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// More ranks than this on one machine are taken for a typing error.
const MOST_RANKS: i64 = 1024;

/// The result of parsing.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Run the measurements.
    Run(Box<Options>),
    /// `-h`: print [`usage`].
    Help,
}

/// Values that only have a meaning together with others.
#[derive(Default)]
struct Pending {
    step_bytes: Option<u64>,
    step_factor: Option<i64>,
    ranks: Option<usize>,
    threads_given: bool,
    gpus_given: bool,
    memcpy_ratio: Option<bool>,
}

/// Reads the arguments of `program`, without its name.
///
/// ```
/// use nccl_tools::{options::{parse, Command}, program};
/// let arguments = ["-b8", "-e", "1.5K", "--iters=5"];
/// let Ok(Command::Run(options)) = parse(&program::ALL_TO_ALL, arguments) else { panic!() };
/// assert_eq!((options.sweep.min, options.sweep.max, options.iterations), (8, 1536, 5));
/// ```
///
/// # Errors
/// One sentence that names the option and what it needs; [`Exit::Usage`](crate::failure::Exit::Usage).
pub fn parse<I>(program: &Program, arguments: I) -> Result<Command, Failure>
where
    I: IntoIterator,
    I::Item: Into<OsString>,
{
    let mut options = Options::default();
    if program.has_operator {
        options.operators.push(ReduceOp::Sum);
    }
    let mut pending = Pending::default();
    let mut parser = lexopt::Parser::from_args(arguments);
    loop {
        let entry = match parser.next() {
            Ok(None) => break,
            Ok(Some(lexopt::Arg::Short(letter))) => table::by_letter(letter).ok_or_else(|| {
                Failure::usage(format!(
                    "unknown option -{letter}; --help lists what there is"
                ))
            })?,
            Ok(Some(lexopt::Arg::Long(name))) => {
                table::by_long(name).map_err(|candidates| unknown_long(name, &candidates))?
            }
            Ok(Some(lexopt::Arg::Value(value))) => {
                return Err(Failure::usage(format!(
                    "{value:?} is not an option; every value follows the option that it belongs to"
                )));
            }
            Err(error) => return Err(Failure::usage(error.to_string())),
        };
        if entry.name == Name::Help {
            return Ok(Command::Help);
        }
        let value = parser.value().map_err(|_| {
            Failure::usage(format!(
                "{} needs a value ({})",
                entry.spelled(),
                entry.value
            ))
        })?;
        apply(program, entry, &value, &mut options, &mut pending)?;
    }
    combine::combine(&mut options, &pending)?;
    Ok(Command::Run(Box::new(options)))
}

fn unknown_long(name: &str, candidates: &[&str]) -> Failure {
    Failure::usage(match candidates {
        [] => format!("unknown option --{name}; --help lists what there is"),
        _ => format!("--{name} could be --{}", candidates.join(" or --")),
    })
}

fn apply(
    program: &Program,
    entry: &Entry,
    value: &OsStr,
    options: &mut Options,
    pending: &mut Pending,
) -> Result<(), Failure> {
    let option = Value { entry, text: value };
    match entry.name {
        Name::MinBytes => options.sweep.min = option.size()?,
        Name::MaxBytes => options.sweep.max = option.size()?,
        Name::StepBytes => pending.step_bytes = Some(option.size()?),
        Name::StepFactor => pending.step_factor = Some(option.between(1, i64::MAX)?),
        Name::Iterations => options.iterations = option.count(1)?,
        Name::Aggregate => options.aggregate = option.count(1)?,
        Name::WarmUp => options.warm_up = option.count(0)?,
        Name::Cycles => options.cycles = Some(option.count(0)?).filter(|&cycles| cycles > 0),
        Name::Check => options.checks = option.count(0)?,
        Name::DataType => options.element = option.element()?,
        Name::Op => {
            let operators = option.operators(program)?;
            if program.has_operator {
                options.operators = operators;
            }
        }
        Name::Root => drop(option.between(0, i64::from(i32::MAX))?),
        Name::Blocking => {
            options.blocking = match option.between(0, 3)? {
                0 => Blocking::Never,
                1 => Blocking::WaitAndBarrier,
                2 => Blocking::Wait,
                _ => Blocking::WaitAndUntimedBarrier,
            }
        }
        Name::Average => {
            options.average = match option.between(0, 3)? {
                0 => Average::RankZero,
                1 => Average::Mean,
                2 => Average::Min,
                _ => Average::Max,
            }
        }
        Name::NullStream => options.null_stream = option.switch()?,
        Name::ParallelInit => options.parallel_init = option.switch()?,
        Name::CpuTime => options.cpu_time = option.switch()?,
        Name::Timestamps => options.timestamps = option.switch()?,
        Name::Memory => options.memory = option.switch()?,
        Name::PerIteration => options.per_iteration = option.switch()?,
        Name::PerIterationSkip => options.per_iteration_skip = option.count(0)?,
        Name::Unalign => options.unalign = option.between(0, 1 << 20)? as u32,
        Name::Timeout => {
            // nccl-tests' 0 means never; this program does not wait without a timeout.
            options.timeout = match option.between(0, 86_400)? {
                0 => DEFAULT_TIMEOUT,
                seconds => Duration::from_secs(seconds as u64),
            }
        }
        Name::OutputFile => options.output_file = Some(option.file("json")?),
        Name::CtaPolicy => options.cta_policy = Some(option.between(0, 2)? as u32),
        Name::Register => options.register = option.register()?,
        Name::Graph => options.graph = option.count(0)?,
        Name::Device => option.only_zero("an operation by own kernels", i64::MAX)?,
        Name::DeviceCtas => drop(option.between(1, 128)?),
        Name::Threads => {
            options.threads = option.between(1, MOST_RANKS)? as u32;
            pending.threads_given = true;
        }
        Name::Gpus => {
            options.gpus = option.between(1, MOST_RANKS)? as u32;
            pending.gpus_given = true;
        }
        Name::Ranks => pending.ranks = Some(option.between(1, MOST_RANKS)? as usize),
        Name::Spawn => {
            option.one_of(&["processes", "threads"])?;
            options.spawn = Some(match option.text.to_str() {
                Some("threads") => Spawn::Threads,
                _ => Spawn::Processes,
            });
        }
        Name::BindTo => {
            option.one_of(&["core", "none"])?;
            options.bind_to = Some(match option.text.to_str() {
                Some("core") => BindTo::Core,
                _ => BindTo::None,
            });
        }
        Name::MemcpyRatio => pending.memcpy_ratio = Some(option.switch()?),
        Name::Algorithm => options.algorithms = option.algorithms(program)?,
        Name::RanksPerNode => {
            options.ranks_per_node = Some(option.between(1, MOST_RANKS)? as usize);
        }
        Name::Plot => options.plot = Some(option.file("svg")?),
        Name::Help => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests;
