//! Stream capture as far as the emulator has it. In a process of its own: a capture in global mode
//! forbids things to all threads. One test, because it would to the others, too.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, sys};

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

#[test]
fn captures_are_seen_and_void() {
    in_time(|| {
        a_capture_is_seen_and_gives_no_graph();
        a_global_capture_is_voided_by_a_bystander_that_did_not_step_aside();
    });
}

fn a_capture_is_seen_and_gives_no_graph() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mut buffer = stream.alloc_zeros::<u8>(16).unwrap();
    stream
        .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    assert_eq!(
        stream.capture_status().unwrap(),
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
    );
    let refused = stream.memset_zeros(&mut buffer).unwrap_err();
    assert_eq!(refused.0, sys::CUresult::CUDA_ERROR_NOT_SUPPORTED);
    // What cudarc does beside was refused as well; it keeps that error for the next call.
    let _ = context.check_err();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let ended = stream.end_capture(flags).map(drop).unwrap_err();
    assert_eq!(
        ended.0,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    );
    assert_eq!(
        stream.capture_status().unwrap(),
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    );
    stream.memset_zeros(&mut buffer).unwrap();
}

fn a_global_capture_is_voided_by_a_bystander_that_did_not_step_aside() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let event = context.new_event(None).unwrap();
    let status = || stream.capture_status().unwrap();
    let begin = || {
        stream
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)
            .unwrap()
    };
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

    begin();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            // SAFETY: a mode to exchange.
            unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }
                .result()
                .unwrap();
            assert_eq!(
                mode,
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL
            );
            assert!(event.try_is_complete().unwrap());
        });
    });
    assert_eq!(
        status(),
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
    );
    thread::scope(|scope| {
        scope.spawn(|| {
            let error = event.try_is_complete().unwrap_err();
            assert_eq!(
                error.0,
                sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            );
        });
    });
    assert_eq!(
        status(),
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED
    );
    assert!(stream.end_capture(flags).is_err());
    assert!(event.try_is_complete().unwrap());
}
