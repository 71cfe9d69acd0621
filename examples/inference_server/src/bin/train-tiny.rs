//! Trains the model of the repository: what `cargo xtask train-tiny` runs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use inference_server::model::{self, Config};
use inference_server::train::{Corpus, Plan, train};
use lexopt::prelude::*;

const HELP: &str = "\
usage: train-tiny [OPTIONS]

  --steps N      steps (2000)
  --texts N      texts of a step (8)
  --length N     tokens of a text (128)
  --rate R       the highest rate (0.003)
  --balance B    how much an even use of experts counts (0.01)
  --seed N       what chance begins from (1)
  --out PATH     the file to write (that of the repository)
";

fn options() -> Result<Option<(Plan, PathBuf)>, lexopt::Error> {
    let (mut plan, mut out) = (Plan::default(), model::tiny());
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("steps") => plan.steps = arguments.value()?.parse()?,
            Long("texts") => plan.texts = arguments.value()?.parse()?,
            Long("length") => plan.length = arguments.value()?.parse()?,
            Long("rate") => plan.rate = arguments.value()?.parse()?,
            Long("balance") => plan.balance = arguments.value()?.parse()?,
            Long("seed") => plan.seed = arguments.value()?.parse()?,
            Long("out") => out = arguments.value()?.into(),
            Long("help") => return Ok(None),
            other => return Err(other.unexpected()),
        }
    }
    Ok(Some((plan, out)))
}

fn main() -> ExitCode {
    let outcome = match options() {
        Ok(Some((plan, out))) => run(&plan, &out),
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprint!("train-tiny: {error}\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("train-tiny: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(plan: &Plan, out: &Path) -> model::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let corpus = Corpus::of_repository(&root)?;
    println!("{} tokens, {plan:?}", corpus.tokens().len());
    let begun = Instant::now();
    let (network, report) = train(&Config::tiny(), &corpus, plan, |progress| {
        let seconds = begun.elapsed().as_secs_f64();
        println!(
            "step {:5}  loss {:.3}  imbalance {:.3}  {:.0} s, {:.0} tokens/s",
            progress.step,
            progress.loss,
            progress.imbalance,
            seconds,
            (progress.step * plan.texts * plan.length) as f64 / seconds,
        );
    })?;
    network.save(out, &report)?;
    println!(
        "{} parameters, loss {:.3}, of what was not seen {:.3}: {}",
        network.parameters(),
        report.loss,
        report.held_out_loss,
        out.display()
    );
    Ok(())
}
