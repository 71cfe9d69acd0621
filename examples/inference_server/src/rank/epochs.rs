//! From one epoch to the next, with those that are left and those that are new.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nccl::{Rendezvous, World};

use super::Outcome;
use super::link::Link;
use super::serve::{After, Rank};
use crate::model::{self, Settings};
use crate::wire::FromRank;

/// What a rank is told when it is started.
#[derive(Clone, Debug)]
pub struct RankOptions {
    /// Whether the emulator takes the place of a GPU that is not there.
    pub emulator: bool,
    /// The name of the front's socket.
    pub link: String,
    /// The file of the model.
    pub model: PathBuf,
    /// How large steps and caches are: the same on all ranks.
    pub settings: Settings,
    /// How long an operation may take.
    pub deadline: Duration,
    /// How many ranks there have to be before it goes on after a death.
    pub wanted: usize,
}

/// How long ranks wait for each other in order to go on; longer by the limit of an operation where one of them may be frozen,
/// which the front ends after that limit.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many epochs in a row may end before a step was taken in them.
const IN_VAIN: usize = 8;

/// A rank, until the front says that it is enough.
///
/// # Errors
/// What cannot be repaired by going on: no file, no device, nobody to go on with.
pub fn run(options: &RankOptions) -> Outcome<()> {
    if options.emulator {
        nccl_emulator::install_unless_gpu()?;
    }
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
    let mut in_vain = 0;
    let mut rank = Rank::new(&world, options, link)?;
    loop {
        let epoch = world.epoch();
        match rank.serve(&world) {
            Ok(After::End) => return Ok(()),
            Ok(After::Next(fault)) => {
                if rank.has_achieved() {
                    in_vain = 0;
                }
                rank.say(&FromRank::Left { epoch, fault })?;
            }
            Err(error) => {
                let fault = rank.fault(&world, &*error);
                // What is no matter between ranks is not mended by meeting again, and neither is what comes each time.
                let alone = fault.is_none() && world.departed().is_empty();
                in_vain = if rank.has_achieved() { 1 } else { in_vain + 1 };
                if (alone && !is_of_ranks(&*error)) || in_vain > IN_VAIN {
                    world.fail(&*error);
                    return Err(error);
                }
                let error = error.to_string();
                rank.say(&FromRank::Failed {
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
