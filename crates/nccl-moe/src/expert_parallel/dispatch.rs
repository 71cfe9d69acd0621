//! Sends rows to the ranks of their experts.

use super::experts::{Direction, ExpertParallel, length};
use super::kernels::PermuteArgs;
use super::layout::ALIGNMENT;
use super::routing::Routing;
use crate::active_calls::CallKind;
use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::collectives::same_type;
use crate::dtype::DataType;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::Result;
use crate::issuing::{IssueBuffers, failed_check, issue};
use crate::operation::{OperationKind, Shape};
use nccl_core::Request;

const KIND: OperationKind = OperationKind::Dispatch;

/// The data that is sent for each token.
struct Payload<'a> {
    x: Erased<'a>,
    y: ErasedMut<'a>,
    /// The names of the two buffers in errors.
    names: [&'static str; 2],
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
    /// Wraps a kernel, and `ncclSend` and `ncclRecv` in a group.
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
        let rows = Payload {
            x: x.erase(),
            y: y.erase_mut(),
            names: ["x", "y"],
        };
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
        let rows = Payload {
            x: x.erase(),
            y: y.erase_mut(),
            names: ["x", "y"],
        };
        let scales = Payload {
            x: scales.erase(),
            y: received_scales.erase_mut(),
            names: ["scales", "received_scales"],
        };
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
        let prepared = self.prepare_dispatch(routing, payloads);
        let (buffers, permutes) =
            prepared.map_err(|error| failed_check(&self.comm, KIND, shape, error))?;
        self.launch_joined(&buffers, KIND, shape, || {
            permutes.iter().try_for_each(|permute| {
                // SAFETY: a token for each slot; the tokens name rows that exist, because `x` has one for each token that
                // was routed; the staging memory was checked to have room for all slots. All are leased by the
                // operation, or are the staging memory, which is used on this stream only.
                unsafe { self.kernels.permute(permute) }
            })
        })?;
        issue(&self.comm, &buffers, KIND, shape)
    }

    /// Checks all arguments, and takes the buffers.
    fn prepare_dispatch<'a, const N: usize>(
        &'a self,
        routing: &'a Routing,
        payloads: [Payload<'a>; N],
    ) -> Result<(IssueBuffers<'a>, [PermuteArgs; N])> {
        let tokens = self.tokens_of(routing)?;
        let slots = self.sizes.rows();
        let (mut row_bytes, mut staging) = (0usize, self.staging.address);
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
            staging = (staging + (slots * bytes) as u64).next_multiple_of(ALIGNMENT as u64);
        }
        if row_bytes > self.sizes.max_row_bytes {
            let rule = "`max_row_bytes` of the builder: those of a row and its scales";
            let given = self.sizes.max_row_bytes;
            return length("the staging memory for a row", given, row_bytes, rule);
        }
        let _inside = self.comm.inner.enter(CallKind::Issue, self.comm.timeout);
        let mut buffers = IssueBuffers::new(self.comm.stream())?;
        let tokens = buffers.read(&*routing.tokens)?;
        let mut permutes = [const { None }; N];
        for ((payload, rows), permute) in payloads.into_iter().zip(rows).zip(&mut permutes) {
            let Some(rows) = rows else {
                unreachable!("one for each payload")
            };
            let (x, y) = (buffers.read(payload.x)?, buffers.write(payload.y)?);
            let (width, data_type) = (rows.width, rows.data_type);
            self.exchange(
                &mut buffers,
                (rows.staging, y),
                (width, data_type),
                Direction::ToExperts,
            );
            *permute = Some(PermuteArgs {
                x,
                tokens,
                y: rows.staging,
                row_bytes: width * data_type.size_in_bytes().unwrap_or_default(),
                slots,
            });
        }
        let permutes = permutes.map(|permute| match permute {
            Some(permute) => permute,
            None => unreachable!("one for each payload"),
        });
        Ok((buffers, permutes))
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
