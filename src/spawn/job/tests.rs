use super::*;

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

fn run(size: usize, script: &str) -> Ended {
    let job = Job::new(size)
        .output(Output::Collect)
        .deadline(Duration::from_secs(30));
    job.run(|_| shell(script)).unwrap()
}

fn failure(ended: &Ended) -> &RankFailure {
    match &ended.outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_that_end_well_make_a_job_that_ends_well() {
    let ended = run(3, "echo rank $NCCL_RUN_RANK of $NCCL_RUN_WORLD_SIZE");
    assert!(matches!(ended.outcome, Outcome::Succeeded), "{ended:?}");
    assert_eq!(ended.ranks[2].stdout, ["rank 2 of 3"]);
}

#[test]
fn the_first_failure_ends_all_and_is_named_with_its_last_words() {
    let begun = Instant::now();
    let ended = run(
        4,
        "if [ $NCCL_RUN_RANK = 2 ]; then echo ouch >&2; exit 5; else exec sleep 60; fi",
    );
    let failure = failure(&ended);
    assert_eq!((failure.end.rank, failure.code()), (2, 5));
    assert_eq!(failure.end.stderr, ["ouch"]);
    assert_eq!(failure.ended, [0, 1, 3]);
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_killed_rank_is_the_cause_even_if_another_complains_first() {
    // Rank 0 returns an error at once; rank 1 is killed a moment later.
    let ended = run(
        2,
        "if [ $NCCL_RUN_RANK = 0 ]; then exit 3; else sleep 0.1; kill -9 $$; fi",
    );
    let failure = failure(&ended);
    assert_eq!((failure.end.rank, failure.code()), (1, 137));
}

#[test]
fn ranks_that_ignore_sigterm_or_are_stopped_end_all_the_same() {
    let begun = Instant::now();
    let ended = run(
        3,
        "case $NCCL_RUN_RANK in
            0) exit 1;;
            1) trap '' TERM; while :; do sleep 1; done;;
            2) kill -STOP $$;;
         esac",
    );
    assert_eq!(failure(&ended).end.rank, 0);
    assert!(
        ended.ranks.iter().all(|rank| rank.exit.is_some()),
        "{ended:?}"
    );
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_deadline_ends_all_and_tells_what_each_was_doing() {
    let job = Job::new(2)
        .output(Output::Collect)
        .deadline(Duration::from_millis(300));
    let ended = job.run(|_| shell("echo waiting; exec sleep 60")).unwrap();
    let Outcome::TimedOut(states) = &ended.outcome else {
        panic!("{ended:?}")
    };
    for part in [
        "rank 0",
        "rank 1",
        "was running",
        "sleep",
        "stdout: waiting",
    ] {
        assert!(states.contains(part), "{states:?} lacks {part:?}");
    }
    assert!(
        ended.ranks.iter().all(|rank| rank.exit.is_some()),
        "{ended:?}"
    );
}

#[test]
fn the_directory_of_a_job_is_private_and_goes_with_it() {
    let ended = run(
        1,
        "d=$(dirname ${NCCL_RUN_RENDEZVOUS#unix:}); stat -c '%a' $d; echo $d",
    );
    let [mode, directory] = &ended.ranks[0].stdout[..] else {
        panic!("{ended:?}")
    };
    assert_eq!(mode, "700");
    assert!(
        !std::path::Path::new(directory).exists(),
        "{directory} is still there"
    );
}

#[test]
fn a_rank_that_prints_without_end_does_not_stop_the_job() {
    let ended = run(
        2,
        "if [ $NCCL_RUN_RANK = 0 ]; then exec yes; else sleep 0.3; exit 4; fi",
    );
    assert_eq!(failure(&ended).end.rank, 1);
}

#[test]
fn only_the_last_lines_are_kept_and_no_progress() {
    let script = r"printf '1\n\r1/3\n\r2/3\n' >&2; seq 2 600 >&2; printf end >&2";
    let ended = run(1, script);
    let said = &ended.ranks[0].stderr;
    assert_eq!(said.len(), 500);
    assert_eq!((&*said[0], &*said[499]), ("102", "end"));
    let short = run(1, r"printf 'one\n\r1/3\ntwo\n' >&2");
    assert_eq!(short.ranks[0].stderr, ["one", "two"]);
}
