//! The calls that have shown that NCCL reaches all ranks of a communicator.

/// A call: its sequence number and its stream.
type Call = (u64, u64);

/// The last call known to have shown this, and two pending calls that will show it once they are done.
#[derive(Default)]
pub(super) struct Reach {
    /// The sequence number of the last call that has shown it; 0 for none.
    shown: u64,
    /// A pending call that is kept until it is done. If each new call replaced it, none might ever be seen to complete.
    first: Option<Call>,
    /// The newest pending call, because the end of `first` may never be known, if that call was refused or its stream
    /// is gone.
    last: Option<Call>,
}

impl Reach {
    pub(super) fn note(&mut self, call: Call, done_on: impl Fn(u64) -> u64) {
        self.update(done_on);
        match self.first {
            None => self.first = Some(call),
            Some(_) => self.last = Some(call),
        }
    }

    pub(super) fn update(&mut self, done_on: impl Fn(u64) -> u64) -> u64 {
        let is_done =
            |call: Option<Call>| call.filter(|(sequence, stream)| *sequence <= done_on(*stream));
        if let Some((sequence, _)) = is_done(self.last) {
            (self.shown, self.first, self.last) = (sequence, None, None);
        } else if let Some((sequence, _)) = is_done(self.first) {
            (self.shown, self.first) = (sequence, self.last.take());
        }
        self.shown
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
        assert_eq!(reach.update(|_| 9), 9);
        reach.note((12, 2), |_| 9);
        assert_eq!(reach.update(|_| 9), 9);
        assert_eq!(reach.update(|stream| if stream == 2 { 12 } else { 0 }), 12);
    }

    #[test]
    fn a_call_whose_end_is_never_known_keeps_no_later_one_from_counting() {
        let mut reach = Reach::default();
        let on_two = |done: u64| move |stream| if stream == 2 { done } else { 0 };
        reach.note((7, 1), on_two(0));
        for sequence in [8, 9, 10] {
            reach.note((sequence, 2), on_two(sequence - 1));
            assert_eq!(reach.update(on_two(sequence)), sequence);
        }
    }
}
