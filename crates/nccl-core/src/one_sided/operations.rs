//! Put, signal and wait.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nccl_sys as sys;

use super::{Signals, Target, Window};
use crate::buffer::SendBuffer;
#[cfg(doc)]
use crate::communicator::Communicator;
use crate::config;
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::group::Group;
use crate::op::Function;
use crate::operation::{OperationKind, Shape};
use crate::queued_op::{CollectiveArgs, Extra, OneSidedArgs, QueuedOp};
use crate::request::Request;
use nccl_base::data_type::DataType;

impl<T: NcclType> Window<T> {
    /// Writes `x` into the window of another rank, on the stream of the window's communicator, and signals that rank.
    ///
    /// `x` must lie in a window of the same communicator, this one or another, as [`view`](Self::view) or a part of it. The
    /// request is done when `x` may be written again; it does not show that the data has arrived, which only the other rank can
    /// observe.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`]; [`ErrorKind::Length`] for a put that does not fit into the window;
    /// [`ErrorKind::InvalidConfig`] for a source outside of all windows, and for a signal or a context that the communicator
    /// does not have.
    /// Otherwise as [`Communicator::all_reduce`].
    ///
    /// Wraps `ncclPutSignal` (NCCL ≥ 2.29.2).
    ///
    /// ```
    /// # fn example(source: &nccl::one_sided::Window<f32>, inbox: &nccl::one_sided::Window<f32>) -> nccl::Result<()> {
    /// use nccl::one_sided::Target;
    /// let own = source.communicator().rank();
    /// inbox.put(source.view().slice(0..8), Target::rank(0).at(8 * own))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn put<'a, X: SendBuffer<'a, Element = T>>(&'a self, x: X, to: Target) -> Result<Request> {
        let shape = Shape {
            peer: Some(to.peer),
            count: Some(x.count()),
            data_type: Some(x.element()),
            ..Shape::default()
        };
        let comm = self.communicator();
        comm.group_of_kind(OperationKind::Put, shape, |group| group.put(x, self, to))
    }

    /// Waits on the stream until all these signals have arrived. Work that is put on the window's stream or the
    /// communicator's stream afterwards sees the data that was put before the signals. A wait consumes its signals.
    ///
    /// **If a signal never arrives**, the request times out like any operation, and the communicator is aborted. NCCL's abort
    /// does not end a stream's wait for a signal, so the communicator is leaked together with its window, and the stream stays
    /// blocked (docs/real-nccl.md).
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`]; [`ErrorKind::InvalidConfig`] without signals, and for a signal or a context that the
    /// communicator does not have. Otherwise as [`Communicator::all_reduce`].
    ///
    /// Wraps `ncclWaitSignal` (NCCL ≥ 2.29.2).
    ///
    /// ```
    /// # fn example(inbox: &mut nccl::one_sided::Window<f32>) -> nccl::Result<()> {
    /// use nccl::one_sided::Signals;
    /// let ranks = inbox.communicator().world_size();
    /// let from_all: Vec<_> = (0..ranks).map(Signals::from).collect();
    /// inbox.wait(&from_all)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait(&mut self, signals: &[Signals]) -> Result<Request> {
        let comm = self.communicator().clone();
        let shape = shape_of_wait(signals);
        comm.group_of_kind(OperationKind::WaitSignal, shape, |group| {
            group.wait_signals(self, signals)
        })
    }
}

impl<'a> Group<'a> {
    /// Records a put; see [`Window::put`](crate::one_sided::Window::put).
    ///
    /// NCCL executes the one-sided operations of a group in the order in which they are recorded, so a wait delays everything
    /// after it. Puts and signals must be recorded before waits.
    ///
    /// # Errors
    /// As [`Window::put`](crate::one_sided::Window::put); [`ErrorKind::InvalidConfig`] after a wait in the same group, and
    /// in a captured plan, which cannot contain puts.
    ///
    /// Wraps `ncclPutSignal`.
    ///
    /// ```
    /// # fn example(source: &nccl::one_sided::Window<f32>, inbox: &nccl::one_sided::Window<f32>) -> nccl::Result<()> {
    /// use nccl::one_sided::Target;
    /// let comm = inbox.communicator();
    /// let (own, n) = (comm.rank(), inbox.len() / comm.world_size());
    /// comm.group(|group| {
    ///     (0..comm.world_size()).try_for_each(|peer| {
    ///         let part = source.view().slice(peer * n..(peer + 1) * n);
    ///         group.put(part, inbox, Target::rank(peer).at(own * n))
    ///     })
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn put<T, X>(&mut self, x: X, window: &'a Window<T>, to: Target) -> Result<()>
    where
        T: NcclType,
        X: SendBuffer<'a, Element = T>,
    {
        self.check_window(window)?;
        self.check_before_waits()?;
        let peer = self.peer_of(to.peer)?;
        let (signal, context) = self.signal_of(to.signal, to.context)?;
        let (count, data_type) = (x.count(), x.element());
        let end = to.offset.checked_add(count);
        if end.is_none_or(|end| end > window.len()) {
            return Err(Error::new(ErrorKind::Length {
                buffer: "the source of a put",
                given: count,
                needed: window.len().saturating_sub(to.offset),
                rule: "at most what the window has from its offset on",
            }));
        }
        let bytes = (count * size_of::<T>()) as u64;
        if count == 0 {
            return self.signal(to);
        }
        let address = self.buffers.read(x)?;
        if !self.comm.inner.is_in_a_window(address, bytes) {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "put",
                reason: String::from(
                    "its source lies in no window of this communicator; NCCL reads from windows alone",
                ),
            }));
        }
        // The window's stream waits for the put, so that the window is not deregistered before.
        self.buffers.read(window.view())?;
        let args = OneSidedArgs::Put {
            window: window.raw(),
            offset: to.offset * size_of::<T>(),
            signal,
            context,
        };
        self.push_one_sided(Function::Put, address, count, data_type, peer, args);
        Ok(())
    }

    /// Records a signal; see [`Communicator::signal`].
    ///
    /// # Errors
    /// As [`Communicator::signal`].
    ///
    /// Wraps `ncclSignal`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// use nccl::one_sided::Target;
    /// comm.group(|group| (0..comm.world_size()).try_for_each(|peer| group.signal(Target::rank(peer))))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn signal(&mut self, to: Target) -> Result<()> {
        self.comm.library().function(sys::Api::ncclSignal)?;
        self.check_outside_of_plans()?;
        self.check_before_waits()?;
        if !self.comm.inner.has_window.load(Ordering::Acquire) {
            return Err(not_possible(
                "window",
                "the ranks make a window first, which connects them for signals",
            ));
        }
        let peer = self.peer_of(to.peer)?;
        let (signal, context) = self.signal_of(to.signal, to.context)?;
        let args = OneSidedArgs::Signal { signal, context };
        self.push_one_sided(Function::Signal, 0, 0, DataType::UInt8, peer, args);
        Ok(())
    }

    /// Records a wait for signals; see [`Window::wait`](crate::one_sided::Window::wait).
    ///
    /// # Errors
    /// As [`Window::wait`](crate::one_sided::Window::wait).
    ///
    /// Wraps `ncclWaitSignal`.
    ///
    /// ```
    /// # fn example(inbox: &mut nccl::one_sided::Window<f32>) -> nccl::Result<()> {
    /// use nccl::one_sided::Signals;
    /// let comm = inbox.communicator().clone();
    /// comm.group(|group| group.wait_signals(inbox, &[Signals::from(0)]))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_signals<T: NcclType>(
        &mut self,
        window: &'a mut Window<T>,
        signals: &[Signals],
    ) -> Result<()> {
        self.check_window(window)?;
        let Some(first) = signals.first() else {
            return Err(not_possible("signals", "a wait needs at least one signal"));
        };
        let first = self.peer_of(first.peer)?;
        let mut descriptors = Vec::with_capacity(signals.len());
        let mut total = 0usize;
        for one in signals {
            let (signal, context) = self.signal_of(one.signal, one.context)?;
            let count = i32::try_from(one.count).ok().filter(|&count| count > 0);
            let Some(count) = count else {
                return Err(not_possible(
                    "signals",
                    "a number of signals is at least 1, and fits into 32 bits",
                ));
            };
            total = total.saturating_add(one.count);
            descriptors.push(sys::ncclWaitSignalDesc_t {
                opCnt: count,
                peer: self.peer_of(one.peer)?,
                sigIdx: signal,
                ctx: context,
            });
        }
        // The window's stream also waits, so that its work sees the data that was put before the signals.
        self.buffers.write(window.view_mut())?;
        let args = OneSidedArgs::Wait(descriptors);
        self.push_one_sided(Function::WaitSignal, 0, total, DataType::UInt8, first, args);
        Ok(())
    }

    /// Refuses a window of another communicator, because NCCL would not find its handle.
    fn check_window<T: NcclType>(&self, window: &Window<T>) -> Result<()> {
        self.comm.library().function(sys::Api::ncclPutSignal)?;
        self.check_outside_of_plans()?;
        match Arc::ptr_eq(&self.comm.inner, &window.communicator().inner) {
            true => Ok(()),
            false => Err(not_possible("window", "it is one of another communicator")),
        }
    }

    /// Refuses plans: in a graph, NCCL waits for an acknowledgement that only a captured wait gives, and without one it
    /// waits for ever.
    fn check_outside_of_plans(&self) -> Result<()> {
        match self.buffers.is_for(None) {
            true => Ok(()),
            false => Err(not_possible(
                "capture",
                "one-sided operations cannot be captured into a plan",
            )),
        }
    }

    fn check_before_waits(&self) -> Result<()> {
        let queued = self.buffers.batch().queued.iter().rev();
        let mut functions = queued.map(|queued| queued.descriptor.function());
        let last = functions.find(|function| {
            matches!(
                function,
                Function::Put | Function::Signal | Function::WaitSignal
            )
        });
        match last {
            Some(Function::WaitSignal) => Err(not_possible(
                "group",
                "puts and signals come before the waits of a group: NCCL carries them out in this order, and the wait might be for \
                 what comes behind it",
            )),
            _ => Ok(()),
        }
    }

    fn peer_of(&self, peer: usize) -> Result<i32> {
        match peer < self.world_size {
            // Fits: the number of ranks was checked when the communicator was made.
            true => Ok(peer as i32),
            false => Err(self.no_such_peer(peer)),
        }
    }

    /// Checks both against the communicator's configuration, as NCCL does.
    fn signal_of(&self, signal: usize, context: usize) -> Result<(i32, i32)> {
        let (signals, contexts) = self.comm.inner.rma_limits;
        if signal >= signals {
            return Err(not_possible(
                "rma_signals",
                &format!("there is no signal {signal}: the communicator has {signals}"),
            ));
        }
        if context >= contexts {
            return Err(not_possible(
                "rma_contexts",
                &format!("there is no context {context}: the communicator has {contexts}"),
            ));
        }
        Ok((signal as i32, context as i32))
    }

    fn push_one_sided(
        &mut self,
        function: Function,
        address: u64,
        count: usize,
        data_type: DataType,
        peer: i32,
        args: OneSidedArgs,
    ) {
        let queued = QueuedOp::new(function, address, count, data_type, peer);
        let args = CollectiveArgs {
            recv: 0,
            reduction_op: sys::ncclRedOp_t::ncclSum,
            extra: Extra::OneSided(Arc::new(args)),
        };
        self.buffers.push_collective(queued, args, self.rank);
    }
}

fn shape_of_wait(signals: &[Signals]) -> Shape {
    let mut peers = signals.iter().map(|one| one.peer);
    let first = peers.next();
    Shape {
        peer: first.filter(|&first| peers.all(|peer| peer == first)),
        ..Shape::default()
    }
}

fn not_possible(field: &'static str, reason: &str) -> Error {
    config::invalid(field, String::from(reason))
}
