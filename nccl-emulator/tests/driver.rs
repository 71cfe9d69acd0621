//! The driver through cudarc, unmodified: what its safe layer promises holds on the emulator.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

/// Fails the test when `body` takes longer than ten seconds.
fn in_time(body: impl FnOnce() + Send + 'static) {
    nccl_emulator::install().unwrap();
    let (send, receive) = mpsc::channel();
    let runner = thread::spawn(move || {
        body();
        let _ = send.send(());
    });
    match receive.recv_timeout(Duration::from_secs(10)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("not done after ten seconds"),
        _ => {
            if let Err(panic) = runner.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// A host function that blocks a stream until the gate is opened.
struct Gate {
    sender: Sender<()>,
    entered: Arc<AtomicBool>,
}

impl Gate {
    fn on(stream: &CudaStream) -> Self {
        unsafe extern "C" fn wait(argument: *mut c_void) {
            // SAFETY: the box was leaked for this one call.
            let (receiver, entered) =
                *unsafe { Box::from_raw(argument.cast::<(Receiver<()>, Arc<AtomicBool>)>()) };
            entered.store(true, Ordering::SeqCst);
            let _ = receiver.recv();
        }
        let (sender, receiver) = mpsc::channel();
        let entered = Arc::new(AtomicBool::new(false));
        let argument = Box::into_raw(Box::new((receiver, Arc::clone(&entered))));
        stream.context().bind_to_thread().unwrap();
        // SAFETY: the argument is valid for one call, and the stream makes exactly one.
        unsafe { result::stream::launch_host_function(stream.cu_stream(), wait, argument.cast()) }
            .unwrap();
        Self { sender, entered }
    }

    fn open(self) {
        let _ = self.sender.send(());
    }
}

#[test]
fn the_device_says_that_it_is_none() {
    in_time(|| {
        let context = CudaContext::new(0).unwrap();
        assert_eq!(CudaContext::device_count().unwrap(), 8);
        assert_eq!(context.name().unwrap(), "CPU emulator, not a GPU");
        assert_eq!(context.compute_capability().unwrap(), (9, 0));
        assert_eq!(context.total_mem().unwrap(), 4 << 30);
        assert!(context.has_async_alloc());
        assert_eq!(
            context.uuid().unwrap().bytes,
            CudaContext::new(0).unwrap().uuid().unwrap().bytes
        );
        assert_ne!(
            context.uuid().unwrap().bytes,
            CudaContext::new(1).unwrap().uuid().unwrap().bytes
        );
        let error = CudaContext::new(8).unwrap_err();
        assert_eq!(error.0, sys::CUresult::CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(
            error.error_string().unwrap().to_str().unwrap(),
            "invalid device ordinal"
        );
    });
}

#[test]
fn data_goes_there_and_back() {
    in_time(|| {
        let context = CudaContext::new(0).unwrap();
        for stream in [
            context.default_stream(),
            context.new_stream().unwrap(),
            context.per_thread_stream(),
        ] {
            for len in [1, 1000, 1 << 20] {
                let data: Vec<u32> = (0..len).collect();
                let there = stream.clone_htod(&data).unwrap();
                let copy = there.try_clone().unwrap();
                assert_eq!(stream.clone_dtoh(&copy).unwrap(), data);
            }
            let zeros = stream.alloc_zeros::<u64>(77).unwrap();
            assert_eq!(stream.clone_dtoh(&zeros).unwrap(), [0; 77]);
            let empty = stream.clone_htod::<u8, _>(&Vec::new()).unwrap();
            assert_eq!(stream.clone_dtoh(&empty).unwrap(), [0_u8; 0]);
        }
    });
}

#[test]
fn copies_between_devices_wait_for_the_source() {
    in_time(|| {
        let (one, two) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
        let (from, to) = (one.new_stream().unwrap(), two.new_stream().unwrap());
        let mut source = from.alloc_zeros::<u8>(1 << 20).unwrap();
        let gate = Gate::on(&from);
        from.memcpy_htod(&vec![7_u8; 1000], &mut source).unwrap();
        let target = to.clone_dtod(&source).unwrap();
        gate.open();
        assert_eq!(to.clone_dtoh(&target).unwrap()[..1000], [7; 1000]);
    });
}

#[test]
fn work_is_asynchronous_and_ordered() {
    in_time(|| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let gate = Gate::on(&stream);
        let order = Arc::new(Mutex::new(Vec::<u32>::new()));
        unsafe extern "C" fn note(argument: *mut c_void) {
            // SAFETY: the box was leaked for this one call.
            let (order, number) =
                *unsafe { Box::from_raw(argument.cast::<(Arc<Mutex<Vec<u32>>>, u32)>()) };
            order.lock().unwrap().push(number);
        }
        for number in 0..10 {
            let argument = Box::into_raw(Box::new((Arc::clone(&order), number)));
            // SAFETY: the argument is valid for one call.
            unsafe {
                result::stream::launch_host_function(stream.cu_stream(), note, argument.cast())
            }
            .unwrap();
        }
        let event = stream.record_event(None).unwrap();
        assert!(!event.is_complete());
        assert!(order.lock().unwrap().is_empty());
        gate.open();
        stream.synchronize().unwrap();
        assert!(event.is_complete());
        assert!(order.lock().unwrap().iter().copied().eq(0..10));
    });
}

#[test]
fn pinned_copies_are_asynchronous_and_pageable_ones_wait() {
    in_time(|| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let len = 1 << 20;
        let source = stream.clone_htod(&vec![5_u8; len]).unwrap();
        // SAFETY: filled by the copy before it is read.
        let mut pinned = unsafe { context.alloc_pinned::<u8>(len) }.unwrap();
        let gate = Gate::on(&stream);
        let start = Instant::now();
        stream.memcpy_dtoh(&source, &mut pinned).unwrap();
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "the gate is closed, and the call came back"
        );
        gate.open();
        assert_eq!(pinned.as_slice().unwrap(), vec![5; len]);

        // Small pageable copies to the device are staged …
        let gate = Gate::on(&stream);
        let mut small = vec![1_u8; 100];
        let there = stream.clone_htod(&small).unwrap();
        small.fill(2);
        gate.open();
        assert_eq!(stream.clone_dtoh(&there).unwrap(), [1; 100]);

        // … and all pageable copies to the host block.
        let gate = Gate::on(&stream);
        let opened = Arc::new(AtomicBool::new(false));
        let opener = thread::spawn({
            let opened = Arc::clone(&opened);
            move || {
                thread::sleep(Duration::from_millis(50));
                opened.store(true, Ordering::SeqCst);
                gate.open();
            }
        });
        assert_eq!(stream.clone_dtoh(&source).unwrap(), vec![5; len]);
        assert!(opened.load(Ordering::SeqCst));
        opener.join().unwrap();
    });
}

#[test]
fn freeing_pinned_memory_waits_for_the_copies_that_use_it() {
    in_time(|| {
        let context = CudaContext::new(0).unwrap();
        // One stream only: cudarc records no event and relies on the driver.
        let stream = context.default_stream();
        let mut target = stream.alloc_zeros::<u8>(1000).unwrap();
        // SAFETY: written below.
        let mut pinned = unsafe { context.alloc_pinned::<u8>(1000) }.unwrap();
        pinned.as_mut_slice().unwrap().fill(9);
        let gate = Gate::on(&stream);
        stream.memcpy_htod(&pinned, &mut target).unwrap();
        let opener = thread::spawn(move || {
            thread::sleep(Duration::from_millis(30));
            gate.open();
        });
        drop(pinned);
        opener.join().unwrap();
        assert_eq!(stream.clone_dtoh(&target).unwrap(), [9; 1000]);
    });
}

#[test]
fn a_slice_dropped_in_stream_order_is_fine() {
    in_time(|| {
        let context = CudaContext::new(6).unwrap();
        let stream = context.new_stream().unwrap();
        let gate = Gate::on(&stream);
        let one = stream.clone_htod(&vec![3_u8; 5000]).unwrap();
        let two = one.try_clone().unwrap();
        drop(one);
        gate.open();
        assert_eq!(stream.clone_dtoh(&two).unwrap(), [3; 5000]);
        assert!(
            !nccl_emulator::violations()
                .iter()
                .any(|v| v.device() == Some(6))
        );
    });
}

#[test]
fn events_order_streams_and_measure_time() {
    in_time(|| {
        let context = CudaContext::new(0).unwrap();
        let (one, two) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let gate = Gate::on(&one);
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let start = one.record_event(timed).unwrap();
        two.wait(&start).unwrap();
        let after = two.record_event(None).unwrap();
        thread::sleep(Duration::from_millis(20));
        assert!(!after.try_is_complete().unwrap());
        gate.open();
        two.synchronize().unwrap();
        thread::sleep(Duration::from_millis(20));
        let end = one.record_event(timed).unwrap();
        let elapsed = start.elapsed_ms(&end).unwrap();
        assert!((19.0..5000.0).contains(&elapsed), "{elapsed}");
        let untimed = one.record_event(None).unwrap();
        let refused = start.elapsed_ms(&untimed).unwrap_err();
        assert_eq!(refused.0, sys::CUresult::CUDA_ERROR_INVALID_HANDLE);
    });
}

#[test]
fn memory_runs_out() {
    in_time(|| {
        let context = CudaContext::new(7).unwrap();
        let stream = context.new_stream().unwrap();
        let (free, total) = context.mem_get_info().unwrap();
        assert_eq!(total, 4 << 30);
        // SAFETY: never read.
        let error = unsafe { stream.alloc::<u8>(total + 1) }.unwrap_err();
        assert_eq!(error.0, sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        // SAFETY: never read.
        let half = unsafe { stream.alloc::<u8>(free / 2) }.unwrap();
        assert_eq!(context.mem_get_info().unwrap().0, free - free / 2);
        // SAFETY: never read.
        let error = unsafe { stream.alloc::<u8>(free / 2 + (4 << 20)) }.unwrap_err();
        assert_eq!(error.0, sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        drop(half);
        context.synchronize().unwrap();
        assert_eq!(context.mem_get_info().unwrap().0, free);
    });
}

#[test]
fn a_failed_context_stays_failed_until_the_last_user_lets_go() {
    in_time(|| {
        let device = 5;
        let fail = || -> Result<(), DriverError> {
            let context = CudaContext::new(device)?;
            let stream = context.new_stream()?;
            // SAFETY: the memory is freed twice on purpose, and read after.
            unsafe {
                let memory = result::malloc_sync(100)?;
                result::free_sync(memory)?;
                let refused = result::memset_d8_async(memory, 0, 100, stream.cu_stream());
                assert_eq!(
                    refused.unwrap_err().0,
                    sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
                );
            }
            for outcome in [
                stream.synchronize(),
                context.synchronize(),
                context.new_stream().map(drop),
                stream.alloc_zeros::<u8>(1).map(drop),
                stream.record_event(None).map(drop),
            ] {
                assert_eq!(
                    outcome.unwrap_err().0,
                    sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
                );
            }
            Ok(())
        };
        fail().unwrap();
        let context = CudaContext::new(device).unwrap();
        let stream = context.new_stream().unwrap();
        let fine = stream.clone_htod(&[1_u8, 2]).unwrap();
        assert_eq!(stream.clone_dtoh(&fine).unwrap(), [1, 2]);
    });
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    in_time(|| {
        static ANSWER: Mutex<Option<sys::CUresult>> = Mutex::new(None);
        unsafe extern "C" fn disobey(_: *mut c_void) {
            // SAFETY: no arguments.
            *ANSWER.lock().unwrap() = Some(unsafe { sys::cuCtxSynchronize() });
        }
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        // SAFETY: the function needs no argument.
        unsafe {
            result::stream::launch_host_function(stream.cu_stream(), disobey, std::ptr::null_mut())
        }
        .unwrap();
        stream.synchronize().unwrap();
        assert_eq!(
            *ANSWER.lock().unwrap(),
            Some(sys::CUresult::CUDA_ERROR_NOT_PERMITTED)
        );
    });
}

#[test]
fn a_host_function_is_run_even_if_nobody_waits() {
    in_time(|| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let gate = Gate::on(&stream);
        let start = Instant::now();
        while !gate.entered.load(Ordering::SeqCst) {
            assert!(start.elapsed() < Duration::from_secs(5));
            thread::sleep(Duration::from_micros(100));
        }
        gate.open();
    });
}

#[test]
fn what_there_is_not_is_refused_by_name() {
    in_time(|| {
        let context = CudaContext::new(0).unwrap();
        context.bind_to_thread().unwrap();
        // SAFETY: the emulator reads none of the arguments.
        let code = unsafe { sys::cuMemAllocManaged(std::ptr::null_mut(), 1, 1) };
        assert_eq!(code, sys::CUresult::CUDA_ERROR_NOT_SUPPORTED);
    });
}

/// Copies `height` rows of `width` bytes with `cuMemcpy2DAsync`, each side with a pitch of its own.
fn rows(
    (to, to_pitch): (u64, usize),
    (from, from_pitch): (u64, usize),
    (width, height): (usize, usize),
    kind: sys::CUmemorytype,
    stream: &CudaStream,
) -> Result<(), DriverError> {
    let description = sys::CUDA_MEMCPY2D {
        srcXInBytes: 1,
        srcY: 1,
        srcMemoryType: kind,
        srcHost: std::ptr::null(),
        srcDevice: from,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: to,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: width,
        Height: height,
    };
    stream.context().bind_to_thread()?;
    // SAFETY: the description lives during the call; the emulator checks the addresses.
    unsafe { sys::cuMemcpy2DAsync_v2(&raw const description, stream.cu_stream()) }.result()
}

#[test]
fn rows_are_copied_from_one_pitch_to_another() {
    in_time(|| {
        let context = CudaContext::new(3).unwrap();
        let stream = context.new_stream().unwrap();
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let x: Vec<u8> = (0..60).collect();
        let from = stream.clone_htod(&x).unwrap();
        let mut to = stream.alloc_zeros::<u8>(12).unwrap();
        {
            use cudarc::driver::{DevicePtr, DevicePtrMut};
            let (from, _from) = from.device_ptr(&stream);
            let (to, _to) = to.device_ptr_mut(&stream);
            // From the second column of the second row on, three rows of three bytes.
            rows((to, 4), (from, 10), (3, 3), device, &stream).unwrap();
            let wide = rows((to, 2), (from, 10), (3, 3), device, &stream);
            assert!(wide.is_err(), "a pitch is at least as long as a row");
            // A copy of no bytes accesses no memory.
            rows((0, 4), (0, 10), (0, 3), device, &stream).unwrap();
            let host = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
            let refused = rows((to, 4), (from, 10), (3, 3), host, &stream).unwrap_err();
            assert_eq!(refused.0, sys::CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let y = stream.clone_dtoh(&to).unwrap();
        assert_eq!(y, [11, 12, 13, 0, 21, 22, 23, 0, 31, 32, 33, 0]);
    });
}

#[test]
fn rows_beyond_the_end_of_memory_fail_the_context() {
    in_time(|| {
        let context = CudaContext::new(4).unwrap();
        let stream = context.new_stream().unwrap();
        let (from, mut to) = (
            stream.alloc_zeros::<u8>(40).unwrap(),
            stream.alloc_zeros::<u8>(40).unwrap(),
        );
        use cudarc::driver::{DevicePtr, DevicePtrMut};
        let failed = {
            let (from, _from) = from.device_ptr(&stream);
            let (to, _to) = to.device_ptr_mut(&stream);
            let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
            // The last row ends one byte past the end of the source.
            rows((to, 10), (from, 10), (10, 3), device, &stream)
        };
        let failed = failed.and_then(|()| stream.synchronize());
        assert_eq!(
            failed.unwrap_err().0,
            sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        );
    });
}
