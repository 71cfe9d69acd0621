//! The loop over generations, with surviving and new ranks.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nccl::{Rendezvous, World};

use super::Outcome;
use super::link::Link;
use super::serve::{After, Rank};
use crate::model::{self, Settings};
use crate::wire::FromRank;

/// The options of a rank.
#[derive(Clone, Debug)]
pub struct RankOptions {
    /// Whether the emulator replaces a missing GPU.
    pub emulator: bool,
    /// The name of the front's socket.
    pub link: String,
    /// The file of the model.
    pub model: PathBuf,
    /// The sizes of steps and caches, the same on all ranks.
    pub settings: Settings,
    /// The timeout of an operation.
    pub deadline: Duration,
    /// How long ranks wait to agree on each step before they enter it; `None`: they do not.
    pub agree: Option<Duration>,
    /// The number of ranks needed to continue after a death.
    pub wanted: usize,
    /// How many copies of each expert there are to be, for a model laid out by requests; otherwise it is laid out by heads.
    pub copies: Option<usize>,
}

/// How long ranks wait for each other in a failover. Where a rank may be frozen, they wait longer by the timeout of an
/// operation, after which the front kills a frozen rank.
const PATIENCE: Duration = Duration::from_secs(10);

/// The most generations in a row that may end before a completed step.
const IN_VAIN: usize = 8;

/// Runs a rank until the front ends it.
///
/// # Errors
/// Errors that a failover cannot repair: no file, no device, no other rank to continue with.
pub fn run(options: &RankOptions) -> Outcome<()> {
    if options.emulator {
        nccl_emulator::install_unless_gpu()?;
    }
    let rendezvous = Rendezvous::from_env()?;
    let timeout = match rendezvous.was_restarted {
        false => PATIENCE,
        // The others may have to wait for a frozen rank before they can admit this one.
        true => PATIENCE + options.deadline,
    };
    let rendezvous = rendezvous.with(|meet| meet.timeout = timeout);
    // One host: its local ranks are all ranks.
    let link = Link::connect(&options.link, place_of(&rendezvous)?)?;
    let mut world = match rendezvous.was_restarted {
        false => World::join(rendezvous)?,
        true => World::join_running(rendezvous)?,
    };
    link.listen_to(&world)?;
    // Other ranks may still be missing; all ranks wait for them before anything else.
    world = wait_for(world, options)?;
    let (mut in_vain, mut leaked) = (0, 0);
    let mut rank = Rank::new(&world, options, link)?;
    loop {
        let generation = world.generation();
        match rank.serve(&world) {
            Ok(After::End) => return Ok(()),
            Ok(After::Next(fault)) => {
                if rank.has_achieved() {
                    in_vain = 0;
                }
                rank.say(&FromRank::Left { generation, fault })?;
            }
            Err(error) => {
                let fault = rank.fault(&world, &*error);
                // A failover repairs neither an error of this rank alone nor an error that recurs each time.
                let alone = fault.is_none() && world.departed().is_empty();
                in_vain = if rank.has_achieved() { 1 } else { in_vain + 1 };
                if (alone && !is_of_ranks(&*error)) || in_vain > IN_VAIN {
                    world.fail(&*error);
                    return Err(error);
                }
                let error = error.to_string();
                rank.say(&FromRank::Failed {
                    generation,
                    error,
                    fault,
                })?;
            }
        }
        world = go_on(world, options)?;
        report_leaks(&mut leaked);
    }
}

/// Prints how many communicators NCCL has not freed, if there are more than `known`: they explain why the process grows.
fn report_leaks(known: &mut u64) {
    let leaked = nccl::stats().leaked_communicators;
    if leaked > *known {
        eprintln!(
            "inference-server: {leaked} communicators are leaked: NCCL did not return from their aborts in time"
        );
        *known = leaked;
    }
}

/// Returns the launcher's number of this rank.
fn place_of(rendezvous: &Rendezvous) -> Outcome<usize> {
    match std::env::var("NCCL_RUN_LOCAL_RANK") {
        Ok(place) => Ok(place.parse()?),
        Err(_) => Ok(rendezvous.rank()),
    }
}

fn is_of_ranks(error: &(dyn Error + 'static)) -> bool {
    error.is::<nccl::Error>() || matches!(error.downcast_ref(), Some(model::Error::Nccl(_)))
}

/// Returns the next generation that has enough ranks.
fn go_on(world: World, options: &RankOptions) -> nccl::Result<World> {
    let next = world.next_generation(PATIENCE + options.deadline)?;
    drop(world);
    wait_for(next, options)
}

/// Returns this generation, if it has enough ranks, or the next one that has. All ranks of a generation call this first, also new
/// ranks.
fn wait_for(mut next: World, options: &RankOptions) -> nccl::Result<World> {
    let wanted = options.wanted;
    while next.size() < wanted {
        next.phase("wait for a new process");
        let begun = Instant::now();
        // After its timeout a rank moves to the next generation with the present ranks, and waits again until the front ends it.
        while next.size() + next.joiners() < wanted
            && next.departed().is_empty()
            && begun.elapsed() < PATIENCE
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        next = next.next_generation(PATIENCE + options.deadline)?;
    }
    Ok(next)
}
