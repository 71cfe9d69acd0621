//! Who may come in: whether the one who said hello may be what it says, and who is told to come again, or elsewhere.

use super::door::Door;
use super::greeting::{Again, Hello, Role};
use super::handover::Standing;

/// Why somebody may not come in, and whether another try may end better.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) why: String,
    pub(super) again: Again,
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self {
            why,
            again: Again::Never,
        }
    }
}

impl Refusal {
    /// `theirs` is the name of another job than this process's `own`.
    pub(super) fn of_job(theirs: &str, own: &str) -> Self {
        Self {
            why: format!(
                "it belongs to job {theirs:?}, and rank 0 here to job {own:?}: one of them is left over, or \
                 two jobs were given one address"
            ),
            again: Again::Elsewhere,
        }
    }

    /// `theirs` is another epoch than rank 0's `own`.
    pub(super) fn of_epoch(theirs: u64, own: u64) -> Self {
        match theirs > own {
            true => Self::later(format!(
                "it is already of epoch {theirs} of the job, and rank 0 still of epoch {own}, which is to end"
            )),
            false => Self::from(format!(
                "it is of epoch {theirs} of the job, and rank 0 of epoch {own}: a process of another \
                 attempt is left over"
            )),
        }
    }

    /// An observer expects another number of ranks than there are.
    pub(super) fn of_observer(expected: usize, size: usize) -> Self {
        Self::from(format!(
            "an observer expects {expected} ranks, rank 0 expects {size}"
        ))
    }

    /// Another try may end better when who answers is gone.
    pub(super) fn later(why: String) -> Self {
        Self {
            why,
            again: Again::Later,
        }
    }
}

impl Door {
    /// That somebody else coordinates, and where that is, as far as this rank has heard.
    pub(super) fn refer(&self) -> Refusal {
        let rank = self.hub.coordinator();
        Refusal {
            why: format!(
                "this is rank {}, and rank {rank} coordinates the job",
                self.rank()
            ),
            again: Again::At {
                rank,
                at: self.hub.address_of(rank).unwrap_or_default(),
            },
        }
    }

    /// Whether the one who said hello may be what it says.
    pub(super) fn check(&self, hello: &Hello) -> Result<(), Refusal> {
        let Hello {
            job,
            epoch,
            world_size,
            role,
            rank,
            ..
        } = hello;
        if *job != self.job.name {
            return Err(Refusal::of_job(job, &self.job.name));
        }
        if *role == Role::Newcomer {
            // Of whatever attempt it was started for.
            return self.may_admit();
        }
        if *epoch > self.job.epoch {
            return Err(Refusal::of_epoch(*epoch, self.job.epoch));
        }
        let size = self.hub.size();
        if *role == Role::Onlooker {
            self.may_admit()?;
            return self.check_size(*epoch, *world_size, size);
        }
        if *epoch != self.job.epoch {
            return Err(Refusal::of_epoch(*epoch, self.job.epoch));
        }
        if matches!(role, Role::Observer | Role::Follower) && self.coordinates() {
            return self.check_size(*epoch, *world_size, size);
        }
        if matches!(role, Role::Observer | Role::Asker) {
            return Ok(());
        }
        if !self.coordinates() {
            return Err(self.refer());
        }
        if *world_size != size {
            return Err(Refusal::from(format!(
                "rank {rank} expects {world_size} ranks, rank 0 expects {size}"
            )));
        }
        if *rank == self.rank() || *rank >= size {
            return Err(Refusal::from(format!("there is no rank {rank} to join")));
        }
        Ok(())
    }

    /// Of an epoch that was not the first, an observer need not know the number of ranks.
    fn check_size(&self, epoch: u64, expected: usize, size: usize) -> Result<(), Refusal> {
        match epoch < self.job.epoch || [0, size].contains(&expected) {
            true => Ok(()),
            false => Err(Refusal::of_observer(expected, size)),
        }
    }

    /// Whether somebody who is new to the world may come in here: at the door of the rank that coordinates the
    /// newest epoch that it knows of, and has not found itself cut off from the others. So nobody comes into a
    /// world that goes on elsewhere without it.
    fn may_admit(&self) -> Result<(), Refusal> {
        match self.hub.standing() {
            Standing::Leads => Ok(()),
            Standing::Follows => Err(self.refer()),
            Standing::TakesOver => Err(Refusal::later(format!(
                "rank {} is just taking over from a rank that is gone",
                self.rank()
            ))),
            Standing::HasGoneOn => Err(Refusal::later(format!(
                "the world just goes on, and this was the door of its epoch {}",
                self.job.epoch
            ))),
            Standing::Apart => Err(Refusal::later(format!(
                "rank {} does not hear the others any more, which go on without it if they live",
                self.rank()
            ))),
        }
    }
}
