//! A rank: a process that has a part of the model, and takes the steps that the front sends.
//!
//! ```text
//!          ┌───────────── next epoch, with those that are left and those that are new ◀────────┐
//!          ▼                                                                                   │
//! join ─▶ enter: who has which part ─▶ communicator ─▶ (load) ─▶ serve: step, step, … ─────────┤ somebody is gone
//! (rejoin)                                                          │                          │ or a step failed
//!                                                                   └─▶ end: the front says so
//! ```
//!
//! What is dear outlives an epoch: the process, its device and stream, and its part of the weights. What belongs to the epoch does
//! not: the communicator, and the caches of keys and values, since nobody knows how far a step came that failed. The front
//! has the tokens, and sends them again.
//!
//! An epoch numbers its ranks anew; a rank that comes is the last one. Which part of the model a rank has must not depend
//! on that, or everybody would have to load after each death. So parts go by the launcher's number of a rank
//! (its *place*), which a process that is started again gets as well, and the communicator of the model has its ranks in
//! that order.
//!
//! - `link`: the connection to the front; `timed`: how much of a step is communication.

mod link;
mod timed;

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaContext, CudaStream};
use nccl::{Communicator, Rendezvous, Timeouts, World};

use self::link::{Link, Told};
use self::timed::Timed;
use crate::model::{self, AnyPart, Collectives, ModelFile, OverNccl, Sampling, Settings};
use crate::wire::{FromRank, Step, ToRank};

/// How long ranks wait for each other in order to go on; longer by the limit of an operation where one of them may be frozen,
/// which the front ends after that limit.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many epochs in a row may end before a step was taken in them.
const IN_VAIN: usize = 8;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What a rank is told when it is started.
#[derive(Clone, Debug)]
pub struct RankOptions {
    /// The name of the front's socket.
    pub link: String,
    /// The file of the model.
    pub model: std::path::PathBuf,
    /// How large steps and caches are: the same on all ranks.
    pub settings: Settings,
    /// How long an operation may take.
    pub deadline: Duration,
    /// How many ranks there have to be before it goes on after a death.
    pub wanted: usize,
}

/// What becomes of a rank after an epoch.
enum After {
    Next,
    End,
}

/// A rank, until the front says that it is enough.
///
/// # Errors
/// What cannot be repaired by going on: no file, no device, nobody to go on with.
pub fn run(options: &RankOptions) -> Outcome<()> {
    nccl_emulator::install_unless_gpu()?;
    let rendezvous = Rendezvous::from_env()?;
    let limit = match rendezvous.was_restarted() {
        false => PATIENCE,
        // The others may have to wait for one that is frozen before they can let this one in.
        true => PATIENCE + options.deadline,
    };
    let rendezvous = rendezvous.timeout(limit);
    // One host: ranks there are all ranks.
    let link = Link::connect(&options.link, place_of(&rendezvous)?)?;
    let mut world = match rendezvous.was_restarted() {
        false => World::join(rendezvous)?,
        true => World::rejoin(rendezvous)?,
    };
    link.listen_to(&world)?;
    // Others may be missing still, and those that wait for them begin with nothing before.
    world = wait_for(world, options)?;
    let devices = usize::try_from(CudaContext::device_count()?)?.max(1);
    let device = world.local_rank() % devices;
    let mut rank = Rank {
        device,
        stream: CudaContext::new(device)?.new_stream()?,
        file: ModelFile::open(&options.model)?,
        decoder: None,
        in_vain: 0,
        options: options.clone(),
        link,
    };
    loop {
        let epoch = world.epoch();
        match rank.serve(&world) {
            Ok(After::End) => return Ok(()),
            Ok(After::Next) => {}
            Err(error) => {
                let fault = rank.fault(&world, &*error);
                // What is no matter between ranks is not mended by meeting again, and neither is what comes each time.
                let alone = fault.is_none() && world.departed().is_empty();
                rank.in_vain += 1;
                if (alone && !is_of_ranks(&*error)) || rank.in_vain > IN_VAIN {
                    world.fail(&*error);
                    return Err(error);
                }
                let error = error.to_string();
                rank.link.say(&FromRank::Failed {
                    epoch,
                    error,
                    fault,
                })?;
            }
        }
        world = go_on(world, options)?;
    }
}

/// The launcher's number of this rank.
fn place_of(rendezvous: &Rendezvous) -> Outcome<usize> {
    match std::env::var("NCCL_RUN_LOCAL_RANK") {
        Ok(place) => Ok(place.parse()?),
        Err(_) => Ok(rendezvous.rank()),
    }
}

fn is_of_ranks(error: &(dyn Error + 'static)) -> bool {
    error.is::<nccl::Error>() || matches!(error.downcast_ref(), Some(model::Error::Nccl(_)))
}

/// The next epoch that has enough ranks.
fn go_on(world: World, options: &RankOptions) -> nccl::Result<World> {
    let next = world.next_epoch(PATIENCE + options.deadline)?;
    drop(world);
    wait_for(next, options)
}

/// This epoch, if it has enough ranks, or the next one that has. What all ranks of an epoch do first, also those that
/// have just come.
fn wait_for(mut next: World, options: &RankOptions) -> nccl::Result<World> {
    let wanted = options.wanted;
    while next.size() < wanted {
        next.phase("wait for a new process");
        let begun = Instant::now();
        // Who waits too long goes on with whoever is there, and waits again: some day the front ends it.
        while next.size() + next.newcomers() < wanted
            && next.departed().is_empty()
            && begun.elapsed() < PATIENCE
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        next = next.next_epoch(PATIENCE + options.deadline)?;
    }
    Ok(next)
}

struct Rank {
    device: usize,
    stream: Arc<CudaStream>,
    file: ModelFile,
    /// What outlives an epoch.
    decoder: Option<Box<AnyPart<Timed<OverNccl>>>>,
    /// Epochs in a row that have failed without a step.
    in_vain: usize,
    options: RankOptions,
    link: Link,
}

impl Rank {
    /// One epoch.
    fn serve(&mut self, world: &World) -> Outcome<After> {
        let epoch = world.epoch();
        self.link.say(&FromRank::Entered { epoch })?;
        world.phase("meet");
        let own = world.local_rank() as u64;
        let places = world.all_gather("places", &own.to_be_bytes())?;
        let mut order: Vec<usize> = (0..world.size()).collect();
        order.sort_by(|&a, &b| places[a].cmp(&places[b]));
        let counts = self.file.rank_counts();
        let shards = counts.iter().rev().find(|&&count| count <= world.size());
        let shards = shards.copied().unwrap_or(1);
        let shard = order.iter().position(|&rank| rank == world.rank());
        let shard = shard.filter(|&shard| shard < shards);

        world.phase("make the communicator");
        let timeouts = Timeouts::new().operation(self.options.deadline);
        let all = world.communicator("all").stream(&self.stream);
        let all = all.timeouts(timeouts).build()?;
        let comm = match order.iter().copied().eq(0..shards) {
            true => Some(all.clone()),
            false => {
                let key = order.iter().position(|&rank| rank == world.rank());
                all.split(
                    "model",
                    shard.map(|_| 0),
                    key.unwrap_or_default().try_into()?,
                )?
            }
        };
        if let Some(comm) = &comm {
            self.connect(world, comm)?;
        }
        world.phase("serve");
        self.link.say(&FromRank::Serves {
            epoch,
            rank: world.rank(),
            shard,
            shards,
            device: self.device,
        })?;
        loop {
            match self.link.hear() {
                Told::Front(ToRank::Step(step)) if step.epoch == epoch && comm.is_some() => {
                    self.step(&step)?;
                }
                Told::Front(ToRank::GoOn { epoch: over }) if over == epoch => {
                    return Ok(After::Next);
                }
                // Of an epoch that is over.
                Told::Front(ToRank::Step(_) | ToRank::GoOn { .. }) => {}
                Told::Front(ToRank::End) => break,
                Told::World => {
                    let mut comms = comm.iter().chain([&all]);
                    if !world.departed().is_empty() || comms.any(|comm| comm.fault().is_some()) {
                        return Ok(After::Next);
                    }
                }
            }
        }
        world.phase("end");
        // The others do so as well, unless they are gone: no reason for not ending.
        for comm in comm.iter().chain([&all]) {
            let _ = comm.finalize();
        }
        Ok(After::End)
    }

    /// Gives the decoder this communicator; loads it, where it is not this part of the model yet.
    fn connect(&mut self, world: &World, comm: &Communicator) -> Outcome<()> {
        let shape = self.file.shape(self.options.settings.rows);
        let ranks = Timed::new(OverNccl::new(comm, shape)?);
        match &mut self.decoder {
            Some(decoder)
                if decoder.ranks().rank() == comm.rank()
                    && decoder.ranks().ranks() == comm.world_size() =>
            {
                decoder.renew(ranks)?;
            }
            _ => {
                world.phase("load weights");
                self.decoder = Some(self.file.load(ranks, self.options.settings)?);
            }
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Outcome<()> {
        let Some(decoder) = &mut self.decoder else {
            return Ok(());
        };
        let (begun, before) = (Instant::now(), decoder.ranks().spent());
        let rows: Vec<_> = step.rows.iter().map(|row| row.row()).collect();
        let logits = decoder.step(&rows)?;
        self.in_vain = 0;
        if decoder.ranks().rank() != 0 {
            return Ok(());
        }
        let drawn = step.rows.iter().enumerate().filter_map(|(number, row)| {
            let logits = logits.row(number)?;
            Some(Sampling::from(row.draw?).pick(logits, row.position + 1))
        });
        let tokens = drawn.collect();
        let communicating = decoder.ranks().spent() - before;
        self.link.say(&FromRank::Drawn {
            epoch: step.epoch,
            number: step.number,
            tokens,
            seconds: begun.elapsed().as_secs_f64(),
            communicating: communicating.as_secs_f64(),
        })?;
        Ok(())
    }

    /// Why a communicator ended, as all of its ranks tell.
    fn fault(&self, world: &World, error: &(dyn Error + 'static)) -> Option<Box<nccl::Fault>> {
        let of = |error: &nccl::Error| error.fault().cloned();
        let direct = error.downcast_ref::<nccl::Error>().and_then(of);
        let model = match error.downcast_ref() {
            Some(model::Error::Nccl(error)) => of(error),
            _ => None,
        };
        direct.or(model).or_else(|| world.fault()).map(Box::new)
    }
}
