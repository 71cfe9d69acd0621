//! The progress of a launch for a profiler, while its stream runs it.
//!
//! Checked after each step, and every few milliseconds while the launch waits: a peer may complete a message without a
//! notification. Without a profiler none of this runs.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lane::{Head, Lane};
use super::launch::Launch;
use super::proxies::Ring;
use super::ring::ring_at;
use super::scope::Outcome;
use crate::nccl::communicator::Session;
use crate::nccl::profiler::{Flow, Tracker};

/// The pause between two checks of a waiting launch for a profiler.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

impl Launch {
    /// Reports the progress of the launch to a profiler. While the launch waits, repeats this a little later.
    #[cold]
    pub(super) fn observe(&mut self, tracker: &Arc<Tracker>, outcome: &Outcome) {
        match outcome {
            Outcome::Failed => return,
            Outcome::Done => see(self, tracker, true),
            _ => see(self, tracker, false),
        }
        if !matches!(outcome, Outcome::Blocked | Outcome::Stuck) {
            return;
        }
        let now = Instant::now();
        if self.look.is_none_or(|look| look <= now) {
            let look = now + LOOK_AGAIN;
            self.look = Some(look);
            ring_at(look, &self.session);
        }
    }
}

/// Records the progress of a launch.
fn see(launch: &Launch, tracker: &Arc<Tracker>, is_over: bool) {
    let (tasks, session) = (&launch.lists, &*launch.session);
    let has_begun = launch.has_begun();
    tracker.see(|collectives, messages| {
        for (at, (operation, task)) in collectives.iter_mut().zip(&tasks.collectives).enumerate() {
            if is_over || at < launch.at {
                operation.see_end();
            } else if at == launch.at && has_begun {
                operation.see_begin();
                if let Some(collective) = &launch.collective {
                    let ring = Ring::of(session, task);
                    let number = collective.number();
                    let arrived = |rank: usize| {
                        let block = session.segment.block(rank);
                        let last = block.collective.load(std::sync::atomic::Ordering::Relaxed);
                        number > 0 && last >= number
                    };
                    let progress = collective.progress(session);
                    for proxy in &mut operation.proxies {
                        let flow = match proxy.is_send() {
                            true => ring.sent(&arrived, progress),
                            false => ring.received(&arrived, progress),
                        };
                        proxy.see(flow);
                    }
                }
            }
        }
        if !is_over && !launch.messages.has_begun() {
            return;
        }
        let mut lanes = launch.messages.lanes.iter().peekable();
        for (at, (operation, task)) in messages.iter_mut().zip(&tasks.messages).enumerate() {
            if is_over {
                operation.see_end();
                continue;
            }
            operation.see_begin();
            if task.peer as usize == session.rank {
                if launch.messages.own_is_over(at, task.direction) {
                    operation.see_end();
                }
                continue;
            }
            // Lanes are in the order of their messages.
            while lanes.next_if(|lane| lane.end <= at).is_some() {}
            match lanes.peek().map(|lane| flow(lane, at, session)) {
                Some(Some(flow)) => operation
                    .proxies
                    .iter_mut()
                    .for_each(|proxy| proxy.see(flow)),
                Some(None) => operation.see_end(),
                None => {}
            }
        }
    });
}

/// Returns the progress of a message of a lane; `None` if it is complete.
fn flow(lane: &Lane, at: usize, session: &Session) -> Option<Flow> {
    match at.cmp(&lane.next) {
        Ordering::Less => None,
        Ordering::Greater => Some(Flow::default()),
        Ordering::Equal => {
            let exchange = lane.exchange(session);
            if lane.head == Head::Empty || exchange.is_done(lane.number) {
                return None;
            }
            Some(Flow {
                is_ready: true,
                has_peer: lane.compare(session) != Ordering::Greater,
                done: exchange.copied(lane.number, lane.chunks()),
            })
        }
    }
}
