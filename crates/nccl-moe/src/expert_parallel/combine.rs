//! Returns rows from the experts, weighted and added up.

use super::experts::{Direction, ExpertParallel, length};
use super::kernels::CombineArgs;
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

const KIND: OperationKind = OperationKind::Combine;

impl ExpertParallel {
    /// Returns the experts' results to their tokens, weighted and added up.
    ///
    /// `expert_out` has [`rows`](Self::rows) rows; each result is in the row in which [`dispatch`](Self::dispatch) put
    /// its input. Rows have any width, the same on all ranks. `weights` is `[token][top_k]`, like the routed choices,
    /// and `out` is `[token][width]`. The elements are f32, f16 or bf16:
    ///
    /// ```text
    /// out[token] = weights[token][0] * (row of choice 0) + weights[token][1] * (row of choice 1) + …
    /// ```
    ///
    /// computed in f32, in the order of the choices, starting from zero, with each product and sum rounded once (a
    /// fused multiply-add), and at the end rounded to the element's type, to nearest, ties to even: the same bits each
    /// time, whatever the number of ranks. Choices without an expert add nothing. If a choice of a token was lost,
    /// because the expert was full or does not exist, the whole row of the token becomes not-a-number.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when the lengths do not match, or a row is longer than `max_row_bytes` of the builder;
    /// [`ErrorKind::NotWeighed`] for other types; otherwise as [`dispatch`](Self::dispatch).
    ///
    /// Wraps `ncclSend` and `ncclRecv` in a group, and a kernel.
    ///
    /// ```
    /// # use nccl::cudarc::driver::CudaSlice;
    /// # fn example(
    /// #     ep: &mut nccl::moe::ExpertParallel, routing: &nccl::moe::Routing, weights: &CudaSlice<f32>,
    /// #     z: &CudaSlice<half::bf16>, out: &mut CudaSlice<half::bf16>,
    /// # ) -> nccl::Result<()> {
    /// ep.combine(routing, z, weights, out)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn combine<'a, Z, O>(
        &'a mut self,
        routing: &'a Routing,
        expert_out: Z,
        weights: impl SendBuffer<'a, Element = f32>,
        out: O,
    ) -> Result<Request>
    where
        Z: SendBuffer<'a>,
        O: RecvBuffer<'a, Element = Z::Element>,
    {
        self.combine_erased(
            routing,
            expert_out.erase(),
            weights.erase(),
            out.erase_mut(),
        )
    }

    fn combine_erased<'a>(
        &'a self,
        routing: &'a Routing,
        expert_out: Erased<'a>,
        weights: Erased<'a>,
        out: ErasedMut<'a>,
    ) -> Result<Request> {
        let data_type = expert_out.data_type();
        let shape = Shape {
            data_type: Some(data_type),
            ..Shape::default()
        };
        let prepared = {
            let _inside = self.comm.inner.enter(CallKind::Issue, self.comm.timeout);
            IssueBuffers::new(self.comm.stream()).and_then(|mut buffers| {
                let combine =
                    self.prepare_combine(&mut buffers, routing, expert_out, weights, out)?;
                Ok((buffers, combine))
            })
        };
        let (buffers, combine) =
            prepared.map_err(|error| failed_check(&self.comm, KIND, shape, error))?;
        let request = issue(&self.comm, &buffers, KIND, shape)?;
        if combine.tokens > 0 {
            self.launch_joined(&buffers, KIND, shape, || {
                let (kernels, on) = (&self.device.kernels, self.comm.stream());
                // SAFETY: prepared; all buffers are leased by the operation.
                unsafe { kernels.combine(on, &combine, data_type) }
            })
            // The other ranks count this combine as done.
            .map_err(|error| self.comm.inner.fail_alone(error))?;
        }
        Ok(request)
    }

    /// Checks all arguments, takes the buffers, and queues the messages. There are a slot and a weight for each choice of
    /// the tokens that were routed, and a row of `out` for each token; the slots name rows of the staging memory, which was
    /// checked to have room for all.
    pub(super) fn prepare_combine<'a>(
        &self,
        buffers: &mut IssueBuffers<'a>,
        routing: &'a Routing,
        expert_out: Erased<'a>,
        weights: Erased<'a>,
        out: ErasedMut<'a>,
    ) -> Result<CombineArgs> {
        let tokens = self.tokens_of(routing)?;
        let (width, data_type) = self.width_of(&expert_out, &out, tokens)?;
        let top_k = self.sizes.top_k;
        if weights.len() != tokens * top_k {
            let rule = "`top_k` for each token that was routed";
            return length("weights", weights.len(), tokens * top_k, rule);
        }
        let from = buffers.read(expert_out)?;
        let combine = CombineArgs {
            y: self.device.staging.address,
            slots: buffers.read(&*routing.memory.slots)?,
            weights: buffers.read(weights)?,
            out: buffers.write(out)?,
            tokens,
            top_k,
            width,
        };
        self.exchange(
            buffers,
            (combine.y, from),
            (width, data_type),
            Direction::FromExperts,
        );
        Ok(combine)
    }

    fn width_of(
        &self,
        expert_out: &Erased<'_>,
        out: &ErasedMut<'_>,
        tokens: usize,
    ) -> Result<(usize, DataType)> {
        let data_type = same_type(expert_out.data_type(), out.data_type())?;
        self.device.kernels.check_weighted_type(data_type)?;
        let (rows, given) = (self.sizes.rows(), expert_out.len());
        if given == 0 || !given.is_multiple_of(rows) {
            let needed = given.next_multiple_of(rows).max(rows);
            let rule = "a multiple of `ExpertParallel::rows`";
            return length("expert_out", given, needed, rule);
        }
        let width = given / rows;
        let row_bytes = width * data_type.size_in_bytes().unwrap_or_default();
        if row_bytes > self.sizes.max_row_bytes {
            let rule = "`max_row_bytes` of the builder";
            let given = self.sizes.max_row_bytes;
            return length("the staging memory for a row", given, row_bytes, rule);
        }
        if out.len() != tokens * width {
            let rule = "a row, as wide as those of `expert_out`, for each token that was routed";
            return length("out", out.len(), tokens * width, rule);
        }
        Ok((width, data_type))
    }
}
