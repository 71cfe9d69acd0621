//! What ranks do together. The model asks for it here, so that one rank alone is the same code.

use nccl::moe::ExpertPlacement;

use super::config::Config;
use super::error::{Error, Result};

/// The sizes of what is exchanged: the same in every step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Rows of a step, of all ranks together: a multiple of the number of ranks.
    pub rows: usize,
    /// Numbers of a row.
    pub hidden: usize,
    /// Experts, of all ranks together; 0 for a model without, which has no use for [`Collectives::dispatch`].
    pub experts: usize,
    /// Experts that a row chooses.
    pub top_k: usize,
    /// Numbers that a rank gives to an [`Collectives::all_gather`] at most, where those are more than its rows.
    pub gathers: usize,
}

impl Shape {
    /// Of a model and its steps.
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

/// The rows that have come to a rank's experts.
///
/// There is room for `rows / ranks` rows of each pair of an expert and a rank, which is all that a rank has: no row
/// is ever refused.
#[derive(Clone, Debug, Default)]
pub struct Arrived {
    /// `[own expert][source rank][rows / ranks][hidden]`; with a placement, places stand for experts.
    pub rows: Vec<f32>,
    /// How many there are, at the beginning of each such block: `[source rank][own expert]`.
    pub counts: Vec<u32>,
}

/// What ranks do together. All ranks call the same in the same order, with buffers of the lengths of a [`Shape`].
///
/// An error means that the ranks are not in step any more: what can be done then is to make it anew.
pub trait Collectives {
    /// The number of this rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// Which experts each rank has, if that was said.
    fn placement(&self) -> Option<&ExpertPlacement> {
        None
    }

    /// Sends numbers to ranks, and receives as many as there is room for from others: all messages together. Between two ranks, messages come in
    /// the order in which they were sent.
    ///
    /// # Errors
    /// Of the operation; [`Error::Unusable`] where there are no other ranks.
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
    /// Of the operation.
    fn all_to_all(&mut self, x: &[f32], y: &mut [f32]) -> Result<()>;

    /// Block `j` of `y` is `x` of rank `j`: of any length, which is the same on all ranks, up to that of a rank's rows
    /// (`rows * hidden / ranks`) or [`Shape::gathers`].
    ///
    /// # Errors
    /// Of the operation.
    fn all_gather(&mut self, x: &[f32], y: &mut [f32]) -> Result<()>;

    /// For a model with experts: brings this rank's rows `x` (`[rows / ranks][hidden]`) to the experts that they have chosen
    /// (`[rows / ranks][top_k]`; −1 is none).
    ///
    /// # Errors
    /// Of the operation.
    fn dispatch(&mut self, choices: &[i32], x: &[f32], arrived: &mut Arrived) -> Result<()>;

    /// Brings back what the experts made of the rows that were dispatched last, where those lay
    /// ([`Arrived::rows`]), weighed (`[rows / ranks][top_k]`) and added up in the order of the choices.
    ///
    /// # Errors
    /// Of the operation.
    fn combine(&mut self, made: &[f32], weights: &[f32], out: &mut [f32]) -> Result<()>;
}
