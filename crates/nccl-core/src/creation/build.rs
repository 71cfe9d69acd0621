//! Makes a communicator from its builder. Every rank first checks everything that it can check alone; then the ranks
//! report to each other whether they can take part, and exchange the token with which they meet inside NCCL.

use crate::communicator::{Communicator, timeouts};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::builder::{CommunicatorBuilder, Origin};
use super::first_handle::first_handle;
use super::init::{InitPlan, PreparedInit, roster_of};
use super::init_exchange::{InitAgreement, InitExchange};
use super::{ResizeWay, grow};
use crate::abort::AbortSignal;
use crate::communicator::launch_mode::{preference, refuse_contradictions};
use crate::communicator::registry::PendingInit;
use crate::error::{Error, ErrorKind, Result};
use crate::events;
use crate::forked;
use crate::library::Library;
use crate::operation::{Operation, OperationKind};
use crate::peers::InitSetup;
use crate::single_rank;
use crate::time::deadline_after;
use crate::unique_id::UniqueId;
use nccl_base::env_timeouts::EnvTimeouts;

impl CommunicatorBuilder<'_> {
    /// Makes the communicator, together with the other ranks.
    ///
    /// Problems that this rank can detect alone are detected before any other rank waits for it. In a `World`, they are
    /// reported to all ranks at once, so that no rank waits for this one.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when not all ranks arrived in time; the unfinished communicator is then freed.
    /// [`ErrorKind::Aborted`] when the abort signal was given. [`ErrorKind::Rendezvous`] when another rank could not
    /// take part. [`ErrorKind::Preflight`], on all ranks, when a requirement of NCCL is not
    /// met (see `World::preflight`). [`ErrorKind::InvalidConfig`], [`ErrorKind::Unsupported`],
    /// [`ErrorKind::Stream`], [`ErrorKind::NoSuchRank`], [`ErrorKind::Load`] for problems on this rank.
    ///
    /// Wraps `ncclCommInitRankConfig`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let world = nccl::World::single();
    /// let comm = world.communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.world_size(), 1);
    /// let error = world.communicator("no stream").build().unwrap_err();
    /// assert!(error.to_string().contains("stream"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn build(self) -> Result<Communicator> {
        self.build_from(None).map(|(made, _)| made)
    }

    /// Like [`build`](Self::build), with the communicator to grow, if any; also returns how it was grown.
    pub(super) fn build_from(
        self,
        parent: Option<&Communicator>,
    ) -> Result<(Communicator, Option<ResizeWay>)> {
        let kind = match parent {
            None => OperationKind::Init,
            Some(_) => OperationKind::Grow,
        };
        let started = Instant::now();
        let (name, rank, world_size) = (self.name, self.rank, self.world_size);
        let generation = self
            .world_members
            .as_ref()
            .map_or(0, |(line, _)| line.job().1);
        let roster = Arc::new(roster_of(self.world_members.as_ref()));
        let span = events::init_span((name, &roster), rank, world_size);
        let _entered = span.enter();
        let made = self.build_until(parent).map_err(|error| {
            error.during(|| Operation {
                kind,
                communicator: Arc::from(name),
                rank,
                world_size,
                host: crate::host::name(),
                pid: std::process::id(),
                generation,
                roster: Arc::clone(&roster),
                sequence: None,
                plan: None,
                peer: None,
                root: None,
                count: None,
                data_type: None,
                reduction: None,
                elapsed: started.elapsed(),
            })
        });
        events::made(
            name,
            started.elapsed(),
            made.as_ref().map(|(made, _)| made.inner.identity()),
        );
        made
    }

    fn build_until(
        mut self,
        parent: Option<&Communicator>,
    ) -> Result<(Communicator, Option<ResizeWay>)> {
        forked::begin()?;
        self.timeouts = timeouts::over(EnvTimeouts::of_process()?, self.timeouts);
        let deadline = deadline_after(self.timeouts.init);
        let (pending_init, signal) = self.begin();
        let agreed = match self.origin {
            Origin::Given(id) => InitAgreement {
                prepared: self.prepare(false, signal, &pending_init)?.0.alone(),
                id,
                way: None,
                growing: None,
            },
            Origin::World(ref parameters) => {
                let prepared = self.prepare(false, signal.clone(), &pending_init);
                // A world of one rank runs on a library that larger worlds do not use, so its launch mode is not
                // inherited.
                let inherited = parent.filter(|parent| !single_rank::is(parent.library()));
                let inherited = inherited.and_then(Communicator::launch_mode);
                let prepared = prepared.map(|(prepared, _)| prepared.inherits(inherited));
                // Checked before the first NCCL call, because NCCL caches its environment.
                let interrupted = || signal.is_aborted();
                let setup = self.preflight.then(|| self.setup());
                let checked = parameters.check.check(setup, deadline, &interrupted);
                let prepared = match (prepared, checked) {
                    // This error is the same on all ranks.
                    (_, Err(error)) if matches!(error.kind(), ErrorKind::Preflight { .. }) => {
                        return Err(error);
                    }
                    // Which kind of token is needed depends on all ranks.
                    (Ok(prepared), Ok(())) if parent.is_some() => Ok((prepared, None)),
                    (Ok(prepared), Ok(())) => {
                        // Leaves time to report to the other ranks why there is no token.
                        let timeout = deadline.saturating_duration_since(Instant::now()) / 2;
                        self.token(timeout).map(|id| (prepared, id))
                    }
                    (Err(error), _) | (Ok(_), Err(error)) => Err(error),
                };
                let init_exchange = InitExchange {
                    roots: self.roots,
                    peers: &*parameters.peers,
                    name: self.name,
                    parent,
                    deadline,
                    signal: &signal,
                };
                let agreed = init_exchange.agree(prepared);
                agreed.map_err(|error| pending_init.explain(error))?
            }
            Origin::Split => {
                return Err(Error::new(ErrorKind::InvalidConfig {
                    field: "build",
                    reason: String::from("the builder of a split is built by the split"),
                }));
            }
        };
        let InitAgreement {
            prepared,
            id,
            way,
            growing,
        } = agreed;
        let inner = match &way {
            Some(ResizeWay::Native) => grow::join(prepared, growing, id, deadline)?,
            _ => prepared.join(&id, deadline, || false)?,
        };
        Ok((first_handle(inner), way))
    }

    fn wanted_library(&self) -> Result<Library> {
        match (&self.library, &self.origin) {
            (Some(library), _) => Ok(library.clone()),
            (None, Origin::World(parameters)) if !parameters.needs_nccl => single_rank::library(),
            (None, _) => Library::load(),
        }
    }

    /// Returns the setup that the ranks compare before they start.
    fn setup(&self) -> InitSetup {
        // `prepare` reports why there is no library.
        let library = self.wanted_library().ok();
        let preference = library
            .as_ref()
            .map(|library| preference(self.asked_mode(), library));
        InitSetup {
            stream: self.stream.clone(),
            preference: preference
                .and_then(Result::ok)
                .map(|(preference, _)| preference),
            library,
        }
    }

    /// Makes a token, on the ranks that make one.
    fn token(&self, timeout: Duration) -> Result<Option<UniqueId>> {
        self.is_root()
            .then(|| UniqueId::within(&self.wanted_library()?, timeout))
            .transpose()
    }

    /// Like [`prepare`](Self::prepare), for a split.
    pub(super) fn prepare_split(&self, makes_id: bool) -> Result<(PreparedInit, Option<UniqueId>)> {
        let (pending_init, signal) = self.begin();
        self.prepare(makes_id, signal, &pending_init)
    }

    /// Registers the call, so that aborting all communicators of the process ends it; returns the signal that combines all signals.
    fn begin(&self) -> (Arc<PendingInit>, AbortSignal) {
        let pending_init = PendingInit::begin(self.name, self.rank, &self.timeouts);
        let mut signals = self.abort_signals.clone();
        signals.push(pending_init.signal().clone());
        (pending_init, AbortSignal::any(&signals))
    }

    /// Checks everything that this rank can check alone; one rank also makes the token.
    fn prepare(
        &self,
        makes_id: bool,
        abort_signal: AbortSignal,
        pending_init: &Arc<PendingInit>,
    ) -> Result<(PreparedInit, Option<UniqueId>)> {
        let stream = self.stream.clone().ok_or_else(|| {
            Error::new(ErrorKind::InvalidConfig {
                field: "stream",
                reason: String::from("a communicator needs a stream to put its operations on"),
            })
        })?;
        let library = self.wanted_library()?;
        self.check_roots(&library)?;
        let (preference, obstacle) = preference(self.asked_mode(), &library)?;
        refuse_contradictions(preference.alone())?;
        let plan = InitPlan {
            library: library.clone(),
            name: self.name,
            rank: self.rank,
            world_size: self.world_size,
            stream,
            config: &self.config,
            preference,
            timeouts: self.timeouts,
            abort_signal,
            world_members: self.world_members.clone(),
            members: self.members.clone(),
            pending_init: Arc::clone(pending_init),
        };
        let prepared = plan.prepare()?.with_obstacle(obstacle);
        let timeout = self.timeouts.init.min(self.timeouts.operation / 2);
        let id = makes_id
            .then(|| UniqueId::within(&library, timeout))
            .transpose()?;
        Ok((prepared, id))
    }
}
