//! Command lines, and their results.

use super::*;

fn no_gpus() -> Result<Vec<String>, String> {
    Ok(Vec::new())
}

fn read(line: &str) -> Result<Asked, String> {
    parse(line.split(' ').map(OsString::from), |_| None, no_gpus)
}

fn options(line: &str) -> Options {
    match read(line) {
        Ok(Asked::Run(options)) => *options,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn everything_behind_the_program_is_its_own() {
    for line in [
        "-n 4 -- prog -n 2 --help",
        "-n4 prog -n 2 --help",
        "--ranks=4 -- prog -n 2 --help",
        "-np 4 prog -n 2 --help",
        "-n=4 prog -n 2 --help",
        "--np 4 -- prog -n 2 --help",
        "--np=4 prog -n 2 --help",
    ] {
        let options = options(line);
        assert_eq!((options.ranks, options.program), (4, "prog".into()));
        assert_eq!(options.arguments, ["-n", "2", "--help"]);
    }
    assert_eq!(options("-n 1 -- prog -- x").arguments, ["--", "x"]);
}

#[test]
fn several_nodes_are_told_apart() {
    let options = options("-n 8 --nodes 2 --node-rank 1 --rendezvous tcp:a:1-9 p");
    assert_eq!((options.nodes, options.node_rank), (2, 1));
}

#[test]
fn there_may_be_several_meeting_places() {
    for places in ["tcp:a:1,tcp:b:2-3,tcp:[::1]:4", "unix:/a,b"] {
        options(&format!("-n 1 --rendezvous {places} p"));
    }
}

#[test]
fn ranks_are_restarted_all_together_or_alone() {
    let restart = |line| options(line).restart;
    assert_eq!(restart("-n 1 --restarts 2 p"), Restart::All);
    assert_eq!(restart("-n 1 --restarts 2 --restart all p"), Restart::All);
    assert_eq!(
        restart("-n 1 --restarts 2 --restart failed p"),
        Restart::Failed
    );
}

#[test]
fn times_are_read_in_every_unit() {
    for (text, expected) in [
        ("500ms", 500),
        ("5s", 5000),
        ("5", 5000),
        ("1.5", 1500),
        ("2m", 120_000),
        ("0", 0),
    ] {
        assert_eq!(time("--grace", text), Ok(Duration::from_millis(expected)));
    }
}

#[test]
fn a_wrong_command_line_is_one_sentence_with_the_value() {
    for (line, words) in [
        ("", &["which program"][..]),
        ("-n 4", &["which program", "--help"]),
        ("prog", &["how many ranks", "-n"]),
        ("-n 0 prog", &["-n 0", "1 is the least"]),
        ("-npx prog", &["-npx is not an option", "-np N"]),
        ("-np4 prog", &["-np4 is not an option", "-np N"]),
        ("-np four prog", &["-np four", "not a number"]),
        ("-np", &["-n needs a value"]),
        ("-n four prog", &["-n four", "not a number"]),
        ("-n", &["-n needs a value"]),
        ("--frobnicate prog", &["--frobnicate", "--help"]),
        ("-n 1 --grace soon prog", &["--grace soon", "5s"]),
        (
            "-n 1 --restarts 2 --restart some prog",
            &["--restart some", "all", "failed"],
        ),
        ("-n 1 --restart failed prog", &["--restarts N"]),
        (
            "-n 1 --keep-others --restarts 2 prog",
            &["exclude", "--restart failed"],
        ),
        (
            "-n 1 --rendezvous tcp:a:1,tcp:b prog",
            &["--rendezvous tcp:b", "tcp:HOST:PORT"],
        ),
        ("-n 1 --grace -3s prog", &["--grace -3s", "5s"]),
        ("-n 1 --nodes 2 prog", &["--node-rank 0 to 1"]),
        (
            "-n 1 --nodes 2 --node-rank 2 prog",
            &["--node-rank 2", "last is 1"],
        ),
        (
            "-n 1 --nodes 2 --node-rank 0 prog",
            &["--rendezvous tcp:HOST:PORT"],
        ),
        (
            "-n 1 --rendezvous nowhere prog",
            &["--rendezvous nowhere", "unix:PATH"],
        ),
        ("-n 1 --rendezvous tcp:a:99999 prog", &["tcp:a:99999"]),
        (
            "-n 1 --rendezvous tcp:fd00::1:29400 prog",
            &["tcp:fd00::1:29400", "tcp:[IPV6]:PORT"],
        ),
        (
            "-n 1 --rendezvous tcp:a:29415-29400 prog",
            &["tcp:a:29415-29400"],
        ),
        ("-n 1 --rendezvous tcp:a:0-5 prog", &["tcp:a:0-5"]),
        ("-n 1 --no-prefix --tag-time prog", &["exclude"]),
        ("-n 2 --one-gpu-each prog", &["2 ranks", "0 GPUs"]),
    ] {
        let sentence = read(line).unwrap_err();
        assert!(!sentence.contains('\n'), "{line}: {sentence}");
        for word in words {
            assert!(sentence.contains(word), "{line}: {word:?} in {sentence:?}");
        }
    }
    let two_secrets = parse(
        ["-n", "1", "prog"].map(OsString::from),
        |_| Some("x".into()),
        no_gpus,
    );
    assert!(two_secrets.unwrap_err().contains("leave one"));
}

#[test]
fn a_secret_and_the_path_of_its_file_may_be_any_bytes() {
    let bytes = b"\xff\xfe\x80binary".to_vec();
    let with = |set: &str| {
        let read = parse(
            ["-n", "1", "prog"].map(OsString::from),
            |name| (name == set).then(|| OsString::from_vec(bytes.clone())),
            no_gpus,
        );
        match read {
            Ok(Asked::Run(options)) => *options,
            other => panic!("{set}: {other:?}"),
        }
    };
    assert_eq!(with("NCCL_RUN_SECRET").secret.as_ref(), Some(&bytes));
    let path = PathBuf::from(OsString::from_vec(bytes.clone()));
    assert_eq!(with("NCCL_RUN_SECRET_FILE").secret_file, Some(path));
}

#[test]
fn there_are_as_many_ranks_as_gpus_unless_told() {
    let found = vec![String::from("0"), String::from("3")];
    let gpus = || Ok(found.clone());
    let read = |line: &str| match parse(line.split(' ').map(OsString::from), |_| None, gpus) {
        Ok(Asked::Run(options)) => *options,
        other => panic!("{other:?}"),
    };
    assert_eq!(read("prog").ranks, 2);
    assert_eq!(read("--one-gpu-each prog").devices, Some(found.clone()));
    assert_eq!(read("-n 5 prog").ranks, 5);
}

#[test]
fn the_help_knows_every_option() {
    let Ok(Asked::Print(help)) = read("-h") else {
        panic!("no help")
    };
    for option in [
        "--ranks",
        "--nodes",
        "--node-rank",
        "--rendezvous",
        "--secret-file",
        "--job",
        "--interface",
        "--one-gpu-each",
        "--no-prefix",
        "--tag-time",
        "--log-dir",
        "--nccl-debug",
        "--tail",
        "--linger",
        "--grace",
        "--restarts",
        "--help",
        "--version",
    ] {
        assert!(help.contains(&format!("{option} ")), "{option}");
    }
    for line in help.lines() {
        assert!(line.len() <= 110, "{line}");
    }
}
