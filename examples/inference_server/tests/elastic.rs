//! The model laid out by requests: on any number of ranks, with any placement of the experts, the logits are bitwise equal to
//! those of a single process.

mod support;

use std::path::Path;

use inference_server::model::{
    Alone, Elastic, Logits, OverNccl, Part, Result, Row, Shape, SlotOwner, WeightsFile,
};
use nccl::World;
use nccl::moe::ExpertPlacement;
use support::{Model, SETTINGS, bits, config, rows, text};

type Outcome = std::result::Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Some steps of several mixed requests, in which some ranks have no rows; returns the logits of each row.
fn several_steps(mut take: impl FnMut(&[Row]) -> Result<Logits>) -> Vec<Vec<u32>> {
    let texts: Vec<_> = (0..8).map(|seed| text(seed, 40)).collect();
    let rows = |slot: usize, from: usize, to: usize| rows(slot, from, &texts[slot][from..to]);
    let steps = [
        rows(0, 0, 7),
        // As many rows as a step has room for, most of them for one rank.
        [rows(0, 7, 8), rows(1, 0, 23)].concat(),
        [rows(7, 0, 3), rows(0, 8, 9), rows(3, 0, 9), rows(1, 23, 26)].concat(),
        Vec::new(),
        [rows(0, 9, 30), rows(4, 0, 2)].concat(),
        (0..8)
            .flat_map(|slot| match slot {
                0 | 1 | 3 | 4 | 7 => rows(
                    slot,
                    [30, 26, 0, 9, 2, 0, 0, 3][slot],
                    [31, 27, 0, 10, 3, 0, 0, 4][slot],
                ),
                _ => rows(slot, 0, 2),
            })
            .collect(),
    ];
    let mut all = Vec::new();
    for step in steps {
        let logits = take(&step).unwrap();
        all.extend((0..step.len()).map(|row| bits(logits.row(row).unwrap())));
    }
    all
}

/// Runs `work` on `ranks` ranks that are threads, with a communicator of all ranks.
fn on_threads(ranks: usize, work: impl Fn(&World, &nccl::Communicator) -> Outcome + Sync) {
    nccl_emulator::install_unless_gpu().unwrap();
    std::thread::scope(|scope| {
        for world in World::threads(ranks) {
            let work = &work;
            scope.spawn(move || {
                let stream = nccl::device(world.local_rank())
                    .unwrap()
                    .new_stream()
                    .unwrap();
                let comm = world.communicator("model").stream(&stream).build().unwrap();
                work(&world, &comm).unwrap();
                comm.finalize().unwrap();
            });
        }
    });
    let violations = nccl_emulator::violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

fn placed(
    path: &Path,
    comm: &nccl::Communicator,
    placement: &ExpertPlacement,
) -> inference_server::model::Result<OverNccl> {
    let file = WeightsFile::open(path)?;
    // As many rows for each rank as a step has.
    let shape = Shape::new(file.config(), SETTINGS.rows * comm.world_size());
    OverNccl::placed(comm, shape, Some(placement.clone()))
}

fn alone(model: &Model) -> Vec<Vec<u32>> {
    let mut alone = model.alone(SETTINGS);
    several_steps(|rows| alone.step(rows))
}

#[test]
fn any_number_of_ranks_and_any_placement_give_the_logits_of_a_single_process() {
    let model = Model::new(&config());
    let expected = alone(&model);
    let file = WeightsFile::open(model.path()).unwrap();
    let one = Alone::new(Shape::new(file.config(), SETTINGS.rows));
    let mut part = Elastic::load(&file, one, SETTINGS).unwrap();
    let found = several_steps(|rows| part.step(rows));
    assert!(found == expected, "one rank without a library");
    let path = model.path();
    for (ranks, copies) in [(1, 1), (2, 1), (3, 2), (5, 3), (7, 2), (8, 2)] {
        let per_rank = (8_usize * copies).div_ceil(ranks);
        let loads = [9, 1, 1, 1, 4, 1, 1, 1];
        let placement = ExpertPlacement::balanced(&loads, ranks, per_rank, copies).unwrap();
        on_threads(ranks, |world, comm| {
            let file = WeightsFile::open(&path)?;
            let mut part = Elastic::load(&file, placed(&path, comm, &placement)?, SETTINGS)?;
            let found = several_steps(|rows| part.step(rows));
            assert!(found == expected, "rank {} of {ranks}", world.rank());
            Ok(())
        });
    }
}

#[test]
fn experts_move_between_steps_in_the_middle_of_texts() {
    let model = Model::new(&config());
    let expected = alone(&model);
    let path = model.path();
    on_threads(3, |world, comm| {
        let file = WeightsFile::open(&path)?;
        let placement = ExpertPlacement::balanced(&[1; 8], 3, 4, 1)?;
        let mut part = Elastic::load(&file, placed(&path, comm, &placement)?, SETTINGS)?;
        let mut random = fastrand::Rng::with_seed(4);
        // An expert has 4,608 numbers.
        let mut most = [901, 1 << 30, 5000].into_iter();
        let (mut planned, mut moved) = (None, 0);
        let found = several_steps(|rows| {
            let logits = part.step(rows)?;
            match planned.take() {
                None => {
                    let loads: Vec<_> = (0..8).map(|_| random.u64(..1000)).collect();
                    let next = ExpertPlacement::balanced(&loads, 3, 4, 1)?;
                    let rounds = part.plan_moves(&next, most.next().unwrap_or(1))?;
                    assert!(rounds > 0);
                    // All rounds but one, before the next step.
                    for _ in 1..rounds {
                        part.move_experts()?;
                    }
                    moved += rounds;
                    planned = Some(next);
                }
                Some(next) => {
                    part.move_experts()?;
                    part.replace_experts(placed(&path, comm, &next)?)?;
                }
            }
            Ok(logits)
        });
        assert!(moved > 8, "{moved} rounds");
        assert!(found == expected, "rank {}", world.rank());
        Ok(())
    });
}

#[test]
fn what_has_arrived_is_not_read_from_the_file() {
    let model = Model::new(&config());
    let expected = alone(&model);
    // A file with other experts.
    let other = Model::changed(&config(), |numbers| {
        let experts = numbers
            .iter_mut()
            .filter(|(name, _)| name.contains(".experts."));
        experts.for_each(|(_, numbers)| numbers.fill(0.5));
    });
    let paths = [model.path(), other.path()];
    let one = [(0..8).map(Some).collect(), vec![None; 8]].concat();
    let one = ExpertPlacement::new(8, 8, &one).unwrap();
    let both = one.rebalanced(&[1; 8], 8, 2).unwrap();
    on_threads(2, |world, comm| {
        let path = &paths[world.rank()];
        let file = WeightsFile::open(path)?;
        let mut part = Elastic::load(&file, placed(path, comm, &one)?, SETTINGS)?;
        for _ in 0..part.plan_moves(&both, 1000)? {
            part.move_experts()?;
        }
        part.replace_experts(placed(path, comm, &both)?)?;
        let found = several_steps(|rows| part.step(rows));
        assert!(found == expected, "rank {}", world.rank());
        Ok(())
    });
}

#[test]
fn loads_are_how_often_experts_were_chosen() {
    let model = Model::new(&config());
    let file = WeightsFile::open(model.path()).unwrap();
    let one = Alone::new(Shape::new(file.config(), SETTINGS.rows));
    let mut part = Elastic::load(&file, one, SETTINGS).unwrap();
    assert_eq!(part.take_loads(), [0; 8]);
    part.step(&rows(0, 0, &text(1, 20))).unwrap();
    let loads = part.take_loads();
    // Each row chooses two experts in each of two layers.
    assert_eq!(loads.iter().sum::<u64>(), 20 * 2 * 2);
    let halves: Vec<_> = loads.iter().map(|load| load / 2).collect();
    assert_eq!(part.take_loads(), halves);
}

#[test]
fn those_that_are_left_begin_again_with_the_copies_that_they_have() {
    let model = Model::new(&config());
    let expected = alone(&model);
    let path = model.path();
    on_threads(4, |world, comm| {
        let before = ExpertPlacement::balanced(&[1; 8], 4, 4, 2)?;
        let file = WeightsFile::open(&path)?;
        let mut part = Elastic::load(&file, placed(&path, comm, &before)?, SETTINGS)?;
        part.step(&rows(0, 0, &text(9, 5)))?;
        let others = comm.split("left", (world.rank() != 1).then_some(0), 0)?;
        let Some(others) = others else { return Ok(()) };
        let after = before.after(&[Some(0), Some(2), Some(3)])?;
        assert!(after.missing().is_empty());
        // Renewing needs no file, because no expert has to be read.
        part.renew(placed(&path, &others, &after)?)?;
        assert!(
            several_steps(|rows| part.step(rows)) == expected,
            "rank {}",
            world.rank()
        );
        others.finalize()?;
        Ok(())
    });
}

#[test]
fn slots_of_ranks_that_stay_keep_their_texts() {
    let model = Model::new(&config());
    let path = model.path();
    let texts: Vec<_> = (0..4).map(|seed| text(seed, 13)).collect();
    let first: Vec<_> = (0..4)
        .flat_map(|slot| rows(slot, 0, &texts[slot][..5]))
        .collect();
    let more: Vec<_> = (0..4)
        .flat_map(|slot| rows(slot, 5, &texts[slot][5..9]))
        .collect();
    let mut alone = model.alone(SETTINGS);
    alone.step(&first).unwrap();
    alone.step(&more).unwrap();
    let last: Vec<_> = (0..4)
        .flat_map(|slot| rows(slot, 9, &texts[slot][9..]))
        .collect();
    let logits = alone.step(&last).unwrap();
    let expected: Vec<_> = (0..16).map(|row| bits(logits.row(row).unwrap())).collect();
    on_threads(4, |world, comm| {
        let before = ExpertPlacement::balanced(&[1; 8], 4, 4, 2)?;
        let file = WeightsFile::open(&path)?;
        let mut part = Elastic::load(&file, placed(&path, comm, &before)?, SETTINGS)?;
        assert_eq!(part.cached(), []);
        part.step(&first)?;
        part.step(&more)?;
        assert_eq!(part.cached(), [(world.rank(), 9)]);
        let others = comm.split("left", (world.rank() != 1).then_some(0), 0)?;
        let Some(others) = others else { return Ok(()) };
        let after = before.after(&[Some(0), Some(2), Some(3)])?;
        part.renew(placed(&path, &others, &after)?)?;
        let owner = |rank, positions| SlotOwner { rank, positions };
        assert!(part.give_slots(&[owner(0, 0); 7]).is_err());
        assert!(part.give_slots(&[owner(3, 0); 8]).is_err());
        // Slot 1 is lost, and another rank recomputes it.
        let mut slots = [owner(0, 9), owner(0, 0), owner(1, 9), owner(2, 9)].to_vec();
        slots.resize(8, owner(1, 0));
        part.give_slots(&slots)?;
        part.step(&rows(1, 0, &texts[1][..9]))?;
        let logits = part.step(&last)?;
        let found: Vec<_> = (0..16).map(|row| bits(logits.row(row).unwrap())).collect();
        assert!(found == expected, "rank {}", world.rank());
        assert_eq!(part.cached().len(), [2, 1, 1][others.rank()]);
        others.finalize()?;
        Ok(())
    });
}

#[test]
fn a_model_without_copies_says_so() {
    let model = Model::new(&config());
    let file = WeightsFile::open(model.path()).unwrap();
    let alone = || Alone::new(Shape::new(file.config(), SETTINGS.rows));
    let error = model.alone(SETTINGS).replace_experts(alone()).unwrap_err();
    assert!(error.to_string().contains("belong to its rank"), "{error}");
}
