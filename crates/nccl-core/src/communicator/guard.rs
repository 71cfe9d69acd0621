//! The guard of blocking calls: a duty of the monitor that pulls the switch of a blocking communicator when a call has been inside
//! for too long.
//!
//! A call only writes a word to memory ([`Switch::enter`]), so that the guard costs the call no system call and no fence. The guard
//! reads all words every [`TICK`], and sleeps after a while without calls. A call that does not return although its
//! switch was pulled is left to the sentinel (`supervision/sentinel.rs`).

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::switch::{BELL, Found, Switch};
use crate::error::Result;
use crate::monitor::{self, Duty, Next, Rest};
use crate::reaper;
use crate::sync::Mutex;
use crate::threads;

/// How often the guard looks. A call may end up to two ticks after its timeout, which counts from the first look at it.
const TICK: Duration = Duration::from_millis(5);

/// The number of looks without a call after which the guard sleeps.
const QUIET: u32 = 200;

static SWITCHES: Mutex<Vec<Weak<Switch>>> = Mutex::new(Vec::new());

/// Guards calls on this communicator from now on, on the thread that [`ensure`] has started.
pub(crate) fn watch(switch: &Arc<Switch>) {
    let mut switches = SWITCHES.lock();
    switches.retain(|switch| switch.strong_count() > 0);
    switches.push(Arc::downgrade(switch));
}

/// Starts the monitor unless it runs.
///
/// # Errors
/// [`ErrorKind::Io`](crate::ErrorKind::Io) when no thread can be started.
pub(crate) fn ensure() -> Result<()> {
    monitor::ensure(&BELL, Guard::new).map_err(threads::not_started("that guards calls that block"))
}

/// The guard; see the module.
struct Guard {
    calls: u64,
    rest: Rest,
    /// Switches still to be pulled, for want of a thread.
    to_pull: Vec<Arc<Switch>>,
    /// Whether the lack of a thread has been logged.
    has_told: bool,
}

impl Guard {
    fn new() -> Self {
        Self {
            calls: 0,
            rest: Rest::new(&BELL, TICK, QUIET),
            to_pull: Vec::new(),
            has_told: false,
        }
    }

    /// Looks at every communicator once. Returns whether a call was made since the last look, or is inside.
    fn look_at_all(&mut self) -> bool {
        let switches: Vec<Arc<Switch>> = SWITCHES.lock().iter().filter_map(Weak::upgrade).collect();
        let (mut inside, mut now) = (false, 0_u64);
        let mut to_pull = std::mem::take(&mut self.to_pull);
        for switch in &switches {
            now = now.wrapping_add(switch.calls());
            match switch.look() {
                Found::Nobody => continue,
                Found::Inside | Found::Ended => {}
                Found::ToEnd => {
                    to_pull.push(Arc::clone(switch));
                    to_pull.extend(switch.companions().iter().filter_map(Weak::upgrade));
                }
            }
            inside = true;
        }
        to_pull.into_iter().for_each(|switch| self.pull(switch));
        let called = now != self.calls;
        self.calls = now;
        inside || called || !self.to_pull.is_empty()
    }

    /// Raises the flag on a thread of its own, because NCCL may take its time.
    fn pull(&mut self, switch: Arc<Switch>) {
        if reaper::is_closed() {
            return;
        }
        let pulled = Arc::clone(&switch);
        let spawned = threads::spawn("nccl-abort", move || pulled.pull());
        match spawned {
            Ok(_) => self.has_told = false,
            Err(error) => {
                if !std::mem::replace(&mut self.has_told, true) {
                    crate::events::no_thread("to end a call; it is tried again", &error);
                }
                self.to_pull.push(switch);
            }
        }
    }
}

impl Duty for Guard {
    fn look(&mut self) -> Next {
        let found = self.look_at_all();
        self.rest.after(found)
    }

    fn is_over(&self) -> bool {
        let switches = SWITCHES.try_lock();
        switches.is_some_and(|switches| switches.iter().all(|switch| switch.strong_count() == 0))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use nccl_sys as sys;

    use super::*;
    use crate::abort::AbortSignal;
    use crate::library::Library;
    use crate::state::Phase;

    #[test]
    fn a_call_is_ended_whenever_the_monitor_has_slept_or_ended_before_it() {
        // SAFETY: nothing is called through an empty table.
        let library = unsafe { Library::from_api(sys::Api::empty(), sys::Version::HEADER) }
            .expect("a table of functions");
        // Right away, while the monitor sleeps, and after it has ended: it does not end while there is a switch.
        let mut last = None;
        for (pause, is_kept) in [(0, false), (2000, true), (2500, false)] {
            let pause = Duration::from_millis(pause);
            if !is_kept {
                drop(last.take());
            }
            std::thread::sleep(pause);
            let switch = Switch::new(&library, &AbortSignal::new(), &Arc::new(Phase::new()));
            let switch = Arc::new(switch);
            watch(&switch);
            ensure().expect("a thread");
            let call = switch.enter(Duration::ZERO);
            let begun = Instant::now();
            while !switch.is_ended() {
                assert!(begun.elapsed() < Duration::from_secs(20), "{pause:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(call.leave().is_some());
            last = Some(switch);
        }
    }
}
