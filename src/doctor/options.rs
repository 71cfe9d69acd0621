//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use lexopt::prelude::*;

use super::Form;

pub(super) const HELP: &str = "\
Find out whether NCCL can work here, and why it did not.

Usage: nccl-doctor [options]              check this host; under a launcher, all ranks
       nccl-doctor log [options] FILE...  read NCCL's debug logs of a run that went wrong
       nccl-doctor timeline [options] DIR|FILE...
                                          what each rank did last, from recordings of its flight recorder
       nccl-doctor decide [options] RANKS which ranks of a world that was cut in two go on
       nccl-doctor ras [options]          what NCCL's own RAS service knows of the ranks of a job

Alone, it looks at what one host needs: libnccl and the driver, network interfaces and adapters, limits,
shared memory, NCCL's variables. Started on all ranks, it compares them as well, and tries whether they
reach each other; rank 0 prints. It needs no GPU for that.

  nccl-doctor                                     this host
  nccl-doctor --ranks 8                           this host, before 8 ranks are started on it
  torchrun --nproc-per-node 8 --no-python nccl-doctor
  srun -N 2 --ntasks-per-node 8 nccl-doctor       all ranks, as the job will be started
  mpirun -np 16 -x NCCL_SOCKET_IFNAME nccl-doctor
  nccl-doctor --rank 0 --world-size 2 --rendezvous tcp:10.0.0.5:29400
                                                  by hand: the same on each host, with its rank
  nccl-doctor --emulator                          to try it out without libnccl

For the logs, run all ranks with NCCL_DEBUG=INFO, and with NCCL_DEBUG_FILE=/tmp/nccl.%h.%p for a file each:

  nccl-doctor log /tmp/nccl.*                     files of several ranks, or their common output
  nccl-doctor log logs/                           all files of a directory
  kubectl logs job/train | nccl-doctor log -      standard input

For recordings, which nccl-run --record DIR or NCCL_RUN_RECORD_DIR leave after a fault; or of a job that hangs:

  nccl-doctor timeline faults/                    one page to look at: timeline.html
  nccl-doctor timeline --trace trace.json faults/ and a file for https://ui.perfetto.dev
  nccl-doctor timeline --pytorch traces/ faults/  and files for PyTorch's analyser: torchfrtrace traces/
  nccl-doctor timeline --pid 4107                 asks all ranks now, of which process 4107 is one: where they are,
                                                  and what they prove to know, is in its environment
  nccl-doctor timeline --rendezvous unix:/run/job.sock
                                                  the same from elsewhere; NCCL_RUN_SECRET, NCCL_RUN_SECRET_FILE,
                                                  NCCL_RUN_JOB and NCCL_RUN_GENERATION as the ranks have them

Of a network that was cut into halves, neither goes on by itself. When it is certain that the ranks of one do not, because they
were ended, say so to the other, before it has given up (12 s, or Rendezvous::majority_timeout):

  nccl-doctor decide --pid 4107 0-3               ranks 0 to 3 go on, of which process 4107 is one

Of a job that hangs, NCCL's RAS service tells which ranks have launched fewer collectives than others, and which do not
answer. Releases before 2.30 have crashed when they were asked often: ask once.

  nccl-doctor ras --pid 4107                      of the job of which process 4107 is a rank
  nccl-doctor ras                                 the process that listens at NCCL_RAS_ADDR, or localhost:28028
  nccl-doctor ras --address 10.0.0.5:28028 --verbose
                                                  NCCL's own text about each rank
  nccl-doctor ras --monitor all                   processes that come and go, until it is ended (NCCL 2.29)

Options of ras:
      --pid PID, --rendezvous ADDRESS
                        which job, as for the timeline: its ranks say where theirs listen
      --address HOST:PORT
                        where a process of the job listens
      --text, --verbose NCCL's own text; about each rank
      --monitor EVENTS  lifecycle, trace or all
      --timeout SECONDS how long to wait for the answer (30)

Options of decide:
      --pid PID, --rendezvous ADDRESS, --timeout SECONDS
                        as those of the timeline

Options of the timeline:
      --out FILE        where to write the page (timeline.html, unless that is there)
      --trace FILE      also write a trace for Perfetto and chrome://tracing
      --json FILE       also write everything as JSON, which this command reads again
      --pytorch DIR     also write a file for each rank that PyTorch's analyser reads (torchfrtrace DIR)
      --pid PID, --rendezvous ADDRESS, --timeout SECONDS
                        ask the ranks of a job that runs, for so long (30)

Options of the check:
      --ranks N         how many ranks there will be on this host (1)
      --rank N, --world-size N, --rendezvous ADDRESS
                        who this process is, without a launcher; ADDRESS as in NCCL_RUN_RENDEZVOUS:
                        unix:PATH, tcp:HOST:PORT or tcp:HOST:FIRST-LAST
      --timeout SECONDS how long the ranks wait for each other (30)
      --communicate     then make a communicator, on a host alone of as many threads as --ranks says, and verify a
                        small all-reduce
      --emulator        put the emulator of NCCL and CUDA in this process: nothing is said about the
                        GPUs and the libnccl of this host

Options of the check, of log and of ras:
  -q, --quiet           leave out what is fine
      --json            print JSON
  -h, --help            print this
  -V, --version         print the version

Exit code: 0 all is fine, 1 warnings, 2 errors, 3 it could not check (wrong arguments, no logs).
Environment: NO_COLOR; what launchers set; NCCL_LIBRARY names a libnccl.
";

/// The command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    Version,
    Check(CheckOptions),
    Log(LogOptions),
    Timeline(TimelineOptions),
    Decide(DecideOptions),
    Ras(RasOptions),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct TimelineOptions {
    pub(super) of: Recordings,
    pub(super) timeout: Duration,
    pub(super) out: Option<PathBuf>,
    pub(super) trace: Option<PathBuf>,
    pub(super) json: Option<PathBuf>,
    pub(super) pytorch: Option<PathBuf>,
}

/// The source of recordings.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Recordings {
    Files(Vec<PathBuf>),
    Job(Job),
}

/// A running job.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// By the address of its rendezvous.
    Address(String),
    /// By the process of one of its ranks on this host.
    Process(u32),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct DecideOptions {
    pub(super) job: Job,
    pub(super) ranks: Vec<usize>,
    pub(super) timeout: Duration,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct RasOptions {
    pub(super) form: Form,
    pub(super) of: RasService,
    pub(super) question: RasQuestion,
    pub(super) timeout: Duration,
}

/// The RAS service to query.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RasService {
    /// `HOST:PORT`.
    Address(String),
    /// A running job, whose ranks report the addresses of their services.
    Job(Job),
}

/// The query to the RAS service.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RasQuestion {
    /// Findings.
    Findings,
    /// NCCL's own text.
    Text { verbose: bool },
    /// Events of these kinds, as they happen.
    Monitor(String),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct CheckOptions {
    pub(super) form: Form,
    /// Ranks that this host will have.
    pub(super) ranks: Option<usize>,
    /// Variables that a launcher would set, from the command line.
    pub(super) explicit: Vec<(&'static str, String)>,
    pub(super) timeout: Duration,
    pub(super) communicate: bool,
    pub(super) emulator: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct LogOptions {
    pub(super) form: Form,
    /// `-` is standard input.
    pub(super) files: Vec<PathBuf>,
}

const TIMEOUT: Duration = Duration::from_secs(30);

/// Reads the arguments; an error is a sentence.
pub(super) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, String> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    match arguments.split_first() {
        Some((first, rest)) if first == "log" => log(rest.to_vec()),
        Some((first, rest)) if first == "timeline" => timeline(rest.to_vec()),
        Some((first, rest)) if first == "decide" => decide(rest.to_vec()),
        Some((first, rest)) if first == "ras" => ras(rest.to_vec()),
        _ => check(arguments),
    }
    .map_err(|error| format!("{error}; nccl-doctor --help explains"))
}

fn check(arguments: Vec<OsString>) -> Result<Command, lexopt::Error> {
    let mut options = CheckOptions {
        form: Form::default(),
        ranks: None,
        explicit: Vec::new(),
        timeout: TIMEOUT,
        communicate: false,
        emulator: false,
    };
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next()? {
        match argument {
            Long("ranks") => options.ranks = Some(positive(&mut parser, "--ranks")?),
            Long("rank") => {
                let rank: usize = parser.value()?.parse()?;
                options.explicit.push(("NCCL_RUN_RANK", rank.to_string()));
            }
            Long("world-size") => {
                let size = positive(&mut parser, "--world-size")?;
                options
                    .explicit
                    .push(("NCCL_RUN_WORLD_SIZE", size.to_string()));
            }
            Long("rendezvous") => {
                let address = parser.value()?.string()?;
                options.explicit.push(("NCCL_RUN_RENDEZVOUS", address));
            }
            Long("timeout") => {
                options.timeout = timeout(&mut parser)?;
            }
            Long("communicate") => options.communicate = true,
            Long("emulator") => options.emulator = true,
            Value(word) => {
                let word = word.to_string_lossy();
                return Err(format!(
                    "{word:?} is no option; to read logs, write: nccl-doctor log {word}"
                )
                .into());
            }
            other => match common(&other, &mut options.form) {
                Some(Some(command)) => return Ok(command),
                Some(None) => {}
                None => return Err(other.unexpected()),
            },
        }
    }
    let given: Vec<_> = options.explicit.iter().map(|(name, _)| *name).collect();
    let together = [
        ("NCCL_RUN_RANK", "--rank"),
        ("NCCL_RUN_WORLD_SIZE", "--world-size"),
        ("NCCL_RUN_RENDEZVOUS", "--rendezvous"),
    ];
    let missing: Vec<_> = together
        .iter()
        .filter(|(name, _)| !given.contains(name))
        .map(|(_, option)| *option)
        .collect();
    if !given.is_empty() && !missing.is_empty() {
        return Err(format!(
            "--rank, --world-size and --rendezvous belong together: {} is missing",
            missing.join(" and ")
        )
        .into());
    }
    Ok(Command::Check(options))
}

fn log(arguments: Vec<OsString>) -> Result<Command, lexopt::Error> {
    let mut form = Form::default();
    let mut files = Vec::new();
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next()? {
        match argument {
            Value(file) => files.push(PathBuf::from(file)),
            other => match common(&other, &mut form) {
                Some(Some(command)) => return Ok(command),
                Some(None) => {}
                None => return Err(other.unexpected()),
            },
        }
    }
    if files.is_empty() {
        return Err("log needs files, or - for standard input".into());
    }
    Ok(Command::Log(LogOptions { form, files }))
}

fn timeline(arguments: Vec<OsString>) -> Result<Command, lexopt::Error> {
    let (mut files, mut job) = (Vec::new(), None);
    let mut options = TimelineOptions {
        of: Recordings::Files(Vec::new()),
        timeout: TIMEOUT,
        out: None,
        trace: None,
        json: None,
        pytorch: None,
    };
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next()? {
        match argument {
            Value(file) => files.push(PathBuf::from(file)),
            Long("out") => options.out = Some(parser.value()?.into()),
            Long("trace") => options.trace = Some(parser.value()?.into()),
            Long("json") => options.json = Some(parser.value()?.into()),
            Long("pytorch") => options.pytorch = Some(parser.value()?.into()),
            Long("rendezvous") => name(&mut job, Job::Address(parser.value()?.string()?))?,
            Long("pid") => name(&mut job, Job::Process(parser.value()?.parse()?))?,
            Long("timeout") => options.timeout = timeout(&mut parser)?,
            other => match common(&other, &mut Form::default()) {
                Some(Some(command)) => return Ok(command),
                _ => return Err(other.unexpected()),
            },
        }
    }
    options.of = match (files.is_empty(), job) {
        (true, None) => {
            return Err("timeline needs files of recordings, or --rendezvous, or --pid".into());
        }
        (false, Some(_)) => {
            return Err("--rendezvous and --pid ask a job that runs, and take no files".into());
        }
        (true, Some(job)) => Recordings::Job(job),
        (false, None) => Recordings::Files(files),
    };
    Ok(Command::Timeline(options))
}

fn decide(arguments: Vec<OsString>) -> Result<Command, lexopt::Error> {
    let (mut ranks, mut job, mut limit) = (None, None, TIMEOUT);
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next()? {
        match argument {
            Value(text) if ranks.is_none() => ranks = Some(ranks_of(&text.string()?)?),
            Long("rendezvous") => name(&mut job, Job::Address(parser.value()?.string()?))?,
            Long("pid") => name(&mut job, Job::Process(parser.value()?.parse()?))?,
            Long("timeout") => limit = timeout(&mut parser)?,
            other => match common(&other, &mut Form::default()) {
                Some(Some(command)) => return Ok(command),
                _ => return Err(other.unexpected()),
            },
        }
    }
    match (ranks, job) {
        (Some(ranks), Some(job)) => Ok(Command::Decide(DecideOptions {
            job,
            ranks,
            timeout: limit,
        })),
        (None, _) => Err("decide needs the ranks that go on, such as 0-3,6".into()),
        (_, None) => Err("decide needs --pid or --rendezvous, which say which job".into()),
    }
}

fn ras(arguments: Vec<OsString>) -> Result<Command, lexopt::Error> {
    let (mut address, mut job) = (None, None);
    let exported = std::env::var("NCCL_RAS_ADDR").ok();
    let usual = exported.unwrap_or_else(|| String::from("localhost:28028"));
    let mut options = RasOptions {
        form: Form::default(),
        of: RasService::Address(usual),
        question: RasQuestion::Findings,
        timeout: TIMEOUT,
    };
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next()? {
        match argument {
            Long("address") => address = Some(parser.value()?.string()?),
            Long("rendezvous") => name(&mut job, Job::Address(parser.value()?.string()?))?,
            Long("pid") => name(&mut job, Job::Process(parser.value()?.parse()?))?,
            Long("text") => options.question = RasQuestion::Text { verbose: false },
            Long("verbose") => options.question = RasQuestion::Text { verbose: true },
            Long("monitor") => {
                options.question = RasQuestion::Monitor(parser.value()?.string()?);
            }
            Long("timeout") => options.timeout = timeout(&mut parser)?,
            other => match common(&other, &mut options.form) {
                Some(Some(command)) => return Ok(command),
                Some(None) => {}
                None => return Err(other.unexpected()),
            },
        }
    }
    options.of = match (address, job) {
        (Some(_), Some(_)) => {
            return Err("--address says where, and takes neither --pid nor --rendezvous".into());
        }
        (Some(address), None) => RasService::Address(address),
        (None, Some(job)) => RasService::Job(job),
        (None, None) => options.of,
    };
    if options.form.json && options.question != RasQuestion::Findings {
        return Err("--json is for findings: leave out --text, --verbose and --monitor".into());
    }
    Ok(Command::Ras(options))
}

/// Sets the job; a second one is an error.
fn name(job: &mut Option<Job>, named: Job) -> Result<(), lexopt::Error> {
    match job.replace(named) {
        None => Ok(()),
        Some(_) => Err("one of --rendezvous and --pid says which job, once".into()),
    }
}

/// The most ranks that a world has.
const RANKS: usize = 1 << 20;

/// Parses numbers and ranges of numbers.
fn ranks_of(text: &str) -> Result<Vec<usize>, lexopt::Error> {
    let mut ranks = std::collections::BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let span: Option<(usize, usize)> = first.parse().ok().zip(last.parse().ok());
        match span.filter(|(first, last)| first <= last && *last < RANKS) {
            Some((first, last)) => ranks.extend(first..=last),
            None => return Err(format!("{part:?} is no rank, and no span such as 0-3").into()),
        }
    }
    Ok(ranks.into_iter().collect())
}

fn timeout(parser: &mut lexopt::Parser) -> Result<Duration, lexopt::Error> {
    let seconds = positive(parser, "--timeout")?;
    if seconds > 86_400 {
        return Err("--timeout is at most 86400 seconds, a day".into());
    }
    Ok(Duration::from_secs(seconds as u64))
}

/// Parses the options of all commands: `None` for others, `Some(Some(…))` for a command to run at once.
#[expect(
    clippy::option_option,
    reason = "not known, known, and known to end it"
)]
fn common(argument: &lexopt::Arg<'_>, form: &mut Form) -> Option<Option<Command>> {
    match argument {
        Long("json") => form.json = true,
        Short('q') | Long("quiet") => form.quiet = true,
        Short('h') | Long("help") => return Some(Some(Command::Help)),
        Short('V') | Long("version") => return Some(Some(Command::Version)),
        _ => return None,
    }
    Some(None)
}

fn positive(parser: &mut lexopt::Parser, option: &str) -> Result<usize, lexopt::Error> {
    let number: usize = parser.value()?.parse()?;
    if number == 0 {
        return Err(format!("{option} is at least 1").into());
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    fn refused(line: &str) -> String {
        parsed(line).expect_err(line)
    }

    #[test]
    fn a_check_is_what_is_done_without_a_command() {
        let Ok(Command::Check(options)) = parsed("--ranks 8 --json -q --timeout 5") else {
            panic!("no check");
        };
        assert_eq!(
            (options.ranks, options.form.json, options.form.quiet),
            (Some(8), true, true)
        );
        assert_eq!(options.timeout, Duration::from_secs(5));
        let Ok(Command::Check(options)) = parsed("--rank 1 --world-size 2 --rendezvous unix:/x")
        else {
            panic!("no check");
        };
        assert_eq!(options.explicit.len(), 3);
    }

    #[test]
    fn logs_are_files_or_standard_input() {
        let Ok(Command::Log(options)) = parsed("log a b - --json") else {
            panic!("no log");
        };
        assert_eq!(options.files, ["a", "b", "-"].map(PathBuf::from));
        assert!(options.form.json);
        assert_eq!(parsed("log --help"), Ok(Command::Help));
    }

    #[test]
    fn the_ras_service_is_asked_for_findings_for_text_or_for_events() {
        let Ok(Command::Ras(options)) = parsed("ras --address [::1]:7 --json --timeout 5") else {
            panic!("no ras");
        };
        assert_eq!(options.of, RasService::Address("[::1]:7".into()));
        assert_eq!(options.question, RasQuestion::Findings);
        let Ok(Command::Ras(options)) = parsed("ras --monitor all") else {
            panic!("no ras");
        };
        assert_eq!(options.question, RasQuestion::Monitor("all".into()));
        assert_eq!(options.of, RasService::Address("localhost:28028".into()));
        let Ok(Command::Ras(options)) = parsed("ras --pid 4107") else {
            panic!("no ras");
        };
        assert_eq!(options.of, RasService::Job(Job::Process(4107)));
        assert!(refused("ras --pid 7 --address x:1").contains("neither --pid"));
        assert!(refused("ras --verbose --json").contains("--json is for findings"));
        assert!(refused("ras file").contains("file"));
    }

    #[test]
    fn a_timeline_is_of_files_or_of_a_job_that_runs() {
        let Ok(Command::Timeline(options)) =
            parsed("timeline --out x.html faults --trace t.json --pytorch traces")
        else {
            panic!("no timeline");
        };
        let files = vec![PathBuf::from("faults")];
        assert_eq!(options.of, Recordings::Files(files));
        assert_eq!(options.out, Some(PathBuf::from("x.html")));
        assert_eq!(options.trace, Some(PathBuf::from("t.json")));
        assert_eq!(options.pytorch, Some(PathBuf::from("traces")));
        assert!(parsed("timeline --rendezvous unix:/x --timeout 5").is_ok());
        let Ok(Command::Timeline(options)) = parsed("timeline --pid 4107") else {
            panic!("no timeline");
        };
        assert_eq!(options.of, Recordings::Job(Job::Process(4107)));
        assert!(refused("timeline --pid 4107 --rendezvous unix:/x").contains("one of"));
        assert!(refused("timeline --pid many").contains("many"));
        assert!(refused("timeline --pid 4107 faults").contains("no files"));
        assert!(refused("timeline").contains("--rendezvous"));
        assert!(refused("timeline --rendezvous unix:/x faults").contains("no files"));
        assert_eq!(parsed("timeline --help"), Ok(Command::Help));
    }

    #[test]
    fn a_decision_names_ranks_and_a_job() {
        let Ok(Command::Decide(options)) = parsed("decide 0-2,6,1 --pid 4107") else {
            panic!("no decision");
        };
        assert_eq!(options.job, Job::Process(4107));
        assert_eq!(options.ranks, [0, 1, 2, 6]);
        assert!(refused("decide --pid 4107").contains("0-3,6"));
        assert!(refused("decide 0,1").contains("--pid"));
        for ranks in ["", "x", "3-1", "0,", "0-9999999999"] {
            let job = "--pid 4107".split(' ').map(OsString::from);
            let line = ["decide", ranks].map(OsString::from).into_iter();
            assert!(parse(line.chain(job)).is_err(), "{ranks:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_what_is_right() {
        assert!(refused("job.log").contains("nccl-doctor log job.log"));
        assert!(refused("--rank 1").contains("--world-size and --rendezvous is missing"));
        assert!(refused("--ranks 0").contains("at least 1"));
        assert!(refused("--ranks many").contains("many"));
        assert!(refused("--bogus").contains("--bogus"));
        assert!(refused("log").contains("standard input"));
        assert!(refused("log --rank 1 x").contains("--rank"));
        assert!(refused("--timeout 100000").contains("a day"));
    }
}
