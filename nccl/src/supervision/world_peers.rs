//! The ranks of a session, as its communicators see them.

use std::sync::Arc;
use std::time::Instant;

use super::attach::{SessionExt as _, register_with_control};
use super::init_supervision::InitSupervision;
use super::supervisor::ControlPlaneSupervisor;
use crate::peers::{InitSupervisor, Peers, SupervisionRequest, Supervisor, set_connect_threads};
use nccl_base::error::Result;
use nccl_base::roster::Roster;
use nccl_control::{RankSession, World};
use nccl_core::recorder::RecorderScope;

/// See the module.
pub(crate) struct WorldPeers(Arc<RankSession>);

impl WorldPeers {
    pub(crate) fn of(session: &Arc<RankSession>) -> Arc<dyn Peers> {
        Arc::new(Self(Arc::clone(session)))
    }
}

impl Peers for WorldPeers {
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
        let processes = self.0.members();
        let processes = processes.get()?;
        let host = |member: &usize| processes.get(*member).map(|process| process.host.clone());
        members.iter().map(host).collect()
    }

    fn departed(&self) -> Vec<usize> {
        let departures = self.0.departures().into_iter();
        departures.map(|(rank, _)| rank).collect()
    }

    fn catch_up(&self) {
        self.0.catch_up();
    }

    fn scope(&self) -> Arc<RecorderScope> {
        self.0.scope()
    }

    fn exchange(
        &self,
        topic: &str,
        members: Option<&Arc<[usize]>>,
        part: &[u8],
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Vec<u8>>> {
        self.0.exchange(topic, members, part, deadline, interrupted)
    }

    fn supervise(&self, request: SupervisionRequest<'_>) -> Arc<dyn Supervisor> {
        ControlPlaneSupervisor::new(&self.0, Self::of(&self.0), request)
    }

    fn supervise_init(
        &self,
        name: &str,
        members: Arc<[usize]>,
        rank: usize,
    ) -> Box<dyn InitSupervisor> {
        Box::new(InitSupervision::new(&self.0, name, members, rank))
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
        set_connect_threads(connect_threads);
    }
    before_main
};

fn connect_threads(size: usize) -> Vec<Arc<dyn Peers>> {
    register_with_control();
    let worlds = World::threads(size);
    worlds
        .iter()
        .map(|world| WorldPeers::of(world.session()))
        .collect()
}
