//! Kernels that run for a while, identified by their host stub.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cuda_emulator::kernels::program::{
    Attributes, Failed, Launched, Program, Progress, Run, handle_of, register_program,
};
use cudarc::driver::{CudaContext, CudaStream, sys};

/// Runs until it is told to end, and counts its steps.
struct Waits {
    ended: Arc<AtomicBool>,
    steps: Arc<AtomicU32>,
}

impl Program for Waits {
    fn start(&self, launch: &Launched) -> Result<Box<dyn Run>, String> {
        if launch.arguments[0] == 13 {
            return Err("thirteen is not interpreted".to_owned());
        }
        let (ended, steps) = (Arc::clone(&self.ended), Arc::clone(&self.steps));
        Ok(Box::new(Waiting { ended, steps }))
    }
}

struct Waiting {
    ended: Arc<AtomicBool>,
    steps: Arc<AtomicU32>,
}

impl Run for Waiting {
    fn step(&mut self, _budget: usize) -> Result<Progress, Failed> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        Ok(match self.ended.load(Ordering::Acquire) {
            true => Progress::Done,
            false => Progress::Waiting,
        })
    }

    fn describe(&self) -> String {
        "a kernel that waits".to_owned()
    }
}

/// Registers a separate program for a test, and returns its handle.
fn register(symbol: &'static u8, program: Waits) -> sys::CUfunction {
    let symbol: *const c_void = std::ptr::from_ref(symbol).cast();
    let attributes = Attributes {
        max_threads: 640,
        parameters: vec![(0, 8)],
    };
    register_program(symbol, "waits", attributes, Arc::new(program)).unwrap();
    handle_of(symbol).unwrap().cast()
}

/// Launches with the arguments in one buffer, as NCCL does.
fn launch(function: sys::CUfunction, stream: &CudaStream, argument: u64) -> sys::CUresult {
    let (mut argument, mut size) = (argument, 8usize);
    let mut extra = [
        std::ptr::without_provenance_mut(1),
        (&raw mut argument).cast(),
        std::ptr::without_provenance_mut(2),
        (&raw mut size).cast(),
        std::ptr::null_mut(),
    ];
    let config = sys::CUlaunchConfig {
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 640,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: stream.cu_stream(),
        attrs: std::ptr::null_mut(),
        numAttrs: 0,
    };
    // SAFETY: the configuration, and a list that ends.
    unsafe { sys::cuLaunchKernelEx(&config, function, std::ptr::null_mut(), extra.as_mut_ptr()) }
}

fn processor_time() -> Duration {
    let mut usage: libc::rusage = unsafe_zeroed();
    // SAFETY: writes one rusage.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let of = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

fn unsafe_zeroed() -> libc::rusage {
    // SAFETY: numbers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

#[test]
fn eight_programs_that_wait_leave_the_cores_alone_and_end_soon() {
    static SYMBOL: u8 = 0;
    nccl_emulator::install().unwrap();
    let (ended, steps) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU32::new(0)),
    );
    let program = Waits {
        ended: Arc::clone(&ended),
        steps: Arc::clone(&steps),
    };
    let function = register(&SYMBOL, program);
    let waiting: Vec<_> = (0..8)
        .map(|device| {
            std::thread::spawn(move || CudaContext::new(device).unwrap().new_stream().unwrap())
        })
        .map(|thread| thread.join().unwrap())
        .collect();
    let function = function as usize;
    let threads: Vec<_> = waiting
        .into_iter()
        .map(|stream| {
            std::thread::spawn(move || {
                stream.context().bind_to_thread().unwrap();
                let code = launch(function as sys::CUfunction, &stream, 1);
                assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
                stream.synchronize().unwrap();
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(200));
    let (start, before) = (Instant::now(), processor_time());
    std::thread::sleep(Duration::from_secs(2));
    let (elapsed, used) = (start.elapsed(), processor_time() - before);
    ended.store(true, Ordering::Release);
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    assert!(steps.load(Ordering::Relaxed) > 8);
    assert!(used <= elapsed, "{used:?} of {elapsed:?}");
}

#[test]
fn a_launch_that_is_refused_says_so_at_the_call() {
    static SYMBOL: u8 = 1;
    nccl_emulator::install().unwrap();
    let program = Waits {
        ended: Arc::new(AtomicBool::new(true)),
        steps: Arc::default(),
    };
    let function = register(&SYMBOL, program);
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    assert_eq!(
        launch(function, &stream, 13),
        sys::CUresult::CUDA_ERROR_NOT_SUPPORTED
    );
    assert_eq!(launch(function, &stream, 1), sys::CUresult::CUDA_SUCCESS);
    stream.synchronize().unwrap();
}
