//! Reduction operators: NCCL's own, and sums of scaled values.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

pub use nccl_base::reduce_op::ReduceOp;
use nccl_sys as sys;

use crate::communicator::{Communicator, KeepAlive};
use crate::drop_queue::{self, DeferredDrop, DropPoll};
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::state::State;
use crate::time::deadline_after;
use crate::{detached_call, ffi};
use nccl_base::data_type::DataType;

/// The operator of a reduction: a [`ReduceOp`], or a reference to a [`PreMulSum`].
///
/// ```
/// # fn example(comm: &nccl::Communicator, y: &mut nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
/// use nccl::{ReduceOp, Reduction};
///
/// fn twice(comm: &nccl::Communicator, y: &mut nccl::cudarc::driver::CudaSlice<f32>, op: impl Reduction + Copy) -> nccl::Result<()> {
///     comm.all_reduce_in_place(&mut *y, op)?;
///     comm.all_reduce_in_place(y, op)?;
///     Ok(())
/// }
/// twice(comm, y, ReduceOp::Max)
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a reduction",
    label = "not a reduction",
    note = "use an `nccl::ReduceOp`, for instance `ReduceOp::Sum`, or a `&nccl::PreMulSum`"
)]
pub trait Reduction: sealed::Sealed {}

mod sealed {
    use super::{Communicator, DataType, Resolved, Result};

    pub trait Sealed {
        /// Returns the operator, if it fits the communicator and the element type.
        fn resolve(&self, comm: &Communicator, data_type: DataType) -> Result<Resolved>;
    }
}

impl Reduction for ReduceOp {}
impl sealed::Sealed for ReduceOp {
    #[inline]
    fn resolve(&self, _: &Communicator, _: DataType) -> Result<Resolved> {
        Ok((self.raw(), None))
    }
}

/// The operator in NCCL's form, and the value that keeps it alive until the operation is issued.
pub(crate) type Resolved = (sys::ncclRedOp_t, Option<Arc<Operator>>);

pub(crate) fn resolve(
    op: &impl Reduction,
    comm: &Communicator,
    data_type: DataType,
) -> Result<Resolved> {
    sealed::Sealed::resolve(op, comm, data_type)
}

/// The sum of the values, where each rank's values are first multiplied by that rank's factor.
///
/// Made by [`Communicator::pre_mul_sum`], for one communicator and one element type. It keeps that communicator alive:
/// a communicator whose handles are dropped ends only after its operators. A dropped operator is destroyed once the
/// groups and plans that were recorded with it are issued; issued operations continue.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let world = nccl::World::threads(1).remove(0);
/// let comm = world.communicator("demo").stream(&stream).build()?;
/// let half = comm.pre_mul_sum(0.5f32)?;
/// let mut y = stream.clone_htod(&[2.0f32, 4.0])?;
/// comm.all_reduce_in_place(&mut y, &half)?.wait()?;
/// assert_eq!(stream.clone_dtoh(&y)?, [1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
pub struct PreMulSum<T: NcclType> {
    operator: Arc<Operator>,
    element: PhantomData<fn() -> T>,
}

/// An operator that was made for a communicator; destroyed when its last user drops it.
pub struct Operator {
    op: sys::ncclRedOp_t,
    /// `None` only during the drop.
    comm: Option<Communicator>,
}

/// Makes an operator that multiplies this rank's values by `factor` and sums the results of all ranks.
pub(crate) fn pre_mul_sum<T: NcclType>(comm: &Communicator, factor: T) -> Result<PreMulSum<T>> {
    let library = &comm.inner.library;
    let create = library.function(sys::Api::ncclRedOpCreatePreMulSum)?;
    library.admit(T::DATA_TYPE)?;
    const CALL: &str = "ncclRedOpCreatePreMulSum";
    let (inner, timeout) = (Arc::clone(&comm.inner), comm.timeout);
    let made = detached_call::run(
        // The wait for the lock has a deadline of its own.
        deadline_after(timeout.saturating_add(detached_call::SLACK)),
        || false,
        move || {
            let (handle, _) = inner.handle.lock_within(None, timeout)?;
            let raw = inner.ready(&handle)?;
            let mut factor = factor;
            let mut op = sys::ncclRedOp_t::ncclSum;
            // SAFETY: `op` is a valid location, `factor` is a value of the type that is named and is read
            // only during the call (it is in host memory); the communicator is alive, under its
            // lock.
            let code = unsafe {
                create(
                    &mut op,
                    (&raw mut factor).cast(),
                    T::DATA_TYPE.raw(),
                    sys::ncclScalarResidence_t::ncclScalarHostImmediate,
                    raw.as_ptr(),
                )
            };
            ffi::check(&inner.library, CALL, code)?;
            Ok::<_, Error>(op)
        },
        drop,
    );
    let op = match made {
        Ok(op) => op?,
        Err(not_back) => {
            let error = not_back.into_error(CALL, timeout);
            if error.is_timeout() {
                comm.inner.abort(&error);
            }
            return Err(comm.inner.final_error(error));
        }
    };
    Ok(PreMulSum {
        operator: Arc::new(Operator {
            op,
            comm: Some(comm.clone()),
        }),
        element: PhantomData,
    })
}

impl<T: NcclType> Reduction for &PreMulSum<T> {}
impl<T: NcclType> sealed::Sealed for &PreMulSum<T> {
    fn resolve(&self, comm: &Communicator, data_type: DataType) -> Result<Resolved> {
        let Some(made_for) = &self.operator.comm else {
            unreachable!("a live reference to a dropped operator");
        };
        let wrong = |made_for: String, used_for: String| {
            Err(Error::new(ErrorKind::WrongReduction { made_for, used_for }))
        };
        if !Arc::ptr_eq(&made_for.inner, &comm.inner) {
            let name = |comm: &Communicator| format!("communicator {:?}", comm.name());
            return wrong(name(made_for), format!("another one, {:?}", comm.name()));
        }
        if data_type != T::DATA_TYPE {
            return wrong(
                format!("elements of {}", T::DATA_TYPE),
                data_type.to_string(),
            );
        }
        Ok((self.operator.op, Some(Arc::clone(&self.operator))))
    }
}

impl Drop for Operator {
    /// Never waits: another thread may be inside a call on the communicator.
    fn drop(&mut self) {
        if let (Some(comm), false) = (self.comm.take(), drop_queue::is_closed()) {
            let comm = KeepAlive::new(comm);
            drop_queue::defer(
                Box::new(DeferredOperator { op: self.op, comm }),
                drop_queue::TIMEOUT,
            );
        }
    }
}

/// The remains of a dropped operator.
struct DeferredOperator {
    op: sys::ncclRedOp_t,
    comm: KeepAlive,
}

impl DeferredDrop for DeferredOperator {
    fn poll(&mut self) -> DropPoll {
        self.comm.abort_if_overdue();
        let inner = &self.comm.inner;
        let Some(handle) = inner.handle.try_lock() else {
            return match inner.lifecycle.get() {
                // The lock is held by a thread that does not return from a call.
                State::Leaked => DropPoll::Over,
                _ => DropPoll::Wait,
            };
        };
        // Without NCCL's pointer, the operator was freed with the communicator.
        let Some(raw) = handle.raw else {
            return DropPoll::Over;
        };
        if let Some(destroy) = inner.library.api().ncclRedOpDestroy {
            // SAFETY: the operator was made for this communicator, which is alive, under its lock, and
            // is destroyed once, because `poll` returns `Over`. Operations copied it when they were issued.
            let code = unsafe { destroy(self.op, raw.as_ptr()) };
            if let Err(failure) = ffi::check(&inner.library, "ncclRedOpDestroy", code) {
                crate::events::leaked("a reduction operator", failure);
            }
        }
        DropPoll::Over
    }

    fn release(self: Box<Self>) {}

    fn describe(&self) -> String {
        format!(
            "a reduction operator of communicator {:?}",
            self.comm.name()
        )
    }
}

impl<T: NcclType> fmt::Debug for PreMulSum<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreMulSum")
            .field(
                "communicator",
                &self.operator.comm.as_ref().map(Communicator::name),
            )
            .field("data_type", &T::DATA_TYPE)
            .finish()
    }
}
