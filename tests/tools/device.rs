//! Devices by number, and the emulator's notice that it replaces them.

use std::process::{Command, Output};

use nccl::ErrorKind;
use nccl_tools::testing::{Role, again, name};

const LINE: &str = "nccl-emulator: no GPU is used";

fn process(test: &str, variables: &[(&str, &str)]) -> Output {
    let mut command: Command = again(test, "process");
    for variable in ["NCCL_EMULATOR", "NCCL_EMULATOR_QUIET"] {
        command.env_remove(variable);
    }
    let output = command.envs(variables.iter().copied()).output();
    let output = output.expect("a process");
    assert!(output.status.success(), "{output:?}");
    output
}

fn lines(output: &Output) -> usize {
    let said = String::from_utf8_lossy(&output.stderr);
    said.lines().filter(|line| line.starts_with(LINE)).count()
}

#[test]
fn a_machine_without_a_driver_is_an_error_that_names_the_library() {
    let test = &name(&|| ());
    if Role::of(test) == Role::Test {
        process(test, &[]);
        return;
    }
    // No code has installed the emulator in this process.
    let error = match nccl::device(0) {
        Err(error) => error,
        Ok(_) => return nccl_tools::gpu_check::not_tested("there is a driver"),
    };
    let ErrorKind::NoDriver { looked_for, reason } = error.kind() else {
        panic!("{error:#}");
    };
    assert_eq!(*looked_for, "libcuda.so.1");
    assert!(reason.contains("libcuda.so.1"), "{reason}");
}

#[test]
fn a_device_that_does_not_exist_is_an_error_with_those_that_do() {
    let test = &name(&|| ());
    if Role::of(test) == Role::Test {
        process(
            test,
            &[("NCCL_EMULATOR", "1"), ("NCCL_EMULATOR_DEVICES", "4")],
        );
        return;
    }
    nccl_emulator::install_unless_gpu().expect("the emulator");
    assert_eq!(nccl::device(3).expect("the last").ordinal(), 3);
    let error = nccl::device(4).unwrap_err();
    let text = format!("{error:#}");
    assert!(
        matches!(
            error.kind(),
            ErrorKind::NoSuchDevice {
                ordinal: 4,
                devices: 4
            }
        ),
        "{text}"
    );
    assert!(text.contains("0 to 3"), "{text}");
}

#[test]
fn the_emulator_says_once_that_it_takes_the_place_of_a_gpu() {
    let test = &name(&|| ());
    if Role::of(test) == Role::Test {
        let asked = ("NCCL_EMULATOR", "1");
        let output = process(test, &[asked]);
        assert_eq!(lines(&output), 1, "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        for part in [
            "NCCL_EMULATOR=1 asks for it",
            "NCCL_EMULATOR=0",
            "NCCL_EMULATOR_QUIET=1",
        ] {
            assert!(said.contains(part), "{said}");
        }
        let quiet = process(test, &[asked, ("NCCL_EMULATOR_QUIET", "1")]);
        assert_eq!(lines(&quiet), 0, "{quiet:?}");
        return;
    }
    for _ in 0..2 {
        nccl_emulator::install_unless_gpu().expect("the emulator");
    }
}

#[test]
fn a_program_that_says_it_itself_is_quiet() {
    let test = &name(&|| ());
    if Role::of(test) == Role::Test {
        let output = process(test, &[("NCCL_EMULATOR", "1")]);
        assert_eq!(lines(&output), 0, "{output:?}");
        return;
    }
    let emulator = nccl_emulator::Emulator::new().quiet();
    emulator.install_unless_gpu().expect("the emulator");
}
