//! Three ways in which safe code frees memory under a running operation through cudarc. The
//! emulator records each as a use after free. Code that builds on cudarc must not rely on cudarc's event
//! tracking alone.

use std::ffi::c_void;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, result};
use nccl_emulator::{Violation, ViolationKind};

/// A host function that blocks a stream until the gate is opened.
struct Gate(Sender<()>);

impl Gate {
    fn on(stream: &CudaStream) -> Self {
        unsafe extern "C" fn wait(argument: *mut c_void) {
            // SAFETY: the box was leaked for this one call.
            let receiver = unsafe { Box::from_raw(argument.cast::<Receiver<()>>()) };
            let _ = receiver.recv();
        }
        let (sender, receiver) = mpsc::channel();
        stream.context().bind_to_thread().unwrap();
        let argument = Box::into_raw(Box::new(receiver));
        // SAFETY: the argument is valid for one call, and the stream makes exactly one.
        unsafe { result::stream::launch_host_function(stream.cu_stream(), wait, argument.cast()) }
            .unwrap();
        Self(sender)
    }

    fn open(self) {
        let _ = self.0.send(());
    }
}

/// Runs `body` for at most ten seconds, and returns the violations recorded on `device`.
fn caught(device: usize, body: impl FnOnce() + Send + 'static) -> Vec<Violation> {
    nccl_emulator::install().unwrap();
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        body();
        let _ = send.send(());
    });
    receive
        .recv_timeout(Duration::from_secs(10))
        .expect("done in ten seconds");
    let here = |violation: &Violation| violation.device() == Some(device as i32);
    nccl_emulator::violations()
        .into_iter()
        .filter(here)
        .collect()
}

fn is_a_use_after_free(violations: &[Violation], size: u64) {
    let [violation] = violations else {
        panic!("one violation expected: {violations:?}")
    };
    assert_eq!(violation.kind(), ViolationKind::UseAfterFree, "{violation}");
    let allocation = violation.allocation().unwrap();
    assert_eq!((allocation.size, allocation.freed), (Some(size), true));
}

#[test]
fn a_second_reader_makes_the_first_forgotten() {
    let violations = caught(1, || {
        let context = CudaContext::new(1).unwrap();
        let owner = context.new_stream().unwrap();
        let (slow, quick) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let data = owner.alloc_zeros::<u8>(3000).unwrap();
        let mut for_slow = slow.alloc_zeros::<u8>(3000).unwrap();
        let mut for_quick = quick.alloc_zeros::<u8>(3000).unwrap();
        owner.synchronize().unwrap();
        let gate = Gate::on(&slow);
        slow.memcpy_dtod(&data, &mut for_slow).unwrap();
        // Re-records the only event that the slice keeps for its readers.
        quick.memcpy_dtod(&data, &mut for_quick).unwrap();
        drop(data);
        owner.synchronize().unwrap();
        gate.open();
        let _ = slow.synchronize();
    });
    is_a_use_after_free(&violations, 3000);
}

#[test]
fn without_owned_streams_a_drop_waits_for_nothing() {
    let violations = caught(2, || {
        let context = CudaContext::new(2).unwrap();
        let default = context.default_stream();
        let stream = context.new_stream().unwrap();
        let data = default.alloc_zeros::<u8>(4000).unwrap();
        let target = default.alloc_zeros::<u8>(4000).unwrap();
        default.synchronize().unwrap();
        let raw = stream.cu_stream();
        let gate = Gate::on(&stream);
        let mut target = target;
        stream.memcpy_dtod(&data, &mut target).unwrap();
        // The last owned stream: after its drop, the context no longer counts as one with several streams.
        drop(stream);
        drop(data);
        let _ = default.synchronize();
        gate.open();
        // SAFETY: the stream is destroyed; the emulator detects that and returns an error.
        assert!(unsafe { result::stream::synchronize(raw) }.is_err());
        let _ = context.synchronize();
    });
    let of_memory: Vec<_> = violations
        .into_iter()
        .filter(|v| v.kind() != ViolationKind::UseAfterDestroy)
        .collect();
    is_a_use_after_free(&of_memory, 4000);
}

#[test]
fn a_stream_of_an_equal_context_is_not_tracked() {
    let violations = caught(3, || {
        let (one, two) = (CudaContext::new(3).unwrap(), CudaContext::new(3).unwrap());
        assert_eq!(one, two);
        // `one` has no streams of its own, so cudarc does not track events for its slices.
        let default = one.default_stream();
        let stream = two.new_stream().unwrap();
        let data = default.alloc_zeros::<u8>(5000).unwrap();
        let mut target = default.alloc_zeros::<u8>(5000).unwrap();
        default.synchronize().unwrap();
        let gate = Gate::on(&stream);
        stream.memcpy_dtod(&data, &mut target).unwrap();
        drop(data);
        default.synchronize().unwrap();
        gate.open();
        let _ = stream.synchronize();
    });
    is_a_use_after_free(&violations, 5000);
}
