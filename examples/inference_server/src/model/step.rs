//! Steps: what a rank's part of a model is given and gives, whatever the model.

use nccl::moe::ExpertPlacement;

use super::collectives::Collectives;
use super::error::{Error, Result};

/// How large steps and the cache are.
///
/// ```
/// use inference_server::model::Settings;
/// assert_eq!(Settings::default().rows, 40); // 8 requests that are at their next token, and 32 tokens of a new one
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Rows of a step, at most: for a model with experts, a multiple of the number of ranks. Messages always have room for all.
    pub rows: usize,
    /// Requests that have a place in the cache at once.
    pub slots: usize,
    /// Tokens of a request, at most; not more than the model's `max_position_embeddings`.
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
    /// The request's place in the cache.
    pub slot: usize,
    /// The place of the token in the request's text, from 0. A row at position 0 begins a new request in the slot; one at
    /// a position that was there already goes back to it.
    pub position: usize,
    /// The token.
    pub token: u32,
    /// Whether logits for the token after it are wanted.
    pub logits: bool,
}

/// The logits of a step, for the rows that wanted them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logits(pub(super) Vec<Option<Vec<f32>>>);

impl Logits {
    /// Of the row with this number in the step: one for each token of the vocabulary.
    #[must_use]
    pub fn row(&self, row: usize) -> Option<&[f32]> {
        self.0.get(row)?.as_deref()
    }
}

/// One rank's part of a model, whichever its architecture: [`Decoder`](super::Decoder) or [`Llama`](super::Llama).
pub trait Part {
    /// What its ranks do together.
    type Ranks: Collectives;

    /// How large steps and the cache are.
    fn settings(&self) -> &Settings;

    /// What ranks do together.
    fn ranks(&self) -> &Self::Ranks;

    /// Goes on with another connection of the same rank, after the one before has failed: the weights stay, and all slots are
    /// empty.
    ///
    /// # Errors
    /// [`Error::Unusable`] for another rank or number of ranks, which has another part of the weights: load that.
    fn renew(&mut self, ranks: Self::Ranks) -> Result<()>;

    /// Prepares to move experts to where `next` says, for a part whose experts have places ([`Elastic`](super::Elastic)), and returns the number of
    /// rounds. In each a rank sends `most` numbers at most, and receives as many.
    ///
    /// # Errors
    /// [`Error::Unusable`] for a part whose experts have no places; [`Error::Nccl`] for a placement of other experts or ranks.
    fn plan_moves(&mut self, next: &ExpertPlacement, most: usize) -> Result<usize> {
        let _ = (next, most);
        Err(without_places())
    }

    /// Takes the next round of [`plan_moves`](Self::plan_moves), together with the other ranks, between any two steps.
    ///
    /// # Errors
    /// Of the exchange, after which nothing has moved.
    fn move_experts(&mut self) -> Result<()> {
        Err(without_places())
    }

    /// Goes on in the middle of texts with other places of the experts: `ranks` says where they are. What has not arrived by
    /// [`move_experts`](Self::move_experts) is read from the file.
    ///
    /// # Errors
    /// [`Error::Unusable`] for other ranks, and for a part whose experts have no places; those of reading the file.
    fn replace_experts(&mut self, ranks: Self::Ranks) -> Result<()> {
        let _ = ranks;
        Err(without_places())
    }

    /// The slots of this rank of which something is in its cache, with the number of positions; none for a part whose slots belong to all ranks.
    fn cached(&self) -> Vec<(usize, usize)> {
        Vec::new()
    }

    /// Gives each slot to a rank that has so many of its positions in its cache, after [`renew`](Self::renew) and before the first step. All ranks give the
    /// same; without it, slot `s` is that of rank `s % ranks`, and nothing is in the caches.
    ///
    /// # Errors
    /// [`Error::Unusable`] for a part whose slots belong to all ranks, for another number of slots, and for ranks that do not exist.
    fn give_slots(&mut self, slots: &[SlotOwner]) -> Result<()> {
        let _ = slots;
        Err(without_places())
    }

    /// How often the rows of this rank have chosen each expert, in all layers together; each call halves the counts. Empty for a part whose
    /// experts have no places.
    fn take_loads(&mut self) -> Vec<u64> {
        Vec::new()
    }

    /// Takes all rows one step, together with the other ranks, which have to be given the same rows. Without rows,
    /// nothing is exchanged.
    ///
    /// All ranks have the same logits, to the bit.
    ///
    /// # Errors
    /// [`Error::Step`] for rows that cannot be: nothing has changed then. After any other error neither the cache
    /// nor the ranks can be relied on: [`Part::renew`] it.
    fn step(&mut self, rows: &[Row]) -> Result<Logits>;

    /// Whether a text is over with this token.
    fn ends(&self, token: u32) -> bool;
}

/// Which rank has a slot, and how many of its positions are in that rank's cache.
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

/// A part of a model of which it was known only when its file was opened what it is.
pub type AnyPart<C> = dyn Part<Ranks = C>;

/// Refuses another rank's connection: its part of the weights would be another.
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

    /// So much of each slot is there.
    pub(super) fn fill(&mut self, filled: impl Iterator<Item = usize>) {
        self.filled = filled.collect();
    }

    /// How much of each slot is there.
    pub(super) fn filled(&self) -> &[usize] {
        &self.filled
    }

    /// The step that was checked has been taken.
    pub(super) fn written(&mut self, filled: Vec<usize>) {
        self.filled = filled;
    }

    /// What will be filled after these rows.
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
