//! Comparison of what the ranks of a communicator are about to do, before NCCL is called.

use std::time::Instant;

use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::operation_comparison::{self, DigestComparison, OperationUse, Operations};
use nccl_base::departure::GatherOutcome;
use nccl_base::wire::Broken;

/// One comparison among all ranks, if they can be reached.
pub(crate) struct Comparison<'c> {
    pub(crate) comm: &'c Communicator,
    /// The name of this comparison: the same on all ranks, and different for every comparison of the communicator.
    pub(crate) topic: String,
    /// Names the comparison in the error about missing ranks.
    pub(crate) what: String,
    pub(crate) started: Instant,
}

impl Comparison<'_> {
    /// Returns each rank's part; `None` if the other ranks cannot be reached.
    fn gather(&self, topic: &str, part: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        let inner = &self.comm.inner;
        let Some(supervisor) = &inner.supervisor else {
            return Ok(None);
        };
        let interrupted = || inner.interrupted();
        let timeout = self.comm.timeout;
        let remaining = timeout.saturating_sub(self.started.elapsed());
        match supervisor.gather(topic, part, remaining, &interrupted) {
            GatherOutcome::All(parts) => Ok(Some(parts)),
            GatherOutcome::Missing(missing) => {
                let missing = missing.iter().map(|&rank| supervisor.rank_of_member(rank));
                let missing: Vec<_> = missing.map(|rank| supervisor.name_of(rank)).collect();
                let what = format!("{} is missing {}, and", self.what, missing.join(", "));
                Err(Error::new(ErrorKind::TimedOut { what, timeout }))
            }
            GatherOutcome::ConnectionLost if interrupted() => Err(inner.out_of_use()),
            // The other ranks cannot be reached any more; other code decides what that means for the communicator.
            GatherOutcome::ConnectionLost => Ok(None),
        }
    }

    /// Returns each rank's part, which is never empty; `None` if the other ranks cannot be reached.
    pub(crate) fn gather_whole(&self, topic: &str, own: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        let all = self.gather(&format!("{}/{topic}", self.topic), own)?;
        // The part of a rank that has departed is empty.
        let departed = |all: &Vec<Vec<u8>>| all.iter().position(Vec::is_empty);
        match all.as_ref().and_then(departed) {
            Some(rank) => Err(self.departed_error(rank)),
            None => Ok(all),
        }
    }

    /// The names of `ranks`: a single one with its host and process, several in short form.
    fn names(&self, ranks: &[usize]) -> String {
        let inner = &self.comm.inner;
        let supervisor = inner.supervisor.as_ref();
        supervisor.map_or_else(
            || inner.roster().who(ranks),
            |supervisor| supervisor.names_of(ranks),
        )
    }

    fn departed_error(&self, rank: usize) -> Error {
        let inner = &self.comm.inner;
        match inner.interrupted() {
            true => inner.out_of_use(),
            false => Error::new(ErrorKind::Aborted {
                reason: format!("{} is gone", self.names(&[rank])),
            }),
        }
    }

    /// Returns how the operations of the ranks differ, in one sentence that is the same on all of them; `None` if they
    /// match, or if the other ranks cannot be reached. A rank without operations passes the reason instead.
    pub(crate) fn operations(
        &self,
        done: OperationUse,
        operations: std::result::Result<Operations<'_>, String>,
    ) -> Result<Option<String>> {
        let failed = operations.is_err();
        let own = operations.clone().unwrap_or_default();
        let own_digest = operation_comparison::digest(operations);
        let Some(digests) = self.gather(&self.topic, &own_digest)? else {
            return Ok(None);
        };
        let broken = |broken: Broken| Error::rendezvous(broken.0);
        match operation_comparison::compare(&digests).map_err(broken)? {
            DigestComparison::Same => Ok(None),
            // This rank's own error is more useful here.
            DigestComparison::Failed(..) if failed => Ok(None),
            DigestComparison::Failed(rank, reason) => Ok(Some(format!(
                "{} {}, because {reason}",
                self.names(&[rank]),
                done.nothing()
            ))),
            DigestComparison::Departed(rank) => Err(self.departed_error(rank)),
            DigestComparison::Different => {
                let own_operations = operation_comparison::encode(own);
                let Some(lists) = self.gather(&format!("{}/all", self.topic), &own_operations)?
                else {
                    return Ok(Some(String::from(
                        "the control connection to the other ranks is lost, so that it is not known in what",
                    )));
                };
                let lists = lists.iter().map(|list| operation_comparison::decode(list));
                let lists: Vec<_> = lists
                    .collect::<std::result::Result<_, _>>()
                    .map_err(broken)?;
                Ok(Some(operation_comparison::difference(
                    &lists,
                    done,
                    |ranks| self.names(ranks),
                )))
            }
        }
    }

    /// Returns which ranks failed, and why, in one sentence that is the same on all of them; `own` is this rank's reason.
    /// `None` if none failed, or if the other ranks cannot be reached.
    pub(crate) fn outcomes(&self, own: Option<&str>) -> Result<Option<String>> {
        let part = own.map_or_else(|| String::from("+"), |reason| format!("-{reason}"));
        let Some(all) = self.gather_whole("outcome", part.as_bytes())? else {
            return Ok(None);
        };
        let failed = all.iter().enumerate().filter_map(|(rank, part)| {
            let reason = part.strip_prefix(b"-")?;
            let reason = String::from_utf8_lossy(reason);
            Some(format!(
                "{} made none, because {reason}",
                self.names(&[rank])
            ))
        });
        let failed: Vec<_> = failed.collect();
        Ok((!failed.is_empty()).then(|| failed.join("; ")))
    }

    /// Returns how the ranks' choices differ, each a short text; like [`operations`](Self::operations).
    pub(crate) fn choices(&self, own: &str) -> Result<Option<String>> {
        let Some(all) = self.gather_whole("choice", format!("={own}").as_bytes())? else {
            return Ok(None);
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut parties: Vec<(String, Vec<usize>)> = Vec::new();
        for (rank, part) in all.iter().enumerate() {
            let choice = text(&part[1..]);
            match parties.iter_mut().find(|(known, _)| *known == choice) {
                Some((_, ranks)) => ranks.push(rank),
                None => parties.push((choice, vec![rank])),
            }
        }
        if parties.len() < 2 {
            return Ok(None);
        }
        parties.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
        let usual = parties.remove(0).0;
        let others = parties.iter().map(|(choice, ranks)| {
            let wants = if ranks.len() == 1 { "wants" } else { "want" };
            format!("{} {wants} {choice}", self.names(ranks))
        });
        let others: Vec<_> = others.collect();
        Ok(Some(format!("{}; the others {usual}", others.join("; "))))
    }
}
