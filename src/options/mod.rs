//! The command line: nccl-tests' options, and a few of our own.
//!
//! Letters, long names and values mean what they mean in nccl-tests 2.19.6. Different are the default
//! sizes (1 KiB to 16 MiB, doubled, instead of 32 MiB alone), the default of `-T` (a run that hangs
//! ends), and that what cannot be obeyed is refused in one sentence instead of being replaced by a
//! default.

mod number;
mod table;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use table::{Entry, Name};

use crate::element::{self, Element};
use crate::failure::Failure;
use crate::sizes::{Step, Sweep};

/// When the host waits during a measurement (`-z`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocking {
    /// Once, at the end.
    Never,
    /// After each operation, for all ranks.
    WaitAndBarrier,
    /// After each operation, for its own.
    Wait,
    /// After each iteration, for all ranks; waiting for the others is not counted.
    WaitAndUntimedBarrier,
}

/// How the times of the ranks become one (`-a`).
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

/// What ranks are (`--spawn`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spawn {
    /// A process each.
    Processes,
    /// Threads of this process.
    Threads,
}

/// What the command line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// `--spawn`, or threads after `-t`; `None` where nothing was said.
    pub spawn: Option<Spawn>,
    /// `--memcpy_ratio`
    pub memcpy_ratio: bool,
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
            spawn: None,
            memcpy_ratio: true,
        }
    }
}

/// How long one operation may take without `-T`.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// More ranks than this on one machine are a typing error.
const MOST_RANKS: i64 = 1024;

/// What parsing came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Measure.
    Run(Box<Options>),
    /// `-h`: print [`usage`].
    Help,
}

/// Values that only mean something together with others.
#[derive(Default)]
struct Pending {
    step_bytes: Option<u64>,
    step_factor: Option<i64>,
    ranks: Option<usize>,
    threads_given: bool,
    gpus_given: bool,
}

/// Reads the arguments, without the program's name.
///
/// ```
/// use nccl_tools::options::{parse, Command};
/// let Ok(Command::Run(options)) = parse(["-b8", "-e", "1.5K", "--iters=5"]) else { panic!() };
/// assert_eq!((options.sweep.min, options.sweep.max, options.iterations), (8, 1536, 5));
/// ```
///
/// # Errors
/// One sentence that names the option and what it needs; [`Exit::Usage`](crate::failure::Exit::Usage).
pub fn parse<I>(arguments: I) -> Result<Command, Failure>
where
    I: IntoIterator,
    I::Item: Into<OsString>,
{
    let mut options = Options::default();
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
        apply(entry, &value, &mut options, &mut pending)?;
    }
    combine(&mut options, &pending)?;
    Ok(Command::Run(Box::new(options)))
}

fn unknown_long(name: &str, candidates: &[&str]) -> Failure {
    Failure::usage(match candidates {
        [] => format!("unknown option --{name}; --help lists what there is"),
        _ => format!("--{name} could be --{}", candidates.join(" or --")),
    })
}

fn apply(
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
        Name::Op => option.one_of(&["sum", "prod", "min", "max", "avg", "mulsum", "all"])?,
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
            // nccl-tests' 0 means never; nothing here waits without a limit.
            options.timeout = match option.between(0, 86_400)? {
                0 => DEFAULT_TIMEOUT,
                seconds => Duration::from_secs(seconds as u64),
            }
        }
        Name::OutputFile => options.output_file = Some(option.json_file()?),
        Name::CtaPolicy => options.cta_policy = Some(option.between(0, 2)? as u32),
        Name::Register => option.only_zero("buffer registration", 2)?,
        Name::Graph => option.only_zero("capturing the iterations in a CUDA graph", i64::MAX)?,
        Name::Device => option.only_zero("an all-to-all by own kernels", i64::MAX)?,
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
        Name::MemcpyRatio => options.memcpy_ratio = option.switch()?,
        Name::Help => {}
    }
    Ok(())
}

/// Joins what depends on several options, and refuses what contradicts itself.
fn combine(options: &mut Options, pending: &Pending) -> Result<(), Failure> {
    options.sweep.step = match (pending.step_factor, pending.step_bytes) {
        (Some(factor), _) if factor > 1 => Step::Factor(factor as u64),
        (_, Some(bytes)) => Step::Bytes(bytes),
        // As in nccl-tests, a factor of 1 is none, and the step 1 MiB.
        (Some(_), None) => Step::Bytes(1 << 20),
        (None, None) => Step::Factor(2),
    };
    let Sweep { min, max, step } = options.sweep;
    if min > max {
        return Err(Failure::usage(format!(
            "the first size (-b) is {min} bytes, more than the last (-e), which is {max}"
        )));
    }
    if min < max && step == Step::Bytes(0) {
        return Err(Failure::usage(
            "sizes that grow by 0 bytes (-i) never reach the last (-e)",
        ));
    }
    if min == 0 && max > 0 && matches!(step, Step::Factor(_)) {
        return Err(Failure::usage(
            "0 bytes (-b) multiplied (-f) stay 0: begin with at least 1, or add with -i",
        ));
    }
    if options.per_iteration_skip > 0 && !options.per_iteration {
        return Err(Failure::usage(
            "-K leaves iterations out of -I's summary, and needs -I 1",
        ));
    }
    if options.per_iteration_skip >= options.iterations {
        return Err(Failure::usage(format!(
            "-K {} leaves none of the {} iterations (-n)",
            options.per_iteration_skip, options.iterations
        )));
    }
    if pending.threads_given && options.spawn.is_none() {
        options.spawn = Some(Spawn::Threads);
    }
    if pending.threads_given && options.spawn == Some(Spawn::Processes) {
        return Err(Failure::usage(
            "-t asks for ranks as threads, --spawn for processes",
        ));
    }
    let product = options.threads as usize * options.gpus as usize;
    options.ranks = match pending.ranks {
        Some(ranks) if (pending.threads_given || pending.gpus_given) && ranks != product => {
            return Err(Failure::usage(format!(
                "--ranks {ranks} contradicts -t {} and -g {}, which make {product}",
                options.threads, options.gpus
            )));
        }
        Some(ranks) => Some(ranks),
        None if pending.threads_given || pending.gpus_given => Some(product),
        None => None,
    };
    if product > MOST_RANKS as usize {
        return Err(Failure::usage(format!(
            "-t {} and -g {} make {product} ranks; {MOST_RANKS} are the most on one machine",
            options.threads, options.gpus
        )));
    }
    Ok(())
}

/// The value of one option, on its way to a type.
struct Value<'a> {
    entry: &'a Entry,
    text: &'a OsStr,
}

impl Value<'_> {
    fn refused(&self, why: &str) -> Failure {
        Failure::usage(format!(
            "{} {}: {why}",
            self.entry.spelled(),
            self.text.to_string_lossy()
        ))
    }

    fn between(&self, low: i64, high: i64) -> Result<i64, Failure> {
        let number = self.text.to_str().and_then(number::integer);
        number
            .filter(|number| (low..=high).contains(number))
            .ok_or_else(|| {
                self.refused(&match high {
                    i64::MAX => format!("a whole number from {low} on is needed"),
                    _ => format!("a whole number from {low} to {high} is needed"),
                })
            })
    }

    fn count(&self, low: i64) -> Result<u32, Failure> {
        // As in nccl-tests these are C ints.
        Ok(self.between(low, i64::from(i32::MAX))? as u32)
    }

    fn switch(&self) -> Result<bool, Failure> {
        Ok(self.between(0, 1)? == 1)
    }

    fn size(&self) -> Result<u64, Failure> {
        let text = self.text.to_str().unwrap_or("?");
        number::size(text).map_err(|why| self.refused(&format!("this {why}")))
    }

    fn one_of(&self, names: &[&str]) -> Result<(), Failure> {
        if names.iter().any(|name| self.text == *name) {
            Ok(())
        } else {
            Err(self.refused(&format!("one of {} is needed", names.join(", "))))
        }
    }

    fn element(&self) -> Result<Option<Element>, Failure> {
        let text = self.text.to_str().unwrap_or_default();
        if text == "all" {
            return Ok(None);
        }
        Element::named(text).map(Some).ok_or_else(|| {
            let names: Vec<_> = element::ALL.iter().map(|element| element.name).collect();
            self.refused(&format!("one of {}, or all is needed", names.join(", ")))
        })
    }

    fn json_file(&self) -> Result<PathBuf, Failure> {
        let path = PathBuf::from(self.text);
        match path.extension() {
            Some(extension) if extension.eq_ignore_ascii_case("json") => Ok(path),
            _ => Err(self.refused("only JSON can be written, to a name that ends in .json")),
        }
    }

    /// For what nccl-tests can and this program cannot: 0 switches it off, and that is granted.
    fn only_zero(&self, what: &str, most: i64) -> Result<(), Failure> {
        match self.between(0, most)? {
            0 => Ok(()),
            _ => Err(self.refused(&format!("{what} is not available in this program"))),
        }
    }
}

/// What `--help` prints.
#[must_use]
pub fn usage(program: &str) -> String {
    let mut text = format!(
        "Time and verify NCCL's all-to-all, with the options and the output of nccl-tests.\n\n\
         Usage: {program} [options]\n\n\
         Without options: as many ranks as there are GPUs, or four emulated ones, as processes\n\
         that this program starts itself. Under torchrun, srun or mpirun it is one rank.\n\n\
         Options (default in parentheses):\n"
    );
    for entry in table::TABLE {
        let letter = entry
            .letter
            .map_or("   ".to_owned(), |letter| format!("-{letter},"));
        let name = format!("{letter} --{} {}", entry.long, entry.value);
        let words = entry.help.split_whitespace().collect::<Vec<_>>().join(" ");
        text.push_str(&format!("  {name:<34} {words}\n"));
    }
    text.push_str(
        "\nExit code: 0 all is well, 1 a rank died or something else failed, 2 bad input,\n\
         3 NCCL or CUDA failed, 4 timeout, 7 wrong elements or too slow, 128+N a rank was\n\
         killed by signal N.\n\n\
         Environment: NCCL_TESTS_DEVICE (first device), NCCL_TESTS_MIN_BW (exit code 7 below\n\
         0.9 of it), NCCL_TOOLS_SELF_TEST=flip:RANK (spoil a received byte on RANK before it is\n\
         verified, to see that a wrong element is noticed).\n",
    );
    text
}

#[cfg(test)]
mod tests;
