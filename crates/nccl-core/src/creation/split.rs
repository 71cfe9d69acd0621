//! Communicators of some of the ranks.
//!
//! The ranks exchange colours over the communicator itself, and the ranks of each colour make a new communicator
//! that shares nothing with the parent: an abort of one leaves the other alone. `ncclCommSplit` is not used,
//! because what it shares depends on the parent's configuration.

use crate::communicator::{Communicator, timeouts};
use std::time::Instant;

use super::CommunicatorBuilder;
use super::first_handle::first_handle;
use super::init::PreparedInit;
use crate::active_calls::CallKind;
use crate::communicator::launch_mode::{LaunchPreference, common_mode};
use crate::cuda_driver;
use crate::error::{Error, Result};
use crate::events;
use crate::forked;
use crate::operation::{OperationKind, Shape};
use crate::sealed_unique_id;
use crate::time::deadline_after;
use crate::unique_id::UniqueId;
use nccl_base::env_timeouts::EnvTimeouts;
use nccl_base::fault::Roster;
use nccl_base::sanitize;

/// A rank's part in a split: its colour, if it takes part, and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SplitChoice {
    color: Option<u32>,
    key: i64,
}

impl SplitChoice {
    const LEN: usize = 16;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = u8::from(self.color.is_some());
        bytes[4..8].copy_from_slice(&self.color.unwrap_or_default().to_le_bytes());
        bytes[8..].copy_from_slice(&self.key.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let field = |range: std::ops::Range<usize>| &bytes[range];
        let color = u32::from_le_bytes(field(4..8).try_into().unwrap_or_default());
        let key = i64::from_le_bytes(field(8..16).try_into().unwrap_or_default());
        Self {
            color: (bytes[0] != 0).then_some(color),
            key,
        }
    }
}

/// Returns the ranks of the parent that have the colour of `rank`, in the order of their new ranks.
fn members(choices: &[SplitChoice], rank: usize) -> Vec<usize> {
    let mut members: Vec<usize> = (0..choices.len())
        .filter(|&other| choices[other].color == choices[rank].color)
        .collect();
    members.sort_by_key(|&member| (choices[member].key, member));
    members
}

/// The kinds of answers in the second round: a token from the first rank of a colour, or why a rank cannot take part.
const READY: u8 = 0;
const FAILED: u8 = 1;
/// The header: the kind, the number of bytes that follow, and the launch mode.
const HEAD: usize = 4;
const MODE: usize = 3;
/// The length of an answer, the same on all ranks: the sealed token with two names, or the start of a reason.
const ANSWER: usize = 1024;
/// The maximum length of a name in a sealed token, in bytes.
const LONGEST_NAME: usize = 300;

/// Makes a communicator of the ranks with the same `color`; `set` configures its builder.
pub(super) fn split(
    comm: &Communicator,
    name: &str,
    color: Option<u32>,
    key: i64,
    set: impl FnOnce(CommunicatorBuilder<'_>) -> CommunicatorBuilder<'_>,
) -> Result<Option<Communicator>> {
    forked::check()?;
    let started = Instant::now();
    let made = split_in(comm, name, SplitChoice { color, key }, set).map_err(|error| {
        error.during(|| {
            let inner = &comm.inner;
            inner.operation(OperationKind::Split, Shape::default(), None, started)
        })
    });
    match &made {
        Ok(Some(comm)) => events::made(name, started.elapsed(), Ok(comm.inner.identity())),
        Ok(None) => {}
        Err(error) => events::made(name, started.elapsed(), Err(error)),
    }
    made
}

fn split_in(
    comm: &Communicator,
    name: &str,
    choice: SplitChoice,
    set: impl FnOnce(CommunicatorBuilder<'_>) -> CommunicatorBuilder<'_>,
) -> Result<Option<Communicator>> {
    let outside = EnvTimeouts::of_process()?;
    let choices = exchange(comm, &choice.to_bytes())?;
    let choices: Vec<SplitChoice> = choices
        .chunks(SplitChoice::LEN)
        .map(SplitChoice::from_bytes)
        .collect();
    let members = match choice.color {
        Some(_) => members(&choices, comm.rank()),
        None => Vec::new(),
    };

    // This rank detects its own problems before the other ranks wait for it.
    let prepared = members
        .iter()
        .position(|&member| member == comm.rank())
        .map(|rank| {
            let builder = CommunicatorBuilder::of_split(name, rank, comm, &members);
            let mut builder = set(builder);
            builder.timeouts = timeouts::over(outside, builder.timeouts);
            let (prepared, id) = builder.prepare_split(rank == 0)?;
            let prepared = prepared.inherits(comm.inner.launch_mode());
            Ok(SplitPart {
                prepared,
                id,
                timeout: builder.init_timeout(),
            })
        });
    let (job, generation) = job(comm);
    let job = short(job);
    let seal = |id: &UniqueId| sealed_unique_id::seal(&job, generation, &short(name), id);
    let answers = exchange(comm, &answer(&prepared, seal))?;
    let answers: Vec<&[u8]> = answers.chunks(ANSWER).collect();
    let Some(prepared) = prepared else {
        return Ok(None);
    };
    // On the rank that failed, its own error is more useful.
    let SplitPart {
        prepared, timeout, ..
    } = prepared?;
    for &member in &members {
        if answers[member][0] == FAILED {
            let text = unpack(answers[member]);
            return Err(Error::rendezvous(format!(
                "{} cannot take part in {name:?}: {}",
                comm.inner.name_of_rank(member),
                sanitize::text(&String::from_utf8_lossy(text))
            )));
        }
    }
    let preference_of = |&member: &usize| {
        answers[member]
            .get(MODE)
            .copied()
            .and_then(LaunchPreference::of_code)
    };
    let preferences: Vec<_> = members.iter().map(preference_of).collect();
    let who = |member: usize| comm.inner.name_of_rank(members[member]);
    let prepared = prepared.in_mode(common_mode(&preferences, who)?);
    let sealed = unpack(answers[members[0]]);
    let id = sealed_unique_id::open(&job, generation, &short(name), sealed).map_err(|why| {
        Error::rendezvous(format!(
            "the token of {name:?} from {} cannot be used: {why}; do all ranks of this colour name it alike?",
            comm.inner.name_of_rank(members[0])
        ))
    })?;
    let rank = members.iter().position(|&member| member == comm.rank());
    let roster = roster_of(comm, &members);
    let span = events::init_span((name, &roster), rank.unwrap_or_default(), members.len());
    let _entered = span.enter();
    // If the parent ends meanwhile, some ranks may never get here.
    let is_void = || comm.inner.lifecycle.get().abort_has_begun();
    let inner = prepared.join(&id, deadline_after(timeout), is_void);
    let inner = inner.map_err(|error| match is_void() {
        true => comm.inner.final_error(comm.inner.out_of_use()),
        false => error,
    })?;
    Ok(Some(first_handle(inner)))
}

/// Returns the world and launcher ranks of the parent's ranks `members`.
fn roster_of(comm: &Communicator, members: &[usize]) -> Roster {
    let supervisor = comm.inner.supervisor.as_ref();
    supervisor.map_or_else(Roster::default, |supervisor| {
        let ranks = supervisor.members();
        let ranks: Vec<_> = members.iter().map(|&member| ranks[member]).collect();
        supervisor.peers().roster(&ranks)
    })
}

/// Returns the job's name and generation, if the ranks met in a world.
fn job(comm: &Communicator) -> (&str, u64) {
    let supervisor = comm.inner.supervisor.as_ref();
    supervisor.map_or(("", 0), |supervisor| supervisor.peers().job())
}

/// Gathers the bytes of all ranks on every rank; all ranks must pass the same number of bytes.
fn exchange(comm: &Communicator, bytes: &[u8]) -> Result<Vec<u8>> {
    // Uses a stream of its own, so that it does not wait for work on the program's stream.
    let context = &comm.inner.context;
    let stream = cuda_driver::ignoring_stored_error(context, || context.new_stream())
        .map_err(Error::cuda("creating a stream (cuStreamCreate)"))?;
    let x = cuda_driver::ignoring_stored_error(context, || stream.clone_htod(bytes))
        .map_err(Error::cuda("copying to the device"))?;
    let len = bytes.len() * comm.world_size();
    let mut y = cuda_driver::ignoring_stored_error(context, || stream.alloc_zeros::<u8>(len))
        .map_err(Error::cuda("allocating device memory"))?;
    comm.on(&stream).all_gather(&x, &mut y)?.wait()?;
    let _inside = comm.inner.enter(CallKind::Query, comm.timeout);
    cuda_driver::ignoring_stored_error(context, || stream.clone_dtoh(&y))
        .map_err(Error::cuda("copying from the device"))
}

/// This rank's part of a split: the prepared communicator, the token if this rank made one, and the init timeout.
struct SplitPart {
    prepared: PreparedInit,
    id: Option<UniqueId>,
    timeout: std::time::Duration,
}

fn answer(
    prepared: &Option<Result<SplitPart>>,
    seal: impl FnOnce(&UniqueId) -> Vec<u8>,
) -> [u8; ANSWER] {
    let (kind, preference, bytes) = match prepared {
        None => (READY, LaunchPreference::Either, Vec::new()),
        Some(Ok(part)) => {
            let id = part.id.as_ref().map(seal);
            (READY, part.prepared.preference(), id.unwrap_or_default())
        }
        Some(Err(error)) => {
            let text = error.kind().to_string().into_bytes();
            (FAILED, LaunchPreference::Either, text)
        }
    };
    let mut answer = [0; ANSWER];
    let len = bytes.len().min(ANSWER - HEAD);
    answer[0] = kind;
    answer[1..MODE].copy_from_slice(&(len as u16).to_le_bytes());
    answer[MODE] = preference.code();
    answer[HEAD..HEAD + len].copy_from_slice(&bytes[..len]);
    answer
}

/// Returns the contents of an answer.
fn unpack(answer: &[u8]) -> &[u8] {
    let len = usize::from(u16::from_le_bytes([answer[1], answer[2]]));
    answer.get(HEAD..HEAD + len).unwrap_or_default()
}

/// Returns a name for a sealed token, shortened to fit; distinct names stay distinct.
fn short(name: &str) -> String {
    if name.len() <= LONGEST_NAME {
        return name.to_owned();
    }
    let end = (0..=LONGEST_NAME)
        .rev()
        .find(|&at| name.is_char_boundary(at));
    let start = &name[..end.unwrap_or_default()];
    format!(
        "{start}… {:016x}",
        nccl_base::wire::checksum(name.as_bytes())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_survives_the_way_through_bytes() {
        for choice in [
            SplitChoice {
                color: None,
                key: 0,
            },
            SplitChoice {
                color: Some(0),
                key: -1,
            },
            SplitChoice {
                color: Some(u32::MAX),
                key: i64::MIN,
            },
        ] {
            assert_eq!(SplitChoice::from_bytes(&choice.to_bytes()), choice);
        }
    }

    #[test]
    fn a_token_comes_through_with_long_names_and_not_for_another_one() {
        let id = UniqueId::from_bytes([7; UniqueId::LEN]);
        let (job, name) = ("ä".repeat(300), "x".repeat(5000));
        let seal = |id: &UniqueId| sealed_unique_id::seal(&short(&job), 1, &short(&name), id);
        let sealed = seal(&id);
        assert!(sealed.len() <= ANSWER - HEAD, "{}", sealed.len());
        let mut answer = [0; ANSWER];
        answer[1..MODE].copy_from_slice(&(sealed.len() as u16).to_le_bytes());
        answer[HEAD..HEAD + sealed.len()].copy_from_slice(&sealed);
        let open =
            |name: &str| sealed_unique_id::open(&short(&job), 1, &short(name), unpack(&answer));
        assert_eq!(open(&name), Ok(id));
        assert!(open(&format!("{name}y")).is_err());
    }

    #[test]
    fn members_are_in_the_order_of_their_keys_and_then_of_their_ranks() {
        let choose = |color, key| SplitChoice { color, key };
        let choices = [
            choose(Some(1), 5),
            choose(Some(2), 0),
            choose(Some(1), -5),
            choose(None, 0),
            choose(Some(1), 5),
        ];
        assert_eq!(members(&choices, 0), [2, 0, 4]);
        assert_eq!(members(&choices, 1), [1]);
    }
}
