//! The ranks of a line, as its communicators see them.

use std::sync::Arc;
use std::time::Instant;

use super::attach::{OfLine as _, introduce};
use super::board::Board;
use super::unborn::Unborn;
use crate::peers::{Peers, Supervisor, Unmade, Ward, set_of_threads};
use crate::rendezvous::{Line, World};
use nccl_base::error::Result;
use nccl_base::roster::Roster;
use nccl_core::recorder::Home;

/// See the module.
pub(crate) struct Session(Arc<Line>);

impl Session {
    pub(crate) fn of(line: &Arc<Line>) -> Arc<dyn Peers> {
        Arc::new(Self(Arc::clone(line)))
    }
}

impl Peers for Session {
    fn job(&self) -> (&str, u64) {
        self.0.job()
    }

    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn describe(&self, rank: usize) -> String {
        self.0.describe(rank)
    }

    fn roster(&self, members: &[usize]) -> Roster {
        self.0.roster(members)
    }

    fn hosts(&self, members: &[usize]) -> Option<Vec<String>> {
        let people = self.0.members();
        let people = people.get()?;
        let host = |member: &usize| people.get(*member).map(|person| person.host.clone());
        members.iter().map(host).collect()
    }

    fn departed(&self) -> Vec<usize> {
        let gone = self.0.departures().into_iter();
        gone.map(|(rank, _)| rank).collect()
    }

    fn catch_up(&self) {
        self.0.catch_up();
    }

    fn home(&self) -> Arc<Home> {
        self.0.home()
    }

    fn round(
        &self,
        topic: &str,
        members: Option<&Arc<[usize]>>,
        part: &[u8],
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Vec<u8>>> {
        self.0.round(topic, members, part, deadline, interrupted)
    }

    fn supervise(&self, ward: Ward<'_>) -> Arc<dyn Supervisor> {
        Board::new(&self.0, Self::of(&self.0), ward)
    }

    fn unmade(&self, name: &str, members: Arc<[usize]>, rank: usize) -> Box<dyn Unmade> {
        Box::new(Unborn::new(&self.0, name, members, rank))
    }
}

/// Runs before `main`, because a program may begin with [`Communicator::init_all`](crate::Communicator::init_all), which is
/// below this crate and calls nothing of it.
#[used]
// SAFETY: the section is a list of C functions that the loader calls, with arguments that this function does not take. It sets
// a `OnceCell`, which needs nothing of the runtime that is missing before `main`, and may be set beside other threads.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn before_main() {
        set_of_threads(of_threads);
    }
    before_main
};

fn of_threads(size: usize) -> Vec<Arc<dyn Peers>> {
    introduce();
    let worlds = World::threads(size);
    worlds
        .iter()
        .map(|world| Session::of(world.line()))
        .collect()
}
