//! Loading, launching and unloading the kernels.
//!
//! The kernels are PTX, which the driver compiles for its GPU. Each is launched once when it is loaded, without work,
//! because a first launch may wait for the device: later, when one rank of a process waits for another, that would be a
//! deadlock.

use std::ffi::{CStr, CString, c_void};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUfunction, CUmodule};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use super::layout::Sizes;
use crate::cuda_driver;
use crate::drop_queue::{self, DeferredDrop, DropPoll, StreamPoint};
use crate::dtype::DataType;
use crate::error::{Error, ErrorKind, Result};

/// The source of the kernels, with their description; the emulator recognizes them by their names.
const PTX: &str = include_str!("kernels.ptx");

/// Number of threads of a block that assigns places.
const PLACING: u32 = 256;
/// Number of threads that copy one row.
const COPYING: u32 = 128;
/// Number of threads that add up one row, or a part of it.
const ADDING: u32 = 256;
/// Maximum number of parts of a row.
const PARTS: usize = 65_535;

/// See the module.
pub(super) struct Kernels {
    module: CUmodule,
    stream: Arc<CudaStream>,
    /// Recorded when this value is dropped; created in advance, so that the drop needs no allocation that could fail.
    last: ManuallyDrop<CudaEvent>,
    place: Function,
    route: Function,
    /// For words of 16, 4 and 1 bytes.
    permute: [(u64, Function); 3],
    combine: [(DataType, Function); 3],
}

#[derive(Clone, Copy)]
struct Function(CUfunction);

// SAFETY: driver handles, which any thread may use; the context is bound before.
unsafe impl Send for Kernels {}
// SAFETY: as above; nothing changes behind a shared reference.
unsafe impl Sync for Kernels {}

/// Choices of experts, and the places of their copies.
#[derive(Clone, Copy)]
pub(super) struct PlaceArgs {
    pub(super) topk: CUdeviceptr,
    pub(super) table: CUdeviceptr,
    pub(super) placed: CUdeviceptr,
    pub(super) entries: usize,
    /// The turn of the first token among the copies of an expert.
    pub(super) turn: u32,
}

/// Input and output of a routing.
#[derive(Clone, Copy)]
pub(super) struct RouteArgs {
    pub(super) topk: CUdeviceptr,
    pub(super) slots: CUdeviceptr,
    pub(super) tokens: CUdeviceptr,
    pub(super) counts: CUdeviceptr,
    pub(super) entries: usize,
    /// The number of the first token.
    pub(super) first: u32,
}

/// Rows that are copied to their slots.
#[derive(Clone, Copy)]
pub(super) struct PermuteArgs {
    pub(super) x: CUdeviceptr,
    pub(super) tokens: CUdeviceptr,
    pub(super) y: CUdeviceptr,
    pub(super) row_bytes: usize,
    pub(super) slots: usize,
    /// Number of rows of `x`; a token from there on is none.
    pub(super) rows: usize,
}

/// Rows that are weighted and added up.
#[derive(Clone, Copy)]
pub(super) struct CombineArgs {
    pub(super) y: CUdeviceptr,
    pub(super) slots: CUdeviceptr,
    pub(super) weights: CUdeviceptr,
    pub(super) out: CUdeviceptr,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    pub(super) width: usize,
}

impl Kernels {
    /// Loads the kernels, and launches each once on `stream`; `nothing` is memory of at least four bytes, all zeros.
    pub(super) fn load(stream: &Arc<CudaStream>, nothing: CUdeviceptr) -> Result<Self> {
        let context = stream.context();
        let last = cuda_driver::new_event(context, None)
            .map_err(Error::cuda("creating an event (cuEventCreate)"))?;
        let module = Module::load(context)?;
        let function = |name| module.function(name);
        let kernels = Self {
            place: function(c"nccl_expert_parallel_place")?,
            route: function(c"nccl_expert_parallel_route")?,
            permute: [
                (16, function(c"nccl_expert_parallel_permute_16")?),
                (4, function(c"nccl_expert_parallel_permute_4")?),
                (1, function(c"nccl_expert_parallel_permute_1")?),
            ],
            combine: [
                (
                    DataType::Float32,
                    function(c"nccl_expert_parallel_combine_f32")?,
                ),
                (
                    DataType::Float16,
                    function(c"nccl_expert_parallel_combine_f16")?,
                ),
                (
                    DataType::BFloat16,
                    function(c"nccl_expert_parallel_combine_bf16")?,
                ),
            ],
            module: module.keep(),
            stream: Arc::clone(stream),
            last: ManuallyDrop::new(last),
        };
        kernels.launch_all(stream, nothing)?;
        Ok(kernels)
    }

    fn launch_all(&self, on: &CudaStream, nothing: CUdeviceptr) -> Result<()> {
        // SAFETY: no entries and no experts: the kernel writes one zero.
        unsafe {
            self.launch_place(on, [nothing; 3], [0; 5])?;
            let route = [nothing, nothing, nothing, nothing];
            self.launch_route(on, route, [0; 5])?;
            for (_, function) in self.permute {
                // One row without bytes, for a token of number 0.
                self.launch_permute(on, function, [nothing; 3], 0, [1, 1])?;
            }
            for (_, function) in self.combine {
                self.launch_combine(on, function, [nothing; 4], (1, 0, 0))?;
            }
        }
        Ok(())
    }

    /// Assigns places to entries, at least one.
    ///
    /// # Safety
    /// As [`route`](Self::route); the table is that of a placement with the experts and places of `sizes`.
    pub(super) unsafe fn place(
        &self,
        on: &CudaStream,
        what: &PlaceArgs,
        sizes: &Sizes,
    ) -> Result<()> {
        let addresses = [what.topk, what.table, what.placed];
        // All fit: the sizes were checked.
        let numbers = [
            what.entries as u32,
            sizes.top_k as u32,
            sizes.experts as u32,
            sizes.places() as u32,
            what.turn,
        ];
        // SAFETY: the caller's promise.
        unsafe { self.launch_place(on, addresses, numbers) }
    }

    unsafe fn launch_place(
        &self,
        on: &CudaStream,
        addresses: [CUdeviceptr; 3],
        numbers: [u32; 5],
    ) -> Result<()> {
        let [topk, table, placed] = &addresses;
        let [entries, top_k, experts, places, turn] = &numbers;
        let arguments = &mut [
            argument(topk),
            argument(table),
            argument(placed),
            argument(entries),
            argument(top_k),
            argument(experts),
            argument(places),
            argument(turn),
        ];
        let blocks = entries.div_ceil(PLACING).max(1);
        // SAFETY: as in `launch_route`.
        unsafe { self.launch(on, self.place, [blocks, 1], PLACING, arguments) }
    }

    /// Assigns slots to entries.
    ///
    /// # Safety
    /// The stream is of the context of the kernels. The addresses are of as many numbers as `sizes` and the entries need,
    /// on the stream's device, and stay valid until the stream has run the kernel; if the stream is capturing, until the
    /// last replay is over, as do the kernels.
    pub(super) unsafe fn route(
        &self,
        on: &CudaStream,
        what: &RouteArgs,
        sizes: &Sizes,
    ) -> Result<()> {
        let addresses = [what.topk, what.slots, what.tokens, what.counts];
        // All fit: the sizes were checked.
        let numbers = [
            what.entries as u32,
            sizes.top_k as u32,
            sizes.places() as u32,
            sizes.capacity as u32,
            what.first,
        ];
        // SAFETY: the caller's promise.
        unsafe { self.launch_route(on, addresses, numbers) }
    }

    unsafe fn launch_route(
        &self,
        on: &CudaStream,
        addresses: [CUdeviceptr; 4],
        numbers: [u32; 5],
    ) -> Result<()> {
        let [topk, slots, tokens, counts] = &addresses;
        let [entries, top_k, experts, capacity, first] = &numbers;
        let arguments = &mut [
            argument(topk),
            argument(slots),
            argument(tokens),
            argument(counts),
            argument(entries),
            argument(top_k),
            argument(experts),
            argument(capacity),
            argument(first),
        ];
        // SAFETY: as the kernel takes them; the caller promises that the addresses are valid.
        unsafe { self.launch(on, self.route, [numbers[2] + 1, 1], 32, arguments) }
    }

    /// Copies rows to their slots.
    ///
    /// # Safety
    /// As [`route`](Self::route): `slots` tokens, `rows` rows to read, and `slots` rows to write.
    pub(super) unsafe fn permute(&self, on: &CudaStream, what: &PermuteArgs) -> Result<()> {
        let bits = what.x | what.y | what.row_bytes as u64;
        let fits = |&&(bytes, _): &&(u64, Function)| bits.is_multiple_of(bytes);
        let Some(&(bytes, function)) = self.permute.iter().find(fits) else {
            unreachable!("anything is a multiple of one")
        };
        let addresses = [what.x, what.tokens, what.y];
        let words = what.row_bytes as u64 / bytes;
        // Both fit: the sizes were checked.
        let numbers = [what.slots as u32, what.rows as u32];
        // SAFETY: the caller's promise.
        unsafe { self.launch_permute(on, function, addresses, words, numbers) }
    }

    unsafe fn launch_permute(
        &self,
        on: &CudaStream,
        function: Function,
        [x, tokens, y]: [CUdeviceptr; 3],
        words: u64,
        [slots, rows]: [u32; 2],
    ) -> Result<()> {
        let arguments = &mut [
            argument(&x),
            argument(&tokens),
            argument(&y),
            argument(&words),
            argument(&rows),
        ];
        // SAFETY: as in `launch_route`.
        unsafe { self.launch(on, function, [slots, 1], COPYING, arguments) }
    }

    /// Returns an error unless rows of this type can be weighted.
    pub(super) fn check_weighted_type(&self, data_type: DataType) -> Result<()> {
        self.combine_of(data_type).map(drop)
    }

    fn combine_of(&self, data_type: DataType) -> Result<Function> {
        let found = self.combine.iter().find(|(known, _)| *known == data_type);
        found
            .map(|&(_, function)| function)
            .ok_or_else(|| Error::new(ErrorKind::NotWeighed(data_type)))
    }

    /// Weights and adds up rows of `data_type`, for at least one token.
    ///
    /// # Safety
    /// As [`route`](Self::route): a slot and a weight for each entry, the rows that they name, and a row to write for
    /// each token.
    pub(super) unsafe fn combine(
        &self,
        on: &CudaStream,
        what: &CombineArgs,
        data_type: DataType,
    ) -> Result<()> {
        let function = self.combine_of(data_type)?;
        let addresses = [what.y, what.slots, what.weights, what.out];
        // Both fit: the sizes were checked.
        let numbers = (what.tokens as u32, what.top_k as u32, what.width as u64);
        // SAFETY: the caller's promise.
        unsafe { self.launch_combine(on, function, addresses, numbers) }
    }

    unsafe fn launch_combine(
        &self,
        on: &CudaStream,
        function: Function,
        [y, slots, weights, out]: [CUdeviceptr; 4],
        (tokens, top_k, width): (u32, u32, u64),
    ) -> Result<()> {
        let arguments = &mut [
            argument(&y),
            argument(&slots),
            argument(&weights),
            argument(&out),
            argument(&top_k),
            argument(&width),
        ];
        let parts = (width as usize).div_ceil(ADDING as usize).clamp(1, PARTS) as u32;
        // SAFETY: as in `launch_route`.
        unsafe { self.launch(on, function, [tokens, parts], ADDING, arguments) }
    }

    /// # Safety
    /// The number and the sizes of the arguments are the kernel's.
    unsafe fn launch(
        &self,
        on: &CudaStream,
        function: Function,
        [x, y]: [u32; 2],
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let stream = on.cu_stream();
        // SAFETY: the module is loaded while `self` lives, the stream lives, and the caller promises the rest.
        unsafe {
            result::launch_kernel(function.0, (x, y, 1), (threads, 1, 1), 0, stream, arguments)
        }
        .map_err(Error::cuda("launching a kernel (cuLaunchKernel)"))
    }
}

/// Returns the address of an argument, where the driver reads it during the call.
fn argument<T>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// A module that is unloaded when this value is dropped, which happens only if making [`Kernels`] fails, while none of
/// them runs.
struct Module<'c> {
    module: CUmodule,
    context: &'c CudaContext,
}

impl<'c> Module<'c> {
    fn load(context: &'c Arc<CudaContext>) -> Result<Self> {
        cuda_driver::bind(context).map_err(Error::cuda(
            "binding the context to this thread (cuCtxSetCurrent)",
        ))?;
        let text = CString::new(PTX).unwrap_or_default();
        // SAFETY: a NUL-terminated string.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) }
            .map_err(Error::cuda("loading the kernels (cuModuleLoadData)"))?;
        Ok(Self { module, context })
    }

    fn function(&self, name: &CStr) -> Result<Function> {
        // SAFETY: the module is loaded.
        unsafe { result::module::get_function(self.module, name.into()) }
            .map(Function)
            .map_err(Error::cuda("looking up a kernel (cuModuleGetFunction)"))
    }

    fn keep(self) -> CUmodule {
        ManuallyDrop::new(self).module
    }
}

impl Drop for Module<'_> {
    fn drop(&mut self) {
        let _ = cuda_driver::bind(self.context);
        // SAFETY: loaded, and unloaded once.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// The module of dropped kernels. Unloading waits for the device, so the drop queue does it.
struct DeferredUnload {
    module: CUmodule,
    behind: StreamPoint,
    stream: Arc<CudaStream>,
}

// SAFETY: as for `Kernels`.
unsafe impl Send for DeferredUnload {}

impl DeferredDrop for DeferredUnload {
    fn poll(&mut self) -> DropPoll {
        match self.behind.is_over() {
            true => DropPoll::Over,
            false => DropPoll::Wait,
        }
    }

    fn release(self: Box<Self>) {
        drop(Module {
            module: self.module,
            context: self.stream.context(),
        });
    }

    fn describe(&self) -> String {
        String::from("the kernels of an expert parallel, whose stream did not come to its end")
    }
}

impl Drop for Kernels {
    /// Never waits.
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let last = unsafe { ManuallyDrop::take(&mut self.last) };
        if drop_queue::is_closed() {
            std::mem::forget(last);
            return;
        }
        let unloaded = DeferredUnload {
            module: self.module,
            behind: StreamPoint::new(Arc::clone(&self.stream), last),
            stream: Arc::clone(&self.stream),
        };
        drop_queue::defer(Box::new(unloaded), drop_queue::TIMEOUT);
    }
}
