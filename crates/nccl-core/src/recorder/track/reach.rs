//! Which calls have shown that NCCL reaches all ranks of a communicator.

use super::Track;

/// The last call that has shown it, and one that will once it is done.
#[derive(Default)]
pub(super) struct Reach {
    /// The sequence number of the last one; 0 for none.
    shown: u64,
    /// The sequence number and the stream of one that is not known to be done.
    pending: Option<(u64, u64)>,
}

impl Reach {
    /// Notes a call, unless an earlier one is pending: one that is replaced again and again would never count.
    fn note(&mut self, call: (u64, u64), done_on: impl Fn(u64) -> u64) {
        self.update(done_on);
        self.pending.get_or_insert(call);
    }

    fn update(&mut self, done_on: impl Fn(u64) -> u64) -> u64 {
        if let Some((sequence, _)) = self
            .pending
            .take_if(|(sequence, stream)| *sequence <= done_on(*stream))
        {
            self.shown = sequence;
        }
        self.shown
    }
}

impl Track {
    /// Notes that operation `sequence` on `stream` shows, once it is done, that NCCL reaches all ranks.
    pub(super) fn note_reach(&self, sequence: u64, stream: u64) {
        let mut reach = self.reach.lock();
        reach.note((sequence, stream), |stream| self.done_on(stream));
    }

    /// The number of the last operation that has shown that NCCL reaches all ranks; 0 for none.
    pub(super) fn last_reaching_all(&self) -> u64 {
        self.reach.lock().update(|stream| self.done_on(stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_counts_once_it_is_done_on_its_stream_also_when_others_follow() {
        let mut reach = Reach::default();
        assert_eq!(reach.update(|_| 100), 0);
        reach.note((7, 1), |_| 0);
        reach.note((9, 1), |_| 6);
        assert_eq!(reach.update(|_| 6), 0);
        assert_eq!(reach.update(|stream| if stream == 1 { 6 } else { 20 }), 0);
        assert_eq!(reach.update(|_| 8), 7);
        reach.note((12, 2), |_| 8);
        assert_eq!(reach.update(|_| 8), 7);
        assert_eq!(reach.update(|stream| if stream == 2 { 12 } else { 0 }), 12);
    }
}
