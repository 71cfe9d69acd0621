//! The work of a rank in a generation.

use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::Arc;
use std::time::Instant;

use nccl::control::ProposedStep;
use nccl::cudarc::driver::CudaStream;
use nccl::moe::ExpertPlacement;
use nccl::{Communicator, ReduceOp, World};

use super::Outcome;
use super::copies::{Own, Plan, fewest, sum};
use super::generations::RankOptions;
use super::link::{Link, Told};
use super::slots::deal;
use super::timed::Timed;
use crate::model::{self, AnyPart, Collectives, ModelFile, OverNccl, Sampling};
use crate::ranks::device;
use crate::wire::{Copies, FromRank, Step, ToRank};

/// How many numbers of experts a rank sends at most between two steps, and receives.
pub(crate) const NUMBERS_PER_ROUND: usize = 64 << 10;

/// The continuation after a generation.
pub(super) enum After {
    /// The next generation, with the fault that ended this one, if known.
    Next(Option<Box<nccl::fault::Fault>>),
    End,
}

pub(super) struct Rank {
    device: usize,
    stream: Arc<CudaStream>,
    file: ModelFile,
    /// The part of the model, which outlives a generation.
    decoder: Option<Box<AnyPart<Timed<OverNccl>>>>,
    /// The expert of each of its places, for a model laid out by requests.
    held: Vec<Option<usize>>,
    /// Where the experts are to be, once all parts of them have arrived.
    next: Option<ExpertPlacement>,
    /// Whether the rank completed work with the others in the last generation.
    achieved: bool,
    options: RankOptions,
    link: Link,
}

impl Rank {
    pub(super) fn new(world: &World, options: &RankOptions, link: Link) -> Outcome<Self> {
        let device = device(world.local_rank())?;
        Ok(Self {
            device: device.ordinal(),
            stream: device.new_stream()?,
            file: ModelFile::open(&options.model)?,
            decoder: None,
            held: Vec::new(),
            next: None,
            achieved: false,
            options: options.clone(),
            link,
        })
    }

    pub(super) fn say(&mut self, message: &FromRank) -> io::Result<()> {
        self.link.say(message)
    }

    /// Whether the rank completed work with the others in the last generation.
    pub(super) fn has_achieved(&self) -> bool {
        self.achieved
    }

    /// Serves in one generation.
    pub(super) fn serve(&mut self, world: &World) -> Outcome<After> {
        let generation = world.generation();
        self.achieved = false;
        self.link.say(&FromRank::Entered { generation })?;
        world.phase("meet");
        let own = Own {
            place: world.local_rank() as u64,
            held: self.held.clone(),
            cached: self
                .decoder
                .as_ref()
                .map(|decoder| decoder.cached())
                .unwrap_or_default(),
            loads: self.take_loads(),
        };
        let ranks = world.all_gather("places", &own.encode())?;
        let ranks: Option<Vec<_>> = ranks.iter().map(|one| Own::decode(one)).collect();
        let mut ranks = ranks.ok_or("a rank says what is no place")?;
        let mut order: Vec<usize> = (0..world.size()).collect();
        order.sort_by_key(|rank| ranks[*rank].place);
        let shards = match self.options.copies {
            Some(_) => world.size(),
            None => {
                let counts = self.file.rank_counts();
                let shards = counts.iter().rev().find(|&&count| count <= world.size());
                shards.copied().unwrap_or(1)
            }
        };
        let held = order
            .iter()
            .map(|rank| std::mem::take(&mut ranks[*rank].held));
        let held: Vec<_> = held.collect();
        let plan = match self.options.copies {
            Some(copies) => {
                let loads = ranks.iter().map(|rank| &rank.loads[..]);
                Some(Plan::new(&held, &sum(self.file.experts(), loads), copies)?)
            }
            None => None,
        };
        let shard = order.iter().position(|&rank| rank == world.rank());
        let shard = shard.filter(|&shard| shard < shards);

        world.phase("make the communicator");
        let all = world.communicator("all").stream(&self.stream);
        let all = all
            .with(|comm| comm.timeouts.operation = self.options.deadline)
            .build()?;
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
            self.connect(world, comm, plan.as_ref())?;
        }
        let mut kept = Vec::new();
        if plan.is_some()
            && let Some(decoder) = &mut self.decoder
        {
            let cached = order
                .iter()
                .map(|rank| std::mem::take(&mut ranks[*rank].cached));
            let slots = deal(&cached.collect::<Vec<_>>(), self.options.settings.slots);
            decoder.give_slots(&slots)?;
            kept = slots.iter().map(|slot| slot.positions).collect();
        }
        let copies = match plan {
            Some(plan) => {
                let now = fewest(&plan.now);
                Some(match plan.next {
                    Some(next) => self.plan_moves(now, next)?,
                    None => Copies {
                        now,
                        planned: now,
                        rounds: None,
                    },
                })
            }
            None => None,
        };
        world.phase("serve");
        self.link.say(&FromRank::Serves {
            generation,
            rank: world.rank(),
            shard,
            shards,
            device: self.device,
            copies,
            kept,
        })?;
        loop {
            match self.link.hear() {
                Told::Front(ToRank::Step(step))
                    if step.generation == generation && comm.is_some() =>
                {
                    let agreement = self.propose(world, comm.as_ref(), &step)?;
                    self.step(&step, agreement)?;
                }
                Told::Front(ToRank::Probe {
                    generation: of,
                    number,
                }) if of == generation => {
                    if let Some(comm) = &comm {
                        self.probe(comm, generation, number)?;
                    }
                }
                Told::Front(ToRank::GoOn { generation: over }) if over == generation => {
                    return Ok(After::Next(None));
                }
                Told::Front(ToRank::MoveExperts {
                    generation: of,
                    number,
                }) if of == generation => {
                    if let Some(decoder) = &mut self.decoder {
                        decoder.move_experts()?;
                    }
                    self.link.say(&FromRank::Moved { generation, number })?;
                }
                Told::Front(ToRank::PlaceExperts {
                    generation: of,
                    number,
                }) if of == generation => {
                    if let Some(comm) = &comm {
                        self.place_experts(comm, generation, number)?;
                    }
                }
                Told::Front(ToRank::Balance {
                    generation: of,
                    number,
                }) if of == generation => {
                    if let Some(comm) = &comm {
                        self.balance(comm, generation, number)?;
                    }
                }
                // Messages for a generation that is over.
                Told::Front(
                    ToRank::Step(_)
                    | ToRank::Probe { .. }
                    | ToRank::GoOn { .. }
                    | ToRank::MoveExperts { .. }
                    | ToRank::PlaceExperts { .. }
                    | ToRank::Balance { .. },
                ) => {}
                // What the others do together ends with this rank, and they go on.
                Told::Front(ToRank::Leave) => return Ok(After::End),
                Told::Front(ToRank::End) => break,
                Told::World => {
                    let mut comms = comm.iter().chain([&all]);
                    let fault = comms.find_map(Communicator::fault);
                    if fault.is_some() || !world.departed().is_empty() {
                        return Ok(After::Next(fault.map(Box::new)));
                    }
                }
            }
        }
        world.phase("end");
        // The other ranks finalize as well, unless they are gone, so errors are ignored.
        for comm in comm.iter().chain([&all]) {
            let _ = comm.finalize();
        }
        Ok(After::End)
    }

    /// Gives the decoder this communicator. First loads the part of the model, unless it is already
    /// loaded.
    fn connect(&mut self, world: &World, comm: &Communicator, plan: Option<&Plan>) -> Outcome<()> {
        if let Some(plan) = plan {
            let ranks = self.ranks_with(comm, &plan.now)?;
            match &mut self.decoder {
                // Reads what no rank had.
                Some(decoder) => decoder.renew(ranks)?,
                None => {
                    world.phase("load weights");
                    let settings = self.options.settings;
                    self.decoder = Some(self.file.load_elastic(ranks, settings)?);
                }
            }
            self.holds(comm, &plan.now);
            return Ok(());
        }
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

    /// Connects ranks that have the experts where this says. Each of them may have all rows of a step.
    fn ranks_with(
        &self,
        comm: &Communicator,
        placement: &ExpertPlacement,
    ) -> Outcome<Timed<OverNccl>> {
        let rows = self.options.settings.rows * comm.world_size();
        let shape = self.file.shape(rows);
        let ranks = OverNccl::placed(comm, shape, Some(placement.clone()))?;
        Ok(Timed::new(ranks))
    }

    fn holds(&mut self, comm: &Communicator, placement: &ExpertPlacement) {
        self.held = placement.places_of(comm.rank()).collect();
        self.next = None;
    }

    fn take_loads(&mut self) -> Vec<u64> {
        let decoder = self.decoder.as_mut();
        decoder
            .map(|decoder| decoder.take_loads())
            .unwrap_or_default()
    }

    /// Prepares to move the experts, beside the service.
    fn plan_moves(&mut self, now: usize, next: ExpertPlacement) -> Outcome<Copies> {
        let Some(decoder) = &mut self.decoder else {
            return Err("no model is loaded".into());
        };
        let rounds = decoder.plan_moves(&next, NUMBERS_PER_ROUND)?;
        let planned = fewest(&next);
        self.next = Some(next);
        Ok(Copies {
            now,
            planned,
            rounds: Some(rounds),
        })
    }

    /// Plans the places of the experts anew, by how often each was chosen.
    fn balance(&mut self, comm: &Communicator, generation: u64, number: u64) -> Outcome<()> {
        let (experts, ranks) = (self.file.experts(), comm.world_size());
        let own = self.take_loads();
        let own = self.stream.clone_htod(&own)?;
        let mut all = self.stream.alloc_zeros::<u64>(experts * ranks)?;
        comm.all_gather(&own, &mut all)?.wait()?;
        let all = self.stream.clone_dtoh(&all)?;
        let loads = sum(experts, all.chunks_exact(experts));
        let decoder = self.decoder.as_ref();
        let now = decoder
            .and_then(|decoder| decoder.ranks().placement())
            .cloned();
        let now = now.ok_or("the experts of this model have no places")?;
        let copies = self.options.copies.unwrap_or(1).min(ranks);
        let places = (experts * copies).div_ceil(ranks);
        let next = now.rebalanced(&loads, places, copies)?;
        let imbalance = [now.imbalance(&loads), next.imbalance(&loads)];
        let before = fewest(&now);
        let copies = match next == now || imbalance[1] >= imbalance[0] {
            false => self.plan_moves(before, next)?,
            true => Copies {
                now: before,
                planned: before,
                rounds: None,
            },
        };
        if comm.rank() == 0 {
            self.link.say(&FromRank::Balanced {
                generation,
                number,
                copies,
                imbalance,
            })?;
        }
        Ok(())
    }

    /// Puts the experts where they are to be, together with the other ranks, in the middle of texts.
    fn place_experts(&mut self, comm: &Communicator, generation: u64, number: u64) -> Outcome<()> {
        let Some(next) = self.next.take() else {
            return Err("no other places of the experts are planned".into());
        };
        let ranks = self.ranks_with(comm, &next)?;
        if let Some(decoder) = &mut self.decoder {
            decoder.replace_experts(ranks)?;
        }
        self.holds(comm, &next);
        self.link.say(&FromRank::Placed {
            generation,
            number,
            copies: fewest(&next),
        })?;
        Ok(())
    }

    /// Tells the other ranks which step this one is about to enter, if that is wanted and all ranks of the world take part in steps.
    fn propose(
        &self,
        world: &World,
        comm: Option<&Communicator>,
        step: &Step,
    ) -> Outcome<Option<ProposedStep>> {
        let (Some(timeout), Some(comm)) = (self.options.agree, comm) else {
            return Ok(None);
        };
        if comm.world_size() < world.size() {
            return Ok(None);
        }
        let mut hasher = DefaultHasher::new();
        for row in &step.rows {
            (row.slot, row.position, row.token).hash(&mut hasher);
        }
        let (number, rows, hash) = (step.number, step.rows.len(), hasher.finish());
        let step = format!("step {number}: {rows} rows, {hash:016x}");
        Ok(Some(world.propose_step("step", &step, timeout)?))
    }

    fn step(&mut self, step: &Step, agreement: Option<ProposedStep>) -> Outcome<()> {
        let Some(decoder) = &mut self.decoder else {
            return Ok(());
        };
        if let Some(agreement) = agreement {
            decoder.ranks().propose(agreement);
        }
        let (begun, before) = (Instant::now(), decoder.ranks().spent());
        let rows: Vec<_> = step.rows.iter().map(|row| row.row()).collect();
        let logits = decoder.step(&rows)?;
        self.achieved = true;
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
            generation: step.generation,
            number: step.number,
            tokens,
            seconds: begun.elapsed().as_secs_f64(),
            communicating: communicating.as_secs_f64(),
        })?;
        Ok(())
    }

    /// Shows that the device and the other ranks work, with an all-reduce that counts the ranks.
    fn probe(&mut self, comm: &Communicator, generation: u64, number: u64) -> Outcome<()> {
        let mut ranks = self.stream.clone_htod(&[1u32])?;
        comm.all_reduce_in_place(&mut ranks, ReduceOp::Sum)?
            .wait()?;
        let ranks = self.stream.clone_dtoh(&ranks)?;
        let expected = comm.world_size();
        if usize::try_from(ranks[0])? != expected {
            return Err(format!("{expected} ranks counted {} of them", ranks[0]).into());
        }
        self.achieved = true;
        if comm.rank() == 0 {
            self.link.say(&FromRank::Probed { generation, number })?;
        }
        Ok(())
    }

    /// Returns the fault that ended a communicator, the same on all of its ranks.
    pub(super) fn fault(
        &self,
        world: &World,
        error: &(dyn Error + 'static),
    ) -> Option<Box<nccl::fault::Fault>> {
        let of = |error: &nccl::Error| error.fault().cloned();
        let direct = error.downcast_ref::<nccl::Error>().and_then(of);
        let model = match error.downcast_ref() {
            Some(model::Error::Nccl(error)) => of(error),
            _ => None,
        };
        direct.or(model).or_else(|| world.fault()).map(Box::new)
    }
}
