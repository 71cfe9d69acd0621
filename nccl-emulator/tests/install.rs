//! Installing the emulator: once per process, and with settings. Each case runs in a process of its own.

use std::process::{Command, Output};

use nccl_emulator::{Emulator, InstallError};

/// The environment variable that names the case of [`the_child`] to run in a child process.
const ROLE: &str = "NCCL_EMULATOR_TEST_ROLE";

fn child(role: &str, environment: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_child", "--nocapture"])
        .env(ROLE, role)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

fn succeeds(role: &str, environment: &[(&str, &str)]) {
    let output = child(role, environment);
    assert!(output.status.success(), "{output:?}");
}

/// Not a test: the code of the child processes that the tests below start.
#[test]
fn the_child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "twice" => {
            let first = nccl_emulator::install().unwrap();
            assert!(first.symbols() > 100);
            assert_eq!(
                first.sonames(),
                [
                    "libcuda.so",
                    "libcuda.so.1",
                    "libnvidia-ml.so.1",
                    "libnvidia-ml.so",
                    "libnccl.so",
                    "libnccl.so.2"
                ]
            );
            let again = nccl_emulator::install().unwrap();
            assert_eq!(first.to_string(), again.to_string());
            assert!(nccl_emulator::install_unless_gpu().unwrap().is_emulator());
        }
        "settings" => {
            let taken = Emulator::new()
                .devices(3)
                .memory(100 << 20)
                .install()
                .unwrap();
            assert!(
                taken.to_string().contains("3 devices with 100 MiB each"),
                "{taken}"
            );
            assert_eq!(cudarc::driver::CudaContext::device_count().unwrap(), 3);
            assert!(Emulator::new().devices(3).install().is_ok());
            let error = Emulator::new().devices(4).install().unwrap_err();
            assert!(
                matches!(error, InstallError::OptionsInForce { .. }),
                "{error}"
            );
        }
        "environment" => {
            nccl_emulator::install().unwrap();
            let context = cudarc::driver::CudaContext::new(1).unwrap();
            assert_eq!(context.total_mem().unwrap(), 256 << 20);
            assert_eq!(cudarc::driver::CudaContext::device_count().unwrap(), 2);
        }
        "bad" => {
            let error = nccl_emulator::install().unwrap_err();
            println!("{error}");
            let bad = matches!(
                error,
                InstallError::BadOption { .. } | InstallError::RealNccl { .. }
            );
            assert!(bad);
        }
        "forced" => {
            let choice = nccl_emulator::install_unless_gpu().unwrap();
            println!("{choice}");
            assert!(choice.is_emulator());
        }
        "not wanted" => {
            assert!(!nccl_emulator::install_unless_gpu().unwrap().is_emulator());
        }
        "dereference" => {
            nccl_emulator::install().unwrap();
            let context = cudarc::driver::CudaContext::new(0).unwrap();
            let stream = context.default_stream();
            let data = stream.clone_htod(&[1_u8; 100]).unwrap();
            let (address, _guard) = cudarc::driver::DevicePtr::device_ptr(&data, &stream);
            println!("before");
            // SAFETY: none: this is what the test is about.
            let value = unsafe {
                std::ptr::with_exposed_provenance::<u8>(address as usize).read_volatile()
            };
            println!("read {value}");
        }
        "fork" => {
            nccl_emulator::install().unwrap();
            let _context = cudarc::driver::CudaContext::new(0).unwrap();
            // SAFETY: the child makes one call and exits.
            unsafe {
                match libc::fork() {
                    0 => {
                        let answer = cudarc::driver::sys::cuInit(0);
                        libc::_exit(answer as i32);
                    }
                    child => {
                        let mut status = 0;
                        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                        assert_eq!(libc::WEXITSTATUS(status), 3, "CUDA_ERROR_NOT_INITIALIZED");
                    }
                }
            }
        }
        "fork with NCCL only" => {
            nccl_emulator::install().unwrap();
            // SAFETY: NCCL's name leads to the emulator. Functions get places for their results; the child makes some
            // calls and exits.
            unsafe {
                let api = nccl_sys::Loader::new().load().unwrap().api;
                let allocate = || {
                    let mut place = std::ptr::null_mut();
                    api.ncclMemAlloc().unwrap()(&mut place, 1 << 20).0
                };
                // No call of the driver's.
                assert_eq!(allocate(), 0);
                match libc::fork() {
                    0 => {
                        let driver = cudarc::driver::sys::cuInit(0) as u32;
                        let version = api.ncclGetVersion().unwrap()(&mut 0).0;
                        libc::_exit((allocate() | driver << 4 | version << 6) as i32);
                    }
                    child => {
                        let mut status = 0;
                        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                        // ncclUnhandledCudaError and CUDA_ERROR_NOT_INITIALIZED; the version needs no CUDA.
                        assert_eq!(libc::WEXITSTATUS(status), 1 | 3 << 4);
                    }
                }
            }
        }
        role => panic!("unknown role {role}"),
    }
}

#[test]
fn installing_twice_is_installing_once() {
    succeeds("twice", &[]);
}

#[test]
fn the_builder_sets_devices_and_memory_once() {
    succeeds("settings", &[]);
}

#[test]
fn the_environment_sets_devices_and_memory() {
    succeeds(
        "environment",
        &[
            ("NCCL_EMULATOR_DEVICES", "2"),
            ("NCCL_EMULATOR_MEMORY", "256M"),
        ],
    );
}

#[test]
fn a_bad_setting_is_an_error_and_not_a_panic() {
    for (name, value) in [
        ("NCCL_EMULATOR_DEVICES", "none"),
        ("NCCL_EMULATOR_MEMORY", "lots"),
        ("NCCL_EMULATOR_STRICT", "perhaps"),
    ] {
        let output = child("bad", &[(name, value)]);
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains(name) && said.contains(value), "{said}");
    }
}

#[test]
fn what_strikes_nothing_on_the_library_of_nvidia_is_refused() {
    let library = ("NCCL_EMULATOR_NCCL", "/nowhere/libnccl.so.2");
    let says = |name, value| {
        let output = child("bad", &[library, (name, value)]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let faults = "NCCL_EMULATOR_FAULTS";
    let said = says(faults, "call=ncclSends,action=hang");
    assert!(
        said.contains("neither NCCL nor the driver has a function"),
        "{said}"
    );
    let said = says(faults, "run=Send,action=stall");
    assert!(
        said.contains("a fault at the operation Send strikes nothing"),
        "{said}"
    );
    let said = says(
        faults,
        "call=cuMemAlloc,action=fail=2; call=ncclGroupEnd,action=hang",
    );
    assert!(said.contains("/nowhere/libnccl.so.2"), "{said}");
    let said = says("NCCL_EMULATOR_STRICT", "1");
    assert!(
        said.contains("NCCL_EMULATOR_STRICT is \"1\", expected nothing beside"),
        "{said}"
    );
}

#[test]
fn a_fault_of_a_named_communicator_is_refused_by_a_release_that_knows_no_names() {
    let fault = "call=ncclGroupEnd,comm=tp,action=hang";
    let environment = [
        ("NCCL_EMULATOR_VERSION", "2.26.2"),
        ("NCCL_EMULATOR_FAULTS", fault),
    ];
    let output = child("bad", &environment);
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    let reason = "names are known from 2.27.3 on, and the emulator is NCCL 2.26.2";
    assert!(said.contains(reason), "{said}");
}

#[test]
fn the_choice_can_be_forced() {
    succeeds("forced", &[("NCCL_EMULATOR", "1")]);
    succeeds("not wanted", &[("NCCL_EMULATOR", "0")]);
}

#[test]
fn a_host_that_reads_device_memory_is_killed_as_on_a_gpu() {
    use std::os::unix::process::ExitStatusExt;
    let output = child("dereference", &[]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        said.contains("before") && !said.contains("read"),
        "{output:?}"
    );
    // An address sanitizer reports the fault and exits by itself.
    let reported = String::from_utf8_lossy(&output.stderr).contains("AddressSanitizer");
    assert!(
        output.status.signal() == Some(libc::SIGSEGV) || reported,
        "{output:?}"
    );
}

#[test]
fn a_forked_child_cannot_use_its_parents_driver() {
    succeeds("fork", &[]);
    succeeds("fork with NCCL only", &[]);
}
