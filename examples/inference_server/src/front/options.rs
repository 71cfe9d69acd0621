//! The command-line options of the server.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use lexopt::prelude::*;

use crate::model::{Known, Settings, fetched};
use crate::rank::RankOptions;

/// The text of `--help`.
pub const HELP: &str = "\
usage: inference-server [OPTIONS]

Serves a language model over HTTP, on several ranks that are processes of their own. When one of them dies, the others
go on with a new one in its place, and so do the texts that were being written.

  --emulator             run on the CPU, where there is no GPU; without it, that is an error
  --ranks N              ranks that share the model: 1, 2, 4 or 8 for tiny (2), 1 or 3 for smollm2 (3)
  --listen ADDR          where to listen; port 0 takes a free one (127.0.0.1:8000)
  --model NAME           which model: tiny, or smollm2, which scripts/get-smollm2 fetches (tiny)
  --models DIR           where fetched models lie (.cache/models of the repository)
  --slots N              requests that are worked on at once (8)
  --queue N              requests that may wait for a slot; more are refused with 429 (32)
  --connections N        clients that may be connected; more are told to come again, but for /livez, /readyz and /metrics
                         (1024, or as many as the limit of open files allows)
  --client-timeout SECONDS
                         how long a client may take to send a request, headers and body each, or to take a part of its
                         answer; a connection without requests is closed after as long (10)
  --recovery HOW         when a rank dies: respawn starts another one in its place, shrink goes on with those that are
                         left, as many of them as the model can be shared by, elastic with all that are left, whose
                         experts have copies (respawn)
  --copies N             copies of each expert with elastic: so many ranks but one may die at once, and the others go
                         on with what they have; what lacks then comes from other ranks while they serve (2)
  --move-rate MIB        how much of its experts a rank sends to others in a second, at most, beside the service (256)
  --deadline SECONDS     how long an operation between ranks may take (10)
  --agree-steps SECONDS  before each step the ranks agree that it is the same, and wait so long for each other: a rank that
                         would enter another one is named, instead of a hang (off)
  --grace SECONDS        how long requests may take to end after SIGTERM (10)
";

/// What to do when a rank dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Start a new process in its place.
    Respawn,
    /// Continue with the remaining ranks.
    Shrink,
    /// Continue with the remaining ranks. The model is laid out by requests, with `copies` copies of each expert.
    Elastic {
        /// The number of copies of each expert.
        copies: usize,
    },
}

/// The options of the server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether the emulator replaces a missing GPU.
    pub emulator: bool,
    /// The most bytes of experts that a rank sends per second.
    pub move_rate: u64,
    /// The number of ranks at the start.
    pub ranks: usize,
    /// The address of the HTTP server.
    pub listen: String,
    /// The model.
    pub model: Known,
    /// The directory of downloaded models.
    pub models: PathBuf,
    /// The sizes of steps and of the cache.
    pub settings: Settings,
    /// The most requests that may wait.
    pub queue: usize,
    /// The most clients that may be connected. By default the usual number, or fewer if the descriptor limit requires it.
    pub connections: Option<usize>,
    /// How long a client may take to send a request, to take something of an answer, or to send the next request.
    pub client_timeout: Duration,
    /// What to do when a rank dies.
    pub recovery: Recovery,
    /// The timeout of an operation.
    pub deadline: Duration,
    /// How long ranks wait for agreement on each step; `None` disables the agreement.
    pub agree: Option<Duration>,
    /// The timeout of an orderly end.
    pub grace: Duration,
}

/// The role of this process.
#[derive(Clone, Debug)]
pub enum Role {
    /// The server, started by a user.
    Front(Options),
    /// A rank, started by the server.
    Rank(RankOptions),
    /// Prints the help.
    Help,
}

impl Role {
    /// Reads the arguments of the process.
    ///
    /// # Errors
    /// For invalid arguments, with the valid ones.
    pub fn from_args(mut arguments: lexopt::Parser) -> Result<Self, lexopt::Error> {
        let mut options = Options {
            emulator: false,
            ranks: 0,
            listen: String::from("127.0.0.1:8000"),
            model: Known::Tiny,
            models: fetched(),
            settings: Settings::default(),
            queue: 32,
            connections: None,
            client_timeout: Duration::from_secs(10),
            recovery: Recovery::Respawn,
            move_rate: 256 << 20,
            deadline: Duration::from_secs(10),
            agree: None,
            grace: Duration::from_secs(10),
        };
        // The options of a rank, which the front passes.
        let (mut link, mut wanted) = (None, 1);
        // The defaults of these depend on the model.
        let (mut ranks, mut slots, mut copies) = (None, None, None);
        while let Some(argument) = arguments.next()? {
            match argument {
                Long("emulator") => options.emulator = true,
                Long("ranks") => ranks = Some(arguments.value()?.parse()?),
                Long("listen") => options.listen = arguments.value()?.string()?,
                Long("model") => {
                    let name = arguments.value()?.string()?;
                    options.model = Known::named(&name).ok_or_else(|| {
                        format!("there is no model {name:?}: there are {}", Known::names())
                    })?;
                }
                Long("models") => options.models = arguments.value()?.into(),
                Long("slots") => slots = Some(arguments.value()?.parse()?),
                Long("queue") => options.queue = arguments.value()?.parse()?,
                Long("connections") => options.connections = Some(arguments.value()?.parse()?),
                Long("client-timeout") => {
                    options.client_timeout = seconds(arguments.value()?.parse()?)?;
                }
                Long("deadline") => options.deadline = seconds(arguments.value()?.parse()?)?,
                Long("agree-steps") => {
                    options.agree = Some(seconds(arguments.value()?.parse()?)?);
                }
                Long("grace") => options.grace = seconds(arguments.value()?.parse()?)?,
                Long("recovery") => {
                    options.recovery = match arguments.value()?.string()?.as_str() {
                        "respawn" => Recovery::Respawn,
                        "shrink" => Recovery::Shrink,
                        "elastic" => Recovery::Elastic { copies: 0 },
                        other => {
                            let text = format!(
                                "there is no recovery {other:?}: respawn, shrink or elastic"
                            );
                            return Err(text.into());
                        }
                    }
                }
                Long("move-rate") => {
                    let rate: u64 = arguments.value()?.parse()?;
                    options.move_rate = rate.saturating_mul(1 << 20);
                }
                Long("copies") => copies = Some(arguments.value()?.parse()?),
                Long("rank-of") => link = Some(arguments.value()?.string()?),
                Long("wanted") => wanted = arguments.value()?.parse()?,
                Long("help") => return Ok(Self::Help),
                other => return Err(other.unexpected()),
            }
        }
        options.ranks = ranks.unwrap_or(options.model.ranks());
        options.settings = options.model.settings();
        options.settings.slots = slots.unwrap_or(options.settings.slots);
        match (&mut options.recovery, copies) {
            (Recovery::Elastic { copies }, said) => *copies = said.unwrap_or(2.min(options.ranks)),
            // A rank is told what it needs, and not why.
            (_, Some(_)) if link.is_none() => {
                return Err("--copies is for --recovery elastic".into());
            }
            _ => {}
        }
        options.are_possible()?;
        Ok(match link {
            None => Self::Front(options),
            Some(link) => Self::Rank(RankOptions {
                emulator: options.emulator,
                link,
                model: options.model.path(&options.models),
                settings: options.settings,
                deadline: options.deadline,
                agree: options.agree,
                wanted,
                copies,
            }),
        })
    }
}

/// A limit that memory and clocks allow on any machine.
const SLOTS: usize = 1024;
const QUEUE: usize = 1 << 20;
const CONNECTIONS: usize = 1 << 20;
/// The kernel counts in milliseconds, and treats 0 as no timeout.
const SHORTEST: Duration = Duration::from_millis(1);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

impl Options {
    fn are_possible(&self) -> Result<(), lexopt::Error> {
        let slots = self.settings.slots;
        let text = if !(1..=SLOTS).contains(&slots) {
            format!("--slots {slots}: 1 to {SLOTS} are possible")
        } else if self.move_rate == 0 {
            String::from("--move-rate 0: nothing would move")
        } else if self.queue > QUEUE {
            format!("--queue {}: {QUEUE} at most", self.queue)
        } else if let Some(connections) = self.connections
            && !(1..=CONNECTIONS).contains(&connections)
        {
            format!("--connections {connections}: 1 to {CONNECTIONS} are possible")
        } else if !(SHORTEST..=DAY).contains(&self.client_timeout) {
            let seconds = self.client_timeout.as_secs_f64();
            format!("--client-timeout {seconds}: a thousandth at least, and at most a day")
        } else if self.deadline.is_zero() || self.deadline > DAY {
            let seconds = self.deadline.as_secs_f64();
            format!("--deadline {seconds}: above 0, and at most a day")
        } else if let Some(timeout) = self.agree
            && !(SHORTEST..=DAY).contains(&timeout)
        {
            let seconds = timeout.as_secs_f64();
            format!("--agree-steps {seconds}: a thousandth at least, and at most a day")
        } else if let Recovery::Elastic { copies } = self.recovery
            && !(1..=self.ranks).contains(&copies)
        {
            format!(
                "--copies {copies}: 1 to {} are possible on so many ranks",
                self.ranks
            )
        } else if self.grace > DAY {
            let seconds = self.grace.as_secs_f64();
            format!("--grace {seconds}: a day at most")
        } else {
            return Ok(());
        };
        Err(text.into())
    }

    /// Returns the command line of a rank of this server.
    pub(super) fn of_rank(&self, link: &str) -> Vec<OsString> {
        let wanted = match self.recovery {
            Recovery::Respawn => self.ranks,
            Recovery::Shrink | Recovery::Elastic { .. } => 1,
        };
        let deadline = self.deadline.as_secs_f64();
        let pairs = [
            ("--rank-of", link.to_owned()),
            ("--wanted", wanted.to_string()),
            ("--model", self.model.name().to_owned()),
            ("--slots", self.settings.slots.to_string()),
            ("--deadline", deadline.to_string()),
        ];
        let words = pairs.map(|(name, value)| [name.to_owned(), value]);
        let words = words.into_iter().flatten().map(OsString::from);
        // A path need not be valid UTF-8.
        let models = [OsString::from("--models"), self.models.clone().into()];
        let emulator = self.emulator.then(|| OsString::from("--emulator"));
        let copies = match self.recovery {
            Recovery::Elastic { copies } => vec![String::from("--copies"), copies.to_string()],
            _ => Vec::new(),
        };
        let agree = self.agree.map(|timeout| {
            let seconds = timeout.as_secs_f64().to_string();
            [String::from("--agree-steps"), seconds]
        });
        let more = copies.into_iter().chain(agree.into_iter().flatten());
        let more = more.map(OsString::from);
        words.chain(models).chain(emulator).chain(more).collect()
    }
}

fn seconds(number: f64) -> Result<Duration, lexopt::Error> {
    Duration::try_from_secs_f64(number).map_err(|error| format!("{number} seconds: {error}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<Role, String> {
        let parser = lexopt::Parser::from_args(words.iter().copied());
        Role::from_args(parser).map_err(|error| error.to_string())
    }

    #[test]
    fn what_the_front_writes_for_a_rank_is_what_a_rank_reads() {
        let words = [
            "--ranks",
            "4",
            "--slots",
            "3",
            "--deadline",
            "2.5",
            "--models",
            "x",
            "--agree-steps",
            "0.5",
            "--emulator",
        ];
        let Ok(Role::Front(options)) = read(&words) else {
            panic!("not a front");
        };
        let mut elastic = options.clone();
        elastic.recovery = Recovery::Elastic { copies: 3 };
        let words = elastic.of_rank("name");
        let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        let Ok(Role::Rank(rank)) = read(&words) else {
            panic!("not a rank");
        };
        assert_eq!((rank.copies, rank.wanted), (Some(3), 1));
        assert_eq!(rank.agree, Some(Duration::from_millis(500)));
        let words = options.of_rank("name");
        let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        let Ok(Role::Rank(rank)) = read(&words) else {
            panic!("not a rank");
        };
        assert_eq!(rank.model, options.model.path(&options.models));
        assert_eq!((rank.link.as_str(), rank.wanted), ("name", 4));
        assert_eq!(rank.copies, None);
        assert!(rank.emulator);
        assert_eq!(rank.settings, options.settings);
        assert_eq!(rank.deadline, Duration::from_millis(2500));
    }

    #[test]
    fn what_is_not_said_is_as_the_model_has_it_in_any_order() {
        let Ok(Role::Front(options)) = read(&["--models", "/m", "--model", "smollm2"]) else {
            panic!("not a front");
        };
        assert_eq!((options.ranks, options.settings.positions), (3, 2048));
        let path = options.model.path(&options.models);
        assert_eq!(path, PathBuf::from("/m/SmolLM2-135M-Instruct.Q4_1.gguf"));
        let words = ["--slots", "2", "--ranks", "1", "--model", "smollm2"];
        let Ok(Role::Front(options)) = read(&words) else {
            panic!("not a front");
        };
        assert_eq!((options.ranks, options.settings.slots), (1, 2));
        let Ok(Role::Front(options)) = read(&[]) else {
            panic!("not a front");
        };
        assert_eq!((options.ranks, options.settings), (2, Settings::default()));
    }

    #[test]
    fn what_is_not_there_is_answered_with_what_is() {
        let error = read(&["--model", "gpt-9"]).unwrap_err();
        assert_eq!(
            error,
            "there is no model \"gpt-9\": there are tiny, smollm2"
        );
        let error = read(&["--recovery", "pray"]).unwrap_err();
        assert_eq!(
            error,
            "there is no recovery \"pray\": respawn, shrink or elastic"
        );
        let error = read(&["--copies", "2"]).unwrap_err();
        assert_eq!(error, "--copies is for --recovery elastic");
        let words = ["--recovery", "elastic", "--copies", "3"];
        let error = read(&words).unwrap_err();
        assert_eq!(error, "--copies 3: 1 to 2 are possible on so many ranks");
        assert!(read(&["--deadline", "-1"]).is_err());
    }

    #[test]
    fn numbers_that_nothing_can_be_done_with_are_refused_before_anything_is_started() {
        for (name, value) in [
            ("--slots", "0"),
            ("--slots", "1025"),
            ("--queue", "18446744073709551615"),
            ("--connections", "0"),
            ("--connections", "1048577"),
            ("--client-timeout", "0"),
            ("--client-timeout", "1e-4"),
            ("--client-timeout", "86401"),
            ("--agree-steps", "0"),
            ("--deadline", "0"),
            ("--deadline", "1e-12"),
            ("--deadline", "1e18"),
            ("--grace", "1e18"),
        ] {
            let error = read(&[name, value]).unwrap_err();
            assert!(error.starts_with(name) && error.contains(':'), "{error}");
        }
        for (name, value) in [("--slots", "1"), ("--queue", "0"), ("--grace", "0")] {
            assert!(read(&[name, value]).is_ok(), "{name} {value}");
        }
    }
}
