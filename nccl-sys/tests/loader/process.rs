//! Tests in a process of their own.

use std::any::type_name_of_val;
use std::env;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Variable with the child's own directory.
const DIRECTORY: &str = "NCCL_SYS_TEST_DIRECTORY";

/// The variables that the loader or the dynamic linker reads.
const VARIABLES: [&str; 10] = [
    "NCCL_LIBRARY",
    "NCCL_EP_LIBRARY",
    "NCCL_HOME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONPATH",
    "PATH",
    "HOME",
];

const DEADLINE: Duration = Duration::from_secs(60);

/// Runs `body` in a new process. `prepare` runs before, in this process: it fills the directory that both
/// closures get, and may set variables of the new process, which starts without any that the loader
/// reads. Fails if `body` fails, or does not end in time.
///
/// The new process is this test binary again, which runs only the calling test; there, this
/// function runs `body`. So the test may contain nothing but this call.
pub(crate) fn alone(prepare: impl FnOnce(&Path, &mut Command), body: impl FnOnce(&Path)) {
    if let Some(directory) = env::var_os(DIRECTORY) {
        body(Path::new(&directory));
        fs::write(Path::new(&directory).join("done"), "").unwrap();
        return;
    }

    // `crate::module::test::{{closure}}`, for which the test harness uses `module::test`.
    let name = type_name_of_val(&body).trim_end_matches("::{{closure}}");
    let (_, name) = name.split_once("::").unwrap();

    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    for variable in VARIABLES {
        command.env_remove(variable);
    }
    prepare(directory.path(), &mut command);
    command.env(DIRECTORY, directory.path());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());

    let child = command.spawn().unwrap();
    let (succeeded, output) = finish(child);
    assert!(succeeded, "the process of {name} failed:\n{output}");
    assert!(
        directory.path().join("done").exists(),
        "{name} did not run:\n{output}"
    );
}

/// Waits for the child, at most until the deadline.
fn finish(mut child: Child) -> (bool, String) {
    fn drain(stream: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
        let mut stream = stream.unwrap();
        thread::spawn(move || {
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            bytes
        })
    }
    let outputs = [drain(child.stdout.take()), drain(child.stderr.take())];
    let start = Instant::now();
    let succeeded = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status.success(),
            None if start.elapsed() > DEADLINE => {
                child.kill().unwrap();
                child.wait().unwrap();
                break false;
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    let output: Vec<u8> = outputs
        .into_iter()
        .flat_map(|out| out.join().unwrap())
        .collect();
    (succeeded, String::from_utf8_lossy(&output).into_owned())
}
