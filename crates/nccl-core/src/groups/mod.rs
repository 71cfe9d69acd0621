//! One group over several communicators.
//!
//! A thread that drives several GPUs has to issue calls that belong together in one group: a call on one
//! communicator may wait for calls on the others, which the same thread would never make while it is blocked.

mod issue;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use self::issue::issue_together;
use crate::active_calls::CallKind;
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::group::{Group, in_group};
use crate::issuing::IssueBuffers;
use crate::request::Request;

/// Records operations of several communicators in `record`, and issues them together.
///
/// The buffers stay borrowed until the operations are on their streams. When `record` fails, nothing is
/// issued and its error is returned.
///
/// # Errors
/// As [`Communicator::group`]. When NCCL fails or does not launch in time, all communicators of the
/// group are aborted. [`ErrorKind::InvalidConfig`] for communicators of different libraries, and for a mix of
/// blocking and nonblocking communicators.
///
/// Wraps `ncclGroupStart` and `ncclGroupEnd`.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// use cudarc::driver::CudaContext;
/// use nccl::{Communicator, ReduceOp};
///
/// // One thread, two GPUs.
/// let streams = [CudaContext::new(0)?.new_stream()?, CudaContext::new(1)?.new_stream()?];
/// let comms = Communicator::init_all("pair", &streams)?;
/// let mut ys = [streams[0].clone_htod(&[1.0f32])?, streams[1].clone_htod(&[2.0f32])?];
/// nccl::group(|group| {
///     for (comm, y) in comms.iter().zip(&mut ys) {
///         group.on(comm)?.all_reduce_in_place(y, ReduceOp::Sum)?;
///     }
///     Ok(())
/// })?
/// .wait()?;
/// assert_eq!(streams[1].clone_dtoh(&ys[1])?, [3.0]);
/// # Ok(())
/// # }
/// ```
pub fn group<'a>(record: impl FnOnce(&mut Groups<'a>) -> Result<()>) -> Result<Requests> {
    let mut groups = Groups { groups: Vec::new() };
    record(&mut groups)?;
    let groups = groups.groups;
    for group in &groups {
        group
            .finish(None)
            .map_err(|error| in_group(group.comm, error))?;
    }
    same_library(groups.iter().map(|group| group.comm))?;
    same_mode(groups.iter().map(|group| group.comm))?;
    issue_together(&groups).map(Requests)
}

/// Checks that all communicators use one copy of NCCL, to which the group belongs.
fn same_library<'a>(mut comms: impl Iterator<Item = &'a Communicator>) -> Result<()> {
    let Some(first) = comms.next() else {
        return Ok(());
    };
    match comms.find(|comm| !comm.library().is(first.library())) {
        None => Ok(()),
        Some(other) => Err(Error::new(ErrorKind::InvalidConfig {
            field: "library",
            reason: format!(
                "communicators {:?} and {:?} live in different libraries, {} and {}, so they cannot be \
                 in one group",
                first.name(),
                other.name(),
                first.library().path().display(),
                other.library().path().display()
            ),
        })),
    }
}

/// Checks that all have one launch mode. NCCL applies the mode of one communicator to all, and would refuse the
/// group, or wait in it.
fn same_mode<'a>(mut comms: impl Iterator<Item = &'a Communicator>) -> Result<()> {
    let Some(first) = comms.next() else {
        return Ok(());
    };
    let Some(other) = comms.find(|comm| comm.launch_mode() != first.launch_mode()) else {
        return Ok(());
    };
    let (blocks, not) = match first.inner.has_blocking_calls {
        true => (first, other),
        false => (other, first),
    };
    // Names the communicator that was made outside of this crate first.
    let (blocks, not) = match not.launch_mode() {
        None => (not, blocks),
        Some(_) => (blocks, not),
    };
    let (name, other) = (blocks.name(), not.name());
    let reason = match (blocks.launch_mode(), not.inner.has_blocking_calls) {
        (None, false) => format!(
            "communicator {name:?} blocks and {other:?} does not, so they cannot be in one group: make the \
             first with blocking = 0 where it is made, or issue its operations in a group of their own"
        ),
        (None, true) => format!(
            "nothing ends a call that waits for communicator {name:?}, which was made elsewhere, and the \
             launch mode of {other:?} promises that its calls end, so they cannot be in one group"
        ),
        (Some(_), _) => format!(
            "communicator {name:?} is of launch mode BlockingChild, which blocks, and {other:?} of NonBlocking, \
             so they cannot be in one group: make both in the same mode, or issue their operations in groups \
             of their own"
        ),
    };
    Err(Error::new(ErrorKind::InvalidConfig {
        field: "blocking",
        reason,
    }))
}

/// Operations of several communicators that are recorded to be issued together; see [`group`].
///
/// ```
/// # fn example(a: &nccl::Communicator, b: &nccl::Communicator, x: &nccl::cudarc::driver::CudaSlice<f32>,
/// #     y: &mut nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
/// nccl::group(|group| {
///     group.on(a)?.isend(x, 1)?;
///     group.on(b)?.irecv(y, 0)
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct Groups<'a> {
    groups: Vec<Group<'a>>,
}

impl<'a> Groups<'a> {
    /// Returns the group that records the operations of `comm`.
    ///
    /// # Errors
    /// [`ErrorKind::Stream`] when the stream of `comm` cannot carry operations.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, x: &nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
    /// nccl::group(|group| group.on(comm)?.isend(x, 0))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn on(&mut self, comm: &'a Communicator) -> Result<&mut Group<'a>> {
        let known = self.groups.iter().position(|group| {
            Arc::ptr_eq(&group.comm.inner, &comm.inner)
                && Arc::ptr_eq(&group.comm.stream, &comm.stream)
        });
        let index = match known {
            Some(index) => index,
            None => {
                let inside = comm.inner.enter(CallKind::Issue, comm.timeout);
                let admitted = IssueBuffers::admit(comm.stream());
                drop(inside);
                admitted.map_err(|error| in_group(comm, error))?;
                self.groups.push(Group::of(comm));
                self.groups.len() - 1
            }
        };
        Ok(&mut self.groups[index])
    }
}

impl fmt::Debug for Groups<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.groups).finish()
    }
}

/// The operations of a [`group`], one request for each communicator and stream.
///
/// ```
/// # fn example(comms: &[nccl::Communicator], ys: &mut [nccl::cudarc::driver::CudaSlice<f32>]) -> nccl::Result<()> {
/// let done = nccl::group(|group| {
///     for (comm, y) in comms.iter().zip(ys.iter_mut()) {
///         group.on(comm)?.all_reduce_in_place(y, nccl::ReduceOp::Sum)?;
///     }
///     Ok(())
/// })?;
/// done.wait_timeout(std::time::Duration::from_secs(5))?;
/// assert!(done.is_complete()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Requests(Vec<Request>);

impl Requests {
    /// Returns whether all operations are done; never waits.
    ///
    /// # Errors
    /// As [`Request::is_complete`].
    ///
    /// ```
    /// # fn example(done: &nccl::Requests) -> nccl::Result<()> {
    /// while !done.is_complete()? {
    ///     std::thread::yield_now(); // or something useful
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn is_complete(&self) -> Result<bool> {
        for request in &self.0 {
            if !request.is_complete()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until all operations are done, each at most for the operation timeout of its communicator.
    ///
    /// # Errors
    /// As [`Request::wait`], of the first that fails.
    ///
    /// ```
    /// # fn example(done: &nccl::Requests) -> nccl::Result<()> {
    /// done.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait(&self) -> Result<()> {
        self.0.iter().try_for_each(Request::wait)
    }

    /// Waits until all operations are done, at most for `timeout` in total.
    ///
    /// # Errors
    /// As [`Request::wait_timeout`], of the first that fails.
    ///
    /// ```
    /// # fn example(done: &nccl::Requests) -> nccl::Result<()> {
    /// done.wait_timeout(std::time::Duration::from_secs(5))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_timeout(&self, timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        self.0
            .iter()
            .try_for_each(|request| request.wait_timeout(timeout.saturating_sub(begun.elapsed())))
    }

    /// Returns the requests, in the order in which the communicators were first named.
    ///
    /// ```
    /// let done = nccl::group(|_| Ok(()))?;
    /// assert!(done.into_vec().is_empty());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn into_vec(self) -> Vec<Request> {
        self.0
    }
}

/// Resolves when all operations are done; see [`Request`].
impl Future for Requests {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut pending = false;
        for request in &mut self.0 {
            match Pin::new(request).poll(context) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => pending = true,
            }
        }
        if pending {
            Poll::Pending
        } else {
            Poll::Ready(Ok(()))
        }
    }
}
