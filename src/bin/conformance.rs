//! The conformance programs: `conformance run` collects what they observe on the NCCL of this process'
//! environment, `conformance compare` puts two such files side by side.
//!
//! ```text
//! conformance list
//! conformance run [--arrangement threads|processes] [--library-only] [--name NAME]
//!                 [--like FACTS.json] --out FACTS.json
//! conformance compare [--emulated] NCCL.json EMULATOR.json
//! ```
//!
//! `NCCL_EMULATOR=1` selects the emulator, `NCCL_EMULATOR=0` the library that `NCCL_LIBRARY` names. With `--like` the
//! emulator acts as the release of those facts. `compare` refuses facts of the emulator in the place of NCCL's, except with
//! `--emulated`.

use std::process::ExitCode;

use nccl_tools::conformance::runner::{self, Selection};
use nccl_tools::conformance::{Needs, compare};
use nccl_tools::failure::{Exit, Failure};
use nccl_tools::gpu_check::RESULT;
use nccl_tools::raw::Way;
use serde_json::{Value, json};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("conformance: {failure}");
            failure.exit().into()
        }
    }
}

const USAGE: &str =
    "usage: conformance list | run --out FACTS.json | compare [--emulated] NCCL.json EMULATOR.json";

/// The value after an option.
fn value<'a>(arguments: &'a [String], name: &str) -> Option<&'a str> {
    let at = arguments.iter().position(|argument| argument == name)?;
    arguments.get(at + 1).map(String::as_str)
}

fn run(arguments: &[String]) -> Result<ExitCode, Failure> {
    let way = value(arguments, "--arrangement").map_or(Ok(Way::Processes), Way::parse)?;
    match arguments {
        [command] if command == "list" => {
            for program in runner::programs() {
                let needs = match program.needs {
                    Needs::Library(_) => "library".to_owned(),
                    Needs::Ranks(ranks, _) => format!("{ranks} ranks"),
                };
                println!("{:<28} {needs:<8} {}", program.name, program.about);
            }
            Ok(ExitCode::SUCCESS)
        }
        [command, name, ..] if command == "one" => {
            runner::one(name, way)?;
            Ok(ExitCode::SUCCESS)
        }
        [command, ..] if command == "run" => {
            let out = value(arguments, "--out")
                .ok_or_else(|| Failure::usage("run needs --out FACTS.json"))?;
            let release =
                match value(arguments, "--like") {
                    None => None,
                    Some(path) => Some(runner::release(&read(path)?).ok_or_else(|| {
                        Failure::usage(format!("{path} does not tell the release"))
                    })?),
                };
            let (facts, unfinished) = runner::all(Selection {
                release,
                way,
                library_only: arguments
                    .iter()
                    .any(|argument| argument == "--library-only"),
                name: value(arguments, "--name"),
            })?;
            runner::write(&facts, out.as_ref())?;
            println!("{unfinished} did not come to their end");
            Ok(ExitCode::from(u8::from(unfinished > 0)))
        }
        [command, sides @ ..] if command == "compare" => {
            let (emulated, files) = match sides {
                [option, files @ ..] if option == "--emulated" => (true, files),
                files => (false, files),
            };
            let [library, emulator] = files else {
                return Err(Failure::usage(USAGE));
            };
            let (library, emulator) = (read(library)?, read(emulator)?);
            compare::check(&library, &emulator, emulated)?;
            let rows = compare::rows(&library, &emulator);
            if rows.is_empty() {
                return Err(Failure::usage("the two files have no program in common"));
            }
            let text = compare::markdown(&rows);
            print!("{text}");
            if let Some(path) = std::env::var_os(RESULT) {
                let result = json!({"markdown": text, "rows": compare::as_json(&rows)});
                runner::write(&result, path.as_ref())?;
            }
            Ok(ExitCode::from(u8::from(compare::unexplained(&rows) > 0)))
        }
        _ => Err(Failure::usage(USAGE)),
    }
}

fn read(path: &str) -> Result<Value, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("{path}: {error}")))?;
    serde_json::from_str(&text)
        .map_err(|error| Failure::new(Exit::Usage, format!("{path}: {error}")))
}
