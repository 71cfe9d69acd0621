//! Chooses the algorithm of a plan.

use super::explain::{Alternative, Explanation};
use super::traffic::Traffic;
use crate::all_to_all::algorithm::Algorithm;
use crate::all_to_all::model::{CostModel, Nodes};
use crate::all_to_all::schedule::{
    Exchange, Schedule, TwoLevel, Within, chunked, grouped, in_place, native, pairwise, two_level,
    two_level_of_parts,
};
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::library::Capability;

/// The inputs of the choice.
pub(super) struct Choice<'c> {
    pub(super) comm: &'c Communicator,
    pub(super) nodes: Nodes,
    /// Why the ranks cannot be divided into nodes, which excludes two levels.
    pub(super) no_nodes: Option<String>,
    pub(super) model: CostModel,
    pub(super) asked: Algorithm,
    /// `None` if this rank's parts are unequal and the ranks cannot exchange the traffic.
    pub(super) traffic: Option<Traffic>,
}

/// The chosen algorithm.
pub(super) struct Decision {
    pub(super) algorithm: Algorithm,
    reason: String,
    nodes: Nodes,
    model: CostModel,
    traffic: Option<Traffic>,
    alternatives: Vec<Alternative>,
    execution: Execution,
}

/// How the algorithm is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Execution {
    AsNamed,
    TwoLevel(TwoLevel),
    /// In place, with this number of peers at a time.
    InPlace(usize),
}

impl Choice<'_> {
    /// Whether all parts of all ranks are equal; false if that is unknown.
    fn is_uniform(&self) -> bool {
        self.traffic.is_some_and(|traffic| traffic.is_uniform())
    }

    /// Returns the modelled time, if the traffic is known.
    fn time(&self, algorithm: Algorithm) -> Option<f64> {
        let traffic = self.traffic?;
        traffic.microseconds(&self.model, algorithm, self.nodes)
    }

    /// Returns why the algorithm cannot be used, if it cannot.
    fn refusal(&self, algorithm: Algorithm) -> Option<String> {
        let not_uniform = || {
            (!self.is_uniform())
                .then(|| String::from("it is for equal parts, one behind the other"))
        };
        match algorithm {
            Algorithm::Auto | Algorithm::Grouped => None,
            Algorithm::Chunked { .. } | Algorithm::Pairwise { .. } => None,
            Algorithm::Native => not_uniform().or_else(|| self.not_native()),
            Algorithm::TwoLevel => self.not_two_levels(),
            Algorithm::CopyEngine => not_uniform()
                .or_else(|| self.not_native())
                .or_else(|| self.not_copy_engine()),
        }
    }

    fn not_native(&self) -> Option<String> {
        let library = self.comm.library();
        (!library.has(Capability::NativeAllToAll)).then(|| {
            format!(
                "ncclAlltoAll needs NCCL {}, found {} at {}",
                Capability::NativeAllToAll.since(),
                library.version(),
                library.path().display()
            )
        })
    }

    fn not_two_levels(&self) -> Option<String> {
        if let Some(why) = &self.no_nodes {
            return Some(why.clone());
        }
        match (self.nodes.count(), self.nodes.ranks_per_node()) {
            (1, _) => Some(String::from("all ranks are on one node")),
            (_, 1) => Some(String::from("every node has one rank")),
            _ => None,
        }
    }

    fn not_copy_engine(&self) -> Option<String> {
        if !self.comm.inner.is_zero_cta {
            return Some(String::from(
                "the communicator was not made with cta_policy = Some(CtaPolicy::Zero), without which NCCL uses \
                 multiprocessors",
            ));
        }
        None
    }

    /// Chooses the algorithm; the same on all ranks with the same settings and the same traffic.
    pub(super) fn decide(&self) -> Result<Decision> {
        let mut known = vec![
            Algorithm::Native,
            Algorithm::Grouped,
            Algorithm::Chunked { pieces: FEW },
            Algorithm::Pairwise { width: ONE },
            Algorithm::TwoLevel,
            Algorithm::CopyEngine,
        ];
        if !known.contains(&self.asked) && self.asked != Algorithm::Auto {
            known.push(self.asked);
        }
        let alternatives: Vec<Alternative> = known
            .into_iter()
            .map(|algorithm| {
                let refusal = self.refusal(algorithm);
                let outcome = refusal.map_or_else(|| Ok(self.time(algorithm)), Err);
                Alternative { algorithm, outcome }
            })
            .collect();
        let (algorithm, reason) = self.pick(&alternatives)?;
        let execution = match algorithm {
            Algorithm::TwoLevel => Execution::TwoLevel(TwoLevel {
                ranks_per_node: self.nodes.ranks_per_node(),
                packed: self.traffic.is_some_and(|traffic| {
                    traffic.is_uniform() && self.model.packs(self.nodes, traffic.bytes)
                }),
            }),
            _ => Execution::AsNamed,
        };
        Ok(self.decision(algorithm, reason, alternatives, execution))
    }

    /// Makes the decision for a plan in place, whose algorithm is fixed, with `width` peers at a time.
    pub(super) fn in_place(&self, width: usize) -> Result<Decision> {
        if self.asked != Algorithm::Auto {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "algorithm",
                reason: format!(
                    "{} cannot be used in place: only pairs of ranks can exchange blocks of one buffer",
                    self.asked
                ),
            }));
        }
        let algorithm = Algorithm::Pairwise {
            width: std::num::NonZeroUsize::new(width).unwrap_or(ONE),
        };
        let reason = String::from(
            "only pairs of ranks can exchange blocks of one buffer; as many at a time as its memory has room for",
        );
        let alternatives = vec![Alternative {
            algorithm,
            outcome: Ok(self.time(algorithm)),
        }];
        Ok(self.decision(algorithm, reason, alternatives, Execution::InPlace(width)))
    }

    fn decision(
        &self,
        algorithm: Algorithm,
        reason: String,
        alternatives: Vec<Alternative>,
        execution: Execution,
    ) -> Decision {
        Decision {
            algorithm,
            reason,
            nodes: self.nodes,
            model: self.model,
            traffic: self.traffic,
            alternatives,
            execution,
        }
    }

    fn pick(&self, alternatives: &[Alternative]) -> Result<(Algorithm, String)> {
        if self.asked != Algorithm::Auto {
            return match self.refusal(self.asked) {
                None => Ok((self.asked, String::from("the program asked for it"))),
                Some(reason) => Err(Error::new(ErrorKind::InvalidConfig {
                    field: "algorithm",
                    reason: format!("{} cannot be used: {reason}", self.asked),
                })),
            };
        }
        if self.traffic.is_none() {
            let reason = "all ranks have to take the same, and this rank cannot ask how much the others have";
            return Ok((Algorithm::Grouped, String::from(reason)));
        }
        // The copy engines need windows, and the buffers are not known yet.
        let usable = alternatives.iter().filter_map(|other| {
            let time = other.outcome.as_ref().ok().copied().flatten()?;
            (other.algorithm != Algorithm::CopyEngine).then_some((other.algorithm, time))
        });
        // Of equal times, takes the first: `ncclAlltoAll` costs the host less than messages.
        let best = usable.min_by(|one, other| one.1.total_cmp(&other.1));
        let (algorithm, time) = best.unwrap_or((Algorithm::Grouped, 0.0));
        let reason = format!("the fastest by the model, {time:.1} µs");
        Ok((algorithm, reason))
    }
}

impl Decision {
    /// Returns the part of the decision, besides the lengths, that has to be the same on all ranks.
    pub(super) fn choice(&self) -> String {
        let Self { algorithm, .. } = self;
        match self.execution {
            Execution::TwoLevel(how) => {
                let execution = if how.packed { "packed" } else { "apart" };
                format!(
                    "{algorithm} over nodes of {} ({execution})",
                    how.ranks_per_node
                )
            }
            _ => algorithm.to_string(),
        }
    }

    /// Returns the placement of the ranks.
    pub(super) fn nodes(&self) -> Nodes {
        self.nodes
    }

    /// Returns the nodes if the ranks of a node have to exchange counts before a schedule can be made ([`Within`]).
    pub(super) fn unknown_within(&self) -> Option<Nodes> {
        let two_level = matches!(self.execution, Execution::TwoLevel(_));
        let uniform = self.traffic.is_some_and(|traffic| traffic.is_uniform());
        (two_level && !uniform).then_some(self.nodes)
    }

    /// Returns the steps of this rank.
    pub(super) fn carry_out(
        self,
        exchange: Exchange<'_>,
        within: Option<&Within>,
    ) -> (Schedule, Explanation) {
        let schedule = match (self.execution, self.algorithm) {
            (Execution::InPlace(width), _) => in_place(exchange, width),
            (Execution::TwoLevel(how), _) => match within {
                Some(within) => two_level_of_parts(exchange, within),
                None => two_level(exchange, how),
            },
            (_, Algorithm::Native | Algorithm::CopyEngine) => native(exchange),
            (_, Algorithm::Chunked { pieces }) => chunked(exchange, pieces.get()),
            (_, Algorithm::Pairwise { width }) => pairwise(exchange, width.get()),
            (_, Algorithm::Auto | Algorithm::Grouped | Algorithm::TwoLevel) => grouped(exchange),
        };
        let messages = schedule.steps.iter().map(|step| step.messages.len());
        let explanation = Explanation {
            algorithm: self.algorithm,
            reason: self.reason,
            nodes: self.nodes,
            traffic: self.traffic,
            groups: schedule.launches(),
            messages: messages.sum(),
            copies: schedule.moves(),
            scratch_bytes: schedule.scratch,
            model: self.model,
            alternatives: self.alternatives,
        };
        (schedule, explanation)
    }
}

const FEW: std::num::NonZeroUsize = std::num::NonZeroUsize::MIN.saturating_add(3);
const ONE: std::num::NonZeroUsize = std::num::NonZeroUsize::MIN;
