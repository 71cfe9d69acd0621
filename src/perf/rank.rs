//! One rank, from its world to its last row.

use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use nccl::{Communicator, Config, CtaPolicy, Library, World};

use super::devices::{self, Device, Emulation};
use super::failure::cuda;
use super::printer::{Facts, Printer};
use super::ranks::WorldRanks;
use crate::bench::{Collective, Ranks, Setting, sweep};
use crate::failure::{Exit, Failure};
use crate::json::Report;
use crate::options::Options;

/// What a rank has when its measurements begin; a collective is made from it.
pub struct Rank {
    /// Who the others are.
    pub world: Arc<World>,
    /// The device.
    pub context: Arc<CudaContext>,
    /// The stream of all operations.
    pub stream: Arc<CudaStream>,
    /// All ranks.
    pub communicator: Communicator,
    /// The options, with sizes that fit.
    pub options: Options,
    /// The bytes that each buffer needs.
    pub buffer_bytes: usize,
    /// Whether there is a GPU.
    pub emulation: Emulation,
}

/// What all ranks of this process have in common.
#[derive(Clone, Debug)]
pub(super) struct Common {
    pub(super) program: String,
    pub(super) options: Options,
    pub(super) emulation: Emulation,
    /// How the ranks came about.
    pub(super) ranks_text: String,
    /// Ranks on this host.
    pub(super) local_ranks: usize,
    /// Whether somebody else than this program started the ranks.
    pub(super) launched: bool,
    /// The file that was reserved for `-J`.
    pub(super) json: Option<PathBuf>,
}

/// Runs one rank to its end.
pub(super) fn run<C: Collective>(
    common: &Common,
    world: World,
    make: impl Fn(Rank) -> Result<C, Failure>,
) -> Result<(), Failure> {
    let library = Library::load()?;
    let world = world.with_timeout(common.options.timeout);
    let facts = facts(common, &library)?;
    let mut printer = if world.rank() == 0 {
        let report = common
            .json
            .clone()
            .map(|path| Report::new(path, facts.library));
        Printer::speaking(&common.options, facts, report)
    } else {
        Printer::silent(&common.options, facts)
    };
    let result = measure(common, &library, Arc::new(world), make, &mut printer);
    // The reason that counts is the first one.
    let written = printer.finish(result.as_ref().err());
    result.and(written)
}

fn facts(common: &Common, library: &Library) -> Result<Facts, Failure> {
    let emulator = common
        .emulation
        .is_emulated()
        .then(|| "nccl-emulator".to_owned());
    Ok(Facts {
        program: common.program.clone(),
        headers: nccl::Version::HEADER.code() as u32,
        library: library.version().code() as u32,
        library_text: format!("NCCL {} at {}", library.version(), library.path().display()),
        ranks_text: common.ranks_text.clone(),
        emulator,
    })
}

fn measure<C: Collective>(
    common: &Common,
    library: &Library,
    world: Arc<World>,
    make: impl Fn(Rank) -> Result<C, Failure>,
    printer: &mut Printer,
) -> Result<(), Failure> {
    let ranks = WorldRanks(&world);
    let mut options = common.options.clone();
    let ordinal = devices::of_rank(
        world.local_rank(),
        devices::first_device()?,
        devices::count()?,
        common.launched,
    )?;
    devices::check_sizes(&options, devices::total_memory(ordinal)?)?;
    let context = CudaContext::new(ordinal).map_err(cuda("opening the device"))?;
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
    }
    let capability = devices
        .iter()
        .map(|device| device.capability)
        .min()
        .unwrap_or(0);
    let elements = devices::elements(&options, library, capability)?;

    let stream = match options.null_stream {
        true => context.default_stream(),
        false => context.new_stream().map_err(cuda("making a stream"))?,
    };
    let free = || match context.mem_get_info() {
        Ok((free, _)) => Ok(free as i64),
        Err(error) => Err(cuda("asking for the free memory")(error)),
    };
    let before = free()?;
    let communicator = world
        .communicator("perf")
        .stream(&stream)
        .config(config(&options, library)?)
        .timeout(options.timeout)
        .build()?;
    let with_communicator = free()?;
    let buffer_bytes = Setting {
        options: &options,
        elements: &elements,
    }
    .buffer_bytes();
    let mut collective = make(Rank {
        world: Arc::clone(&world),
        context: Arc::clone(&context),
        stream,
        communicator,
        options: options.clone(),
        buffer_bytes: usize::try_from(buffer_bytes)
            .map_err(|_| Failure::usage("the buffers are larger than memory can be"))?,
        emulation: common.emulation,
    })?;
    let with_buffers = free()?;

    printer.header()?;
    let setting = Setting {
        options: &options,
        elements: &elements,
    };
    let totals = sweep(setting, &ranks, &mut collective, printer)?;
    let after = free()?;
    let memory = [
        before - with_communicator,
        with_communicator - with_buffers,
        with_buffers - after,
    ];
    let memory = largest(&ranks, memory)?;
    let footer = printer.end(&totals, needed_bus()?, options.memory.then_some(memory))?;
    // All ranks end alike, whoever received the wrong element.
    drop(collective);
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

/// What nccl-tests sets, and what `-x` asks for.
fn config(options: &Options, library: &Library) -> Result<Config, Failure> {
    let mut config = Config::new();
    if library.version() >= nccl::Version::new(2, 28, 3) {
        config = config.nvlink_centric_scheduling(true);
    }
    if let Some(policy) = options.cta_policy {
        config = config.cta_policy(match policy {
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

/// For each number, the largest that a rank has.
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
