//! Two libraries by NCCL's name in one process.

use std::ffi::{c_int, c_void};
use std::process::Command;

use nccl::{ErrorKind, Library};

/// `ncclGetVersion` of the second library.
extern "C" fn version(code: *mut c_int) -> c_int {
    // SAFETY: the loader passes a valid pointer.
    unsafe { *code = 22_800 };
    0
}

/// The test runs itself in a process of its own: the libraries of a process are those of all its tests.
const CHILD: &str = "NCCL_TEST_TWO_LIBRARIES";

#[test]
fn the_second_of_two_libraries_in_a_process_is_refused() {
    if std::env::var_os(CHILD).is_some() {
        return two();
    }
    let name = std::thread::current()
        .name()
        .expect("the test's")
        .to_owned();
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", &name, "--nocapture"])
        .envs([(CHILD, "1"), ("NCCL_EMULATOR", "1")])
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{output:?}");
}

fn two() {
    nccl_emulator::install_unless_gpu().expect("an emulator");
    let first = Library::load().expect("the emulator");
    // SAFETY: both are NCCL's emulator, or as much of NCCL as is called here.
    let load = |path| unsafe { Library::load_from(path) };
    assert_eq!(load(first.path()).expect("the same").path(), first.path());
    let soname = c"libnccl.so.2.28";
    let symbols = [(c"ncclGetVersion", version as *const c_void)];
    stand_in_object::load("test", soname, &symbols).expect("a memory file");
    let second = stand_in_object::loaded_from(soname).expect("it is loaded");
    let error = load(&second).expect_err("another library");
    assert!(matches!(error.kind(), ErrorKind::Load(_)), "{error}");
    let text = format!("{error:#}");
    for path in [first.path(), &second] {
        assert!(
            text.contains(&path.display().to_string()),
            "{path:?} in {text}"
        );
    }
    assert_eq!(Library::load().expect("the emulator").path(), first.path());
}
