//! What can be seen from outside: the log's names and fields are those of the page that lists them, and the
//! numbers are those of what was done.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use nccl::{Communicator, OperationKind, ReduceOp, World};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use support::ranks_as_threads;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

const PAGE: &str = include_str!("../docs/observability.md");

/// What is said of one name: at which levels, and with which fields.
#[derive(Debug, Default, PartialEq, Eq)]
struct Entry {
    levels: BTreeSet<String>,
    fields: BTreeSet<String>,
}

type Table = BTreeMap<String, Entry>;

/// The words in backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The rows of the page's tables whose first cell is a name with this beginning, cell by cell.
fn rows(beginning: &str) -> Vec<Vec<&'static str>> {
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| "));
    rows.filter(|row| row.starts_with(&format!("`{beginning}")))
        .map(|row| row.split(" | ").flat_map(|cell| cell.split("| ")).collect())
        .collect()
}

/// What the page lists of the log.
fn listed() -> Table {
    let mut table = Table::new();
    for row in rows("nccl.") {
        let [name, levels, fields, ..] = row[..] else {
            panic!("a row has four cells: {row:?}");
        };
        let name = quoted(name).next().unwrap().to_owned();
        let entry = Entry {
            levels: levels
                .split(", ")
                .map(|level| level.trim().to_owned())
                .collect(),
            fields: quoted(fields).map(str::to_owned).collect(),
        };
        assert!(table.insert(name.clone(), entry).is_none(), "{name} twice");
    }
    table
}

fn sources(directory: &Path, into: &mut Vec<PathBuf>) -> Outcome {
    for entry in directory.read_dir()? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, into)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
    Ok(())
}

/// One use of a macro of `tracing`.
struct Said {
    /// `None` where a macro of the crate's own fills it in.
    level: Option<String>,
    name: String,
    target: String,
    fields: Vec<String>,
}

/// Finds all of them in a file.
fn find(tokens: TokenStream, found: &mut Vec<Said>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        if let TokenTree::Group(group) = token {
            find(group.stream(), found);
        }
        if token.to_string() != "tracing" {
            continue;
        }
        // `tracing :: [$] name ! ( … )`
        let rest: Vec<&TokenTree> = tokens[at + 1..].iter().take(6).collect();
        let texts: Vec<String> = rest.iter().map(|token| token.to_string()).collect();
        let (which, own, bang) = match texts.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            [":", ":", "$", ref which, "!", ..] => (which.to_string(), true, 4),
            [":", ":", ref which, "!", ..] => (which.to_string(), false, 3),
            _ => continue,
        };
        let Some(TokenTree::Group(group)) = rest.get(bang + 1) else {
            continue;
        };
        if group.delimiter() == Delimiter::Parenthesis {
            let is_span = which.ends_with("_span");
            let level = (!own).then(|| which.trim_end_matches("_span").to_owned());
            found.push(arguments(group.stream(), level, is_span));
        }
    }
}

fn arguments(tokens: TokenStream, level: Option<String>, is_span: bool) -> Said {
    let text = |token: &TokenTree| token.to_string().trim_matches('"').to_owned();
    let mut said = Said {
        level,
        name: String::new(),
        target: String::new(),
        fields: Vec::new(),
    };
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for argument in tokens.split(|token| matches!(token, TokenTree::Punct(p) if p.as_char() == ','))
    {
        let words: Vec<String> = argument.iter().map(|token| token.to_string()).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["name", ":", _] => said.name = text(&argument[2]),
            ["target", ":", _] => said.target = text(&argument[2]),
            [literal] if literal.starts_with('"') && is_span && said.name.is_empty() => {
                said.name = text(&argument[0]);
            }
            // The message, and what comes after it is for the message.
            [literal, ..] if literal.starts_with('"') => break,
            ["?" | "%", field] => said.fields.push(field.to_owned()),
            [] => {}
            _ => {
                let name = words.iter().take_while(|word| **word != "=");
                said.fields.push(name.copied().collect());
            }
        }
    }
    said
}

#[test]
fn the_page_lists_what_the_sources_say() -> Outcome {
    let mut files = Vec::new();
    sources(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("nccl/src"),
        &mut files,
    )?;
    let mut said = Table::new();
    for file in files {
        let tokens: TokenStream = std::fs::read_to_string(&file)?.parse()?;
        let mut found = Vec::new();
        find(tokens, &mut found);
        for one in found {
            let place = file.display();
            assert!(!one.name.is_empty(), "{place}: an event without a name");
            assert_eq!(one.target, "nccl", "{place}: {}", one.name);
            let entry = said.entry(one.name).or_default();
            match one.level {
                Some(level) => entry.levels.insert(level),
                None => ["error", "warn"].map(|level| entry.levels.insert(level.into()))[0],
            };
            entry.fields.extend(one.fields);
        }
    }
    let listed = listed();
    let names = |table: &Table| table.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(&said), names(&listed));
    for (name, entry) in &listed {
        assert_eq!(said[name], *entry, "{name}");
    }
    Ok(())
}

/// What a subscriber got to see.
#[derive(Clone, Debug)]
struct Seen {
    name: &'static str,
    target: &'static str,
    level: String,
    fields: BTreeMap<String, String>,
}

struct Collector;

static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

#[derive(Default)]
struct Values(BTreeMap<String, String>);

impl Visit for Values {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

fn see(metadata: &'static tracing::Metadata<'static>, values: Values) {
    SEEN.lock().unwrap().push(Seen {
        name: metadata.name(),
        target: metadata.target(),
        level: metadata.level().to_string().to_lowercase(),
        fields: values.0,
    });
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collector {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut values = Values::default();
        event.record(&mut values);
        see(event.metadata(), values);
    }

    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        _: &tracing::span::Id,
        _: Context<'_, S>,
    ) {
        let mut values = Values::default();
        attributes.record(&mut values);
        see(attributes.metadata(), values);
    }

    fn on_record(
        &self,
        id: &tracing::span::Id,
        more: &tracing::span::Record<'_>,
        context: Context<'_, S>,
    ) {
        let mut values = Values::default();
        more.record(&mut values);
        see(context.span(id).unwrap().metadata(), values);
    }
}

/// Sees everything from here on, of all tests of this file.
fn subscribe() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let subscriber = tracing_subscriber::registry().with(Collector);
        tracing::subscriber::set_global_default(subscriber).unwrap();
    });
}

fn seen(name: &str, comm: &str) -> Vec<Seen> {
    let all = SEEN.lock().unwrap();
    let of = |seen: &&Seen| seen.name == name && seen.fields.get("comm").is_some_and(|c| c == comm);
    all.iter().filter(of).cloned().collect()
}

/// Waits for so many of them.
fn await_seen(name: &str, comm: &str, number: usize) -> Vec<Seen> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let seen = seen(name, comm);
        if seen.len() >= number || Instant::now() > deadline {
            assert_eq!(seen.len(), number, "{name} of {comm}: {seen:?}");
            return seen;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn one_does_not_come(world: World) -> Outcome {
    const NAME: &str = "observed/late";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    if world.rank() == 1 {
        let comm = comm.within(Duration::from_millis(300));
        let late = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait();
        let error = late.unwrap_err();
        // Rank 0 did not come.
        assert_eq!(error.fault().unwrap().rank(), 0, "{error}");
    }
    let fault = await_fault(&comm)?;
    let events = await_seen("nccl.fault", NAME, 2);
    for rank in ["0", "1"] {
        let mine = events.iter().find(|seen| seen.fields["on_rank"] == rank);
        let Seen { level, fields, .. } = mine.ok_or("each rank tells of it")?;
        assert_eq!(level, "error");
        let expected = [
            ("nranks", "2"),
            ("class", "timed_out"),
            ("role", "initiating"),
            ("rank", "0"),
            ("host", fault.host()),
            ("pid", &fault.pid().to_string()),
            ("operation", "all_reduce"),
            ("seq", "2"),
            ("cause", fault.cause()),
        ];
        for (field, value) in expected {
            assert_eq!(
                fields.get(field).map(String::as_str),
                Some(value),
                "{field}"
            );
        }
        assert!(!fields["hint"].is_empty());
    }
    await_seen("nccl.comm.aborting", NAME, 2);
    for aborted in await_seen("nccl.comm.aborted", NAME, 2) {
        assert_eq!(aborted.fields["result"], "freed");
    }
    await_seen("nccl.comm.abort", NAME, 2);
    await_seen("nccl.comm.ready", NAME, 2);
    let spans = seen("nccl.comm.init", NAME);
    assert_eq!(spans.len(), 2, "{spans:?}");
    if world.rank() == 0 {
        let stats = nccl::stats();
        assert_eq!((stats.faults.timed_out, stats.faults.gone), (2, 0));
        assert_eq!((stats.aborts_freed, stats.aborts_leaked), (2, 0));
        assert_eq!((stats.init.count(), stats.abort.count()), (2, 2));
        only_what_is_listed()?;
    }
    Ok(())
}

fn await_fault(comm: &Communicator) -> Outcome<nccl::Fault> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(fault) = comm.fault() {
            return Ok(fault);
        }
        if Instant::now() > deadline {
            return Err("there is a fault".into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_subscriber_gets_what_the_page_lists_when_a_rank_does_not_come() {
    subscribe();
    ranks_as_threads(2, one_does_not_come);
}

/// Everything that was seen, in this process and by now.
fn only_what_is_listed() -> Outcome {
    let listed = listed();
    let all = SEEN.lock().unwrap().clone();
    let ours = all.iter().filter(|seen| seen.target.starts_with("nccl"));
    let mut names = BTreeSet::new();
    for seen in ours {
        let entry = listed
            .get(seen.name)
            .ok_or_else(|| format!("{seen:?} is not listed"))?;
        assert_eq!(seen.target, "nccl", "{seen:?}");
        assert!(entry.levels.contains(&seen.level), "{seen:?}");
        for field in seen.fields.keys().filter(|field| *field != "message") {
            assert!(entry.fields.contains(field), "{field} of {seen:?}");
        }
        names.insert(seen.name);
    }
    assert!(names.contains("nccl.library"), "{names:?}");
    Ok(())
}

fn a_program_aborts(world: World) -> Outcome {
    const NAME: &str = "observed/asked";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    comm.abort("enough")?;
    let [fault] = &await_seen("nccl.fault", NAME, 1)[..] else {
        return Err("one fault".into());
    };
    assert_eq!(
        (&fault.level[..], &fault.fields["class"][..]),
        ("warn", "asked")
    );
    assert_eq!(fault.fields["cause"], "enough");
    assert!(!fault.fields.contains_key("seq"));
    assert_eq!(nccl::stats().faults.asked, 1);
    Ok(())
}

#[test]
fn what_a_program_asks_for_is_a_warning() {
    subscribe();
    ranks_as_threads(1, a_program_aborts);
}

#[test]
fn the_span_of_an_init_says_which_library_it_is() {
    subscribe();
    ranks_as_threads(1, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("observed/init")
            .stream(&stream)
            .build()?;
        let all = SEEN.lock().unwrap();
        let mut spans = all.iter().filter(|seen| seen.name == "nccl.comm.init");
        let version = comm.library().version().to_string();
        assert!(spans.any(|span| span.fields.get("nccl.version") == Some(&version)));
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

#[test]
fn who_is_turned_away_is_counted_and_told() -> Outcome {
    subscribe();
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("door");
    let before = nccl::stats().strangers;
    let stranger = {
        let path = path.clone();
        std::thread::spawn(move || -> std::io::Result<()> {
            let deadline = Instant::now() + Duration::from_secs(10);
            let mut connection = loop {
                match std::os::unix::net::UnixStream::connect(&path) {
                    Ok(connection) => break connection,
                    Err(error) if Instant::now() > deadline => return Err(error),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            };
            connection.write_all(b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n")?;
            while nccl::stats().strangers == 0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(())
        })
    };
    // Nobody else comes, so it listens until its limit.
    let rendezvous = nccl::Rendezvous::unix(&path, 0, 2)?.timeout(Duration::from_secs(3));
    let alone = World::join(rendezvous);
    assert!(alone.is_err());
    stranger.join().map_err(|_| "the stranger panicked")??;
    assert!(nccl::stats().strangers > before);
    let all = SEEN.lock().unwrap();
    assert!(all.iter().any(|seen| seen.name == "nccl.stranger"));
    Ok(())
}

fn everything_is_counted(world: World) -> Outcome {
    const NAME: &str = "observed/counted";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    let next = (world.rank() + 1) % world.size();
    let previous = (world.rank() + world.size() - 1) % world.size();
    let x = stream.clone_htod(&[1.0f32; 10])?;
    let mut y = stream.alloc_zeros::<f32>(10)?;
    for _ in 0..3 {
        comm.group(|group| {
            group.isend(x.slice(..6), next)?;
            group.irecv(y.slice_mut(..6), previous)
        })?
        .wait()?;
    }
    comm.all_reduce(&x, &mut y, ReduceOp::Sum)?.wait()?;
    let part = stream.clone_htod(&[world.rank() as u8; 4])?;
    let mut parts = stream.alloc_zeros::<u8>(4 * world.size())?;
    comm.all_gather(&part, &mut parts)?.wait()?;
    let buffer = stream.alloc_zeros::<f32>(8)?;
    let mut plan = comm.capture(buffer, |capture, buffer| {
        capture.group(|group| group.all_reduce_in_place(buffer, ReduceOp::Sum))
    })?;
    for _ in 0..5 {
        plan.launch()?.wait()?;
    }
    world.barrier("all is done")?;
    counted(world.size() as u64)?;
    world.barrier("all have looked")?;
    drop(plan);
    comm.finalize()?;
    drop(comm);
    let deadline = Instant::now() + Duration::from_secs(10);
    while nccl::stats()
        .communicator(NAME)
        .is_none_or(|comm| comm.ended < 2)
    {
        assert!(Instant::now() < deadline, "both end");
        std::thread::sleep(Duration::from_millis(2));
    }
    counted(world.size() as u64)
}

fn counted(ranks: u64) -> Outcome {
    let stats = nccl::stats();
    let comm = stats
        .communicator("observed/counted")
        .ok_or("it was made")?;
    assert_eq!((comm.groups(), comm.replays()), (3 * ranks, 5 * ranks));
    assert_eq!(comm.calls_of(OperationKind::AllReduce), ranks);
    let of = |kind| {
        let found = comm.operations.iter().find(|one| one.kind == kind);
        found.map_or((0, 0), |one| (one.count, one.bytes))
    };
    assert_eq!(of(OperationKind::Send), (3 * ranks, 3 * ranks * 24));
    assert_eq!(of(OperationKind::Recv), (3 * ranks, 3 * ranks * 24));
    // One by itself, and five by launches.
    assert_eq!(
        of(OperationKind::AllReduce),
        (6 * ranks, ranks * (40 + 5 * 32))
    );
    assert_eq!(of(OperationKind::AllGather), (ranks, ranks * 4 * ranks));
    Ok(())
}

#[test]
fn calls_operations_and_bytes_are_counted_and_stay_counted() {
    ranks_as_threads(2, everything_is_counted);
}

#[test]
fn some_calls_are_timed() {
    ranks_as_threads(1, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("observed/timed")
            .stream(&stream)
            .build()?;
        let mut y = stream.alloc_zeros::<f32>(4)?;
        for _ in 0..130 {
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        }
        let enqueue = nccl::stats().enqueue;
        let [(OperationKind::AllReduce, durations)] = &enqueue[..] else {
            return Err(format!("one kind was timed: {enqueue:?}").into());
        };
        assert_eq!(durations.count(), 3); // the 2nd, the 66th, the 130th
        assert!(durations.longest() >= durations.mean());
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// The watchdog looks when it looks.
fn await_took(comm: &str, kind: OperationKind, number: u64) -> Outcome<nccl::stats::Durations> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let stats = nccl::stats();
        let comm = stats.communicator(comm).ok_or("it was made")?;
        let found = comm.took.iter().find(|(known, _)| *known == kind);
        match found {
            Some((_, took)) if took.count() >= number => return Ok(took.clone()),
            _ if Instant::now() > deadline => return Err(format!("{:?}", comm.took).into()),
            _ => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

fn calls_take_time_on_their_stream(world: World) -> Outcome {
    const NAME: &str = "observed/took";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    let before = await_took(NAME, OperationKind::AllReduce, world.size() as u64)?;
    assert!(before.sum() > Duration::ZERO);
    world.barrier("all have looked")?;
    // After a pause the next call is marked.
    std::thread::sleep(Duration::from_millis(30));
    let late = Duration::from_millis(150);
    if world.rank() == 1 {
        std::thread::sleep(late);
    }
    let called = Instant::now();
    let mut z = stream.alloc_zeros::<f32>(4)?;
    comm.broadcast_in_place(&mut z, 1)?.wait()?;
    let whole = called.elapsed();
    let waited = await_took(NAME, OperationKind::Broadcast, world.size() as u64)?;
    if world.rank() == 0 {
        // With the wait for the other, and no more than a watch saw.
        assert!(waited.longest() > late - late / 3, "{waited:?}");
        assert!(
            waited.longest() <= whole + late / 3,
            "{waited:?} of {whole:?}"
        );
    }
    Ok(world.barrier("all have seen it")?)
}

#[test]
fn what_calls_take_on_their_stream_is_sampled() {
    ranks_as_threads(2, calls_take_time_on_their_stream);
}

/// Rank 1 stays away from a call, and all go on in the next epoch.
fn a_fault_is_recovered_from(world: World) -> Outcome<World> {
    const NAME: &str = "observed/broken";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    if world.rank() == 0 {
        let comm = comm.within(Duration::from_millis(200));
        let late = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
        assert!(late.and_then(|late| late.wait()).is_err());
    }
    await_fault(&comm)?;
    Ok(world.next_epoch(Duration::from_secs(20))?)
}

#[test]
fn going_on_after_a_fault_is_timed_until_there_is_a_communicator() {
    ranks_as_threads(2, |world| -> Outcome {
        let begun = Instant::now();
        let next = a_fault_is_recovered_from(world)?;
        assert_eq!(nccl::stats().recover.count(), 0, "there is none yet");
        next.barrier("all are there")?;
        let pause = Duration::from_millis(50);
        std::thread::sleep(pause);
        let stream = support::device(&next)?.new_stream()?;
        for name in ["observed/mended", "observed/another"] {
            next.communicator(name).stream(&stream).build()?;
        }
        next.barrier("all have made theirs")?;
        let detect = nccl::stats().detect;
        assert_eq!(detect.count(), 1, "on the rank that gave up");
        let limit = Duration::from_millis(200);
        assert!(
            (limit..begun.elapsed()).contains(&detect.longest()),
            "{detect:?}"
        );
        let recover = nccl::stats().recover;
        assert_eq!(recover.count(), 2, "once on each rank");
        assert!(recover.mean() >= pause, "{recover:?}");
        assert!(recover.longest() <= begun.elapsed(), "{recover:?}");
        Ok(next.barrier("all have looked")?)
    });
}

/// What a layer of the program's own keeps of a span.
struct Fields(String);

struct Keeper;

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Keeper {
    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        id: &tracing::span::Id,
        context: Context<'_, S>,
    ) {
        let mut values = Values::default();
        attributes.record(&mut values);
        let fields = values
            .0
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        let fields = Fields(fields.collect::<Vec<_>>().join(" "));
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }
}

fn calls_are_made_in_spans(world: World) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let comm = world
        .communicator("observed/spans")
        .stream(&stream)
        .build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    let mut call = || comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait();
    // Nobody listens.
    let unheard = tracing::info_span!("step", number = 16).entered();
    call()?;
    drop(unheard);
    let registry: tracing::Dispatch = tracing_subscriber::registry().with(Keeper).into();
    let listening = tracing::dispatcher::set_default(&registry);
    let step = tracing::info_span!("step", number = 17).entered();
    call()?;
    let inner = tracing::info_span!("request", user = "ada").entered();
    call()?;
    let id = inner.id().ok_or("somebody listens")?.into_u64();
    drop(inner);
    call()?;
    drop(step);
    call()?;
    drop(listening);
    call()?;
    let names = |recording: &nccl::recorder::Recording| -> Vec<Option<String>> {
        let spans = recording.calls.iter().map(|call| call.span.as_ref());
        spans
            .map(|span| span.map(|span| span.name.clone()))
            .collect()
    };
    let expected = [
        None,
        Some("step"),
        Some("request"),
        Some("step"),
        None,
        None,
    ];
    let expected = expected.map(|name| name.map(str::to_owned));
    assert_eq!(names(&comm.recording()), expected);

    let again = tracing::dispatcher::set_default(&registry);
    let open = tracing::info_span!("step", number = 18).entered();
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    nccl::recorder::describe_spans(move |asked| {
        if asked == id {
            panic!("of one that is over");
        }
        let registry = registry.downcast_ref::<tracing_subscriber::Registry>()?;
        let span = registry.span(&tracing::Id::from_u64(asked))?;
        let fields = span.extensions().get::<Fields>()?.0.clone();
        Some(fields)
    });
    let recording = comm.recording();
    let spans: Vec<_> = recording
        .calls
        .iter()
        .filter_map(|call| call.span.as_ref())
        .collect();
    let [step, request, .., last] = &spans[..] else {
        return Err(format!("four in spans: {spans:?}").into());
    };
    assert_eq!(
        (request.id, &request.about),
        (id, &None),
        "its description panics"
    );
    assert_eq!(step.about, None, "it is over");
    assert_eq!(last.about.as_deref(), Some("number=18"));
    drop(open);
    drop(again);
    let timeline = nccl::recorder::Timeline::merge(vec![nccl::recorder::snapshot()])?;
    let page = timeline.to_html();
    assert!(
        page.contains("in span \\\"step\\\", number"),
        "the page's tip says it: {page}"
    );
    Ok(())
}

#[test]
fn a_call_says_in_which_span_of_the_program_it_was_made() {
    ranks_as_threads(1, calls_are_made_in_spans);
}

#[test]
fn a_trace_of_opentelemetry_holds_both_ranks_and_the_recorder_names_it() {
    let example = nccl_tools::testing::example("opentelemetry");
    let output = std::process::Command::new(example).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let of = |beginning: &str| -> Vec<&str> {
        let lines = said.lines().filter(|line| line.starts_with(beginning));
        lines
            .map(|line| line.split_once("trace ").unwrap().1)
            .collect()
    };
    let trace = |line: &&str| line.split_once(' ').unwrap().0.to_owned();
    let (zero, one) = (
        of("rank 0: all_reduce #1 in request"),
        of("rank 1: all_reduce #1 in request"),
    );
    assert_eq!((zero.len(), one.len()), (1, 1), "{said}");
    assert_eq!(trace(&zero[0]), trace(&one[0]), "{said}");
    let exported = of("exported: ");
    let requests: Vec<_> = exported
        .iter()
        .filter(|line| line.contains(" request "))
        .collect();
    assert_eq!(requests.len(), 2, "{said}");
    assert!(
        requests.iter().all(|line| trace(line) == trace(&zero[0])),
        "{said}"
    );
    let inits = exported.iter().filter(|line| {
        line.contains(" nccl.comm.init ")
            && line.contains("comm=model/tp")
            && line.contains("communicator ready")
    });
    assert_eq!(inits.count(), 2, "{said}");
}

#[test]
fn the_page_shows_lines_of_the_example() {
    let (_, text) = PAGE.split_once("### With OpenTelemetry").unwrap();
    let (_, code) = text.split_once("```rust,ignore\n").unwrap();
    let (code, _) = code.split_once("```").unwrap();
    let example = include_str!("../examples/opentelemetry.rs");
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat(example).contains(&flat(code)), "{code}");
}

mod metrics {
    use std::collections::BTreeSet;

    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::{
        Duration, Outcome, ReduceOp, World, quoted, ranks_as_threads, rows, support, until_skewed,
    };

    fn ranks_work(world: World) -> Outcome {
        let world = super::a_fault_is_recovered_from(world)?;
        until_skewed(&world, "observed/metrics/skewed")?;
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("observed/metrics")
            .stream(&stream)
            .build()?;
        let mut y = stream.alloc_zeros::<f32>(4)?;
        for _ in 0..4 {
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        }
        world.barrier("all is done")?;
        if world.rank() == 1 {
            return Ok(());
        }
        super::await_took("observed/metrics", super::OperationKind::AllReduce, 1)?;
        comm.abort("an abort has a duration")?;
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            nccl::metrics::sample();
            nccl::metrics::sample();
        });
        let text = handle.render();
        let name = |line: &str| {
            let (name, _) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
            Some(name.to_owned())
        };
        let mut exported: BTreeSet<String> = text.lines().filter_map(name).collect();
        // Threads have none; the other test has.
        assert!(exported.insert(AGE.to_owned()), "{text}");
        let listed = rows("nccl_");
        let names = listed.iter().filter_map(|row| quoted(row[0]).next());
        let listed: BTreeSet<String> = names.map(str::to_owned).collect();
        assert_eq!(exported, listed, "{text}");
        for expected in [
            r#"nccl_ops_total{comm="observed/metrics",op="all_reduce"} 8"#,
            r#"nccl_bytes_total{comm="observed/metrics",op="all_reduce"} 128"#,
            // Sampled twice, recorded once: three communicators of two ranks.
            "nccl_init_seconds_count 6",
            "nccl_recover_seconds_count 2",
        ] {
            assert!(
                text.lines().any(|line| line == expected),
                "{expected}: {text}"
            );
        }
        Ok(())
    }

    const AGE: &str = "nccl_peer_heartbeat_age_seconds";

    fn a_process_is_heard(world: World) -> Outcome {
        if world.rank() == 1 {
            return Ok(world.barrier("seen")?);
        }
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        let beginning = format!("{AGE}{{peer=\"1\"}} ");
        let age = || {
            metrics::with_local_recorder(&recorder, nccl::metrics::sample);
            let text = handle.render();
            let line = text.lines().find_map(|line| line.strip_prefix(&beginning));
            line.and_then(|age| age.parse::<f64>().ok())
        };
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        let until = |wanted: &dyn Fn(f64) -> bool| {
            while !age().is_some_and(wanted) {
                assert!(std::time::Instant::now() < deadline, "{}", handle.render());
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        until(&|age| age < 5.0);
        world.barrier("seen")?;
        until(&f64::is_nan);
        Ok(())
    }

    #[test]
    fn another_process_is_heard_until_it_is_gone() {
        if support::needs_processes(2) {
            super::support::ranks_as_processes(2, a_process_is_heard);
        }
    }

    #[test]
    fn the_metrics_are_those_of_the_page() {
        ranks_as_threads(2, ranks_work);
    }

    #[test]
    fn a_sampler_ends_when_it_is_dropped() -> Outcome {
        let sampler = nccl::metrics::Sampler::start(Duration::from_secs(3600))?;
        let dropped = std::time::Instant::now();
        drop(sampler);
        assert!(dropped.elapsed() < Duration::from_secs(60));
        Ok(())
    }
}

/// A rank that is late by this, where others are asked after [`PATIENCE`].
const LATE: Duration = Duration::from_millis(700);
const PATIENCE: Duration = Duration::from_millis(150);

fn one_comes_late(world: World) -> Outcome {
    const NAME: &str = "observed/straggler";
    let stream = support::device(&world)?.new_stream()?;
    let timeouts = nccl::Timeouts::new().straggler(PATIENCE);
    let comm = world.communicator(NAME).stream(&stream).timeouts(timeouts);
    let comm = comm.build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    // Numbers of calls differ among ranks from here on.
    if let Some(peer) = [Some(1), Some(0), None][world.rank()] {
        let x = stream.alloc_zeros::<f32>(4)?;
        let messages = comm.group(|group| {
            group.isend(&x, peer)?;
            group.irecv(&mut y, peer)
        })?;
        messages.wait()?;
    }
    world.barrier("begin")?;
    if world.rank() == 2 {
        world.phase("load shards");
        std::thread::sleep(LATE);
    }
    let sum = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
    let own = if world.rank() == 2 { 2 } else { 3 };
    assert_eq!(sum.sequence(), own);
    sum.wait()?;
    let told = await_seen("nccl.straggler", NAME, 3);
    for rank in ["0", "1", "2"] {
        let mine = told.iter().find(|seen| seen.fields["on_rank"] == rank);
        let Seen { level, fields, .. } = mine.ok_or("each rank tells of it")?;
        assert_eq!(level, "warn");
        let expected = [
            ("rank", "2"),
            ("op", "all_reduce"),
            ("seq", "3"),
            ("phase", "load shards"),
            ("answers", "true"),
            ("more", "0"),
        ];
        for (name, value) in expected {
            assert_eq!(fields[name], value, "{name} of {fields:?}");
        }
        assert!(fields["last"].contains("all_reduce #1"), "{fields:?}");
        let behind: u128 = fields["behind_ms"].parse()?;
        assert!(behind >= PATIENCE.as_millis(), "{behind}");
    }
    let entered = await_seen("nccl.straggler.entered", NAME, 3);
    let behind: u128 = entered[0].fields["behind_ms"].parse()?;
    assert!((LATE.as_millis() - 50..5000).contains(&behind), "{behind}");
    assert!(nccl::stats().stragglers >= 3);
    world.barrier("end")?;
    Ok(())
}

#[test]
fn a_straggler_is_named_on_every_rank_with_its_phase_and_heard_of_when_it_comes() {
    subscribe();
    ranks_as_threads(3, one_comes_late);
}

/// All have called it, and one of them has other work on its stream.
fn one_is_busy(world: World) -> Outcome {
    const NAME: &str = "observed/busy";
    let stream = support::device(&world)?.new_stream()?;
    let timeouts = nccl::Timeouts::new().straggler(PATIENCE);
    let comm = world.communicator(NAME).stream(&stream).timeouts(timeouts);
    let comm = comm.build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    let gate = (world.rank() == 1).then(|| support::gate::Gate::closed_on(&stream));
    let gate = gate.transpose()?;
    world.barrier("begin")?;
    let sum = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
    std::thread::sleep(4 * PATIENCE);
    drop(gate);
    sum.wait()?;
    let told = seen("nccl.straggler", NAME);
    assert!(told.is_empty(), "{told:?}");
    Ok(())
}

#[test]
fn nobody_is_called_a_straggler_while_all_have_called_the_operation() {
    if !support::needs_emulator("a stream that is held up") {
        return;
    }
    subscribe();
    ranks_as_threads(2, one_is_busy);
}

/// Works on a communicator of two ranks, of which the second is always later, until that shows.
fn until_skewed(world: &World, name: &str) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator(name).stream(&stream).build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    let begun = Instant::now();
    loop {
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(40));
        }
        comm.all_reduce_in_place(&mut y, ReduceOp::Max)?.wait()?;
        let stats = nccl::stats();
        let skew = &stats.communicator(name).ok_or("it counts")?.arrival_skew;
        // They stop together.
        let mut done = stream.clone_htod(&[u32::from(skew.samples.count() > 0)])?;
        comm.all_reduce_in_place(&mut done, ReduceOp::Min)?.wait()?;
        if stream.clone_dtoh(&done)? == [1] {
            let mean = skew.samples.mean();
            assert!(mean < Duration::from_secs(5), "{mean:?}");
            let times: u64 = skew.last.iter().map(|(_, times)| times).sum();
            assert_eq!(times, skew.samples.count());
            return Ok(());
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "no sample");
    }
}

#[test]
fn how_far_apart_the_ranks_come_is_sampled() {
    ranks_as_threads(2, |world| until_skewed(&world, "observed/skewed"));
}
