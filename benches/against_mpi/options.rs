//! The options of the command line.

use std::path::PathBuf;

use super::Outcome;
use crate::root::root;

/// The options.
pub(crate) struct Options {
    /// The directory of the page and the picture.
    pub(crate) output: PathBuf,
    /// Turns of each competitor, for each operation and size.
    pub(crate) rounds: usize,
    /// The sizes, in bytes of a rank's send buffer: all powers of two from `min` to `max`.
    pub(crate) min: usize,
    pub(crate) max: usize,
    /// The duration of a turn in seconds.
    pub(crate) turn: f64,
    /// Numbers of ranks.
    pub(crate) ranks: Vec<usize>,
    /// The command, for the page.
    pub(crate) command: String,
}

/// For mpirun: nothing is sent before the receiver is ready (by the names of Open MPI 4 and of 5).
pub(crate) const NOT_EAGER: [&str; 9] = [
    "--mca",
    "btl_vader_eager_limit",
    "256",
    "--mca",
    "btl_vader_rndv_eager_limit",
    "256",
    "--mca",
    "btl_sm_eager_limit",
    "256",
];

const USAGE: &str = "\
cargo bench -p nccl-benches --bench against_mpi [-- OPTIONS]
    --output DIRECTORY   where against-mpi.md and against-mpi.svg go (docs/results of this repository)
    --rounds N           turns of each competitor for each operation and size (21; at least 3)
    --min BYTES          the smallest size (1K)
    --max BYTES          the largest size (64M)
    --turn MILLISECONDS  how long a turn is to take (3)
    --ranks LIST         numbers of ranks, each even (2,4)";

impl Options {
    /// The options; `None`: help was requested.
    pub(crate) fn parse() -> Outcome<Option<Self>> {
        use lexopt::Arg::Long;
        let mut options = Self {
            output: root().join("docs/results"),
            rounds: 21,
            min: 1 << 10,
            max: 64 << 20,
            turn: 0.003,
            ranks: vec![2, 4],
            command: String::from("cargo bench -p nccl-benches --bench against_mpi"),
        };
        let arguments: Vec<String> = std::env::args()
            .skip(1)
            .filter(|argument| argument != "--bench")
            .collect();
        if !arguments.is_empty() {
            options.command += &format!(" -- {}", arguments.join(" "));
        }
        let mut parser = lexopt::Parser::from_args(&arguments);
        while let Some(argument) = parser.next()? {
            match argument {
                Long("output") => options.output = root().join(parser.value()?),
                Long("rounds") => options.rounds = text(&mut parser)?.parse()?,
                Long("min") => options.min = size(&text(&mut parser)?)?,
                Long("max") => options.max = size(&text(&mut parser)?)?,
                Long("turn") => options.turn = text(&mut parser)?.parse::<f64>()? * 1e-3,
                Long("ranks") => {
                    let numbers = text(&mut parser)?;
                    options.ranks = numbers
                        .split(',')
                        .map(str::parse)
                        .collect::<Result<_, _>>()?;
                }
                Long("help") => {
                    println!("{USAGE}");
                    return Ok(None);
                }
                other => return Err(format!("{}\n{USAGE}", other.unexpected()).into()),
            }
        }
        // The ranks come in pairs, and each of many ranks gets a part of the smallest size.
        let fits = |&ranks: &usize| ranks > 0 && ranks % 2 == 0 && 4 * ranks <= options.min;
        let powers = options.min.is_power_of_two()
            && options.max.is_power_of_two()
            && options.min <= options.max;
        if options.rounds < 3
            || !powers
            || options.ranks.is_empty()
            || !options.ranks.iter().all(fits)
        {
            return Err(format!("these options do not fit together\n{USAGE}").into());
        }
        Ok(Some(options))
    }

    pub(crate) fn sizes(&self) -> impl Iterator<Item = usize> + use<> {
        let max = self.max;
        std::iter::successors(Some(self.min), |size| Some(2 * size))
            .take_while(move |&size| size <= max)
    }
}

fn text(parser: &mut lexopt::Parser) -> Outcome<String> {
    Ok(parser
        .value()?
        .into_string()
        .map_err(|_| "an option's value is no text")?)
}

fn size(text: &str) -> Outcome<usize> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 10),
        Some(b'M') => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    Ok(digits.parse::<usize>()? << shift)
}

/// The options of mpirun for `ranks` ranks: one to a core, in turn.
pub(crate) fn mpirun(ranks: usize, cores: usize) -> Vec<String> {
    let mut words = vec!["--allow-run-as-root", "--map-by", "core"];
    match ranks > cores {
        false => words.extend(["--bind-to", "core"]),
        // Waiting ranks yield the core to the others.
        true => words.extend([
            "--oversubscribe",
            "--bind-to",
            "core:overload-allowed",
            "--mca",
            "mpi_yield_when_idle",
            "1",
        ]),
    }
    let mut words: Vec<String> = words.into_iter().map(str::to_owned).collect();
    words.extend(["-np".to_owned(), ranks.to_string()]);
    words
}
