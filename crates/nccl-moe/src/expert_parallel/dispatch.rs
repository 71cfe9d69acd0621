//! Sends rows to the ranks of their experts.

use cudarc::driver::{CudaStream, result};

use super::experts::{Direction, ExpertParallel, OnDevice, length};
use super::kernels::PermuteArgs;
use super::layout::{ALIGNMENT, DispatchWay, Sizes};
use super::routing::Routing;
use crate::active_calls::CallKind;
use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::collectives::same_type;
use crate::dtype::DataType;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::issuing::{IssueBuffers, failed_check, issue};
use crate::operation::{OperationKind, Shape};
use nccl_core::Request;

const KIND: OperationKind = OperationKind::Dispatch;

/// The data that is sent for each token.
pub(super) struct Payload<'a> {
    x: Erased<'a>,
    y: ErasedMut<'a>,
    /// The names of the two buffers in errors.
    names: [&'static str; 2],
}

impl<'a> Payload<'a> {
    pub(super) fn rows(x: Erased<'a>, y: ErasedMut<'a>) -> Self {
        let names = ["x", "y"];
        Self { x, y, names }
    }

    pub(super) fn scales(x: Erased<'a>, y: ErasedMut<'a>) -> Self {
        let names = ["scales", "received_scales"];
        Self { x, y, names }
    }
}

/// What is done with a payload on this rank.
#[derive(Clone, Copy)]
pub(super) enum Move {
    /// The rows of the experts are copied from those of the tokens, and sent.
    Rows(PermuteArgs),
    /// The own tokens are copied to where the tokens of all ranks are gathered. Of these, the rows of the experts here are
    /// copied.
    Gathered {
        from: u64,
        to: u64,
        bytes: usize,
        permute: PermuteArgs,
    },
}

/// When a rank does its part of a [`Move`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    BeforeMessages,
    AfterMessages,
}

impl Move {
    /// # Safety
    /// As [`Kernels::permute`](super::kernels::Kernels::permute): made by [`ExpertParallel::prepare_dispatch`].
    pub(super) unsafe fn launch(
        &self,
        moment: Moment,
        device: &OnDevice,
        on: &CudaStream,
    ) -> Result<()> {
        match (self, moment) {
            // SAFETY: the caller's promise.
            (Self::Rows(permute), Moment::BeforeMessages) => unsafe {
                device.kernels.permute(on, permute)
            },
            (
                &Self::Gathered {
                    from, to, bytes, ..
                },
                Moment::BeforeMessages,
            ) if bytes > 0 => {
                // SAFETY: the caller's promise.
                unsafe { result::memcpy_dtod_async(to, from, bytes, on.cu_stream()) }
                    .map_err(Error::cuda("copying on the device (cuMemcpyDtoDAsync)"))
            }
            // SAFETY: the caller's promise.
            (Self::Gathered { permute, .. }, Moment::AfterMessages) => unsafe {
                device.kernels.permute(on, permute)
            },
            _ => Ok(()),
        }
    }
}

/// The rows of a payload.
#[derive(Clone, Copy)]
struct Rows {
    /// Number of elements of a row.
    width: usize,
    data_type: DataType,
    /// Their address in the staging memory.
    staging: u64,
}

impl ExpertParallel {
    /// Sends the rows of the tokens to their experts.
    ///
    /// `x` is `[token][width]`, with as many tokens as were routed. `y` has [`rows`](Self::rows) rows of the same
    /// width, in the order of the [`ExpertLayout`](super::ExpertLayout); rows without a token become zeros. The
    /// elements may be of any type: they are copied, bit by bit. `width` is the same on all ranks.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when the lengths do not match, or a row is longer than `max_row_bytes` of the builder;
    /// [`ErrorKind::InvalidConfig`] for a routing of another `ExpertParallel`, or one without a route; otherwise as any
    /// operation.
    ///
    /// Wraps a kernel, and `ncclSend` and `ncclRecv` in a group, or `ncclAllGather`: see
    /// [`DispatchWay`].
    ///
    /// ```
    /// # fn example(
    /// #     ep: &mut nccl::moe::ExpertParallel, routing: &nccl::moe::Routing, x: &nccl::cudarc::driver::CudaSlice<half::bf16>,
    /// # ) -> Result<(), Box<dyn std::error::Error>> {
    /// let width = 7168;
    /// let rows = ep.rows();
    /// let mut y = ep.communicator().stream().alloc_zeros::<half::bf16>(rows * width)?;
    /// ep.dispatch(routing, x, &mut y)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn dispatch<'a, X, Y>(&'a mut self, routing: &'a Routing, x: X, y: Y) -> Result<Request>
    where
        X: SendBuffer<'a>,
        Y: RecvBuffer<'a, Element = X::Element>,
    {
        let rows = Payload::rows(x.erase(), y.erase_mut());
        self.dispatch_payloads(routing, [rows])
    }

    /// Sends rows together with their scales, as [`dispatch`](Self::dispatch), in one group of messages.
    ///
    /// `scales` is `[token][scales of a row]`, and arrives in `received_scales` in the same order as the rows in `y`.
    /// `x` and `scales` may have different element types.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    ///
    /// ```
    /// # fn example(
    /// #     ep: &mut nccl::moe::ExpertParallel, routing: &nccl::moe::Routing,
    /// #     x: &nccl::cudarc::driver::CudaSlice<u8>, scales: &nccl::cudarc::driver::CudaSlice<f32>,
    /// # ) -> Result<(), Box<dyn std::error::Error>> {
    /// let (stream, rows) = (ep.communicator().stream().clone(), ep.rows());
    /// let mut y = stream.alloc_zeros::<u8>(rows * 7168)?; // 8-bit floats, as bytes
    /// let mut received = stream.alloc_zeros::<f32>(rows * 56)?; // one for each 128 of them
    /// ep.dispatch_with_scales(routing, x, &mut y, scales, &mut received)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn dispatch_with_scales<'a, X, Y, S, R>(
        &'a mut self,
        routing: &'a Routing,
        x: X,
        y: Y,
        scales: S,
        received_scales: R,
    ) -> Result<Request>
    where
        X: SendBuffer<'a>,
        Y: RecvBuffer<'a, Element = X::Element>,
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let rows = Payload::rows(x.erase(), y.erase_mut());
        let scales = Payload::scales(scales.erase(), received_scales.erase_mut());
        self.dispatch_payloads(routing, [rows, scales])
    }

    fn dispatch_payloads<'a, const N: usize>(
        &'a self,
        routing: &'a Routing,
        payloads: [Payload<'a>; N],
    ) -> Result<Request> {
        let shape = Shape {
            data_type: payloads.first().map(|rows| rows.x.data_type()),
            ..Shape::default()
        };
        let prepared = {
            let _inside = self.comm.inner.enter(CallKind::Issue, self.comm.timeout);
            IssueBuffers::new(self.comm.stream()).and_then(|mut buffers| {
                let moves = self.prepare_dispatch(&mut buffers, routing, payloads)?;
                Ok((buffers, moves))
            })
        };
        let (buffers, moves) =
            prepared.map_err(|error| failed_check(&self.comm, KIND, shape, error))?;
        let launch = |moment| {
            self.launch_joined(&buffers, KIND, shape, || {
                // SAFETY: prepared; all buffers are leased by the operation.
                let launch =
                    |one: &Move| unsafe { one.launch(moment, &self.device, self.comm.stream()) };
                moves.iter().try_for_each(launch)
            })
        };
        launch(Moment::BeforeMessages)?;
        let request = issue(&self.comm, &buffers, KIND, shape)?;
        if self.sizes.way == DispatchWay::AllGather {
            // The other ranks count this dispatch as done.
            launch(Moment::AfterMessages).map_err(|error| self.comm.inner.fail_alone(error))?;
        }
        Ok(request)
    }

    /// Checks all arguments, takes the buffers, and queues the messages. There is a token for each row; `x` has a row for each
    /// token that was routed, and the staging memory was checked to have room for all rows.
    pub(super) fn prepare_dispatch<'a, const N: usize>(
        &self,
        buffers: &mut IssueBuffers<'a>,
        routing: &'a Routing,
        payloads: [Payload<'a>; N],
    ) -> Result<[Move; N]> {
        let tokens = self.tokens_of(routing)?;
        let Sizes {
            ranks, max_tokens, ..
        } = self.sizes;
        let slots = self.sizes.rows();
        let (mut row_bytes, mut staging) = (0usize, self.device.staging.address);
        let mut rows = [None; N];
        for (payload, rows) in payloads.iter().zip(&mut rows) {
            let (width, data_type) = self.rows_of(payload, tokens)?;
            let bytes = width * data_type.size_in_bytes().unwrap_or_default();
            *rows = Some(Rows {
                width,
                data_type,
                staging,
            });
            row_bytes += bytes;
            let staged = match self.sizes.way {
                DispatchWay::Rows => slots,
                DispatchWay::AllGather => ranks * max_tokens,
            };
            staging = (staging + (staged * bytes) as u64).next_multiple_of(ALIGNMENT as u64);
        }
        if row_bytes > self.sizes.max_row_bytes {
            let rule = "`max_row_bytes` of the builder: those of a row and its scales";
            let given = self.sizes.max_row_bytes;
            return length("the staging memory for a row", given, row_bytes, rule);
        }
        let named = match &routing.memory.received {
            Some(received) => buffers.read(&**received)?,
            None => buffers.read(&*routing.memory.tokens)?,
        };
        let mut moves = [const { None }; N];
        for ((payload, rows), one) in payloads.into_iter().zip(rows).zip(&mut moves) {
            let Some(Rows {
                width,
                data_type,
                staging,
            }) = rows
            else {
                unreachable!("one for each payload")
            };
            let (x, y) = (buffers.read(payload.x)?, buffers.write(payload.y)?);
            let row_bytes = width * data_type.size_in_bytes().unwrap_or_default();
            let permute = |x, y, rows| PermuteArgs {
                x,
                tokens: named,
                y,
                row_bytes,
                slots,
                rows,
            };
            *one = Some(match self.sizes.way {
                DispatchWay::Rows => {
                    let (addresses, numbers) = ((staging, y), (width, data_type));
                    self.exchange(buffers, addresses, numbers, Direction::ToExperts);
                    Move::Rows(permute(x, staging, tokens))
                }
                DispatchWay::AllGather => {
                    let own = self.comm.rank() * max_tokens * row_bytes;
                    let count = max_tokens * width;
                    // SAFETY: the staging memory was checked to have room for the tokens of all ranks. Its stream orders
                    // all uses, and plans keep it.
                    unsafe { buffers.push_all_gather(&self.comm, staging, count, data_type) }?;
                    buffers.grouped = true;
                    Move::Gathered {
                        from: x,
                        to: staging + own as u64,
                        bytes: tokens * row_bytes,
                        permute: permute(staging, y, ranks * max_tokens),
                    }
                }
            });
        }
        Ok(moves.map(|one| match one {
            Some(one) => one,
            None => unreachable!("one for each payload"),
        }))
    }

    /// Connects the ranks for gathers of the largest size: NCCL does that on the host, at the first of a kind.
    pub(super) fn connect_gathers(&self) -> Result<()> {
        let Sizes {
            way,
            max_tokens,
            max_row_bytes,
            ..
        } = self.sizes;
        if way != DispatchWay::AllGather {
            return Ok(());
        }
        let mut buffers = IssueBuffers::new(self.comm.stream())?;
        let (start, count) = (self.device.staging.address, max_tokens * max_row_bytes);
        // SAFETY: the staging memory has room for the tokens of all ranks, and lives longer than this call, which waits.
        unsafe { buffers.push_all_gather(&self.comm, start, count, DataType::UInt8) }?;
        issue(&self.comm, &buffers, KIND, Shape::default())?.wait()
    }

    /// Returns the width and type of a payload's rows.
    fn rows_of(&self, payload: &Payload<'_>, tokens: usize) -> Result<(usize, DataType)> {
        let [x, y] = payload.names;
        let data_type = same_type(payload.x.data_type(), payload.y.data_type())?;
        self.comm.library().admit(data_type)?;
        let rows = self.sizes.rows();
        let given = payload.y.len();
        if given == 0 || !given.is_multiple_of(rows) {
            let needed = given.next_multiple_of(rows).max(rows);
            return length(y, given, needed, "a multiple of `ExpertParallel::rows`");
        }
        let width = given / rows;
        if payload.x.len() != tokens * width {
            let rule = "a row, as wide as those that are received, for each token that was routed";
            return length(x, payload.x.len(), tokens * width, rule);
        }
        Ok((width, data_type))
    }
}
