//! Measurements of NCCL for decisions of this workspace; see [`nccl_tools::measure`].
//!
//! ```text
//! measure list
//! measure NAME [--arrangement threads|processes] [--short]
//! measure page FILE [--short]
//! measure first-sign
//! measure arrangement one-thread|threads|processes|hosts RANKS
//! measure nccl-tests --ranks RANKS [--short] THEIRS OURS
//! measure mps PROGRAM ARGUMENT...
//! ```

use std::process::ExitCode;

use nccl_tools::measure::{self, Setting, arrangement, mps, nccl_tests, page};
use nccl_tools::raw::{Result, Way, leave};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(code) => leave(code.into()),
        Err(error) => {
            eprintln!("measure: {error}");
            leave(1)
        }
    }
}

fn run(arguments: &[String]) -> Result<u8> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let value = |name: &str| {
        let at = words.iter().position(|&word| word == name)?;
        words.get(at + 1).copied()
    };
    let short = words.contains(&"--short");
    match words[..] {
        ["list"] => {
            for measurement in measure::MEASUREMENTS {
                println!("{:<18} {}", measurement.name, measurement.about);
            }
        }
        ["first-sign"] => arrangement::first_sign()?,
        ["arrangement", way, ranks] => arrangement::arrangement(way, ranks.parse()?)?,
        ["mps", ..] => return mps::run(&arguments[1..]),
        ["nccl-tests", .., theirs, ours] => nccl_tests::run(&nccl_tests::Comparison {
            theirs: theirs.into(),
            ours: ours.into(),
            ranks: value("--ranks").unwrap_or("2").parse()?,
            short,
        })?,
        ["page", path, ..] if !path.starts_with('-') => page::write(path.as_ref(), short)?,
        [name, ..] => {
            let way = value("--arrangement").map_or(Ok(Way::Processes), Way::parse)?;
            measure::run(name, way, Setting { short })?;
        }
        [] => return Err("which measurement? `measure list` lists them".into()),
    }
    Ok(0)
}
