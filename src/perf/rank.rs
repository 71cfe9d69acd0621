//! One rank, from joining its world to its last row.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use nccl::{Communicator, Config, CtaPolicy, Library, OwnedBuffer, World};

use super::choice::choose;
use super::devices::{self, Device, Emulation};
use super::failure::cuda;
use super::operation::Operation;
use super::printer::{Facts, Printer};
use super::ranks::WorldRanks;
use super::runner::Runner;
use crate::bench::{Ranks, Setting, Totals, sweep};
use crate::failure::{Exit, Failure};
use crate::json::Report;
use crate::options::{Options, Register};
use crate::shape::Case;

/// The state of a rank when its measurements begin.
pub(super) struct Rank {
    /// The world of the ranks.
    pub(super) world: Arc<World>,
    /// The device.
    pub(super) context: Arc<CudaContext>,
    /// The stream of all operations.
    pub(super) stream: Arc<CudaStream>,
    /// The communicator of all ranks.
    pub(super) communicator: Communicator,
    /// The options, with sizes that fit.
    pub(super) options: Options,
    /// The bytes that each buffer needs.
    pub(super) buffer_bytes: usize,
    /// Whether there is a GPU.
    pub(super) emulation: Emulation,
}

/// The data that all ranks of this process share.
#[derive(Clone, Debug)]
pub(super) struct Common {
    pub(super) program: String,
    pub(super) options: Options,
    pub(super) emulation: Emulation,
    /// How the ranks were started.
    pub(super) ranks_text: String,
    pub(super) binding: String,
    /// Ranks on this host.
    pub(super) local_ranks: usize,
    /// Whether another program started the ranks.
    pub(super) launched: bool,
    /// The file that was reserved for `-J`.
    pub(super) json: Option<PathBuf>,
}

/// Runs one rank to its end.
pub(super) fn run<O: Operation>(common: &Common, world: World) -> Result<(), Failure> {
    let library = Library::load()?;
    let world = world.with_timeout(common.options.timeout);
    let facts = facts(common, &library)?;
    let mut printer = if world.rank() == 0 {
        let report = common
            .json
            .clone()
            .map(|path| Report::new(path, facts.library));
        Printer::speaking(O::PROGRAM, &common.options, facts, report)
    } else {
        Printer::silent(O::PROGRAM, &common.options, facts)
    };
    let result = measure::<O>(common, &library, Arc::new(world), &mut printer);
    // The first failure counts.
    let written = printer.finish(result.as_ref().err());
    result.and(written)
}

fn facts(common: &Common, library: &Library) -> Result<Facts, Failure> {
    let emulator = common.emulation.name().map(str::to_owned);
    Ok(Facts {
        program: common.program.clone(),
        headers: nccl::Version::HEADER.code() as u32,
        library: library.version().code() as u32,
        release: library.version().to_string(),
        library_path: library.path().display().to_string(),
        ranks_text: common.ranks_text.clone(),
        binding: common.binding.clone(),
        emulator,
    })
}

fn measure<O: Operation>(
    common: &Common,
    library: &Library,
    world: Arc<World>,
    printer: &mut Printer,
) -> Result<(), Failure> {
    let ranks = WorldRanks(&world);
    let mut options = common.options.clone();
    let operation = O::new(&options)?;
    operation.check(&options, world.size())?;
    let ordinal = devices::of_rank(
        world.local_rank(),
        devices::first_device()?,
        devices::count()?,
        common.launched,
    )?;
    devices::check_sizes(&options, devices::total_memory(ordinal)?)?;
    let context = CudaContext::new(ordinal).map_err(cuda("opening the device"))?;
    // Otherwise two events for each buffer of an operation would be timed as well, which nccl-tests does not have.
    // SAFETY: all that touches memory of the device is on one stream.
    unsafe { context.disable_event_tracking() };
    let own = Device::of(
        &context,
        world.rank(),
        common.local_ranks,
        &options,
        common.emulation,
    )?;
    let devices: Vec<Device> = ranks
        .all_gather(&own.encode())?
        .iter()
        .map(|bytes| Device::decode(bytes))
        .collect::<Option<_>>()
        .ok_or_else(|| {
            Failure::new(
                Exit::Failed,
                "the ranks do not all run this version of this program",
            )
        })?;
    devices::check_distinct(&devices)?;
    let agreements = ranks.all_gather(&operation.agreement())?;
    if let Some(rank) = agreements.iter().position(|other| *other != agreements[0]) {
        return Err(Failure::usage(format!(
            "rank {rank} has other data than rank 0 for the {}: give all ranks the same files and variables",
            O::PROGRAM.what
        )));
    }
    let lines: Vec<_> = devices.iter().map(|device| device.line.clone()).collect();
    printer.begin(&lines)?;

    let fitting = devices
        .iter()
        .map(|device| device.fitting)
        .min()
        .unwrap_or(0);
    if options.sweep.max > fitting {
        options.sweep.max = fitting;
        options.sweep.min = options.sweep.min.min(fitting);
        printer.reduced(fitting)?;
        operation.check(&options, world.size())?;
    }
    let capability = devices
        .iter()
        .map(|device| device.capability)
        .min()
        .unwrap_or(0);
    let elements = devices::elements(&options, library, capability)?;
    let hosts: BTreeSet<_> = devices.iter().map(|device| &device.line.host).collect();
    let mut choice = choose(O::PROGRAM, &options, library, world.size(), hosts.len())?;
    let operators: Vec<_> = match &options.operators[..] {
        [] => vec![None],
        operators => operators.iter().copied().map(Some).collect(),
    };
    let mut cases = Case::all(&choice.algorithms, &elements, &operators);
    let lacking = |case: &Case| operation.lacks(*case, world.size());
    if let Some(why) = cases.iter().find_map(lacking) {
        cases.retain(|case| lacking(case).is_none());
        if cases.is_empty() {
            return Err(Failure::usage(why));
        }
        choice.left_out.push(format!("left out: {why}"));
    }

    let stream = match options.null_stream {
        true => context.default_stream(),
        false => context.new_stream().map_err(cuda("making a stream"))?,
    };
    let before = free_memory(&context)?;
    let settings = operation.configure(config(&options, library)?, library);
    let communicator = world
        .communicator("perf")
        .stream(&stream)
        .with(|comm| {
            comm.config = settings;
            comm.timeouts.operation = options.timeout;
        })
        .build()?;
    let with_communicator = free_memory(&context)?;
    let setting = Setting {
        options: &options,
        cases: &cases,
    };
    let bytes = usize::try_from(setting.buffer_bytes())
        .map_err(|_| Failure::usage("the buffers are larger than memory can be"))?;
    let rank = Rank {
        world: Arc::clone(&world),
        context: Arc::clone(&context),
        stream: Arc::clone(&stream),
        communicator: communicator.clone(),
        options: options.clone(),
        buffer_bytes: bytes,
        emulation: common.emulation,
    };
    let run = Run {
        setting,
        left_out: &choice.left_out,
        printer,
    };
    // As nccl-tests allocates.
    let (with_buffers, after, totals) = if options.register != Register::No {
        let registered = || match options.register {
            Register::Window => communicator.register_window(communicator.buffer::<u8>(bytes)?),
            _ => communicator.register(communicator.buffer::<u8>(bytes)?),
        };
        let buffers = [registered()?, registered()?];
        let effective = buffers.iter().all(|buffer| buffer.is_effective());
        let text = match (options.register, effective) {
            (Register::Window, true) => "ncclMemAlloc, in symmetric windows",
            (Register::Window, false) => "ncclMemAlloc; NCCL has no symmetric windows here",
            (_, true) => "ncclMemAlloc, registered",
            (_, false) => "ncclMemAlloc, registered, of which NCCL makes no use",
        };
        run.with(operation, rank, buffers, text)?
    } else if library.version() >= nccl::Version::new(2, 19, 1) {
        let buffers = [communicator.buffer(bytes)?, communicator.buffer(bytes)?];
        run.with(operation, rank, buffers, "ncclMemAlloc")?
    } else {
        let plain = || {
            let bytes = stream.alloc_zeros::<u8>(bytes);
            bytes.map_err(cuda("allocating a buffer"))
        };
        run.with(operation, rank, [plain()?, plain()?], "cuMemAlloc")?
    };
    let memory = [
        before - with_communicator,
        with_communicator - with_buffers,
        with_buffers - after,
    ];
    let memory = largest(&ranks, memory)?;
    let footer = printer.end(&totals, needed_bus()?, options.memory.then_some(memory))?;
    // All ranks end alike, whichever rank received the wrong element.
    ranks.barrier()?;
    if totals.out_of_bounds > 0 {
        let (n, s) = (
            totals.out_of_bounds,
            if totals.out_of_bounds == 1 { "" } else { "s" },
        );
        return Err(Failure::new(
            Exit::Wrong,
            format!("wrong elements arrived: {n} measurement{s} failed; see the #wrong columns"),
        ));
    }
    if footer.fast_enough() == Some(false) {
        return Err(Failure::new(
            Exit::Wrong,
            format!(
                "the average bus bandwidth is {:.2} GB/s, less than 0.9 of NCCL_TESTS_MIN_BW",
                totals.average_bus
            ),
        ));
    }
    Ok(())
}

/// The rest of the run, for any kind of buffers.
struct Run<'a> {
    setting: Setting<'a>,
    left_out: &'a [String],
    printer: &'a mut Printer,
}

impl Run<'_> {
    /// Measures everything, and returns the memory in use before and after.
    fn with<O: Operation, B: OwnedBuffer<Element = u8>>(
        self,
        operation: O,
        rank: Rank,
        buffers: [B; 2],
        text: &'static str,
    ) -> Result<(i64, i64, Totals), Failure> {
        let world = Arc::clone(&rank.world);
        let context = Arc::clone(&rank.context);
        let before = free_memory(&context)?;
        let mut runner = Runner::new(operation, rank, buffers)?;
        self.printer.before_tables(text, self.left_out)?;
        let ranks = WorldRanks(&world);
        let totals = sweep(self.setting, &ranks, &mut runner, self.printer)?;
        Ok((before, free_memory(&context)?, totals))
    }
}

/// The free memory of the device in bytes.
fn free_memory(context: &CudaContext) -> Result<i64, Failure> {
    match context.mem_get_info() {
        Ok((free, _)) => Ok(free as i64),
        Err(error) => Err(cuda("asking for the free memory")(error)),
    }
}

/// The config of nccl-tests, with the policy of `-x`.
fn config(options: &Options, library: &Library) -> Result<Config, Failure> {
    let mut config = Config::default();
    if library.version() >= nccl::Version::new(2, 28, 3) {
        config.nvlink_centric_scheduling = Some(true);
    }
    if let Some(policy) = options.cta_policy {
        config.cta_policy = Some(match policy {
            0 => CtaPolicy::Default,
            1 => CtaPolicy::Efficiency,
            _ => CtaPolicy::Zero,
        });
    }
    Ok(config)
}

/// `NCCL_TESTS_MIN_BW` in GB/s.
pub(super) fn needed_bus() -> Result<Option<f64>, Failure> {
    match std::env::var("NCCL_TESTS_MIN_BW") {
        Err(_) => Ok(None),
        Ok(text) => match text.trim().parse::<f64>() {
            Ok(needed) if needed.is_finite() => Ok(Some(needed)),
            _ => Err(Failure::usage(format!(
                "NCCL_TESTS_MIN_BW={text}: a bandwidth in GB/s is needed"
            ))),
        },
    }
}

/// For each number, the largest among the ranks.
fn largest(ranks: &impl Ranks, own: [i64; 3]) -> Result<[i64; 3], Failure> {
    let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
    let mut largest = own;
    for bytes in ranks.all_gather(&bytes)? {
        let (numbers, _) = bytes.as_chunks::<8>();
        for (largest, number) in largest.iter_mut().zip(numbers) {
            *largest = (*largest).max(i64::from_le_bytes(*number));
        }
    }
    Ok(largest)
}
