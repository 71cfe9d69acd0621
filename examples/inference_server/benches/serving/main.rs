//! How many tokens the server makes, how much of its time is communication, and how long a death takes.
//!
//! ```text
//! cargo bench -p inference-server --bench serving            all of it; writes docs/results/inference_server.md
//! cargo bench -p inference-server --bench serving -- --output DIRECTORY --ranks 4 --turns 7 --kills 20
//! cargo bench -p inference-server --bench serving -- --ranks 0     the picture alone
//! ```
//!
//! The program itself is started, with processes for its ranks, and asked over TCP, as in `tests/server`. Times of a step and of its
//! communication are the server's own (`/metrics`); all others are those of this program's clock, from outside.
//!
//! - `deaths`: ranks that are killed; `timeline`: one of them as a picture; `throughput`: tokens; `page`: what is written of it.

// Each has more than is needed here.
#[allow(dead_code)]
#[path = "../../tests/server/client.rs"]
mod client;
mod deaths;
mod page;
#[path = "../../tests/server/patience.rs"]
mod patience;
#[allow(dead_code)]
#[path = "../../tests/server/program.rs"]
mod program;
mod throughput;
mod timeline;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use inference_server::model::{Known, fetched};
use nccl_tools::machine;
use nccl_tools::statistics::median;
use serde_json::{Value, json};

use deaths::{Death, Recovery};
use patience::{DEADLINE, until};
use throughput::{Agreement, Throughput};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("serving: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What is measured.
struct Plan {
    output: PathBuf,
    /// The most ranks.
    ranks: usize,
    turns: usize,
    kills: usize,
    /// The arguments, for the page.
    arguments: String,
}

impl Plan {
    fn from_args() -> Outcome<Self> {
        let arguments: Vec<String> = std::env::args()
            .skip(1)
            .filter(|argument| argument != "--bench")
            .collect();
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
        let mut plan = Self {
            output: results,
            ranks: 8,
            turns: 9,
            kills: 20,
            arguments: arguments.join(" "),
        };
        let mut words = arguments.iter();
        while let Some(option) = words.next() {
            let value = words
                .next()
                .ok_or_else(|| format!("{option} needs a value"))?;
            match option.as_str() {
                "--output" => plan.output = PathBuf::from(value),
                "--ranks" => plan.ranks = value.parse()?,
                "--turns" => plan.turns = value.parse()?,
                "--kills" => plan.kills = value.parse()?,
                _ => {
                    let known = "--output, --ranks, --turns and --kills";
                    return Err(format!("{option}: there are {known}").into());
                }
            }
        }
        Ok(plan)
    }
}

fn run() -> Outcome {
    let plan = Plan::from_args()?;
    let before = machine::load();
    let mut figures = Figures::default();
    for ranks in [1, 2, 4, 8] {
        if ranks > plan.ranks {
            continue;
        }
        for clients in [1, 16] {
            let text = Text::tiny(if clients == 1 { 200 } else { 100 });
            let found = throughput::measure(ranks, None, clients, plan.turns, &text)?;
            figures.throughput.push(found);
            for copies in [1, 2] {
                if copies <= ranks && ranks > 1 {
                    let copies = Some(copies);
                    let found = throughput::measure(ranks, copies, clients, plan.turns, &text)?;
                    figures.throughput.push(found);
                }
            }
        }
        if ranks == 2 || ranks == 8 {
            for clients in [1, 8] {
                let text = Text::tiny(if clients == 1 { 200 } else { 100 });
                // Pairs of turns: more of them than of single turns.
                let found = throughput::agreement(ranks, clients, 2 * plan.turns, &text)?;
                figures.agreement.push(found);
            }
        }
        for streams in [0, 4] {
            let how = Recovery::Respawn;
            let found = deaths::measure(ranks, how, streams, plan.kills, &Text::tiny(150))?;
            figures.deaths.push(found);
        }
        if ranks > 1 {
            for how in [Recovery::Shrink, Recovery::Elastic] {
                let found = deaths::measure(ranks, how, 4, plan.turns, &Text::tiny(150))?;
                figures.deaths.push(found);
            }
        }
    }
    if plan.ranks == 0 {
        // The picture alone.
    } else if Known::SmolLm2.path(&fetched()).exists() {
        for ranks in [1, 3] {
            for (clients, length) in [(1, 24), (8, 12)] {
                let text = Text::smollm2(length);
                let found = throughput::measure(ranks, None, clients, plan.turns, &text)?;
                figures.throughput.push(found);
            }
        }
        let text = Text::smollm2(24);
        let found = deaths::measure(3, Recovery::Respawn, 1, plan.turns, &text)?;
        figures.deaths.push(found);
    } else {
        eprintln!("serving: smollm2 is not measured: scripts/get-smollm2 fetches it");
    }
    std::fs::create_dir_all(&plan.output)?;
    let picture = plan.output.join("elastic_death.svg");
    std::fs::write(&picture, timeline::draw()?)?;
    eprintln!("wrote {}", picture.display());
    if plan.ranks == 0 {
        return Ok(());
    }
    let path = plan.output.join("inference_server.md");
    std::fs::write(&path, page::write(&plan, &before, &figures))?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

/// All that was measured.
#[derive(Default)]
struct Figures {
    throughput: Vec<Throughput>,
    agreement: Vec<Agreement>,
    deaths: Vec<Death>,
}

/// What is asked for.
#[derive(Clone)]
struct Text {
    model: &'static str,
    prompt: &'static str,
    most: usize,
    temperature: f64,
}

impl Text {
    /// Of the repository's model: hot enough not to end early, as it seldom does.
    fn tiny(most: usize) -> Self {
        Self {
            model: "tiny",
            prompt: "The communicator",
            most,
            temperature: 1.3,
        }
    }

    fn smollm2(most: usize) -> Self {
        Self {
            model: "smollm2",
            prompt: "Once upon a time, there was a little",
            most,
            temperature: 0.7,
        }
    }

    /// The body of a request for a stream; each number is another text.
    fn body(&self, seed: usize) -> Value {
        json!({
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.most,
            "temperature": self.temperature,
            "seed": seed,
            "stream": true,
        })
    }
}

/// The median of some measurements, with the least and the greatest.
#[derive(Clone, Copy, Debug)]
struct Spread {
    least: f64,
    median: f64,
    greatest: f64,
}

impl Spread {
    fn of(values: &[f64]) -> Option<Self> {
        Some(Self {
            least: values.iter().copied().reduce(f64::min)?,
            median: median(values)?,
            greatest: values.iter().copied().reduce(f64::max)?,
        })
    }
}
