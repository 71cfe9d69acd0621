//! Connects to other processes of the job, on threads that end when there is nothing to do: connecting and greeting wait.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Node;
use crate::client::{self, Claim, Tried};
use crate::departure::{How, Lost, Sign};
use crate::launcher;
use crate::proto::MemberId;
use crate::sync::Mutex;

/// How many connections are made at once.
const THREADS: usize = 16;

/// How long one may take.
const TRY: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(super) struct Dialer {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(MemberId, String)>,
    threads: usize,
}

impl Dialer {
    /// Connects to `peer`, which listens `at`, and tells `node`.
    pub(super) fn dial(&self, node: &Weak<Node>, peer: MemberId, at: String) {
        let mut state = self.state.lock();
        state.queue.push_back((peer, at));
        if state.threads == THREADS {
            return;
        }
        let node = Weak::clone(node);
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-dial"))
            .spawn(move || run(&node));
        match spawned {
            Ok(_) => state.threads += 1,
            // Another thread does it, or the machine asks again.
            Err(error) => {
                tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "dial", why = %error, "no thread to connect with");
            }
        }
    }
}

fn run(node: &Weak<Node>) {
    loop {
        let Some(node) = node.upgrade() else { return };
        let next = {
            let mut state = node.dialer.state.lock();
            let next = state.queue.pop_front();
            if next.is_none() {
                state.threads -= 1;
            }
            next
        };
        let Some((peer, at)) = next else { return };
        match connect(&node, &at) {
            Ok(met) => node.dialled(peer, met),
            Err(lost) => node.dial_failed(peer, lost),
        }
    }
}

fn connect(node: &Arc<Node>, at: &str) -> Result<client::Met, Lost> {
    let address = launcher::place(at).ok_or_else(|| Lost::from(How::NoAddress))?;
    let claim = Claim::member(node.slot());
    match client::attempt(&address, &node.job, claim, 0, Instant::now() + TRY) {
        Tried::Met(met) => Ok(met),
        Tried::Follows { why, .. } | Tried::Refused(why) => Err(How::Said(why).into()),
        Tried::NotYet(error, _) => Err(match error.kind() {
            std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound => {
                How::NobodyListens.into()
            }
            _ => Sign::Error(error.to_string()).into(),
        }),
    }
}
