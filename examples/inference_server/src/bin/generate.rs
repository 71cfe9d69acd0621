//! Continues a text, on several ranks that are threads of this process.
//!
//! ```text
//! cargo run --release -p inference-server --bin generate -- --ranks 4 "The communicator"
//! ```
//!
//! `--help` lists the options.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use inference_server::generate::{Request, generate};
use inference_server::model::tokenizer::Tokenizer;
use inference_server::model::{
    self, Collectives, Known, ModelFile, Part, Sampling, Settings, fetched,
};
use inference_server::ranks::on_threads;
use lexopt::prelude::*;

const HELP: &str = "\
usage: generate [OPTIONS] TEXT

  --ranks N          ranks that share the model: 1, 2, 4 or 8; 1 or 3 for smollm2 (1)
  --tokens N         how many to make (200)
  --temperature T    0 takes the likeliest token always (0.7)
  --top-k N          draw from so many of the likeliest tokens; 0 is all (0)
  --top-p P          draw from the likeliest that are as probable together (1)
  --seed N           what chance begins from (0)
  --model MODEL      tiny, smollm2 (which scripts/get-smollm2 fetches), or the file of another one (tiny)
";

struct Options {
    ranks: usize,
    model: PathBuf,
    text: String,
    most: usize,
    sampling: Sampling,
}

fn options() -> Result<Option<Options>, lexopt::Error> {
    let mut options = Options {
        ranks: 1,
        model: model::tiny(),
        text: String::new(),
        most: 200,
        sampling: Sampling {
            temperature: 0.7,
            ..Sampling::default()
        },
    };
    let mut arguments = lexopt::Parser::from_env();
    let mut text = None;
    while let Some(argument) = arguments.next()? {
        let sampling = &mut options.sampling;
        match argument {
            Long("ranks") => options.ranks = arguments.value()?.parse()?,
            Long("tokens") => options.most = arguments.value()?.parse()?,
            Long("temperature") => sampling.temperature = arguments.value()?.parse()?,
            Long("top-k") => sampling.top_k = arguments.value()?.parse()?,
            Long("top-p") => sampling.top_p = arguments.value()?.parse()?,
            Long("seed") => sampling.seed = arguments.value()?.parse()?,
            Long("model") => {
                let value = arguments.value()?;
                options.model = match value.to_str().and_then(Known::named) {
                    Some(known) => known.path(&fetched()),
                    None => value.into(),
                };
            }
            Long("help") => return Ok(None),
            Value(value) if text.is_none() => text = Some(value.string()?),
            other => return Err(other.unexpected()),
        }
    }
    options.text = text.ok_or("which text to go on with?")?;
    Ok(Some(options))
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprint!("generate: {error}\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("generate: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> model::Result<()> {
    let file = match Known::SmolLm2.path(&fetched()) == options.model {
        true => Known::SmolLm2.open(&fetched())?,
        false => ModelFile::open(&options.model)?,
    };
    let tokenizer = file.tokenizer()?;
    let request = Request {
        prompt: tokenizer.encode(&options.text)?,
        most: options.most,
        sampling: options.sampling,
    };
    // Uses as many positions as this one request needs, up to the model's limit.
    let needed = request.prompt.len().saturating_add(request.most);
    let settings = Settings {
        slots: 1,
        positions: file.positions().min(needed),
        ..Settings::default()
    };
    drop(file);
    let times = on_threads(options.ranks, &options.model, settings, |part| {
        one_rank(part, &request, &tokenizer)
    })?;
    let (tokens, seconds) = times[0];
    eprintln!(
        "{tokens} tokens in {seconds:.2} s on {} ranks: {:.0} tokens/s",
        options.ranks,
        tokens as f64 / seconds
    );
    Ok(())
}

/// Returns the number of generated tokens and the duration in seconds. Rank 0 prints the tokens.
fn one_rank<P: Part + ?Sized>(
    part: &mut P,
    request: &Request,
    tokenizer: &Tokenizer,
) -> model::Result<(usize, f64)> {
    let first = part.ranks().rank() == 0;
    let mut text = tokenizer.stream();
    let say = |words: &str| {
        if first {
            print!("{words}");
            // stdout may be closed.
            let _ = std::io::stdout().flush();
        }
    };
    for &token in &request.prompt {
        say(&text.push(token));
    }
    let begun = Instant::now();
    let made = generate(part, std::slice::from_ref(request), 32, |_, token| {
        say(&text.push(token));
    })?;
    say("\n");
    Ok((made[0].len(), begun.elapsed().as_secs_f64()))
}
