//! The communication of the ranks, behind a trait: the model code is the same for a single rank.

use nccl::moe::ExpertPlacement;

use super::config::Config;
use super::error::{Error, Result};

/// The sizes of the exchanged data: the same in every step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Rows of a step, over all ranks: a multiple of the number of ranks.
    pub rows: usize,
    /// Numbers in a row.
    pub hidden: usize,
    /// Experts, over all ranks; 0 for a model without experts, which never calls [`Collectives::dispatch`].
    pub experts: usize,
    /// Experts chosen for each row.
    pub top_k: usize,
    /// The most numbers that a rank passes to [`Collectives::all_gather`], if those are more than its rows.
    pub gathers: usize,
}

impl Shape {
    /// Returns the sizes for a model and the rows of a step.
    #[must_use]
    pub fn new(config: &Config, rows: usize) -> Self {
        Self {
            rows,
            hidden: config.hidden_size,
            experts: config.num_local_experts,
            top_k: config.num_experts_per_tok,
            gathers: 0,
        }
    }
}

/// The rows that have arrived at a rank's experts.
///
/// There is room for `rows / ranks` rows for each pair of an expert and a rank, which is all that a rank has: no row is
/// dropped.
#[derive(Clone, Debug, Default)]
pub struct Arrived {
    /// `[own expert][source rank][rows / ranks][hidden]`; with a placement, the first index is the rank's place for an expert.
    pub rows: Vec<f32>,
    /// The number of rows at the beginning of each such block: `[source rank][own expert]`.
    pub counts: Vec<u32>,
}

/// The communication of the ranks. All ranks call the same functions in the same order, with buffers of the lengths of a
/// [`Shape`].
///
/// After an error the ranks are out of step: create a new value.
pub trait Collectives {
    /// The number of this rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// Returns the placement of the experts, if one was given.
    fn placement(&self) -> Option<&ExpertPlacement> {
        None
    }

    /// Sends numbers to other ranks, and receives as many as the buffers of `received` hold. All messages progress together;
    /// messages between two ranks arrive in the order in which they were sent.
    ///
    /// # Errors
    /// Those of the operation; [`Error::Unusable`] if there are no other ranks.
    fn exchange(
        &mut self,
        sent: &[(usize, &[f32])],
        received: &mut [(usize, Vec<f32>)],
    ) -> Result<()> {
        match sent.is_empty() && received.is_empty() {
            true => Ok(()),
            false => Err(Error::Unusable(String::from("there is no other rank"))),
        }
    }

    /// Block `i` of `x` goes to rank `i`; block `j` of `y` is from rank `j`. Both have `rows * hidden / ranks` numbers.
    ///
    /// # Errors
    /// Those of the operation.
    fn all_to_all(&mut self, x: &[f32], y: &mut [f32]) -> Result<()>;

    /// Block `j` of `y` is `x` of rank `j`: of any length, which is the same on all ranks, up to that of a rank's rows
    /// (`rows * hidden / ranks`) or [`Shape::gathers`].
    ///
    /// # Errors
    /// Those of the operation.
    fn all_gather(&mut self, x: &[f32], y: &mut [f32]) -> Result<()>;

    /// For a model with experts: sends this rank's rows `x` (`[rows / ranks][hidden]`) to their chosen experts
    /// (`[rows / ranks][top_k]`; −1 is none).
    ///
    /// # Errors
    /// Those of the operation.
    fn dispatch(&mut self, choices: &[i32], x: &[f32], arrived: &mut Arrived) -> Result<()>;

    /// Brings back the experts' results `made` for the rows that were dispatched last, from the positions of those rows
    /// ([`Arrived::rows`]). They are multiplied by the weights (`[rows / ranks][top_k]`) and summed in `out`, in the order of
    /// the choices.
    ///
    /// # Errors
    /// Those of the operation.
    fn combine(&mut self, made: &[f32], weights: &[f32], out: &mut [f32]) -> Result<()>;
}
