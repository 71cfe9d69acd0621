//! Steps: the input and output of a rank's part, for any model.

use nccl::moe::ExpertPlacement;

use super::collectives::Collectives;
use super::error::{Error, Result};

/// The sizes of steps and of the cache.
///
/// ```
/// use inference_server::model::Settings;
/// assert_eq!(Settings::default().rows, 40); // 8 requests that are at their next token, and 32 tokens of a new one
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The most rows of a step: for a model with experts, a multiple of the number of ranks. Messages always have room for all.
    pub rows: usize,
    /// The number of requests in the cache at once.
    pub slots: usize,
    /// The most tokens of a request; not more than the model's `max_position_embeddings`.
    pub positions: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            rows: 40,
            slots: 8,
            positions: 1024,
        }
    }
}

/// One token of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The request's slot in the cache.
    pub slot: usize,
    /// The position of the token in the request's text, from 0. A row at position 0 begins a new request in the slot; a row at
    /// an earlier position of the request rewinds it to there.
    pub position: usize,
    /// The token.
    pub token: u32,
    /// Whether to return logits for the next token.
    pub logits: bool,
}

/// The logits of a step, for the rows that requested them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logits(pub(super) Vec<Option<Vec<f32>>>);

impl Logits {
    /// Returns the logits of a row by its index in the step: one for each token of the vocabulary.
    #[must_use]
    pub fn row(&self, row: usize) -> Option<&[f32]> {
        self.0.get(row)?.as_deref()
    }
}

/// One rank's part of a model: [`Decoder`](super::Decoder), [`Elastic`](super::Elastic) or [`Llama`](super::Llama).
pub trait Part {
    /// The communication of the ranks.
    type Ranks: Collectives;

    /// Returns the sizes of steps and of the cache.
    fn settings(&self) -> &Settings;

    /// Returns the communication of the ranks.
    fn ranks(&self) -> &Self::Ranks;

    /// Replaces the connection of this rank after an error: the weights stay, and all slots are empty.
    ///
    /// # Errors
    /// [`Error::Unusable`] for another rank or number of ranks, if those have other weights: load a new part.
    fn renew(&mut self, ranks: Self::Ranks) -> Result<()>;

    /// Prepares to move experts to the places of `next`, and returns the number of rounds. In each round a rank sends and
    /// receives at most `most` numbers. Only an [`Elastic`](super::Elastic) has places for experts.
    ///
    /// # Errors
    /// [`Error::Unusable`] for a part without places; [`Error::Nccl`] for a placement of other experts or ranks.
    fn plan_moves(&mut self, next: &ExpertPlacement, most: usize) -> Result<usize> {
        let _ = (next, most);
        Err(without_places())
    }

    /// Takes the next round of [`plan_moves`](Self::plan_moves), together with the other ranks, between any two steps.
    ///
    /// # Errors
    /// Those of the exchange; nothing has moved then.
    fn move_experts(&mut self) -> Result<()> {
        Err(without_places())
    }

    /// Continues with the placement of `ranks`, in the middle of texts. Experts that have not arrived by
    /// [`move_experts`](Self::move_experts) are read from the file.
    ///
    /// # Errors
    /// [`Error::Unusable`] for other ranks, and for a part without places; those of reading the file.
    fn replace_experts(&mut self, ranks: Self::Ranks) -> Result<()> {
        let _ = ranks;
        Err(without_places())
    }

    /// Returns the non-empty slots of this rank, each with its number of positions; none for a part whose slots belong to all
    /// ranks.
    fn cached(&self) -> Vec<(usize, usize)> {
        Vec::new()
    }

    /// Assigns each slot to a rank that has the given number of its positions in the cache. Called after [`renew`](Self::renew)
    /// and before the first step, with the same arguments on all ranks. Without this call, slot `s` belongs to rank
    /// `s % ranks`, and the caches are empty.
    ///
    /// # Errors
    /// [`Error::Unusable`] for a part whose slots belong to all ranks, for a wrong number of slots, and for an unknown rank.
    fn give_slots(&mut self, slots: &[SlotOwner]) -> Result<()> {
        let _ = slots;
        Err(without_places())
    }

    /// Returns how often the rows of this rank have chosen each expert, in all layers; each call halves the counts. Empty for a
    /// part without places.
    fn take_loads(&mut self) -> Vec<u64> {
        Vec::new()
    }

    /// Takes a step with these rows, together with the other ranks, which must get the same rows. Without rows, nothing is
    /// exchanged.
    ///
    /// All ranks have the same logits, to the bit.
    ///
    /// # Errors
    /// [`Error::Step`] for invalid rows: nothing has changed then. After any other error the state of the cache and of the
    /// ranks is undefined: call [`Part::renew`].
    fn step(&mut self, rows: &[Row]) -> Result<Logits>;

    /// Returns whether this token ends a text.
    fn ends(&self, token: u32) -> bool;
}

/// The rank of a slot, and how many of the slot's positions are in that rank's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotOwner {
    /// The rank.
    pub rank: usize,
    /// The positions.
    pub positions: usize,
}

fn without_places() -> Error {
    Error::Unusable(String::from(
        "the experts of this part belong to its rank, and its slots to all ranks",
    ))
}

/// A part of a model whose architecture is known only at run time.
pub type AnyPart<C> = dyn Part<Ranks = C>;

/// Refuses the connection of another rank, which needs other weights.
pub(super) fn same_rank(before: &impl Collectives, now: &impl Collectives) -> Result<()> {
    let (before, now) = ((before.rank(), before.ranks()), (now.rank(), now.ranks()));
    if before != now {
        let text = format!(
            "the part of rank {} of {} is loaded, and this is rank {} of {}: load its part",
            before.0, before.1, now.0, now.1
        );
        return Err(Error::Unusable(text));
    }
    Ok(())
}

impl Settings {
    /// Refuses more positions than a model has.
    pub(super) fn fit(&self, most: usize) -> Result<()> {
        let positions = self.positions;
        if positions == 0 || positions > most {
            let text = format!("{positions} positions for a model of 1 to {most}");
            return Err(Error::Unusable(text));
        }
        Ok(())
    }
}

/// Which positions of each slot of the cache have been written.
pub(super) struct Slots {
    settings: Settings,
    vocabulary: usize,
    filled: Vec<usize>,
}

impl Slots {
    pub(super) fn new(settings: Settings, vocabulary: usize) -> Self {
        Self {
            settings,
            vocabulary,
            filled: vec![0; settings.slots],
        }
    }

    pub(super) fn empty(&mut self) {
        self.filled.fill(0);
    }

    /// Sets the number of written positions of each slot.
    pub(super) fn fill(&mut self, filled: impl Iterator<Item = usize>) {
        self.filled = filled.collect();
    }

    /// Returns the number of written positions of each slot.
    pub(super) fn filled(&self) -> &[usize] {
        &self.filled
    }

    /// Records that the checked step has been taken.
    pub(super) fn written(&mut self, filled: Vec<usize>) {
        self.filled = filled;
    }

    /// Checks the rows of a step, and returns the number of written positions of each slot after it.
    pub(super) fn check(&self, rows: &[Row]) -> Result<Vec<usize>> {
        let refuse = |row, reason| {
            Err(Error::Step {
                row,
                rows: rows.len(),
                reason,
            })
        };
        if rows.len() > self.settings.rows {
            let most = self.settings.rows;
            return refuse(most, format!("a step has room for {most} rows"));
        }
        let mut filled = self.filled.clone();
        let mut last = vec![None; filled.len()];
        for (number, row) in rows.iter().enumerate() {
            let &Row {
                slot,
                position,
                token,
                ..
            } = row;
            if slot >= filled.len() {
                return refuse(
                    number,
                    format!("there are {} slots, no slot {slot}", filled.len()),
                );
            }
            if position >= self.settings.positions {
                let most = self.settings.positions;
                return refuse(number, format!("position {position} of a cache of {most}"));
            }
            if position > filled[slot] {
                let reason = format!(
                    "position {position} of slot {slot}, of which {} are there",
                    filled[slot]
                );
                return refuse(number, reason);
            }
            if last[slot].is_some_and(|last| position != last + 1) {
                let reason =
                    format!("position {position} of slot {slot} does not follow the one before");
                return refuse(number, reason);
            }
            if token as usize >= self.vocabulary {
                let most = self.vocabulary;
                return refuse(number, format!("token {token} of a vocabulary of {most}"));
            }
            last[slot] = Some(position);
            filled[slot] = position + 1;
        }
        Ok(filled)
    }
}
