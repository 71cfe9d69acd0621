//! Tests of the method: the ranks are threads, and the collective is a copy through shared vectors.

use std::sync::{Arc, Barrier};

use parking_lot::Mutex;

use super::*;
use crate::algorithm::Algorithm;
use crate::element;
use crate::options::{Algorithms, Command, Options, parse};
use crate::program;
use crate::verify::Source;

struct Board {
    barrier: Barrier,
    gathered: Mutex<Vec<Vec<u8>>>,
    sent: Mutex<Vec<Vec<u8>>>,
}

struct ThreadRank {
    rank: usize,
    size: usize,
    board: Arc<Board>,
}

impl Ranks for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn barrier(&self) -> Result<(), Failure> {
        self.board.barrier.wait();
        Ok(())
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        self.board.gathered.lock()[self.rank] = bytes.to_vec();
        self.board.barrier.wait();
        let all = self.board.gathered.lock().clone();
        self.board.barrier.wait();
        Ok(all)
    }
}

/// The calls that a rank's collective received.
#[derive(Default)]
struct Asked {
    meetings: usize,
    shifts: Vec<Vec<u64>>,
    finishes: usize,
    marks: Vec<usize>,
    /// The captures, and how often they were launched and released.
    captured: Vec<Vec<Vec<u64>>>,
    launches: usize,
    prepared: Option<Shape>,
    releases: usize,
    copies: u64,
}

struct Vectors {
    /// The operations of a launch.
    graph: Option<(Shape, Placement, Vec<Vec<u64>>)>,
    rank: usize,
    size: usize,
    board: Arc<Board>,
    buffers: [Vec<u8>; 2],
    asked: Asked,
    /// Spoil the nth verified operation on this rank.
    spoil: Option<u64>,
    verified: u64,
}

impl Vectors {
    fn sides(placement: Placement) -> (usize, usize) {
        match placement {
            Placement::OutOfPlace => (0, 1),
            Placement::InPlace => (1, 1),
        }
    }
}

impl Collective for Vectors {
    fn shape(&self, bytes: u64, case: Case) -> Shape {
        Shape::split(bytes, case, self.size)
    }

    fn prepare(&mut self, shape: Shape) -> Result<(), Failure> {
        self.asked.prepared = Some(shape);
        Ok(())
    }

    fn capture(
        &mut self,
        shape: Shape,
        placement: Placement,
        iterations: &[Vec<u64>],
    ) -> Result<(), Failure> {
        assert!(self.graph.is_none(), "one at a time");
        self.asked.captured.push(iterations.to_vec());
        self.graph = Some((shape, placement, iterations.to_vec()));
        Ok(())
    }

    fn launch(&mut self) -> Result<(), Failure> {
        self.asked.launches += 1;
        let (shape, placement, iterations) = self.graph.clone().unwrap();
        for shifts in iterations {
            self.start(shape, placement, &shifts)?;
        }
        Ok(())
    }

    fn release(&mut self) -> Result<(), Failure> {
        assert!(self.graph.take().is_some());
        self.asked.releases += 1;
        Ok(())
    }

    fn notes(&self, shape: Shape, _: f64) -> Vec<String> {
        vec![format!("{} B", shape.bytes)]
    }

    fn fill(&mut self, shape: Shape, placement: Placement, repetition: u64) -> Result<(), Failure> {
        let (send, recv) = Self::sides(placement);
        let total = shape.bytes as usize;
        self.buffers[recv][..total].fill(0);
        Source::new(repetition, self.rank).fill(0, &mut self.buffers[send][..total]);
        Ok(())
    }

    fn start(&mut self, shape: Shape, placement: Placement, shifts: &[u64]) -> Result<(), Failure> {
        assert_eq!(
            self.asked.prepared,
            Some(shape),
            "it comes before the operations"
        );
        self.asked.shifts.push(shifts.to_vec());
        let (send, recv) = Self::sides(placement);
        let (total, part) = (shape.bytes as usize, shape.part_bytes() as usize);
        for &shift in shifts {
            let shift = shift as usize;
            let sent = self.buffers[send][shift..shift + total].to_vec();
            self.board.sent.lock()[self.rank] = sent;
            self.board.barrier.wait();
            for peer in 0..shape.ranks {
                let sent = &self.board.sent.lock()[peer];
                let from = &sent[self.rank * part..(self.rank + 1) * part];
                let to = shift + peer * part;
                self.buffers[recv][to..to + part].copy_from_slice(from);
            }
            self.board.barrier.wait();
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Failure> {
        self.asked.finishes += 1;
        Ok(())
    }

    fn count_wrong(
        &mut self,
        shape: Shape,
        placement: Placement,
        repetition: u64,
    ) -> Result<u64, Failure> {
        let (_, recv) = Self::sides(placement);
        let part = shape.part_bytes() as usize;
        if self.spoil == Some(self.verified) && part > 0 {
            self.buffers[recv][part - 1] ^= 1;
        }
        self.verified += 1;
        let wrong = (0..shape.ranks).map(|peer| {
            let received = &self.buffers[recv][peer * part..(peer + 1) * part];
            let start = (self.rank * part) as u64;
            Source::new(repetition, peer).count_wrong(start, received, shape.element().size)
        });
        Ok(wrong.sum())
    }

    fn mark(&mut self, index: usize) -> Result<(), Failure> {
        self.asked.marks.push(index);
        Ok(())
    }

    fn seconds_between(&mut self, from: usize, to: usize) -> Result<f64, Failure> {
        assert!(self.asked.marks.contains(&from) && self.asked.marks.contains(&to));
        Ok((to - from) as f64 * 0.125 * (self.rank + 1) as f64)
    }

    fn copy(&mut self, _bytes: u64, _shift: u64) -> Result<(), Failure> {
        self.asked.copies += 1;
        std::thread::sleep(std::time::Duration::from_micros(200));
        Ok(())
    }

    fn align(&mut self) -> Result<(), Failure> {
        self.asked.meetings += 1;
        Ok(())
    }

    fn finish_copies(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

#[derive(Default)]
struct Rows {
    rows: Vec<Row>,
    tables: Vec<Option<&'static str>>,
}

impl Reporter for Rows {
    fn progress(&mut self, row: usize, rows: usize, _: Shape, _: &str) {
        assert!(row <= rows);
    }

    fn table(&mut self, algorithm: Option<&'static Algorithm>) -> Result<(), Failure> {
        self.tables.push(algorithm.map(|algorithm| algorithm.name));
        Ok(())
    }

    fn row(&mut self, row: &Row) -> Result<(), Failure> {
        self.rows.push(row.clone());
        Ok(())
    }
}

fn options(line: &str) -> Options {
    match parse(&program::ALL_TO_ALL, line.split_whitespace()) {
        Ok(Command::Run(options)) => *options,
        other => panic!("{other:?}"),
    }
}

struct Outcome {
    rows: Vec<Row>,
    tables: Vec<Option<&'static str>>,
    totals: Totals,
    asked: Asked,
}

/// Runs a sweep on `size` threads; rank 1 spoils its `spoil`-th verified operation.
fn run(size: usize, line: &str, spoil: Option<u64>) -> Vec<Outcome> {
    let options = options(line);
    let elements = options
        .element
        .map_or(element::ALL.to_vec(), |element| vec![element]);
    let algorithms = match &options.algorithms {
        Algorithms::Named(algorithms) => algorithms.iter().copied().map(Some).collect(),
        _ => vec![None],
    };
    let cases = Case::all(&algorithms, &elements, &[None]);
    let board = Arc::new(Board {
        barrier: Barrier::new(size),
        gathered: Mutex::new(vec![Vec::new(); size]),
        sent: Mutex::new(vec![Vec::new(); size]),
    });
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let (options, cases) = (&options, &cases);
                let board = Arc::clone(&board);
                scope.spawn(move || {
                    let setting = Setting { options, cases };
                    let bytes = setting.buffer_bytes() as usize;
                    let mut vectors = Vectors {
                        graph: None,
                        rank,
                        size,
                        board: Arc::clone(&board),
                        buffers: [vec![0; bytes], vec![0; bytes]],
                        asked: Asked::default(),
                        spoil: spoil.filter(|_| rank == 1),
                        verified: 0,
                    };
                    let ranks = ThreadRank { rank, size, board };
                    let mut rows = Rows::default();
                    let totals = sweep(setting, &ranks, &mut vectors, &mut rows).unwrap();
                    Outcome {
                        rows: rows.rows,
                        tables: rows.tables,
                        totals,
                        asked: vectors.asked,
                    }
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

#[test]
fn every_size_of_every_type_is_measured_twice_and_verified() {
    let outcomes = run(3, "-b 16 -e 1K -f 4 -d all -n 2 --memcpy_ratio 0", None);
    let rows = &outcomes[0].rows;
    assert_eq!(rows.len(), 4 * element::ALL.len());
    for row in rows {
        assert_eq!(row.out_of_place.wrong, Some(0), "{row:?}");
        assert_eq!(row.in_place.wrong, Some(0), "{row:?}");
        assert!(row.out_of_place.seconds > 0.0);
    }
    assert_eq!(outcomes[0].totals.out_of_bounds, 0);
    assert_eq!(outcomes[0].totals, outcomes[2].totals);
}

#[test]
fn all_ranks_compute_the_same_times() {
    let outcomes = run(2, "-b 1K -e 1K -n 3 --memcpy_ratio 0", None);
    let seconds = |outcome: &Outcome| outcome.rows[0].out_of_place.seconds;
    assert_eq!(seconds(&outcomes[0]), seconds(&outcomes[1]));
}

#[test]
fn a_wrong_element_on_any_rank_is_seen_by_all() {
    // Verified operations alternate: out of place, in place; the fourth is in place at the 2nd size.
    let outcomes = run(3, "-b 64 -e 128 -n 1 --memcpy_ratio 0", Some(3));
    for outcome in &outcomes {
        assert_eq!(outcome.rows[0].in_place.wrong, Some(0));
        assert_eq!(outcome.rows[1].out_of_place.wrong, Some(0));
        assert_eq!(outcome.rows[1].in_place.wrong, Some(1));
        assert_eq!(outcome.totals.out_of_bounds, 1);
    }
}

#[test]
fn without_checks_nothing_is_verified() {
    let outcomes = run(2, "-b 64 -e 64 -n 1 -c 0 --memcpy_ratio 0", Some(0));
    assert_eq!(outcomes[0].rows[0].out_of_place.wrong, None);
    assert_eq!(outcomes[0].totals.out_of_bounds, 0);
}

#[test]
fn iterations_walk_through_the_buffer() {
    let outcomes = run(2, "-b 64 -e 256 -f 4 -n 5 -w 0 -c 0 --memcpy_ratio 0", None);
    let shifts: Vec<u64> = outcomes[0].asked.shifts[..6].iter().map(|s| s[0]).collect();
    // One untimed, then five: 64 bytes in a buffer of 256.
    assert_eq!(shifts, [0, 0, 64, 128, 192, 0]);
}

#[test]
fn operations_of_a_group_never_share_a_place() {
    for line in [
        "-b 64 -e 256 -m 3 -n 4",
        "-b 256 -e 256 -m 5 -n 2",
        "-b 32 -e 1000 -m 2 -n 3",
    ] {
        let outcomes = run(2, &format!("{line} --memcpy_ratio 0"), None);
        for shifts in &outcomes[0].asked.shifts {
            let mut distinct = shifts.clone();
            distinct.dedup();
            assert_eq!(distinct.len(), shifts.len(), "{line}: {shifts:?}");
        }
        assert_eq!(outcomes[0].rows[0].out_of_place.wrong, Some(0), "{line}");
    }
}

#[test]
fn blocking_waits_as_often_as_nccl_tests() {
    let finishes = |line: &str| {
        let line = format!("-b 64 -e 64 -n 5 -w 0 -c 0 --memcpy_ratio 0 {line}");
        run(2, &line, None)[0].asked.finishes
    };
    // Once for the warm-up of the size; then per placement one untimed and the timed ones.
    assert_eq!(finishes("-z 0"), 1 + 2 * (1 + 1));
    for blocking in 1..=3 {
        assert_eq!(
            finishes(&format!("-z {blocking}")),
            1 + 2 * (1 + 5),
            "{blocking}"
        );
    }
}

#[test]
fn iterations_are_reported_by_the_slowest_rank() {
    for (blocking, marks) in [(0, 5), (3, 8)] {
        let line = format!("-b 64 -e 64 -n 4 -I 1 -K 1 -z {blocking} -c 0 --memcpy_ratio 0");
        let outcomes = run(3, &line, None);
        let measured = &outcomes[0].rows[0].out_of_place;
        let iterations = measured.per_iteration.as_ref().unwrap();
        assert_eq!(iterations.longest, [0.375; 4]);
        assert_eq!(iterations.by_rank[0], [0.125; 4]);
        assert_eq!(iterations.summary.mean, 0.375);
        assert_eq!(outcomes[0].asked.marks.len(), 2 * marks, "-z {blocking}");
    }
}

#[test]
fn a_graph_holds_all_iterations_and_is_launched_as_often_as_asked_for() {
    let outcomes = run(2, "-b 64 -e 64 -n 3 -m 2 -w 0 -G 5", None);
    let row = &outcomes[0].rows[0];
    assert_eq!(
        (row.out_of_place.wrong, row.in_place.wrong),
        (Some(0), Some(0))
    );
    assert_eq!(row.ratio, None);
    let asked = &outcomes[0].asked;
    let timed = vec![vec![0, 64]; 3];
    let verified = vec![vec![0]];
    assert_eq!(
        asked.captured,
        [&timed, &verified, &timed, &verified].map(Vec::clone)
    );
    assert_eq!((asked.launches, asked.releases), (2 * (5 + 1), 4));
}

#[test]
fn a_graph_that_moves_wrong_data_is_noticed() {
    let outcomes = run(2, "-b 64 -e 64 -n 3 -G 2", Some(1));
    let row = &outcomes[0].rows[0];
    assert_eq!(
        (row.out_of_place.wrong, row.in_place.wrong),
        (Some(0), Some(1))
    );
}

#[test]
fn each_algorithm_has_a_table_with_all_sizes_of_all_types() {
    let line = "-b 64 -e 128 -n 1 -d all --algo grouped,native --memcpy_ratio 0";
    let outcomes = run(2, line, None);
    assert_eq!(outcomes[0].tables, [Some("grouped"), Some("native")]);
    let rows = &outcomes[0].rows;
    assert_eq!(rows.len(), 2 * 2 * element::ALL.len());
    let algorithm = |row: &Row| row.shape.case.algorithm.map(|algorithm| algorithm.name);
    assert!(
        rows[..rows.len() / 2]
            .iter()
            .all(|row| algorithm(row) == Some("grouped"))
    );
    assert!(
        rows[rows.len() / 2..]
            .iter()
            .all(|row| algorithm(row) == Some("native"))
    );
    // The notes beside a row: once for each placement.
    assert_eq!(rows[0].notes, ["64 B", "64 B"]);
}

#[test]
fn a_copy_is_compared_on_all_ranks_alike() {
    let outcomes = run(2, "-b 8 -e 1K -f 128 -n 2", None);
    assert_eq!(
        outcomes[0].rows[0].ratio, None,
        "8 bytes for two ranks are nothing"
    );
    let ratio = outcomes[0].rows[1].ratio.unwrap();
    assert!(ratio.copy_seconds >= 2e-4, "{ratio:?}");
    assert!(
        ratio.lowest <= ratio.ratio && ratio.ratio <= ratio.highest,
        "{ratio:?}"
    );
    assert!(
        ratio.ratio < 1.0,
        "copying sleeps, the collective does not: {ratio:?}"
    );
    assert_eq!(outcomes[1].rows[1].ratio, Some(ratio));
    assert!(outcomes[1].asked.copies > 0);
}

#[test]
fn the_ways_to_average_are_those_of_nccl_tests() {
    let times = [3.0, 1.0, 5.0];
    assert_eq!(Average::RankZero.of(&times), 3.0);
    assert_eq!(Average::Mean.of(&times), 3.0);
    assert_eq!(Average::Min.of(&times), 1.0);
    assert_eq!(Average::Max.of(&times), 5.0);
}
