//! The answers that a coordinator keeps for ranks that may not have received them, and may repeat their requests.
//!
//! A request that must be carried out only once ([`OnceKind`]) is kept with its answer until its rank states that it no
//! longer waits for it ([`RequestHead::settled`](crate::driver_message::RequestHead::settled)), or until the rank has had
//! very many later answers. If its answer has to make room for those of other ranks, [`RequestError::OutcomeLost`] takes its
//! place. Other requests can be carried out again, so their answers are dropped when there is no room.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use crate::coordinator_message::Answer;
use crate::frame::LARGEST;
use crate::request::OnceKind;
use crate::round::RequestError;

/// The maximum size of all kept answers to requests that must be carried out only once, in bytes. No answer is larger,
/// so the last one is kept.
const MAX_BYTES: usize = LARGEST;

/// The maximum size of the kept answers to other requests, in bytes.
const MAX_REPLACEABLE_BYTES: usize = 1 << 20;

/// How many exchanges and messages of one rank are kept after their answers. A rank that does not receive its answers
/// has fewer requests under way, and one that receives them settles them, unless another request waits for long.
const MAX_ANSWERED: usize = 1024;

/// As [`MAX_ANSWERED`], for ends, which are never settled: a rank repeats at least as many of them.
const MAX_ANSWERED_ENDS: usize = 128;

/// The kept answers of one generation; see the module.
pub(super) struct Answers {
    /// By rank, kind and number, the requests that must be carried out only once; `None` until they are answered.
    once: HashMap<usize, [BTreeMap<u64, Option<Given>>; OnceKind::COUNT]>,
    /// At least the size of all answers in `once`.
    bytes: usize,
    /// The number of answers so far.
    count: u64,
    /// The last answers to other requests, and their size.
    replaceable: VecDeque<(usize, u64, Answer)>,
    replaceable_bytes: usize,
    max_replaceable: usize,
}

struct Given {
    answer: Answer,
    /// The number of the answer, which several ranks may share.
    number: u64,
}

/// Returns the size of an answer in memory, beside that of every answer.
fn size(answer: &Answer) -> usize {
    match answer {
        Answer::Parts(parts) => parts
            .iter()
            .map(|part| size_of_val(part) + part.len())
            .sum(),
        Answer::Value(value) => value.len(),
        Answer::Done | Answer::Absent | Answer::Sum(_) | Answer::Failed(_) => 0,
    }
}

impl Answers {
    /// Creates the answers of a generation of this many ranks.
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            once: HashMap::new(),
            bytes: 0,
            count: 0,
            replaceable: VecDeque::new(),
            replaceable_bytes: 0,
            max_replaceable: 4 * ranks + 64,
        }
    }

    /// Forgets what a request of `rank` with this head states to be settled; `once` is the request's kind.
    pub(super) fn settle(&mut self, rank: usize, once: Option<OnceKind>, settled: u64) {
        let Some(kept) = self.once.get_mut(&rank).filter(|_| settled > 0) else {
            return;
        };
        let own = once.filter(|kind| matches!(kind, OnceKind::Exchange | OnceKind::Message));
        for kind in [OnceKind::StoreChange].into_iter().chain(own) {
            let kept = &mut kept[kind as usize];
            if kept.first_key_value().is_some_and(|(id, _)| *id < settled) {
                *kept = kept.split_off(&settled);
            }
        }
    }

    /// Forgets what is kept for a rank that has departed: its requests are refused.
    pub(super) fn forget(&mut self, rank: usize) {
        self.once.remove(&rank);
        self.replaceable.retain(|(to, ..)| *to != rank);
        let sizes = self.replaceable.iter().map(|(.., answer)| size(answer));
        self.replaceable_bytes = sizes.sum();
    }

    /// Keeps a request that is carried out now, and only once.
    pub(super) fn begin(&mut self, rank: usize, id: u64, kind: OnceKind) {
        let kept = &mut self.once.entry(rank).or_default()[kind as usize];
        let max = match kind {
            OnceKind::StoreChange => usize::MAX,
            OnceKind::Exchange | OnceKind::Message => MAX_ANSWERED,
            OnceKind::End => MAX_ANSWERED_ENDS,
        };
        let mut answered = kept.iter().filter(|(_, given)| given.is_some());
        let oldest = answered.next().map(|(id, _)| *id);
        if let Some(oldest) = oldest.filter(|_| answered.count() + 1 >= max) {
            kept.remove(&oldest);
        }
        kept.insert(id, None);
    }

    /// Returns the kept answer to a request.
    pub(super) fn get(&self, rank: usize, id: u64) -> Option<Answer> {
        let once = self.once.get(&rank).into_iter().flatten();
        if let Some(given) = once.into_iter().find_map(|kept| kept.get(&id)) {
            return given.as_ref().map(|given| given.answer.clone());
        }
        let mut replaceable = self.replaceable.iter();
        let found = replaceable.find(|(to, n, _)| (*to, *n) == (rank, id));
        found.map(|(.., answer)| answer.clone())
    }

    /// Whether a request that must be carried out only once was begun and has no answer yet.
    pub(super) fn is_open(&self, rank: usize, id: u64) -> bool {
        let mut once = self.once.get(&rank).into_iter().flatten();
        once.any(|kept| matches!(kept.get(&id), Some(None)))
    }

    /// Keeps the answer to these requests.
    pub(super) fn remember(&mut self, to: &[(usize, u64)], answer: &Answer) {
        let bytes = size(answer);
        let number = self.count;
        self.count += 1;
        let mut is_once = false;
        for &(rank, id) in to {
            let mut once = self.once.get_mut(&rank).into_iter().flatten();
            if let Some(given) = once.find_map(|kept| kept.get_mut(&id)) {
                let answer = answer.clone();
                *given = Some(Given { answer, number });
                is_once = true;
            } else if bytes <= MAX_REPLACEABLE_BYTES {
                self.replaceable.push_back((rank, id, answer.clone()));
                self.replaceable_bytes += bytes;
            }
        }
        while self.replaceable.len() > self.max_replaceable
            || self.replaceable_bytes > MAX_REPLACEABLE_BYTES
        {
            let oldest = self.replaceable.pop_front();
            let Some((.., answer)) = oldest else { break };
            self.replaceable_bytes -= size(&answer);
        }
        if is_once {
            self.bytes += bytes;
            if self.bytes > MAX_BYTES {
                self.limit();
            }
        }
    }

    /// Replaces the oldest answers so that the others have half of the maximum size, but keeps the last one.
    fn limit(&mut self) {
        let all = self.once.values_mut().flatten();
        let all = all.flat_map(|kept| kept.values_mut().flatten());
        let mut large: Vec<_> = all.filter(|given| size(&given.answer) > 0).collect();
        large.sort_unstable_by_key(|given| std::cmp::Reverse(given.number));
        let mut counted = HashSet::new();
        let (mut sum, mut kept) = (0, 0);
        for given in large {
            if counted.insert(given.number) {
                sum += size(&given.answer);
            }
            // An answer is kept for all of its ranks or for none.
            if counted.len() > 1 && sum > MAX_BYTES / 2 {
                given.answer = Answer::Failed(Arc::new(RequestError::OutcomeLost));
            } else {
                kept = sum;
            }
        }
        self.bytes = kept;
    }

    /// Forgets the changes of the store, as a planted mistake.
    #[cfg(any(test, feature = "simulator"))]
    pub(super) fn forget_changes(&mut self) {
        for kept in self.once.values_mut() {
            kept[OnceKind::StoreChange as usize].clear();
        }
    }

    /// Returns how many requests of this kind by `rank` are kept.
    #[cfg(test)]
    pub(super) fn count(&self, rank: usize, kind: OnceKind) -> usize {
        let kept = self.once.get(&rank);
        kept.map_or(0, |kept| kept[kind as usize].len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(bytes: usize) -> Answer {
        Answer::Parts(Arc::new(vec![vec![0; bytes]]))
    }

    #[test]
    fn large_answers_make_room_and_settled_ones_do_not_count() {
        let lost = Answer::Failed(Arc::new(RequestError::OutcomeLost));
        let mut answers = Answers::new(4);
        let large = LARGEST / 2 - 1024;
        for id in 1..4 {
            let to = [(0, id), (1, id)];
            for (rank, id) in to {
                answers.begin(rank, id, OnceKind::Exchange);
            }
            answers.remember(&to, &parts(large));
            // Rank 0 waits for none of them, and rank 1 for all.
            answers.settle(0, Some(OnceKind::Exchange), id + 1);
        }
        assert_eq!(answers.get(0, 3), None);
        let kept = [1, 2, 3].map(|id| answers.get(1, id).unwrap() == lost);
        assert_eq!(kept, [true, true, false]);
        assert!(answers.bytes <= MAX_BYTES);
        // What no rank waits for any more makes room, so that no other answer has to.
        for id in 4..20 {
            answers.begin(2, id, OnceKind::Exchange);
            answers.remember(&[(2, id)], &parts(large));
            answers.settle(2, Some(OnceKind::Exchange), id + 1);
            answers.settle(1, Some(OnceKind::Exchange), 4);
            answers.begin(1, 100 + id, OnceKind::Exchange);
            answers.remember(&[(1, 100 + id)], &parts(1));
        }
        let all = (4..20).map(|id| answers.get(1, 100 + id).unwrap());
        assert!(all.into_iter().all(|answer| answer != lost));
    }

    #[test]
    fn nothing_is_kept_for_a_rank_that_is_forgotten() {
        let mut answers = Answers::new(2);
        let value = Answer::Value(vec![0; MAX_REPLACEABLE_BYTES / 2].into());
        for rank in 0..2 {
            answers.begin(rank, 1, OnceKind::Exchange);
            answers.remember(&[(rank, 1)], &Answer::Done);
            answers.remember(&[(rank, 2)], &value);
        }
        answers.forget(0);
        let kept = |rank| [1, 2].map(|id| answers.get(rank, id).is_some());
        assert_eq!([kept(0), kept(1)], [[false; 2], [true; 2]]);
        // Its place is free.
        answers.remember(&[(1, 3)], &value);
        assert!([2, 3].iter().all(|id| answers.get(1, *id).is_some()));
    }

    #[test]
    fn answers_that_can_be_computed_again_have_a_maximum_size() {
        let mut answers = Answers::new(4);
        let value = |bytes| Answer::Value(vec![0; bytes].into());
        for id in 0..10 {
            answers.remember(&[(0, id)], &value(MAX_REPLACEABLE_BYTES / 3));
        }
        answers.remember(&[(0, 10)], &value(MAX_REPLACEABLE_BYTES + 1));
        let kept: Vec<_> = (0..11).filter(|id| answers.get(0, *id).is_some()).collect();
        assert_eq!(kept, [7, 8, 9]);
        answers.remember(&[(0, 11)], &value(MAX_REPLACEABLE_BYTES));
        assert_eq!(answers.replaceable.len(), 1);
    }

    #[test]
    fn of_many_answered_requests_the_last_are_kept_and_all_that_wait() {
        let mut answers = Answers::new(4);
        answers.begin(0, 0, OnceKind::Exchange);
        for id in 1..3000 {
            answers.begin(0, id, OnceKind::Exchange);
            answers.remember(&[(0, id)], &Answer::Done);
        }
        assert!(answers.is_open(0, 0));
        assert!(answers.get(0, 2999).is_some());
        assert_eq!(answers.count(0, OnceKind::Exchange), MAX_ANSWERED + 1);
    }
}
