//! What happens to a job, drawn at random from a seed.

use std::fmt;

use nccl_control::proto::MILLI;

/// One thing that happens. Processes are named by the slot in which they began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    Kill(usize),
    /// It dies after so many more frames.
    Fuse(usize, u32),
    Freeze(usize),
    Thaw(usize),
    /// Packets from the first kernel to the second are dropped or rejected.
    Cut {
        from: usize,
        to: usize,
        rejects: bool,
    },
    Heal {
        from: usize,
        to: usize,
    },
    /// All connections between two processes end.
    Reset(usize, usize),
    Restart(usize),
    Say(usize),
    Tell(usize, usize),
    GoOn(usize),
    Jump(usize, u64),
    Leave(usize),
}

impl Step {
    /// Its place in the histogram.
    pub(crate) fn kind(&self) -> usize {
        match self {
            Self::Kill(_) => 0,
            Self::Fuse(..) => 1,
            Self::Freeze(_) => 2,
            Self::Thaw(_) => 3,
            Self::Cut { rejects: false, .. } => 4,
            Self::Cut { rejects: true, .. } => 5,
            Self::Heal { .. } => 6,
            Self::Reset(..) => 7,
            Self::Restart(_) => 8,
            Self::Say(_) => 9,
            Self::Tell(..) => 10,
            Self::GoOn(_) => 11,
            Self::Jump(..) => 12,
            Self::Leave(_) => 13,
        }
    }
}

/// The names of the kinds of steps.
pub(crate) const KINDS: [&str; 14] = [
    "kill",
    "kill between two sends",
    "freeze",
    "thaw",
    "one way drops",
    "one way rejects",
    "one way heals",
    "reset",
    "restart",
    "say",
    "tell",
    "go on",
    "clock jumps",
    "leave",
];

/// A job and what happens to it.
#[derive(Clone)]
pub(crate) struct Schedule {
    pub(crate) seed: u64,
    /// The kernel of each slot.
    pub(crate) kernels: Vec<usize>,
    pub(crate) launcher: bool,
    /// Whether the job has a `Discovery` that decides between two halves.
    pub(crate) claims: bool,
    /// Whether programs go on when they hear of a fault, and whether they leave others behind.
    pub(crate) goes_on: bool,
    pub(crate) leaves_behind: bool,
    /// Times are from the moment at which the first generation is active.
    pub(crate) steps: Vec<(u64, Step)>,
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seed,
            kernels,
            launcher,
            claims,
            goes_on,
            leaves_behind,
            steps,
        } = self;
        writeln!(
            f,
            "seed {seed}: kernels {kernels:?}, launcher {launcher}, claims {claims}, goes on {goes_on}, leaves behind {leaves_behind}"
        )?;
        for (time, step) in steps {
            writeln!(f, "  {:>9.3} ms {step:?}", *time as f64 / MILLI as f64)?;
        }
        Ok(())
    }
}

impl Schedule {
    pub(crate) fn draw(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let size = random.usize(2..=7);
        let layout = random.u8(0..4);
        let kernels: Vec<_> = (0..size)
            .map(|slot| match layout {
                0 => 0,
                1 => slot,
                2 => usize::from(slot >= size / 2),
                _ => slot * 3 / size,
            })
            .collect();
        let many = kernels.iter().max().map_or(1, |most| most + 1);
        let mut steps = Vec::new();
        let mut time = 0;
        for _ in 0..random.u8(1..=5) {
            // Many things at once, or one after another, or much later.
            time += match random.u8(0..6) {
                0..=2 => random.u64(0..3 * MILLI),
                3 | 4 => random.u64(0..1500) * MILLI,
                _ => random.u64(1000..9000) * MILLI,
            };
            let one = match random.bool() {
                true => 0,
                false => random.usize(0..size),
            };
            let other = random.usize(0..size);
            match random.u8(0..20) {
                0..=3 => steps.push((time, Step::Kill(one))),
                4..=6 => steps.push((time, Step::Fuse(one, random.u32(0..40)))),
                7 | 8 => {
                    steps.push((time, Step::Freeze(one)));
                    if random.u8(0..4) > 0 {
                        let long = match random.bool() {
                            true => random.u64(10..3000),
                            false => random.u64(3000..20000),
                        };
                        steps.push((time + long * MILLI, Step::Thaw(one)));
                    }
                }
                9..=12 if many > 1 => {
                    let side = random.u32(1..(1 << many) - 1);
                    let is_here = |kernel: &usize| side & (1 << kernel) != 0;
                    let rejects = random.u8(0..3) == 0;
                    let one_way = random.u8(0..5) == 0;
                    let heals = match random.u8(0..3) {
                        0 => None,
                        1 => Some(random.u64(50..2900)),
                        _ => Some(random.u64(2900..15000)),
                    };
                    for from in 0..many {
                        for to in 0..many {
                            if is_here(&from) == is_here(&to) || (one_way && is_here(&from)) {
                                continue;
                            }
                            steps.push((time, Step::Cut { from, to, rejects }));
                            if let Some(heals) = heals {
                                steps.push((time + heals * MILLI, Step::Heal { from, to }));
                            }
                        }
                    }
                }
                9..=12 => steps.push((time, Step::Kill(one))),
                13 | 14 => steps.push((time, Step::Reset(one, other))),
                15 => {
                    steps.push((time, Step::Kill(one)));
                    let later = random.u64(1..4000) * MILLI;
                    steps.push((time + later, Step::Restart(one)));
                }
                16 => steps.push((time, Step::Say(other))),
                17 => steps.push((time, Step::GoOn(other))),
                18 => steps.push((time, Step::Jump(one, random.u64(100..20000) * MILLI))),
                _ => steps.push((time, Step::Leave(other))),
            }
            if random.bool() {
                steps.push((time + random.u64(0..2 * MILLI), Step::Say(other)));
                steps.push((
                    time + random.u64(0..2 * MILLI),
                    Step::Tell(other, random.usize(0..size)),
                ));
            }
        }
        steps.sort_by_key(|(time, _)| *time);
        Self {
            seed,
            kernels,
            launcher: random.u8(0..3) == 0,
            claims: random.u8(0..4) == 0,
            goes_on: random.u8(0..4) > 0,
            leaves_behind: random.bool(),
            steps,
        }
    }
}
