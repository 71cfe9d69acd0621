//! The argument of kernels that use NCCL's device functions.

use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, DeviceRepr};
use nccl_sys as sys;

use super::properties::properties;
use crate::communicator::{Communicator, Holds, KeepAlive, together};
use crate::config;
use crate::cuda_driver;
use crate::drop_queue::{self, DeferredDrop, DropPoll, StreamPoint};
use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::state::State;

const CREATE: &str = "ncclDevCommCreate";
const DESTROY: &str = "ncclDevCommDestroy";

/// The resources that kernels need from a [`DeviceCommunicator`]. All ranks must request the same.
///
/// ```
/// use nccl::device_api::DeviceRequirements;
///
/// let mut needs = DeviceRequirements::default();
/// needs.load_store_barriers = 16; // one for each block of a kernel
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DeviceRequirements {
    /// The number of barriers among the ranks of a [`Team::load_store`](super::Team::load_store): one for each block
    /// that uses a barrier at the same time.
    pub load_store_barriers: usize,
    /// The number of barriers among all ranks.
    pub barriers: usize,
    /// The number of barriers among the ranks of a [`Team::rail`](super::Team::rail), over the network.
    pub rail_barriers: usize,
    /// Whether the ranks of a [`Team::load_store`](super::Team::load_store) need a multicast address.
    pub multimem: bool,
    /// The number of signals that kernels set over the network.
    pub network_signals: usize,
    /// The number of counters for data that kernels have put on the network.
    pub network_counters: usize,
    /// The number of blocks that take part in the all-to-all for short messages of NCCL's device functions
    /// (`ncclLLA2ASession`).
    pub short_message_blocks: usize,
    /// The number of slots of each of these blocks. A slot holds 8 bytes of data.
    pub short_message_slots: usize,
}

impl DeviceRequirements {
    fn to_raw(&self) -> Result<sys::ncclDevCommRequirements_t> {
        let number = |field: &'static str, value: usize| {
            i32::try_from(value)
                .map_err(|_| config::invalid(field, format!("{value} is more than NCCL can count")))
        };
        Ok(sys::ncclDevCommRequirements_t {
            lsaMultimem: self.multimem,
            barrierCount: number("barriers", self.barriers)?,
            lsaBarrierCount: number("load_store_barriers", self.load_store_barriers)?,
            railGinBarrierCount: number("rail_barriers", self.rail_barriers)?,
            ginSignalCount: number("network_signals", self.network_signals)?,
            ginCounterCount: number("network_counters", self.network_counters)?,
            lsaLLA2ABlockCount: number("short_message_blocks", self.short_message_blocks)?,
            lsaLLA2ASlotCount: number("short_message_slots", self.short_message_slots)?,
            ..sys::NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER
        })
    }
}

/// A communicator in the form that kernels with the device functions of `nccl_device.h` need; from
/// [`Communicator::device_communicator`].
///
/// Kernels take [`argument`](Self::argument) by value, as a `ncclDevComm` in C++. Its layout is that of the header of
/// [`nccl_sys::Version::HEADER`]; NCCL of that release and newer accepts kernels that were compiled with that header.
///
/// The value keeps the communicator alive. Dropping it returns immediately; NCCL's allocations for it are freed in the
/// background, after the work that is on the communicator's stream at the time of the drop, and after the
/// [holds](Communicator::hold_windows) of that time. An abort also frees them, at any time, so kernels that use the value need
/// a hold.
///
/// ```no_run
/// # fn example(comm: &nccl::Communicator, kernel: &nccl::cudarc::driver::CudaFunction) -> Result<(), Box<dyn std::error::Error>> {
/// use nccl::cudarc::driver::{LaunchConfig, PushKernelArg};
/// use nccl::device_api::DeviceRequirements;
///
/// let mut needs = DeviceRequirements::default();
/// needs.load_store_barriers = 1;
/// let device = comm.device_communicator(&needs)?;
/// let hold = comm.hold_windows()?;
/// let mut launch = comm.stream().launch_builder(kernel);
/// launch.arg(device.argument());
/// // SAFETY: `extern "C" __global__ void kernel(ncclDevComm comm)`; the windows are held until it is over.
/// unsafe { launch.launch(LaunchConfig::for_num_elems(256)) }?;
/// hold.until(comm.stream())?;
/// # Ok(())
/// # }
/// ```
pub struct DeviceCommunicator {
    argument: ManuallyDrop<Box<DeviceArgument>>,
    comm: ManuallyDrop<KeepAlive>,
    /// Recorded on drop; created beforehand, because creating it in the drop could fail.
    last: ManuallyDrop<CudaEvent>,
}

/// A `ncclDevComm`, as an argument of kernels.
///
/// ```
/// fn size(argument: &nccl::device_api::DeviceArgument) -> usize {
///     size_of_val(argument)
/// }
/// ```
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct DeviceArgument(sys::ncclDevComm_t);

// SAFETY: plain data that kernels take by value. The memory behind its addresses belongs to NCCL and is for the device.
unsafe impl DeviceRepr for DeviceArgument {}

// SAFETY: numbers and addresses for the device and for NCCL, never dereferenced here.
unsafe impl Send for DeviceArgument {}
// SAFETY: likewise.
unsafe impl Sync for DeviceArgument {}

impl DeviceArgument {
    /// Returns this rank's place among the ranks whose memory its kernels can load and store, and their number (`lsaRank`,
    /// `lsaSize`).
    ///
    /// ```
    /// # fn example(device: &nccl::device_api::DeviceCommunicator) {
    /// let (place, size) = device.argument().load_store_place();
    /// assert!(place < size);
    /// # }
    /// ```
    #[must_use]
    pub fn load_store_place(&self) -> (usize, usize) {
        let number = |value: i32| usize::try_from(value).unwrap_or(0);
        (number(self.0.lsaRank), number(self.0.lsaSize))
    }
}

impl fmt::Debug for DeviceArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceArgument")
            .field("rank", &self.0.rank)
            .field("ranks", &self.0.nRanks)
            .field("load_store_place", &self.load_store_place())
            .finish_non_exhaustive()
    }
}

/// The memory that NCCL reads and writes, possibly from its own thread after the call has returned.
struct Place {
    needs: sys::ncclDevCommRequirements_t,
    made: sys::ncclDevComm_t,
}

struct PlacePointer(*mut Place);

// SAFETY: only one thread owns the memory at a time.
unsafe impl Send for PlacePointer {}

impl PlacePointer {
    /// Returns the pointer. A method, so that closures capture the whole value.
    fn get(&self) -> *mut Place {
        self.0
    }
}

/// Makes a device communicator. `gather` returns the numbers that all ranks pass to it, in rank order.
pub(crate) fn device_communicator(
    comm: &Communicator,
    needs: &DeviceRequirements,
    gather: impl FnOnce(u64) -> Result<Vec<u64>>,
) -> Result<DeviceCommunicator> {
    let library = comm.library();
    let function = library.function(sys::Api::ncclDevCommCreate)?;
    library.function(sys::Api::ncclDevCommDestroy)?;
    if library.version() < sys::Version::HEADER {
        return Err(library.unsupported(
            String::from("a device communicator as these bindings have it"),
            sys::Version::HEADER,
        ));
    }
    compare(needs, gather)?;
    let needs = needs.to_raw()?;
    // From here on, the other ranks wait for this one.
    let alone = |error| comm.inner.fail_alone(error);
    let properties = properties(comm).map_err(alone)?;
    if !properties.device_api {
        return Err(Error::new(ErrorKind::Unavailable {
            what: "a device communicator",
            reason: String::from(
                "NCCL has no device API among these ranks; it needs peer access between the devices of all ranks and memory \
                 from cuMem (NCCL_CUMEM_ENABLE), or a network with GIN",
            ),
        }));
    }
    if needs.lsaMultimem && !properties.multimem {
        return Err(Error::new(ErrorKind::Unavailable {
            what: "a multicast address of all ranks",
            reason: String::from("these devices have none (NVLink SHARP)"),
        }));
    }
    let last = cuda_driver::new_event(&comm.inner.context, None)
        .map_err(Error::cuda("creating an event (cuEventCreate)"))
        .map_err(alone)?;
    // SAFETY: integers, booleans, arrays of them and pointers, all of which may be zero.
    let made = unsafe { std::mem::zeroed::<sys::ncclDevComm_t>() };
    // Leaked where the call fails: NCCL may still write to it.
    let place = Box::into_raw(Box::new(Place { needs, made }));
    let theirs = PlacePointer(place);
    together(
        comm,
        CREATE,
        |inner, handle| inner.ready(handle),
        // SAFETY: the communicator is alive, under its lock. `needs` and `made` stay valid until the call has settled;
        // if it never does, they are leaked.
        move |raw| unsafe {
            let place = theirs.get();
            function(
                raw.as_ptr(),
                &raw const (*place).needs,
                &raw mut (*place).made,
            )
        },
        |_| {},
    )?;
    // SAFETY: the box was made above, and NCCL does not use it any more.
    let place = unsafe { Box::from_raw(place) };
    Ok(DeviceCommunicator {
        argument: ManuallyDrop::new(Box::new(DeviceArgument(place.made))),
        comm: ManuallyDrop::new(KeepAlive::new(comm.clone())),
        last: ManuallyDrop::new(last),
    })
}

/// Fails on all ranks if their requirements differ: kernels store into memory that the peers have allocated for these
/// requirements.
fn compare(needs: &DeviceRequirements, gather: impl FnOnce(u64) -> Result<Vec<u64>>) -> Result<()> {
    let mut hasher = DefaultHasher::new();
    needs.hash(&mut hasher);
    let all = gather(hasher.finish())?;
    match all.iter().position(|&one| one != all[0]) {
        None => Ok(()),
        Some(rank) => Err(config::invalid(
            "requirements",
            format!("rank {rank} requires something else than rank 0; this rank {needs:?}"),
        )),
    }
}

impl DeviceCommunicator {
    /// Returns the argument that kernels take by value.
    ///
    /// ```
    /// # fn example(device: &nccl::device_api::DeviceCommunicator) {
    /// println!("{:?}", device.argument());
    /// # }
    /// ```
    #[must_use]
    pub fn argument(&self) -> &DeviceArgument {
        &self.argument
    }
}

impl fmt::Debug for DeviceCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCommunicator")
            .field("communicator", &self.comm.name())
            .field("argument", &self.argument)
            .finish()
    }
}

/// The remains of a dropped device communicator.
struct Ending {
    argument: Box<DeviceArgument>,
    comm: KeepAlive,
    behind: StreamPoint,
    holds: Holds,
}

impl DeferredDrop for Ending {
    fn poll(&mut self) -> DropPoll {
        if !self.behind.is_over() || !self.holds.are_over() {
            self.comm.abort_if_overdue();
            return DropPoll::Wait;
        }
        let inner = &self.comm.inner;
        let Some(guard) = inner.handle.try_lock() else {
            self.comm.abort_if_overdue();
            return DropPoll::Wait;
        };
        // NCCL freed the device communicator together with its communicator.
        let Some(raw) = guard.raw.filter(|_| inner.lifecycle.get() != State::Leaked) else {
            return DropPoll::Over;
        };
        if !inner.may_free_objects() {
            drop(guard);
            self.comm.abort_if_overdue();
            return DropPoll::Wait;
        }
        let Some(destroy) = inner.library.api().ncclDevCommDestroy else {
            return DropPoll::Over;
        };
        // `ncclDevCommDestroy` queries the thread's current device and restores it afterwards.
        if cuda_driver::bind(&inner.context).is_err() {
            return DropPoll::Over;
        }
        // SAFETY: made for this communicator, which is alive, under its lock. Destroyed once: `poll` is not called again after
        // `Over`.
        let code = unsafe { destroy(raw.as_ptr(), &self.argument.0) };
        if let Err(failure) = ffi::check(&inner.library, DESTROY, code) {
            crate::events::leaked(&self.describe(), Error::from(failure));
        }
        DropPoll::Over
    }

    fn release(self: Box<Self>) {}

    fn describe(&self) -> String {
        format!("a device communicator of {:?}", self.comm.name())
    }
}

impl Drop for DeviceCommunicator {
    /// Never waits; see the type.
    fn drop(&mut self) {
        if drop_queue::is_closed() {
            return;
        }
        // SAFETY: each is taken once, here.
        let (argument, comm, last) = unsafe {
            (
                ManuallyDrop::take(&mut self.argument),
                ManuallyDrop::take(&mut self.comm),
                ManuallyDrop::take(&mut self.last),
            )
        };
        let behind = StreamPoint::new(Arc::clone(comm.stream()), last);
        let holds = comm.inner.peer_kernels.holds();
        let patience = holds.patience();
        let ending = Ending {
            argument,
            comm,
            behind,
            holds,
        };
        drop_queue::defer(Box::new(ending), patience);
    }
}
