//! One row of the table: what happens, what every rank that lives has to be told, and within what.

use std::fmt::Write as _;
use std::time::Duration;

use nccl::FaultClass;

use crate::actor::Actor;
use crate::stage::{Stage, Unable};

/// A limit of operations that is meant to pass.
pub(crate) const SHORT: Duration = Duration::from_secs(1);
/// A limit that is not meant to pass: what ends before it was told by somebody.
pub(crate) const LONG: Duration = Duration::from_secs(40);

/// Who takes part.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cast {
    /// So many processes, whose parent says nothing.
    Processes(usize),
    /// So many, started by `nccl::launch`, which tells how they ended.
    Fleet(usize),
    /// So many on each host, which are network namespaces.
    Hosts(&'static [usize]),
}

impl Cast {
    pub(crate) fn ranks(self) -> usize {
        match self {
            Self::Processes(ranks) | Self::Fleet(ranks) => ranks,
            Self::Hosts(hosts) => hosts.iter().sum(),
        }
    }
}

/// What is to come of it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ends {
    /// Every rank that lives is told this, the same on all.
    Cause {
        /// The ranks of which one is at fault, whichever it is; none where no rank is to be named as the culprit.
        culprits: &'static [usize],
        class: FaultClass,
        /// `RootCause`, as its form for serde names it.
        root: &'static str,
        /// What the cause says, among other things.
        says: &'static [&'static str],
    },
    /// A call fails with this, on these ranks; nothing else happens.
    Refused {
        on: &'static [usize],
        says: &'static [&'static str],
    },
    /// Nothing.
    Nothing,
}

impl Ends {
    /// A process is gone, and with this every rank is told so.
    pub(crate) const fn died(culprits: &'static [usize], says: &'static [&'static str]) -> Self {
        Self::Cause {
            culprits,
            class: FaultClass::Gone,
            root: "died",
            says,
        }
    }

    /// A limit passes, and this is why.
    pub(crate) const fn timed_out(
        root: &'static str,
        culprits: &'static [usize],
        says: &'static [&'static str],
    ) -> Self {
        Self::Cause {
            culprits,
            class: FaultClass::TimedOut,
            root,
            says,
        }
    }
}

/// With what those who live show that they are usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// `World::next_epoch`, without those that are gone.
    Epoch,
    /// `World::next_epoch_leaving_behind`.
    Behind,
    /// Another communicator of the same ranks in the same world.
    Again,
    /// `Communicator::shrink` without those that are gone, in the same world.
    Shrink,
    /// The communicator that they have.
    Same,
}

/// What comes of a row on NVIDIA's own library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnNvidias {
    /// The same as on the emulator's own NCCL.
    Same,
    /// Something else, and what.
    Differs(&'static str),
    /// It is not tried, and why.
    NotTried(&'static str),
}

/// What is done to the ranks from outside.
pub(crate) type Harm = fn(&mut Stage) -> Result<(), Unable>;

pub(crate) struct Row {
    /// Its name, by which it can be run alone.
    pub(crate) name: &'static str,
    pub(crate) fault: &'static str,
    pub(crate) cast: Cast,
    /// Of operations.
    pub(crate) limit: Duration,
    /// In the environment of the ranks.
    pub(crate) variables: &'static [(&'static str, &'static str)],
    /// Whether the ranks have a communicator, that has worked, before it begins.
    pub(crate) built: bool,
    /// What a rank does; an error is how it ended.
    pub(crate) play: fn(&Actor) -> nccl::Result<()>,
    /// What is done to the ranks; otherwise they say themselves when it begins.
    pub(crate) harm: Option<Harm>,
    pub(crate) ends: Ends,
    /// Those that do not live to tell it, or cannot.
    pub(crate) lost: &'static [usize],
    /// Those that are told as all are, and end then: nothing more can be done in their process.
    pub(crate) leave: &'static [usize],
    /// Those that are cut off from the others, and what they are told.
    pub(crate) aside: &'static [usize],
    pub(crate) aside_says: &'static str,
    /// From the fault until the last rank that lives has its error.
    pub(crate) bound: Duration,
    pub(crate) then: Then,
    pub(crate) on_nvidias: OnNvidias,
    /// What is not right yet; such a row is not run unless it is asked for.
    pub(crate) not_yet: Option<&'static str>,
}

/// A row in which three processes work, and which ends for all at once.
pub(crate) const ROW: Row = Row {
    name: "",
    fault: "",
    cast: Cast::Processes(3),
    limit: LONG,
    variables: &[],
    built: true,
    play: Actor::work,
    harm: None,
    ends: Ends::Nothing,
    lost: &[],
    leave: &[],
    aside: &[],
    aside_says: "",
    bound: Duration::from_secs(2),
    then: Then::Again,
    on_nvidias: OnNvidias::Same,
    not_yet: None,
};

impl Row {
    /// What a table has of it.
    pub(crate) fn line(&self) -> String {
        let who = match self.cast {
            Cast::Processes(ranks) => format!("{ranks} processes"),
            Cast::Fleet(ranks) => format!("{ranks} processes of `nccl::launch`"),
            Cast::Hosts(hosts) => {
                let hosts: Vec<_> = hosts.iter().map(usize::to_string).collect();
                format!("hosts with {} ranks", hosts.join(" + "))
            }
        };
        let mut told = match self.ends {
            Ends::Cause {
                culprits,
                class,
                root,
                says,
            } => {
                let culprits: Vec<_> = culprits.iter().map(usize::to_string).collect();
                let culprit = match &culprits[..] {
                    [] => String::from("no rank"),
                    ranks => format!("rank {}", ranks.join(" or ")),
                };
                let mut told = format!("`{class:?}`, `{root}`, {culprit}");
                for (at, says) in says.iter().enumerate() {
                    let _ = write!(told, "{} `{says}`", if at == 0 { ":" } else { "," });
                }
                told
            }
            Ends::Refused { on, says } => {
                let ranks: Vec<_> = on.iter().map(usize::to_string).collect();
                let says: Vec<_> = says.iter().map(|says| format!("`{says}`")).collect();
                let ranks = match on.len() == self.cast.ranks() {
                    true => String::from("on every rank"),
                    false => format!("on rank {} alone", ranks.join(", ")),
                };
                format!("{ranks}, an error that ends nothing: {}", says.join(", "))
            }
            Ends::Nothing => String::from("nothing, because nothing ends"),
        };
        if !self.aside.is_empty() {
            let _ = write!(told, "; those that are cut off: `{}`", self.aside_says);
        }
        let then = match self.then {
            Then::Epoch => "the next epoch",
            Then::Behind => "the next epoch, without those that do not come",
            Then::Again => "a new communicator",
            Then::Shrink => "`shrink`",
            Then::Same => "the same communicator",
        };
        let within = match self.ends {
            Ends::Cause { .. } if self.limit == SHORT => {
                let more = self.bound - self.limit;
                format!("limit + {:.1} s", more.as_secs_f64())
            }
            Ends::Cause { .. } => format!("{:.1} s", self.bound.as_secs_f64()),
            _ => String::from("–"),
        };
        let row = match self.not_yet {
            Some(why) => format!("**not yet**: {why}"),
            None => then.to_owned(),
        };
        format!(
            "| {} | {who} | {told} | {within} | {row} | `{}` |",
            self.fault, self.name
        )
    }
}
