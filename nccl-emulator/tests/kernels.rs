//! Kernels: Rust functions that the emulator runs in their place, as work on streams. Every test runs in a
//! process of its own, because an invalid address makes the context unusable.

mod captures;
mod ranks;

use std::ffi::CString;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult as Code;
use cudarc::driver::{CudaStream, DriverError, result, sys};
use nccl_emulator::kernels::Progress;
use nccl_emulator::{ViolationKind, clear_violations, faults, kernels, violations};

use captures::{GLOBAL, code, device, end, fill, hold, memory, read};
use ranks::alone;

/// Loads a module whose kernels have these heads: names and parameters.
fn module(heads: &[&str]) -> sys::CUmodule {
    let mut text = String::from(".version 7.0\n.target sm_70\n.address_size 64\n");
    for head in heads {
        text += &format!(".visible .entry {head} {{ ret; }}\n");
    }
    let text = CString::new(text).unwrap();
    // SAFETY: a text that ends with a zero.
    unsafe { result::module::load_data(text.as_ptr().cast()) }.unwrap()
}

fn function(module: sys::CUmodule, name: &str) -> Result<sys::CUfunction, DriverError> {
    // SAFETY: the module is loaded; otherwise the emulator detects it.
    unsafe { result::module::get_function(module, CString::new(name).unwrap()) }
}

/// Provides the kernel `add_one(.param .u64 y, .param .u32 n)`, which adds one to each of `n` bytes.
fn add_one() -> sys::CUfunction {
    kernels::provide("add_one", |launch| {
        let (y, n) = (launch.argument::<u64>(0), launch.argument::<u32>(1));
        let bytes: Vec<u8> = launch.read(y, n as usize)?;
        launch.write(y, &bytes.iter().map(|byte| byte + 1).collect::<Vec<_>>())
    });
    function(
        module(&["add_one(.param .u64 y, .param .u32 n)"]),
        "add_one",
    )
    .unwrap()
}

fn launch(
    stream: &CudaStream,
    function: sys::CUfunction,
    mut y: u64,
    mut n: u32,
) -> Result<(), DriverError> {
    let arguments = &mut [(&raw mut y).cast(), (&raw mut n).cast()];
    // SAFETY: the arguments match the kernel's parameters; the emulator checks the addresses.
    unsafe {
        result::launch_kernel(
            function,
            (1, 1, 1),
            (32, 1, 1),
            0,
            stream.cu_stream(),
            arguments,
        )
    }
}

#[test]
fn a_launch_has_its_place_in_the_stream_and_the_arguments_of_its_call() {
    alone(
        "a_launch_has_its_place_in_the_stream_and_the_arguments_of_its_call",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let (add, y) = (add_one(), memory(&context, 8));
            let gate = hold(&stream);
            fill(&stream, y, 5, 8).unwrap();
            // The arguments are in variables that no longer exist when the kernel runs.
            launch(&stream, add, y, 4).unwrap();
            launch(&stream, add, y, 2).unwrap();
            fill(&stream, y + 7, 1, 1).unwrap();
            gate.send(()).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(read(y, 8), [7, 7, 6, 6, 5, 5, 5, 1]);
        },
    );
}

#[test]
fn a_launch_can_be_late_and_its_stream_waits_for_it() {
    alone(
        "a_launch_can_be_late_and_its_stream_waits_for_it",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let (add, y) = (add_one(), memory(&context, 1));
            let by = Duration::from_millis(30);
            let late = faults::late(by);
            let start = Instant::now();
            launch(&stream, add, y, 1).unwrap();
            fill(&stream, y, 9, 1).unwrap();
            launch(&stream, add, y, 1).unwrap();
            assert_eq!(code(stream.context().check_err()), Code::CUDA_SUCCESS);
            stream.synchronize().unwrap();
            assert!(start.elapsed() >= by);
            drop(late);
            assert_eq!(read(y, 1), [10]);
        },
    );
}

#[test]
fn a_captured_launch_runs_with_its_arguments_at_each_replay() {
    alone(
        "a_captured_launch_runs_with_its_arguments_at_each_replay",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let (add, y) = (add_one(), memory(&context, 4));
            stream.begin_capture(GLOBAL).unwrap();
            launch(&stream, add, y, 4).unwrap();
            launch(&stream, add, y + 2, 2).unwrap();
            let graph = end(&stream);
            assert_eq!(captures::nodes(&graph), 2);
            stream.synchronize().unwrap();
            assert_eq!(read(y, 4), [0; 4], "a capture runs nothing");
            for _ in 0..3 {
                graph.launch().unwrap();
            }
            stream.synchronize().unwrap();
            assert_eq!(read(y, 4), [3, 3, 6, 6]);
        },
    );
}

#[test]
fn loading_a_module_voids_a_capture() {
    alone("loading_a_module_voids_a_capture", &[], || {
        let context = device();
        let stream = context.new_stream().unwrap();
        stream.begin_capture(GLOBAL).unwrap();
        let text = c".version 7.0 .target sm_70 .entry k() { ret; }";
        // SAFETY: a text that ends with a zero.
        let loaded = unsafe { result::module::load_data(text.as_ptr().cast()) };
        assert_eq!(code(loaded), Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        captures::assert_void(&stream);
    });
}

#[test]
fn a_kernel_that_nobody_gave_is_refused_at_its_launch() {
    alone(
        "a_kernel_that_nobody_gave_is_refused_at_its_launch",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let y = memory(&context, 1);
            let unknown = module(&["unknown(.param .u64 y, .param .u32 n)"]);
            let unknown = function(unknown, "unknown").unwrap();
            let refused = launch(&stream, unknown, y, 1);
            assert_eq!(code(refused), Code::CUDA_ERROR_NOT_SUPPORTED);
            // The context is still usable, and the kernel can still be provided.
            kernels::provide("unknown", |launch| {
                launch.write(launch.argument(0), &[launch.arguments() as u8])
            });
            launch(&stream, unknown, y, 1).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(read(y, 1), [2]);
        },
    );
}

#[test]
fn memory_that_is_not_there_costs_the_context() {
    alone("memory_that_is_not_there_costs_the_context", &[], || {
        let context = device();
        let stream = context.new_stream().unwrap();
        let (add, y) = (add_one(), memory(&context, 64));
        launch(&stream, add, y, 64).unwrap();
        stream.synchronize().unwrap();
        assert!(violations().is_empty());
        // One byte too many.
        launch(&stream, add, y, 65).unwrap();
        let lost = stream.synchronize();
        assert_eq!(code(lost), Code::CUDA_ERROR_ILLEGAL_ADDRESS);
        let told = violations();
        assert_eq!(told[0].kind(), ViolationKind::OutOfBounds);
        assert!(
            told[0].to_string().contains("kernel add_one"),
            "{}",
            told[0]
        );
        // The error is sticky.
        let next = launch(&stream, add, y, 1);
        assert_eq!(code(next), Code::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
}

#[test]
fn memory_that_is_freed_before_a_late_launch_runs_is_caught() {
    alone(
        "memory_that_is_freed_before_a_late_launch_runs_is_caught",
        &[],
        || {
            let context = device();
            let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let (add, y) = (add_one(), memory(&context, 64));
            let gate = hold(&stream);
            launch(&stream, add, y, 64).unwrap();
            // SAFETY: none; this is the misuse. The free on another stream does not wait for the launch.
            unsafe { result::free_async(y, other.cu_stream()) }.unwrap();
            other.synchronize().unwrap();
            gate.send(()).unwrap();
            let lost = stream.synchronize();
            assert_eq!(code(lost), Code::CUDA_ERROR_ILLEGAL_ADDRESS);
            assert_eq!(violations()[0].kind(), ViolationKind::UseAfterFree);
        },
    );
}

#[test]
fn a_bad_access_fails_the_context_whatever_the_function_returns() {
    alone(
        "a_bad_access_fails_the_context_whatever_the_function_returns",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let y = memory(&context, 64);
            kernels::provide("careless", |launch| {
                let _: Result<Vec<u32>, _> = launch.read(launch.argument::<u64>(0), 2);
                Ok(())
            });
            let careless = module(&["careless(.param .u64 y, .param .u32 n)"]);
            let careless = function(careless, "careless").unwrap();
            launch(&stream, careless, y + 4, 0).unwrap();
            stream.synchronize().unwrap();
            // The address is not aligned to the element, so a GPU cannot load from it.
            launch(&stream, careless, y + 2, 0).unwrap();
            let lost = stream.synchronize();
            assert_eq!(code(lost), Code::CUDA_ERROR_MISALIGNED_ADDRESS);
            assert_eq!(violations()[0].kind(), ViolationKind::Misuse);
        },
    );
}

#[test]
fn memory_of_another_device_is_refused_to_a_kernel() {
    alone(
        "memory_of_another_device_is_refused_to_a_kernel",
        &[],
        || {
            let elsewhere = cudarc::driver::CudaContext::new;
            let context = device();
            let stream = context.new_stream().unwrap();
            let add = add_one();
            let other = elsewhere(1).unwrap();
            let y = memory(&other, 8);
            context.bind_to_thread().unwrap();
            launch(&stream, add, y, 8).unwrap();
            let lost = stream.synchronize();
            assert_eq!(code(lost), Code::CUDA_ERROR_ILLEGAL_ADDRESS);
            assert!(violations()[0].to_string().contains("memory of device 1"));
        },
    );
}

#[test]
fn a_kernel_that_panics_is_a_failed_launch() {
    alone("a_kernel_that_panics_is_a_failed_launch", &[], || {
        let context = device();
        let stream = context.new_stream().unwrap();
        kernels::provide("wrong", |launch| {
            // The parameter has eight bytes.
            let _: u32 = launch.argument(0);
            Ok(())
        });
        let wrong = module(&["wrong(.param .u64 y, .param .u32 n)"]);
        let wrong = function(wrong, "wrong").unwrap();
        launch(&stream, wrong, 0, 0).unwrap();
        let lost = stream.synchronize();
        assert_eq!(code(lost), Code::CUDA_ERROR_LAUNCH_FAILED);
    });
}

#[test]
fn a_kernel_that_waits_is_called_until_it_is_done_and_keeps_a_state_for_each_launch() {
    alone(
        "a_kernel_that_waits_is_called_until_it_is_done_and_keeps_a_state_for_each_launch",
        &[],
        || {
            let context = device();
            let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let y = memory(&context, 8);
            // Waits until the first word is at least `n`, and adds one to the second word if it had to wait.
            kernels::provide_waiting("await_word", || {
                let mut waited = false;
                move |launch| {
                    let (y, n) = (launch.argument::<u64>(0), launch.argument::<u32>(1));
                    if launch.load_acquire(y)? < n {
                        waited = true;
                        return Ok(Progress::Waiting);
                    }
                    let before = launch.load_acquire(y + 4)?;
                    launch.store_release(y + 4, before + u32::from(waited))?;
                    Ok(Progress::Done)
                }
            });
            let module = module(&["await_word(.param .u64 y, .param .u32 n)"]);
            let await_word = function(module, "await_word").unwrap();
            stream.begin_capture(GLOBAL).unwrap();
            launch(&stream, await_word, y, 1).unwrap();
            launch(&stream, await_word, y, 1).unwrap();
            let graph = end(&stream);
            for replay in 1..=2u8 {
                graph.launch().unwrap();
                std::thread::sleep(Duration::from_millis(5));
                // SAFETY: the stream is alive.
                let waiting = unsafe { sys::cuStreamQuery(stream.cu_stream()) };
                assert_eq!(waiting, Code::CUDA_ERROR_NOT_READY);
                // Another stream of the same thread goes on meanwhile.
                fill(&other, y, 1, 1).unwrap();
                stream.synchronize().unwrap();
                assert_eq!(read(y, 8), [1, 0, 0, 0, replay, 0, 0, 0]);
                fill(&other, y, 0, 1).unwrap();
                other.synchronize().unwrap();
            }
            // A misaligned word, which a GPU cannot load.
            launch(&stream, await_word, y + 1, 1).unwrap();
            let lost = stream.synchronize();
            assert_eq!(code(lost), Code::CUDA_ERROR_MISALIGNED_ADDRESS);
        },
    );
}

#[test]
fn functions_end_with_their_module() {
    alone("functions_end_with_their_module", &[], || {
        let context = device();
        let stream = context.new_stream().unwrap();
        let y = memory(&context, 1);
        let _given = add_one();
        let module = module(&["add_one(.param .u64 y, .param .u32 n)", "other()"]);
        let missing = function(module, "no_such");
        assert_eq!(code(missing), Code::CUDA_ERROR_NOT_FOUND);
        let add = function(module, "add_one").unwrap();
        assert_eq!(
            function(module, "add_one").unwrap(),
            add,
            "one handle for each"
        );
        let gate = hold(&stream);
        launch(&stream, add, y, 1).unwrap();
        // SAFETY: a launched kernel keeps what it needs of the module.
        unsafe { result::module::unload(module) }.unwrap();
        gate.send(()).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(read(y, 1), [1], "launched before");
        let late = launch(&stream, add, y, 1);
        assert_eq!(code(late), Code::CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(violations()[0].kind(), ViolationKind::UseAfterDestroy);
        clear_violations();
        assert_eq!(
            code(function(module, "add_one")),
            Code::CUDA_ERROR_INVALID_HANDLE
        );
    });
}

#[test]
fn grids_that_no_device_takes_are_refused() {
    alone("grids_that_no_device_takes_are_refused", &[], || {
        let context = device();
        let stream = context.new_stream().unwrap();
        static LAUNCHED: AtomicU32 = AtomicU32::new(0);
        kernels::provide("counted", |launch| {
            assert_eq!((launch.name(), launch.shared_bytes()), ("counted", 16));
            LAUNCHED.fetch_add(launch.grid()[0] * launch.block()[1], Ordering::SeqCst);
            Ok(())
        });
        let counted = function(module(&["counted()"]), "counted").unwrap();
        let with = |grid, block| {
            // SAFETY: a kernel without arguments.
            code(unsafe {
                result::launch_kernel(counted, grid, block, 16, stream.cu_stream(), &mut [])
            })
        };
        assert_eq!(with((3, 1, 1), (1, 512, 2)), Code::CUDA_SUCCESS);
        for (grid, block) in [
            ((0, 1, 1), (1, 1, 1)),
            ((1, 65_536, 1), (1, 1, 1)),
            ((1 << 31, 1, 1), (1, 1, 1)),
            ((1, 1, 1), (1025, 1, 1)),
            ((1, 1, 1), (64, 32, 1)),
            ((1, 1, 1), (1, 1, 65)),
            ((1, 1, 1), (1, 0, 1)),
        ] {
            let refused = with(grid, block);
            assert_eq!(
                refused,
                Code::CUDA_ERROR_INVALID_VALUE,
                "{grid:?} {block:?}"
            );
        }
        stream.synchronize().unwrap();
        assert_eq!(LAUNCHED.load(Ordering::SeqCst), 3 * 512);
    });
}

#[test]
fn what_is_no_ptx_is_refused_as_cuda_does() {
    alone("what_is_no_ptx_is_refused_as_cuda_does", &[], || {
        let context = device();
        context.bind_to_thread().unwrap();
        // SAFETY: each ends with a zero.
        let load = |image: &[u8]| code(unsafe { result::module::load_data(image.as_ptr().cast()) });
        assert_eq!(load(b"no PTX\0"), Code::CUDA_ERROR_INVALID_PTX);
        assert_eq!(load(b"\x7fELF\x02\0"), Code::CUDA_ERROR_NOT_SUPPORTED);
        let missing = result::module::load(c"/no/such.ptx".into());
        assert_eq!(code(missing), Code::CUDA_ERROR_FILE_NOT_FOUND);
        let file = std::env::temp_dir().join(format!("kernels-{}.ptx", std::process::id()));
        std::fs::write(&file, ".version 7.0 .target sm_70 .entry k() { ret; }").unwrap();
        let path = CString::new(file.to_str().unwrap()).unwrap();
        let module = result::module::load(path).unwrap();
        function(module, "k").unwrap();
        std::fs::remove_file(file).unwrap();
    });
}
