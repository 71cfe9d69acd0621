//! A fault as text: in one sentence, and with all that is known of it.

use std::fmt;

use super::cause::FaultRole;
use super::value::{Fault, FaultClass, Origin};

impl Fault {
    /// Returns all that is known of the fault, for a reader: the cause, the evidence, the waiting ranks and the remedy, one
    /// line for each that is known. The text is the same on every rank.
    ///
    /// ```
    /// # fn example(fault: &nccl::fault::Fault) {
    /// eprintln!("{}", fault.explain());
    /// # }
    /// ```
    #[must_use]
    pub fn explain(&self) -> String {
        let mut text = format!("  root cause: {self:#}");
        if let Some(legend) = self.roster.legend(&self.communicator) {
            text.push_str("\n  ranks:      ");
            text.push_str(&legend);
        }
        if !self.evidence.is_empty() {
            text.push_str("\n  evidence:   ");
            text.push_str(&self.evidence.join("; "));
        }
        if !self.host_evidence.is_empty() {
            text.push_str("\n  hosts:      ");
            text.push_str(&self.host_evidence.join("; "));
        }
        if !self.also.is_empty() {
            let also = self.also.iter();
            let also: Vec<_> = also.map(|one| one.text_of(&self.roster)).collect();
            text.push_str("\n  also:       ");
            text.push_str(&also.join("; "));
        }
        if !self.hint.is_empty() {
            text.push_str("\n  hint:       ");
            text.push_str(&self.hint);
        }
        text
    }
}

impl Fault {
    /// Returns the text in front of a rank that was only the first to report. A rank that is cut off has observed that
    /// itself.
    fn first_reporter_text(&self) -> Option<&'static str> {
        match (self.role, self.class) {
            (FaultRole::Initiating, _) | (_, FaultClass::CutOff | FaultClass::Asked) => None,
            (_, FaultClass::TimedOut) => Some("first to run out of time"),
            _ => Some("first to report a consequence"),
        }
    }

    fn write_sentence(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let roster = &self.roster;
        let others = match self.origin {
            Origin::Culprit(rank) | Origin::ReportedBy(rank) => {
                write!(f, "rank {rank}")?;
                if roster.world_ranks().is_some() {
                    write!(f, " of {:?}", self.communicator)?;
                }
                roster.others(rank)
            }
            Origin::Outside {
                world_rank,
                launcher_rank,
            } => {
                write!(f, "world rank {world_rank}")?;
                launcher_rank.map_or_else(String::new, |rank| format!("launcher rank {rank}, "))
            }
            Origin::NoRank {} => {
                if roster.world_ranks().is_some() {
                    write!(f, "on {}: ", roster.named(&self.communicator))?;
                }
                return f.write_str(&self.cause);
            }
        };
        write!(f, " ({others}{}, pid {}", self.host, self.pid)?;
        if self.generation > 0 {
            write!(f, ", generation {}", self.generation)?;
        }
        f.write_str(")")?;
        match self.class {
            FaultClass::Gone => write!(f, " {}", self.cause),
            FaultClass::Revoked => write!(f, " revoked it: {}", self.cause),
            FaultClass::CutOff => write!(f, " is {}", self.cause),
            FaultClass::Asked if self.operation.text.is_empty() => {
                write!(f, " asked for it: {}", self.cause)
            }
            _ if self.root.names_a_rank() => write!(f, " {}", self.cause),
            _ if self.operation.text.is_empty() => write!(f, ": {}", self.cause),
            _ => write!(f, " in {}: {}", self.operation.text, self.cause),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.first_reporter_text() else {
            return match (self.class, self.role) {
                // An end that all ranks asked for is attributed to no single rank.
                (FaultClass::Asked, FaultRole::Cascade) => f.write_str(&self.cause),
                _ => self.write_sentence(f),
            };
        };
        // The alternate form is printed after a heading of its own.
        let heading = if f.alternate() { "" } else { "root cause " };
        write!(f, "{heading}not found ({first}: ")?;
        self.write_sentence(f)?;
        f.write_str(")")
    }
}
