//! One row of the table: the fault, what every surviving rank must be told, and within which time.

use std::fmt::Write as _;
use std::time::Duration;

use nccl::fault::FaultClass;

use crate::actor::Actor;
use crate::stage::{Stage, Unable};

/// A timeout of operations that is meant to pass.
pub(crate) const SHORT: Duration = Duration::from_secs(1);
/// A timeout that is not meant to pass: an earlier end was caused by a report.
pub(crate) const LONG: Duration = Duration::from_secs(40);

/// The processes of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cast {
    /// This many processes, whose parent reports nothing.
    Processes(usize),
    /// This many, started by `nccl::launch`, which reports how they ended.
    Fleet(usize),
    /// This many on each host, which are network namespaces.
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

/// The expected end.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ends {
    /// Every surviving rank gets this cause, the same on all.
    Cause {
        /// The ranks of which one is at fault, whichever it is; empty where no rank is to be named as the culprit.
        culprits: &'static [usize],
        class: FaultClass,
        /// The name of `RootCause` in its serde form.
        root: &'static str,
        /// Texts that the cause must contain.
        says: &'static [&'static str],
    },
    /// A call fails with this, on these ranks; nothing else happens.
    Refused {
        on: &'static [usize],
        says: &'static [&'static str],
    },
    /// Nothing happens.
    Nothing,
}

impl Ends {
    /// A process has died, and every rank is told so with these texts.
    pub(crate) const fn died(culprits: &'static [usize], says: &'static [&'static str]) -> Self {
        Self::Cause {
            culprits,
            class: FaultClass::Gone,
            root: "died",
            says,
        }
    }

    /// A timeout passes, for this reason.
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

/// How the surviving ranks show that they are usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// `World::next_generation`, without the dead ranks.
    Generation,
    /// `World::next_generation_leaving_behind`.
    Behind,
    /// Another communicator of the same ranks in the same world.
    Again,
    /// `Communicator::shrink` without the dead ranks, in the same world.
    Shrink,
    /// The communicator that they have.
    Same,
}

/// The result of a row on NVIDIA's own library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnNvidias {
    /// The same as on the emulator's own NCCL.
    Same,
    /// Another result, described here.
    MismatchField(&'static str),
    /// Not tried, for this reason.
    NotTried(&'static str),
}

/// An action on the ranks from outside.
pub(crate) type Harm = fn(&mut Stage) -> Result<(), Unable>;

pub(crate) struct Row {
    /// Its name, by which it can be run alone.
    pub(crate) name: &'static str,
    pub(crate) fault: &'static str,
    pub(crate) cast: Cast,
    /// The timeout of operations.
    pub(crate) timeout: Duration,
    /// Variables of the ranks.
    pub(crate) variables: &'static [(&'static str, &'static str)],
    /// Whether the ranks have a working communicator before the row begins.
    pub(crate) built: bool,
    /// The code of a rank; an error is how it ended.
    pub(crate) play: fn(&Actor) -> nccl::Result<()>,
    /// The action on the ranks; otherwise they announce the fault themselves.
    pub(crate) harm: Option<Harm>,
    pub(crate) ends: Ends,
    /// The ranks that die, or cannot report.
    pub(crate) lost: &'static [usize],
    /// The ranks that get the fault like all others, and then end: their process is no longer usable.
    pub(crate) leave: &'static [usize],
    /// The ranks that are cut off from the others, and what they are told.
    pub(crate) aside: &'static [usize],
    pub(crate) aside_says: &'static str,
    /// From the fault until the last surviving rank has its error.
    pub(crate) bound: Duration,
    pub(crate) then: Then,
    pub(crate) on_nvidias: OnNvidias,
    /// A known defect; such a row is run only on request.
    pub(crate) not_yet: Option<&'static str>,
}

/// A row in which three processes work, and which ends for all at once.
pub(crate) const ROW: Row = Row {
    name: "",
    fault: "",
    cast: Cast::Processes(3),
    timeout: LONG,
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
    /// The row of the table.
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
            Then::Generation => "the next generation",
            Then::Behind => "the next generation, without those that do not come",
            Then::Again => "a new communicator",
            Then::Shrink => "`shrink`",
            Then::Same => "the same communicator",
        };
        let within = match self.ends {
            Ends::Cause { .. } if self.timeout == SHORT => {
                let more = self.bound - self.timeout;
                format!("timeout + {:.1} s", more.as_secs_f64())
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
