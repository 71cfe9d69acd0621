//! The steps of a check, and their order.
//!
//! Early results decide about later steps: tests, conformance programs and measurements use the arrangements of ranks
//! that work here.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::bundle::{Unpacked, unpack};
use super::options::Options;
use super::processes::Token;
use super::report::{FILES, Report};
use super::step::{Outcome, Record, Step};
use super::{ARRANGEMENTS, MOST_RANKS, PROGRAMS};
use crate::failure::{Exit, Failure};
use crate::measure;

/// Ways to put several ranks on one device, the cheapest first.
pub const WAYS: [&str; 5] = [
    "one-thread",
    "threads",
    "processes",
    "processes-mps",
    "hosts",
];

/// Variables for ranks that share a device: without the first NCCL refuses, and with more channels than multiprocessors
/// it hangs.
const SHARING: [(&str, &str); 3] = [
    ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_MAX_CTAS", "4"),
];

/// Variables that would make the check measure something else than it reports.
const UNWANTED: [&str; 16] = [
    "NCCL_COMM_BLOCKING",
    "NCCL_COMM_ID",
    "NCCL_EMULATOR",
    "NCCL_EMULATOR_DEVICES",
    "NCCL_EMULATOR_FAULTS",
    "NCCL_EMULATOR_LATE_WRITES",
    "NCCL_EMULATOR_MEMORY",
    "NCCL_EMULATOR_NCCL",
    "NCCL_EMULATOR_STRICT",
    "NCCL_EMULATOR_VERSION",
    "NCCL_RUN_RANK",
    "RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
];

const MINUTE: Duration = Duration::from_secs(60);

/// The steps that find the facts which are then compared.
const SIDES: [&str; 2] = ["conformance of the library", "conformance of the emulator"];

/// The reason of every step that is left out because ranks cannot meet.
const NO_ARRANGEMENT: &str = "no arrangement of two ranks works here";

/// Runs the check and writes the reports. Returns the exit code of the program.
///
/// # Errors
/// When the bundle cannot be unpacked or the reports cannot be written.
pub fn run(options: &Options) -> Result<u8, Failure> {
    let io =
        |error: io::Error| Failure::new(Exit::Usage, format!("{}: {error}", options.out.display()));
    let logs = options.out.join("logs");
    fs::create_dir_all(&logs).map_err(io)?;
    let out = options.out.canonicalize().map_err(io)?;
    // A check that is cut off before its first step must not leave the verdict of an earlier one.
    remove(&FILES.map(|file| out.join(file))).map_err(io)?;
    let unpacked_at = out.join("unpacked");
    let unpacked = unpack(&options.bundle, &unpacked_at, !options.emulated)?;
    let mut check = Check {
        options,
        token: Token::new().map_err(io)?,
        logs: out.join("logs"),
        report: Report::new(options, &unpacked),
        unpacked,
        ways: Vec::new(),
    };
    let done = check.all();
    let left = check.token.end(Duration::from_secs(2));
    check.report.left_behind = left.into_iter().map(|process| process.command).collect();
    if !options.keep {
        let _ = fs::remove_dir_all(&unpacked_at);
    }
    check.report.complete = done.is_ok();
    check.report.write(&out).map_err(io)?;
    done.map_err(io)?;
    for objection in check.report.objections() {
        println!("==== not good: {objection}");
    }
    Ok(u8::from(!check.report.is_good()))
}

/// Removes what an earlier check left in the same directory, if it did.
fn remove(files: &[PathBuf]) -> io::Result<()> {
    for file in files {
        match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Returns the cheapest working arrangement, for programs that support any.
fn cheapest(ways: &[&'static str]) -> Option<&'static str> {
    ["threads", "processes-mps", "processes"]
        .into_iter()
        .find(|way| ways.contains(way))
}

/// Returns the working arrangements by the names that the tests know. Processes that work only under MPS count as
/// processes, because each test binary is started under MPS as a whole.
fn for_tests(ways: &[&str]) -> String {
    let mut names: Vec<&str> = ways
        .iter()
        .map(|way| way.trim_end_matches("-mps"))
        .filter(|way| ["threads", "processes"].contains(way))
        .collect();
    names.dedup();
    names.join(",")
}

/// Returns the tests of a module, or of all modules if it is empty, in what a test binary lists.
fn listed(output: &str, module: &str) -> Vec<String> {
    output
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .filter(|test| test.starts_with(module))
        .map(str::to_owned)
        .collect()
}

/// Returns the outcome of listing the tests of a file, which is not to have none.
fn listing(outcome: Outcome, tests: &[String]) -> Outcome {
    match outcome {
        Outcome::Passed if tests.is_empty() => Outcome::Failed("it lists no test".to_owned()),
        outcome => outcome,
    }
}

struct Check<'a> {
    options: &'a Options,
    token: Token,
    logs: PathBuf,
    unpacked: Unpacked,
    report: Report,
    /// The arrangements that work.
    ways: Vec<&'static str>,
}

impl Check<'_> {
    fn all(&mut self) -> io::Result<()> {
        self.machine();
        if !self.first_sign()? {
            return Ok(());
        }
        self.arrangements()?;
        self.tests()?;
        self.conformance()?;
        self.benchmark()?;
        self.measurements()?;
        self.nccl_tests()
    }

    /// A program of the bundle, with the environment of all steps.
    fn program(&self, path: &str) -> Command {
        self.environment(Command::new(self.unpacked.programs.join(path)))
    }

    fn environment(&self, mut command: Command) -> Command {
        for name in UNWANTED {
            command.env_remove(name);
        }
        command.envs(SHARING);
        if self.options.emulated {
            // One device, as on a machine with one GPU.
            command
                .env("NCCL_EMULATOR", "1")
                .env("NCCL_EMULATOR_DEVICES", "1")
                .env_remove("NCCL_LIBRARY");
        } else {
            command.env("NCCL_EMULATOR", "0");
            if let Some(library) = &self.unpacked.library {
                command.env("NCCL_LIBRARY", library);
            }
        }
        command
            .env(ARRANGEMENTS, for_tests(&self.ways))
            .env(MOST_RANKS, "4")
            .env(PROGRAMS, &self.unpacked.programs);
        command
    }

    /// Runs the program under MPS if processes need that to share a device.
    fn for_processes(&self, program: &str) -> Command {
        if !self.ways.contains(&"processes-mps") {
            return self.program(program);
        }
        let mut command = self.program("measure");
        command.arg("mps").arg(self.unpacked.programs.join(program));
        command
    }

    fn run(
        &mut self,
        name: &str,
        command: Command,
        deadline: Duration,
        counts: bool,
    ) -> io::Result<Option<Record>> {
        if !self.options.wants(name) {
            return Ok(None);
        }
        let step = Step {
            name: name.to_owned(),
            command,
            deadline,
            counts,
        };
        println!("==== {name}");
        let record = step.run(&self.logs, &self.token)?;
        self.add(record.clone())?;
        Ok(Some(record))
    }

    fn add(&mut self, record: Record) -> io::Result<()> {
        let seconds = record.took.as_secs_f64();
        println!(
            "     {} {} ({seconds:.1} s)",
            record.outcome.word(),
            record.outcome.detail()
        );
        self.report.add(record);
        // Written after every step, in case the check does not complete.
        self.report
            .write(self.logs.parent().expect("it is in the output directory"))
    }

    fn skip(&mut self, name: &str, reason: &str) {
        if self.options.wants(name) {
            println!("==== {name}\n     skipped: {reason}");
            let outcome = Outcome::Skipped(reason.to_owned());
            self.report.add(without_command(name, outcome, false));
        }
    }

    /// Adds a failure of the check that is no failure of a command.
    fn fail(&mut self, name: &str, reason: &str) -> io::Result<()> {
        println!("==== {name}");
        let outcome = Outcome::Failed(reason.to_owned());
        self.add(without_command(name, outcome, true))
    }

    /// Facts about the machine; no later step needs them.
    fn machine(&mut self) {
        for (name, program, arguments) in [
            ("kernel", "uname", "-srvm"),
            (
                "GPU",
                "nvidia-smi",
                "--query-gpu=name,driver_version,memory.total,mig.mode.current --format=csv,noheader",
            ),
            ("nvcc", "nvcc", "--version"),
            ("glibc", "getconf", "GNU_LIBC_VERSION"),
            ("cores", "nproc", ""),
        ] {
            let output = Command::new(program)
                .args(arguments.split_whitespace())
                .stdin(Stdio::null())
                .stderr(Stdio::null())
                .output();
            let text = match output {
                Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
                Err(error) => format!("{program}: {error}"),
            };
            self.report.machine.push((name, text));
        }
    }

    /// The library, a communicator and an all-reduce: without these no other step makes sense.
    fn first_sign(&mut self) -> io::Result<bool> {
        let mut command = self.program("measure");
        command.arg("first-sign");
        let record = self.run("first-sign", command, MINUTE * 2, true)?;
        Ok(record.is_none_or(|record| record.outcome == Outcome::Passed))
    }

    fn arrangements(&mut self) -> io::Result<()> {
        for way in WAYS {
            let mut command = self.program("measure");
            if way == "processes-mps" {
                command
                    .arg("mps")
                    .arg(self.unpacked.programs.join("measure"));
            }
            command.args(["arrangement", way.trim_end_matches("-mps"), "2"]);
            // On GPUs, that an arrangement does not work is a result, not a failure.
            let counts = self.options.emulated;
            let record = self.run(&format!("arrangement {way}"), command, MINUTE * 2, counts)?;
            // A step that is not run does not exclude the arrangement.
            if record.is_none_or(|record| record.outcome == Outcome::Passed) {
                self.ways.push(way);
            }
        }
        if !self.options.wants("arrangement") {
            self.ways.retain(|way| !way.ends_with("-mps"));
        }
        // One arrangement that does not work is a result. If none does, almost everything else is left out.
        if self.options.only.is_empty() && cheapest(&self.ways).is_none() {
            self.fail("arrangements", NO_ARRANGEMENT)?;
        }
        Ok(())
    }

    fn tests(&mut self) -> io::Result<()> {
        let files = self.names("tests");
        if files.is_empty() && self.options.wants_some("tests") {
            self.fail("tests", "the bundle names no tests")?;
        }
        for file in files {
            // A binary, or a module of one.
            let (binary, module) = match file.split_once("::") {
                Some((binary, module)) => (binary, format!("{module}::")),
                None => (&*file, String::new()),
            };
            let name = format!("tests {binary} {module}");
            let name = name.trim_end();
            if !self.options.wants_some(name) {
                continue;
            }
            for test in self.list(name, binary, &module)? {
                let mut command = self.for_processes(&format!("deps/{binary}"));
                command.args(["--exact", &test, "--nocapture", "--test-threads", "1"]);
                self.run(&format!("tests {binary} {test}"), command, MINUTE * 3, true)?;
            }
        }
        Ok(())
    }

    /// Returns the tests of a file. A file whose tests cannot be listed is a failed step, and has none.
    fn list(&mut self, name: &str, binary: &str, module: &str) -> io::Result<Vec<String>> {
        let mut command = self.program(&format!("deps/{binary}"));
        command.args(["--list", "--format", "terse"]);
        let step = Step {
            name: name.to_owned(),
            command,
            deadline: MINUTE,
            counts: true,
        };
        let mut record = step.run(&self.logs, &self.token)?;
        let text = fs::read(&record.log)?;
        let tests = listed(&String::from_utf8_lossy(&text), module);
        record.outcome = listing(record.outcome, &tests);
        if record.outcome == Outcome::Passed {
            return Ok(tests);
        }
        println!("==== {}", record.name);
        self.add(record)?;
        Ok(Vec::new())
    }

    fn names(&self, kind: &str) -> Vec<String> {
        let names = self.unpacked.description[kind].as_array();
        let names = names.into_iter().flatten().filter_map(|name| name.as_str());
        names.map(str::to_owned).collect()
    }

    fn conformance(&mut self) -> io::Result<()> {
        let facts = ["library", "emulator"]
            .map(|name| self.logs.join(format!("conformance-{name}-facts.json")));
        // Otherwise the facts of an earlier check would be compared if a side of this one leaves none.
        for (file, step) in facts.iter().zip(SIDES) {
            if self.options.wants(step) {
                remove(std::slice::from_ref(file))?;
            }
        }
        let [ours, theirs] = facts;
        let Some(way) = cheapest(&self.ways) else {
            self.skip("conformance", NO_ARRANGEMENT);
            return Ok(());
        };
        let way = way.trim_end_matches("-mps");
        let mut command = self.for_processes("conformance");
        command
            .args(["run", "--arrangement", way, "--out"])
            .arg(&ours);
        self.run(SIDES[0], command, MINUTE * 15, self.options.emulated)?;
        let mut command = self.program("conformance");
        command
            .args(["run", "--arrangement", way, "--out"])
            .arg(&theirs)
            .env("NCCL_EMULATOR", "1")
            .env("NCCL_EMULATOR_DEVICES", "1")
            .env_remove("NCCL_LIBRARY");
        self.run(SIDES[1], command, MINUTE * 15, true)?;
        let mut command = self.program("conformance");
        command.arg("compare");
        if self.options.emulated {
            command.arg("--emulated");
        }
        command.arg(&ours).arg(&theirs);
        self.run("conformance compared", command, MINUTE, true)?;
        Ok(())
    }

    fn benchmark(&mut self) -> io::Result<()> {
        let Some(way) = cheapest(&self.ways) else {
            self.skip("all_to_all_perf", NO_ARRANGEMENT);
            return Ok(());
        };
        let spawn = way.trim_end_matches("-mps");
        let sizes: &[&str] = match (self.options.full, self.options.emulated) {
            (true, false) => &["-b", "1K", "-e", "1G"],
            _ => &["-b", "1K", "-e", "1M", "-f", "32", "-n", "5"],
        };
        for ranks in ["2", "4"] {
            let mut command = self.for_processes("examples/all_to_all_perf");
            command
                .args(["--ranks", ranks, "--spawn", spawn])
                .args(sizes);
            let counts = self.options.emulated || ranks == "2";
            self.run(
                &format!("all_to_all_perf {ranks} ranks"),
                command,
                MINUTE * 5,
                counts,
            )?;
        }
        let others: [(&str, &[&str]); 5] = [
            ("all_to_all_perf", &["--algo", "all"]),
            ("all_to_all_perf", &["--algo", "all", "-G", "2", "-R", "1"]),
            ("all_to_all_v_perf", &[]),
            ("sendrecv_perf", &[]),
            ("all_reduce_perf", &["-d", "all", "-o", "all"]),
        ];
        for (program, more) in others {
            let mut command = self.for_processes(&format!("examples/{program}"));
            command
                .args(["--ranks", "2", "--spawn", spawn, "-b", "1K", "-e", "1M"])
                .args(["-f", "32", "-n", "5"])
                .args(more);
            let name = [&[program], more].concat().join(" ");
            self.run(&name, command, MINUTE * 5, true)?;
        }
        Ok(())
    }

    fn measurements(&mut self) -> io::Result<()> {
        let Some(way) = cheapest(&self.ways) else {
            self.skip("measure", NO_ARRANGEMENT);
            return Ok(());
        };
        for measurement in measure::MEASUREMENTS {
            if !self.options.full && !measurement.quick {
                continue;
            }
            let mut command = self.for_processes("measure");
            command.args([
                measurement.name,
                "--arrangement",
                way.trim_end_matches("-mps"),
            ]);
            if self.options.emulated {
                command.arg("--short");
            }
            self.run(
                &format!("measure {}", measurement.name),
                command,
                MINUTE * 5,
                self.options.emulated,
            )?;
        }
        self.sanitized(way.trim_end_matches("-mps"))
    }

    /// Repeats the aborts under compute-sanitizer's memory checks.
    fn sanitized(&mut self, way: &str) -> io::Result<()> {
        let name = "measure abort-repeat, sanitized";
        let there = Command::new("compute-sanitizer")
            .arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !self.options.full || self.options.emulated || !there {
            self.skip(name, "needs `full`, a GPU and compute-sanitizer");
            return Ok(());
        }
        let mut command = self.environment(Command::new("compute-sanitizer"));
        command
            .args(["--target-processes", "all", "--error-exitcode", "99"])
            .arg(self.unpacked.programs.join("measure"))
            .args(["abort-repeat", "--short", "--arrangement", way]);
        self.run(name, command, MINUTE * 5, false)?;
        Ok(())
    }

    /// NVIDIA's own benchmark, built here against the same library.
    fn nccl_tests(&mut self) -> io::Result<()> {
        let name = "nccl-tests";
        let sources = self.unpacked.programs.join("nccl-tests");
        if !self.options.full {
            return Ok(());
        }
        if self.options.emulated {
            self.skip(name, "its kernels need a GPU");
            // This workspace's program on both sides, to test the comparison.
            let ours = self.unpacked.programs.join("examples/all_to_all_perf");
            let mut command = self.program("measure");
            command
                .args(["nccl-tests", "--ranks", "2", "--short"])
                .args([&ours, &ours]);
            self.run("comparison with itself", command, MINUTE * 5, true)?;
            return Ok(());
        }
        let Some(library) = self.unpacked.library.clone().filter(|_| sources.is_dir()) else {
            self.skip(name, "the bundle has no sources of it, or no libnccl (see --nccl-tests of cargo xtask gpu-bundle)");
            return Ok(());
        };
        let command = self.build_nccl_tests(&sources, &library);
        let built = self.run("nccl-tests build", command, MINUTE * 9, false)?;
        if built.is_some_and(|built| built.outcome != Outcome::Passed) {
            return Ok(());
        }
        for ranks in ["2", "4"] {
            let mut command = self.for_processes("measure");
            command.args(["nccl-tests", "--ranks", ranks]);
            command.arg(sources.join("build/alltoall_perf"));
            command.arg(self.unpacked.programs.join("examples/all_to_all_perf"));
            self.run(
                &format!("nccl-tests {ranks} ranks"),
                command,
                MINUTE * 15,
                false,
            )?;
        }
        Ok(())
    }

    fn build_nccl_tests(&self, sources: &Path, library: &Path) -> Command {
        let mut command = self.environment(Command::new("sh"));
        let programs = &self.unpacked.programs;
        let lib = library.parent().expect("it is in a directory");
        command
            .args(["-e", "-c", BUILD_NCCL_TESTS])
            .env("SOURCES", sources)
            .env("NCCL", programs)
            .env("LIB", lib)
            .env("MPI", programs.join("mpi"));
        command
    }
}

/// The record of something that is not the outcome of a command.
fn without_command(name: &str, outcome: Outcome, counts: bool) -> Record {
    Record {
        name: name.to_owned(),
        command: String::new(),
        outcome,
        counts,
        took: Duration::ZERO,
        result: None,
        tail: Vec::new(),
        log: PathBuf::new(),
    }
}

/// `mpi.h` of the bundle is a header alone; the linker still wants a library of that name.
const BUILD_NCCL_TESTS: &str = r#"
mkdir -p "$MPI/include" "$MPI/lib" "$NCCL/lib"
cp "$MPI/mpi.h" "$MPI/include/"
ar cr "$MPI/lib/libmpi.a"
ln -sf "$LIB/libnccl.so.2" "$NCCL/lib/libnccl.so"
ln -sf "$LIB/libnccl.so.2" "$NCCL/lib/libnccl.so.2"
CUDA="${CUDA_HOME:-$(dirname "$(dirname "$(command -v nvcc)")")}"
make -C "$SOURCES/src" -j "$(nproc)" BUILDDIR="$SOURCES/build" CUDA_HOME="$CUDA" NCCL_HOME="$NCCL" \
    MPI=1 MPI_HOME="$MPI" NVCC_GENCODE="-gencode=arch=compute_90,code=sm_90" \
    "$SOURCES/build/alltoall_perf"
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_work_only_under_mps_are_processes_for_the_tests() {
        assert_eq!(for_tests(&["one-thread", "processes-mps"]), "processes");
        assert_eq!(for_tests(&WAYS), "threads,processes");
        assert_eq!(for_tests(&["one-thread", "hosts"]), "");
    }

    #[test]
    fn the_cheapest_arrangement_is_one_that_every_program_knows() {
        assert_eq!(cheapest(&WAYS), Some("threads"));
        assert_eq!(
            cheapest(&["processes", "processes-mps"]),
            Some("processes-mps")
        );
        assert_eq!(cheapest(&["one-thread", "hosts"]), None);
    }

    #[test]
    fn a_file_without_tests_is_a_failure_and_keeps_its_own() {
        let output = "plans::one: test\nmemory::two: test\nplans::three: benchmark\n";
        let tests = listed(output, "plans::");
        assert_eq!(tests, ["plans::one"]);
        assert_eq!(listed(output, "").len(), 2);
        assert_eq!(listing(Outcome::Passed, &tests), Outcome::Passed);
        let none = listed(output, "aborts::");
        let failed = Outcome::Failed("it lists no test".to_owned());
        assert_eq!(listing(Outcome::Passed, &none), failed);
        let killed = Outcome::Failed("killed by signal 11".to_owned());
        assert_eq!(listing(killed.clone(), &none), killed);
        assert_eq!(listing(killed.clone(), &tests), killed);
    }

    #[test]
    fn what_an_earlier_check_left_is_removed_and_need_not_be_there() {
        let directory = tempfile::tempdir().unwrap();
        let files = ["facts.json", "absent.json"].map(|name| directory.path().join(name));
        fs::write(&files[0], "{}").unwrap();
        remove(&files).unwrap();
        assert!(!files[0].exists());
        assert!(remove(&[directory.path().to_owned()]).is_err());
    }
}
