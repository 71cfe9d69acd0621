//! Connects to other processes of the job, on threads that end when idle, because connecting and the handshake block.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::driver::MachineDriver;
use crate::address::Address;
use crate::connect::{self, AttemptOutcome, ClaimedRole};
use crate::departure::{LossKind, Lost, UnreachableEvidence};
use crate::proto::MemberId;
use crate::sync::Mutex;

/// The maximum number of connections made at the same time.
const THREADS: usize = 16;

#[derive(Default)]
pub(crate) struct Dialer {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(MemberId, String)>,
    threads: usize,
}

impl Dialer {
    /// Connects to `peer`, which listens at `at`, and reports to `driver`. If no thread runs and none can be started,
    /// reports the failure at once.
    pub(crate) fn dial(&self, driver: &Weak<dyn MachineDriver>, peer: MemberId, at: String) {
        let mut state = self.state.lock();
        state.queue.push_back((peer, at));
        if state.threads == THREADS {
            return;
        }
        let (own, shared) = (Weak::clone(driver), Arc::clone(&self.state));
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-dial"))
            .spawn(move || run(&own, &shared));
        match spawned {
            Ok(_) => state.threads += 1,
            // Another thread will take it.
            Err(_) if state.threads > 0 => {}
            Err(error) => {
                let next = state.queue.pop_back();
                drop(state);
                tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "dial", why = %error, "no thread to connect with");
                if let (Some((peer, _)), Some(driver)) = (next, driver.upgrade()) {
                    driver.dial_failed(peer, Lost::reported(error.to_string()));
                }
            }
        }
    }
}

fn run(driver: &Weak<dyn MachineDriver>, state: &Mutex<State>) {
    loop {
        let Some(driver) = driver.upgrade() else {
            return;
        };
        let next = {
            let mut state = state.lock();
            let next = state.queue.pop_front();
            if next.is_none() {
                state.threads -= 1;
            }
            next
        };
        let Some((peer, at)) = next else { return };
        match connect(&*driver, &at) {
            Ok(connection) => driver.dialled(peer, connection),
            Err(lost) => driver.dial_failed(peer, lost),
        }
    }
}

fn connect(driver: &dyn MachineDriver, at: &str) -> Result<connect::AuthenticatedConnection, Lost> {
    let address = Address::parse(at).ok_or_else(|| Lost::from(LossKind::NoAddress))?;
    let claimed_role = ClaimedRole::member(driver.slot());
    match connect::attempt(
        &address,
        driver.job(),
        claimed_role,
        0,
        Instant::now() + connect::ATTEMPT_TIMEOUT,
    ) {
        AttemptOutcome::Connected(connection) => Ok(connection),
        AttemptOutcome::Follows { why, .. } | AttemptOutcome::Refused(why) => {
            Err(LossKind::Reported(why).into())
        }
        AttemptOutcome::NotYet(error, _) => Err(match error.kind() {
            std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound => {
                UnreachableEvidence::Refused.into()
            }
            _ => UnreachableEvidence::Error(error.to_string()).into(),
        }),
    }
}
