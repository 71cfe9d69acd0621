//! The handlers of notices, called one after the other.

use super::notice::Notice;
use super::state::{Handler, Inbox};

/// The maximum number of notices kept for the first handler, besides the ends of ranks.
const MAX_EARLY_NOTICES: usize = 1024;

impl Inbox {
    /// Registers `handler`, which is called with each notice, on the thread that received it, so it must not block. The
    /// first handler is immediately called with the earlier notices.
    pub(crate) fn on_notice(&self, handler: Handler) {
        let mut handlers = self.handlers.lock();
        let early_notices = std::mem::take(&mut self.state.lock().early_notices);
        early_notices.iter().for_each(&handler);
        handlers.push(handler);
    }

    /// Calls the handlers with the received notices, unless another thread is doing so. Returns whether all notices are
    /// processed.
    pub(crate) fn run_handlers(&self) -> bool {
        loop {
            let notice = {
                let mut state = self.state.lock();
                if state.handler_is_running {
                    return false;
                }
                let Some(notice) = state.notices.pop_front() else {
                    return true;
                };
                state.handler_is_running = true;
                notice
            };
            let handlers = self.handlers.lock();
            if handlers.is_empty() {
                let mut state = self.state.lock();
                // What has become of the ranks is kept in any case; there is one such notice for each rank.
                let is_end = matches!(notice, Notice::Departed { .. } | Notice::CutOff { .. });
                if is_end || state.early_notices.len() < MAX_EARLY_NOTICES {
                    state.early_notices.push(notice);
                }
            } else {
                for handler in handlers.iter() {
                    // A panic of one handler does not affect the others.
                    let call = std::panic::AssertUnwindSafe(|| handler(&notice));
                    let _ = std::panic::catch_unwind(call);
                }
            }
            drop(handlers);
            self.state.lock().handler_is_running = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::coordinator_message::Push;
    use crate::departure::Departure;
    use crate::sync::Mutex;

    #[test]
    fn the_first_handler_learns_of_departures_after_however_many_other_notices() {
        let inbox = Inbox::default();
        for _ in 0..2 * MAX_EARLY_NOTICES {
            inbox.push(Push::Announced {
                from: 0,
                topic: String::from("x"),
                bytes: Arc::from([]),
            });
        }
        let (rank, departure) = (1, Departure::Left);
        inbox.push(Push::Departed { rank, departure });
        inbox.cut_off(vec![2], "cut off");
        inbox.run_handlers();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&heard);
        inbox.on_notice(Box::new(move |notice| record.lock().push(notice.clone())));
        let heard = heard.lock();
        assert_eq!(heard.len(), MAX_EARLY_NOTICES + 2);
        assert!(
            matches!(
                heard[MAX_EARLY_NOTICES..],
                [Notice::Departed { rank: 1, .. }, Notice::CutOff { .. }]
            ),
            "{:?}",
            &heard[MAX_EARLY_NOTICES..]
        );
    }
}
