//! What the emulated driver costs: enqueue and wait, events, copies, allocation. Ratios between
//! rows of one run mean something; the times are those of the machine, and of no GPU.

use std::ffi::c_void;
use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut, result, sys};

fn driver(criterion: &mut Criterion) {
    println!("{}", nccl_emulator::install().expect("the emulator"));
    let context = CudaContext::new(0).expect("a device");
    let stream = context.new_stream().expect("a stream");
    let raw = stream.cu_stream();
    // SAFETY: cudarc's raw functions, with handles that live to the end of this function.
    unsafe {
        let mut group = criterion.benchmark_group("stream");
        unsafe extern "C" fn nothing(_: *mut c_void) {}
        group.bench_function("empty job, wait", |b| {
            b.iter(|| {
                result::stream::launch_host_function(raw, nothing, std::ptr::null_mut()).unwrap();
                result::stream::synchronize(raw).unwrap();
            });
        });
        group.bench_function("32 empty jobs, wait", |b| {
            b.iter(|| {
                for _ in 0..32 {
                    result::stream::launch_host_function(raw, nothing, std::ptr::null_mut())
                        .unwrap();
                }
                result::stream::synchronize(raw).unwrap();
            });
        });
        group.bench_function("wait for an idle stream", |b| {
            b.iter(|| result::stream::synchronize(raw).unwrap());
        });
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
        group.bench_function("event record and query", |b| {
            b.iter(|| {
                result::event::record(event, raw).unwrap();
                result::event::query(event).unwrap();
            });
        });
        let mut memory = stream.alloc_zeros::<u8>(64).unwrap();
        let (address, guard) = memory.device_ptr_mut(&stream);
        group.bench_function("fill of 8 bytes, wait", |b| {
            b.iter(|| {
                result::memset_d8_async(address, 1, 8, raw).unwrap();
                result::stream::synchronize(raw).unwrap();
            });
        });
        drop(guard);
        group.bench_function("is the stream capturing", |b| {
            b.iter(|| black_box(result::stream::is_capturing(raw).unwrap()));
        });
        group.bench_function("current context", |b| {
            b.iter(|| black_box(result::ctx::get_current().unwrap()))
        });
        group.finish();

        let mut group = criterion.benchmark_group("memory");
        for size in [256_usize, 1 << 20, 64 << 20] {
            group.bench_function(
                BenchmarkId::new("allocate and free on a stream", size),
                |b| {
                    b.iter(|| {
                        let address = result::malloc_async(raw, size).unwrap();
                        result::free_async(address, raw).unwrap();
                    });
                },
            );
        }
        group.bench_function("allocate and free at once/256", |b| {
            b.iter(|| result::free_sync(result::malloc_sync(256).unwrap()).unwrap());
        });
        group.finish();

        let mut group = criterion.benchmark_group("copy");
        for size in [8_usize, 4096, 64 << 10, 1 << 20, 16 << 20] {
            let from = stream.alloc_zeros::<u8>(size).unwrap();
            let mut to = stream.alloc_zeros::<u8>(size).unwrap();
            group.throughput(Throughput::Bytes(size as u64));
            let ((from, _one), (to, _two)) = (from.device_ptr(&stream), to.device_ptr_mut(&stream));
            group.bench_function(BenchmarkId::new("device to device, wait", size), |b| {
                b.iter(|| {
                    result::memcpy_dtod_async(to, from, size, raw).unwrap();
                    result::stream::synchronize(raw).unwrap();
                });
            });
            let (source, mut target) = (vec![1_u8; size], vec![0_u8; size]);
            group.bench_function(BenchmarkId::new("memcpy", size), |b| {
                b.iter(|| {
                    black_box(&mut target[..]).copy_from_slice(black_box(&source));
                });
            });
        }
        group.finish();
    }
}

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    driver(&mut criterion);
    criterion.final_summary();
}
