//! The handlers of notices, called one after the other.

use super::state::{Handler, Inbox};

/// The maximum number of notices kept for the first handler.
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
                if state.early_notices.len() < MAX_EARLY_NOTICES {
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
