//! The error texts of requests and exchanges.

use std::time::Duration;

use nccl_base::ranges::ranges;

use super::handle::RankSession;
use crate::error::{Error, ErrorKind};
use crate::frame::LARGEST;
use crate::round::{Missing, RequestError};
use crate::service::names;

impl RankSession {
    /// Returns the error of a failed request about `topic`.
    pub(crate) fn error_of(&self, topic: &str, error: &RequestError) -> Error {
        self.plain_error(topic, error)
            .of_exchange(error.unfinished())
    }

    fn plain_error(&self, topic: &str, error: &RequestError) -> Error {
        match error {
            RequestError::TimedOut {
                missing,
                waited,
                notes,
            } => Error::rendezvous(self.timed_out(topic, missing, *waited, notes)),
            RequestError::Departed { rank, departure } => Error::rendezvous(format!(
                "{} will not come to {topic:?}: {departure}",
                self.describe(*rank)
            )),
            RequestError::Twice => Error::rendezvous(format!(
                "rank {} entered {topic:?} twice: two processes or threads use one rank",
                self.rank
            )),
            RequestError::TooLarge { bytes } => {
                let max_mib = LARGEST >> 20;
                let too_large = std::io::Error::new(
                    std::io::ErrorKind::InvalidInput,
                    format!(
                        "{bytes} bytes are more than the {max_mib} MiB of all ranks together, or a name \
                         is too long, or too many are open"
                    ),
                );
                Error::io(format!("exchanging {topic:?}"))(too_large)
            }
            RequestError::GivenUp { rank, reason } => Error::rendezvous(format!(
                "{} gave up {topic:?}: {reason}",
                self.describe(*rank)
            )),
            RequestError::OtherMembers => Error::rendezvous(format!(
                "rank {} named other members for {topic:?} than another rank did: all ranks have to name the same \
                 members in the same order",
                self.rank
            )),
            RequestError::NoKey { waited } => Error::rendezvous(format!(
                "no rank set {topic:?} within {:.1} s",
                waited.as_secs_f64()
            )),
            RequestError::NoKeys { missing, waited } => Error::rendezvous(format!(
                "no rank set {} within {:.1} s",
                names(missing.iter()),
                waited.as_secs_f64()
            )),
            RequestError::NotANumber { found } => Error::rendezvous(format!(
                "nothing can be added to {topic:?}: its value is {found:?}, which is no decimal integer of 64 bits"
            )),
            RequestError::SumOverflows { counter, amount } => Error::rendezvous(format!(
                "{amount} cannot be added to {topic:?}: its value is {counter}, and the sum has more than 64 bits"
            )),
            RequestError::StoreLost => Error::rendezvous(format!(
                "{topic:?} was in the store of an earlier coordinator, which is lost: the next generation begins with an \
                 empty one"
            )),
            RequestError::ChannelsLost { rank } => Error::rendezvous(format!(
                "messages of {topic:?} may be lost: they passed through {}, and another rank coordinates since that one was \
                 not reached for some time; the channels of the next generation begin empty",
                self.describe(*rank)
            )),
            RequestError::OldGeneration => Error::rendezvous(format!(
                "{topic:?} was requested in generation {}, which is not served any more: use the world that next_generation \
                 has returned",
                self.job.1
            )),
            RequestError::OutcomeLost => Error::rendezvous(format!(
                "{topic:?} has ended, and its outcome was lost on the way to rank {}, with the coordinator that it came from or \
                 with the connection to it",
                self.rank
            )),
            RequestError::NoMajority { waited } => Error::rendezvous(format!(
                "{topic:?} cannot end on rank {}: for {:.1} s its coordinator has not reached a majority of the ranks, \
                 and the others may continue without this side",
                self.rank,
                waited.as_secs_f64()
            )),
            RequestError::Interrupted => Error::new(ErrorKind::Aborted {
                reason: format!("its abort signal was given during {topic:?}"),
            }),
        }
    }

    fn timed_out(
        &self,
        topic: &str,
        missing: &[Missing],
        waited: Duration,
        notes: &[String],
    ) -> String {
        let ranks: Vec<_> = missing.iter().map(|missing| missing.rank).collect();
        let who = match ranks[..] {
            [rank] => format!("rank {rank}"),
            _ => format!("ranks {}", ranges(&ranks)),
        };
        let mut text = format!(
            "{who} of {} did not come to {topic:?} within {:.1} s",
            self.size,
            waited.as_secs_f64()
        );
        let never: Vec<_> = missing
            .iter()
            .filter(|missing| missing.phase.is_none())
            .map(|missing| missing.rank)
            .collect();
        if !never.is_empty() {
            let verb = if never.len() == 1 { "has" } else { "have" };
            let never = ranges(&never);
            let coordinator = self.coordinator();
            text.push_str(&format!(
                "; {never} {verb} never reached rank {coordinator}"
            ));
        }
        let elsewhere = missing.iter().filter_map(|missing| {
            let (phase, since) = missing.phase.as_ref()?;
            Some((missing.rank, phase.name(), since.as_secs_f64()))
        });
        for (rank, name, since) in elsewhere.clone().take(8) {
            let rank = self.describe(rank);
            text.push_str(&format!(
                "; {rank} has been in phase {name:?} for {since:.1} s"
            ));
        }
        if elsewhere.clone().count() > 8 {
            text.push_str("; …");
        }
        let suspects = self.suspects().into_iter();
        for suspect in suspects.filter(|suspect| ranks.contains(&suspect.rank)) {
            let rank = self.describe(suspect.rank);
            text.push_str(&format!("; {rank} is {suspect}"));
        }
        for note in notes {
            text.push_str("; ");
            text.push_str(note);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_in_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5]), "0-2,5");
        assert_eq!(ranges(&[3]), "3");
        assert_eq!(ranges(&[1, 3, 4]), "1,3-4");
    }
}
