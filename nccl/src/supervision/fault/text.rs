//! How a fault reads: in one sentence, and with all that is known of it.

use std::fmt;

use super::{Fault, FaultClass};

impl Fault {
    /// All of it, as a person reads it: cause, evidence, who waited, and what to do, a line for each that is
    /// known. The same bytes on every rank.
    ///
    /// ```
    /// # fn example(fault: &nccl::Fault) {
    /// eprintln!("{}", fault.explain());
    /// # }
    /// ```
    #[must_use]
    pub fn explain(&self) -> String {
        let mut text = format!("  root cause: {self}");
        if !self.evidence.is_empty() {
            text.push_str("\n  evidence:   ");
            text.push_str(&self.evidence.join("; "));
        }
        if !self.also.is_empty() {
            let also: Vec<_> = self.also.iter().map(ToString::to_string).collect();
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

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} ({}, pid {}", self.rank, self.host, self.pid)?;
        if self.epoch > 0 {
            write!(f, ", epoch {}", self.epoch)?;
        }
        f.write_str(")")?;
        match self.class {
            FaultClass::Gone => write!(f, " {}", self.cause),
            FaultClass::Revoked => write!(f, " revoked it: {}", self.cause),
            FaultClass::CutOff => write!(f, " is {}", self.cause),
            FaultClass::Asked if self.operation.is_empty() => {
                write!(f, " ended it: {}", self.cause)
            }
            _ if self.root.is_told_of_a_rank() => write!(f, " {}", self.cause),
            _ if self.operation.is_empty() => write!(f, ": {}", self.cause),
            _ => write!(f, " in {}: {}", self.operation, self.cause),
        }
    }
}
