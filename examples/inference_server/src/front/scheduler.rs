//! The scheduler: it chooses the tokens of the next step. This is continuous batching in miniature.
//!
//! ```text
//! waiting (first come, first served) ──a slot is free──▶ prefill, in chunks ──▶ decode, a token a step ──▶ over
//!                                                          ▲                          │
//!                                                          └─ its cache was lost ────┘
//! ```
//!
//! A step takes first the next token of each request in its decode phase, and then parts of prompts, up to its capacity, of
//! which the oldest prompt gets at least one row. A request keeps its prompt and all drawn tokens, so that it can start again
//! from there when the caches are lost. The result is the same, since tokens are a function of the text alone (see
//! [`model`](crate::model)).
//!
//! The scheduler is independent of ranks and connections; the engine gives each request a [`Client`].

use std::collections::VecDeque;

use crate::model::Settings;
use crate::wire::{Draw, StepRow};

/// The client of a request.
pub(super) trait Client {
    /// Tells the client that the request has a place in the queue.
    fn taken(&mut self);
    /// Whether the client has disconnected.
    fn is_gone(&self) -> bool;
    /// Whether this token ends the text.
    fn ends(&self, token: u32) -> bool;
    /// Passes on a drawn token that does not end the text. Returns whether the client has enough.
    fn say(&mut self, token: u32) -> bool;
    /// Ends the answer.
    fn end(self, why: Finish, prompt: usize);
}

/// The reason for the end of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    /// The text ended by itself, or with a stop text of the client.
    Stop,
    /// The text has the requested number of tokens, or fills the cache.
    Length,
}

/// A request.
#[derive(Clone, Debug)]
pub(super) struct Request<C> {
    pub(super) prompt: Vec<u32>,
    /// The most tokens to generate; at least one.
    pub(super) most: usize,
    pub(super) draw: Draw,
    pub(super) client: C,
}

struct Running<C> {
    request: Request<C>,
    slot: usize,
    /// The prompt and the drawn tokens.
    text: Vec<u32>,
    /// The number of these tokens in the caches.
    known: usize,
}

/// The requests of a server.
pub(super) struct Scheduler<C> {
    settings: Settings,
    /// The most tokens of one prompt in a step.
    chunk: usize,
    queue: usize,
    waiting: VecDeque<Request<C>>,
    running: Vec<Running<C>>,
    free: Vec<usize>,
    /// The ends of the tokens that the step in progress takes of each running request, in the order of its rows.
    planned: Vec<(usize, usize)>,
}

impl<C: Client> Scheduler<C> {
    /// Creates a scheduler. Up to `queue` requests may wait for a slot.
    pub(super) fn new(settings: Settings, chunk: usize, queue: usize) -> Self {
        Self {
            settings,
            chunk,
            queue,
            waiting: VecDeque::new(),
            running: Vec::new(),
            free: (0..settings.slots).rev().collect(),
            planned: Vec::new(),
        }
    }

    /// Takes a request, or returns it when too many wait.
    pub(super) fn submit(&mut self, mut request: Request<C>) -> Result<(), Request<C>> {
        self.forget_the_gone();
        let places = self.free.len().saturating_add(self.queue);
        if self.waiting.len() >= places {
            return Err(request);
        }
        request.client.taken();
        self.waiting.push_back(request);
        Ok(())
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn running(&self) -> usize {
        self.running.len()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Returns the clients of all requests.
    pub(super) fn clients(&mut self) -> impl Iterator<Item = &mut C> {
        let running = self.running.iter_mut().map(|one| &mut one.request.client);
        running.chain(self.waiting.iter_mut().map(|request| &mut request.client))
    }

    /// Forgets the step that was under way.
    pub(super) fn interrupt(&mut self) {
        self.planned.clear();
    }

    /// Goes on with caches that have so many positions of each slot; none of slots that are not named.
    pub(super) fn resume(&mut self, kept: &[usize]) {
        for one in &mut self.running {
            let kept = kept.get(one.slot).copied().unwrap_or(0);
            // What the step that was under way has written is written again.
            one.known = one.known.min(kept);
        }
    }

    /// Drops the requests of disconnected clients. Frees their slots only while no step is in progress.
    pub(super) fn forget_the_gone(&mut self) {
        self.waiting.retain(|request| !request.client.is_gone());
        if self.planned.is_empty() {
            let free = &mut self.free;
            self.running.retain(|one| {
                let gone = one.request.client.is_gone();
                if gone {
                    free.push(one.slot);
                }
                !gone
            });
        }
    }

    /// Returns the rows of the next step; none when there is no work.
    pub(super) fn plan(&mut self) -> Vec<StepRow> {
        self.forget_the_gone();
        while !self.waiting.is_empty()
            && let Some(slot) = self.free.pop()
            && let Some(request) = self.waiting.pop_front()
        {
            let text = request.prompt.clone();
            self.running.push(Running {
                request,
                slot,
                text,
                known: 0,
            });
        }
        // Requests that need only one token come first; otherwise by arrival.
        let mut order: Vec<usize> = (0..self.running.len()).collect();
        let is_prompt = |one: &Running<C>| one.text.len() - one.known > 1;
        order.sort_by_key(|&number| is_prompt(&self.running[number]));
        let has_prompts = self.running.iter().any(is_prompt);
        let mut rows = Vec::new();
        self.planned.clear();
        for number in order {
            let one = &self.running[number];
            // With more slots than rows, texts that need one token could take all rows, step after step.
            let kept = usize::from(has_prompts && !is_prompt(one));
            let room = (self.settings.rows - kept - rows.len()).min(self.chunk);
            let to = (one.known + room).min(one.text.len());
            if to == one.known {
                continue;
            }
            rows.extend((one.known..to).map(|position| StepRow {
                slot: one.slot,
                position,
                token: one.text[position],
                draw: (position + 1 == one.text.len()).then_some(one.request.draw),
            }));
            self.planned.push((number, to));
        }
        rows
    }

    /// Ends the planned step with its tokens, and returns their number.
    ///
    /// Returns `None`, and changes nothing, if the number differs from the plan.
    pub(super) fn took(&mut self, tokens: &[u32]) -> Option<usize> {
        let wanted = |&&(number, to): &&(usize, usize)| to == self.running[number].text.len();
        if self.planned.iter().filter(wanted).count() != tokens.len() {
            return None;
        }
        let mut left = tokens.iter();
        let mut over = Vec::new();
        for (number, to) in std::mem::take(&mut self.planned) {
            let one = &mut self.running[number];
            one.known = to;
            if to < one.text.len() {
                continue;
            }
            let &token = left.next()?;
            one.text.push(token);
            let made = one.text.len() - one.request.prompt.len();
            // The next plan frees the slot of a disconnected client.
            let enough = one.request.client.ends(token) || one.request.client.say(token);
            let full = made == one.request.most || one.text.len() == self.settings.positions;
            if enough {
                over.push((number, Finish::Stop));
            } else if full {
                over.push((number, Finish::Length));
            }
        }
        over.sort_by_key(|&(number, _)| number);
        // From the end, so that the indices stay valid.
        for (number, why) in over.into_iter().rev() {
            let one = self.running.remove(number);
            self.free.push(one.slot);
            let prompt = one.request.prompt.len();
            one.request.client.end(why, prompt);
        }
        Some(tokens.len())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use super::*;
    use crate::model::tokenizer::END;

    #[derive(Clone, Default)]
    struct Log {
        said: Rc<RefCell<Vec<u32>>>,
        ended: Rc<Cell<Option<(Finish, usize)>>>,
        gone: Rc<Cell<bool>>,
    }

    impl Client for Log {
        fn taken(&mut self) {}

        fn is_gone(&self) -> bool {
            self.gone.get()
        }

        fn ends(&self, token: u32) -> bool {
            token == END
        }

        fn say(&mut self, token: u32) -> bool {
            self.said.borrow_mut().push(token);
            token == 99
        }

        fn end(self, why: Finish, prompt: usize) {
            self.ended.set(Some((why, prompt)));
        }
    }

    const SETTINGS: Settings = Settings {
        rows: 8,
        slots: 2,
        positions: 12,
    };

    fn request(prompt: usize, most: usize) -> (Request<Log>, Log) {
        let client = Log::default();
        let draw = Draw {
            temperature: 0.0,
            top_p: 1.0,
            seed: 0,
        };
        let request = Request {
            prompt: (1..=prompt as u32).collect(),
            most,
            draw,
            client: client.clone(),
        };
        (request, client)
    }

    fn places(rows: &[StepRow]) -> Vec<(usize, usize, bool)> {
        rows.iter()
            .map(|row| (row.slot, row.position, row.draw.is_some()))
            .collect()
    }

    #[test]
    fn next_tokens_come_before_prompts_which_come_in_chunks() {
        let mut scheduler = Scheduler::new(SETTINGS, 4, 2);
        let (one, log) = request(2, 9);
        assert!(scheduler.submit(one).is_ok());
        assert_eq!(places(&scheduler.plan()), [(0, 0, false), (0, 1, true)]);
        assert_eq!(scheduler.took(&[7]), Some(1));
        let (two, _) = request(6, 9);
        assert!(scheduler.submit(two).is_ok());
        let rows = scheduler.plan();
        assert_eq!(rows[0].token, 7);
        assert_eq!(
            places(&rows),
            [
                (0, 2, true),
                (1, 0, false),
                (1, 1, false),
                (1, 2, false),
                (1, 3, false)
            ]
        );
        assert_eq!(scheduler.took(&[8]), Some(1));
        assert_eq!(
            places(&scheduler.plan()),
            [(0, 3, true), (1, 4, false), (1, 5, true)]
        );
        assert_eq!(*log.said.borrow(), [7, 8]);
    }

    #[test]
    fn a_prompt_gets_a_row_although_texts_that_need_one_token_could_take_all() {
        let few_rows = Settings {
            rows: 2,
            slots: 4,
            ..SETTINGS
        };
        let mut scheduler = Scheduler::new(few_rows, 4, 4);
        let (long, log) = request(3, 1);
        assert!(scheduler.submit(long).is_ok());
        for _ in 0..3 {
            assert_eq!(log.ended.get(), None);
            // Another request comes for each that is over.
            while scheduler.waiting() + scheduler.running() < few_rows.slots {
                assert!(scheduler.submit(request(1, 1).0).is_ok());
            }
            let rows = scheduler.plan();
            assert_eq!(rows.len(), 2);
            let drawn = rows.iter().filter(|row| row.draw.is_some()).count();
            assert_eq!(scheduler.took(&vec![5; drawn]), Some(drawn));
        }
        assert_eq!(log.ended.get(), Some((Finish::Length, 3)));
    }

    #[test]
    fn a_request_goes_on_from_what_is_left_in_a_cache() {
        let mut scheduler = Scheduler::new(SETTINGS, 4, 2);
        let (one, log) = request(3, 9);
        assert!(scheduler.submit(one).is_ok());
        scheduler.plan();
        scheduler.took(&[40]);
        // The step in progress failed, and its rank has written position 3 or has not; then that rank is gone as well.
        for kept in [4, 3] {
            scheduler.plan();
            scheduler.interrupt();
            scheduler.resume(&[kept, 9]);
            assert_eq!(places(&scheduler.plan()), [(0, 3, true)]);
        }
        scheduler.interrupt();
        scheduler.resume(&[]);
        let rows = scheduler.plan();
        assert_eq!(
            places(&rows),
            [(0, 0, false), (0, 1, false), (0, 2, false), (0, 3, true)]
        );
        assert_eq!(rows[3].token, 40);
        scheduler.took(&[41]);
        assert_eq!(*log.said.borrow(), [40, 41]);
        // Another one at its place has nothing of it, whatever is there.
        scheduler.interrupt();
        scheduler.resume(&[2]);
        assert_eq!(
            places(&scheduler.plan()),
            [(0, 2, false), (0, 3, false), (0, 4, true)]
        );
    }

    #[test]
    fn a_text_is_over_by_its_token_the_clients_wish_its_length_or_the_cache() {
        for (tokens, most, expected) in [
            (vec![5, END], 9, (Finish::Stop, 3)),
            (vec![5, 99], 9, (Finish::Stop, 3)),
            (vec![5, 5], 2, (Finish::Length, 3)),
            (vec![5; 9], 100, (Finish::Length, 3)),
        ] {
            let mut scheduler = Scheduler::new(SETTINGS, 4, 2);
            let (one, log) = request(3, most);
            assert!(scheduler.submit(one).is_ok());
            for token in tokens {
                assert_eq!(log.ended.get(), None);
                scheduler.plan();
                assert_eq!(scheduler.took(&[token]), Some(1));
            }
            assert_eq!(log.ended.get(), Some(expected));
            assert!(scheduler.is_idle() && scheduler.plan().is_empty());
            assert!(!log.said.borrow().contains(&END));
        }
    }

    #[test]
    fn a_client_that_goes_away_gives_its_slot_to_the_next() {
        let mut scheduler = Scheduler::new(SETTINGS, 4, 1);
        let logs: Vec<_> = (0..3)
            .map(|_| {
                let (one, log) = request(2, 9);
                assert!(scheduler.submit(one).is_ok());
                log
            })
            .collect();
        scheduler.plan();
        assert_eq!((scheduler.running(), scheduler.waiting()), (2, 1));
        logs[0].gone.set(true);
        // A step in progress keeps its requests.
        scheduler.forget_the_gone();
        assert_eq!(scheduler.took(&[5, 6]), Some(2));
        let rows = scheduler.plan();
        assert_eq!((scheduler.running(), scheduler.waiting()), (2, 0));
        assert_eq!(places(&rows), [(1, 2, true), (0, 0, false), (0, 1, true)]);
    }

    #[test]
    fn so_many_may_wait_beyond_the_slots_and_no_more() {
        let mut scheduler = Scheduler::new(SETTINGS, 4, 1);
        for _ in 0..3 {
            assert!(scheduler.submit(request(2, 9).0).is_ok());
        }
        assert!(scheduler.submit(request(2, 9).0).is_err());
        scheduler.plan();
        assert!(scheduler.submit(request(2, 9).0).is_err());
        assert_eq!(scheduler.waiting(), 1);
        // A waiting request whose client disconnects makes room.
        let mut scheduler = Scheduler::new(SETTINGS, 4, 1);
        let (last, log) = request(2, 9);
        assert!(scheduler.submit(request(2, 9).0).is_ok());
        assert!(scheduler.submit(request(2, 9).0).is_ok());
        assert!(scheduler.submit(last).is_ok());
        log.gone.set(true);
        assert!(scheduler.submit(request(2, 9).0).is_ok());
    }

    #[test]
    fn an_answer_with_another_number_of_tokens_changes_nothing() {
        let mut scheduler = Scheduler::new(SETTINGS, 4, 1);
        let (one, log) = request(2, 9);
        assert!(scheduler.submit(one).is_ok());
        scheduler.plan();
        assert_eq!(scheduler.took(&[1, 2]), None);
        assert_eq!(scheduler.took(&[]), None);
        assert!(log.said.borrow().is_empty());
        assert_eq!(scheduler.took(&[3]), Some(1));
    }
}
