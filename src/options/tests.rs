use super::*;
use crate::failure::Exit;
use crate::program;

fn options(line: &str) -> Options {
    match parse(&program::ALL_TO_ALL, line.split_whitespace()) {
        Ok(Command::Run(options)) => *options,
        other => panic!("{line}: {other:?}"),
    }
}

fn refusal(line: &str) -> String {
    match parse(&program::ALL_TO_ALL, line.split_whitespace()) {
        Err(failure) => {
            assert_eq!(failure.exit(), Exit::Usage, "{line}");
            failure.to_string()
        }
        Ok(_) => panic!("{line} was accepted"),
    }
}

#[test]
fn nothing_said_means_one_kibibyte_to_sixteen_mebibytes_doubled_and_verified() {
    let options = options("");
    assert_eq!(options, Options::default());
    assert_eq!(options.sweep.sizes().count(), 15);
    assert_eq!(
        (options.checks, options.ranks, options.spawn),
        (1, None, None)
    );
}

#[test]
fn letters_and_long_names_take_values_in_every_usual_spelling() {
    for line in [
        "-b8 -e64",
        "-b 8 -e 64",
        "--minbytes=8 --maxbytes 64",
        "--minb 8 --maxb=64",
    ] {
        let sweep = options(line).sweep;
        assert_eq!((sweep.min, sweep.max), (8, 64), "{line}");
    }
    assert_eq!(options("--agg-iters 3").aggregate, 3);
}

#[test]
fn every_option_of_nccl_tests_is_known() {
    let line = "-t 2 -g 1 -b 8 -e 128M -i 1M -f 2 -n 5 -m 2 -w 3 -N 2 -p 1 -c 2 -o max -d half -r 0 \
                -z 3 -y 1 -T 9 -G 0 -C 1 -a 3 -R 0 -x 2 -D 0 -V 16 -J out.json -S 1 -M 1 -u 1 -I 1 \
                -K 2";
    let options = options(line);
    assert_eq!(options.sweep.step, Step::Factor(2));
    assert_eq!(
        (options.iterations, options.aggregate, options.warm_up),
        (5, 2, 3)
    );
    assert_eq!((options.cycles, options.checks), (Some(2), 2));
    assert_eq!(options.element.map(|element| element.name), Some("half"));
    assert_eq!(options.blocking, Blocking::WaitAndUntimedBarrier);
    assert_eq!(options.average, Average::Max);
    assert_eq!(options.timeout, Duration::from_secs(9));
    assert_eq!(
        (options.ranks, options.spawn),
        (Some(2), Some(Spawn::Threads))
    );
    assert_eq!(options.cta_policy, Some(2));
    assert_eq!(
        (options.per_iteration, options.per_iteration_skip),
        (true, 2)
    );
    assert!(options.cpu_time && options.timestamps && options.memory && options.null_stream);
}

#[test]
fn a_step_in_bytes_is_used_unless_a_factor_is_given() {
    assert_eq!(options("-i 512").sweep.step, Step::Bytes(512));
    assert_eq!(options("-i 512 -f 4").sweep.step, Step::Factor(4));
    assert_eq!(options("-i 512 -f 1").sweep.step, Step::Bytes(512));
    assert_eq!(options("-f 1").sweep.step, Step::Bytes(1 << 20));
}

#[test]
fn all_types_and_endless_cycles_have_their_own_words() {
    assert_eq!(options("-d all").element, None);
    assert_eq!(options("-N 0").cycles, None);
    assert_eq!(options("-T 0").timeout, DEFAULT_TIMEOUT);
}

#[test]
fn ranks_may_be_said_in_nccl_tests_way() {
    assert_eq!(options("-g 8").ranks, Some(8));
    assert_eq!(options("-g 8").spawn, None);
    assert_eq!(options("-t 2 -g 4").ranks, Some(8));
    assert_eq!(options("--ranks 8 -t 2 -g 4").ranks, Some(8));
}

#[test]
fn help_wins_over_what_follows_it() {
    assert_eq!(parse(&program::ALL_TO_ALL, ["-h", "-Q"]), Ok(Command::Help));
    use program::{ALL_REDUCE, ALL_TO_ALL, ALL_TO_ALL_V, SEND_RECV};
    for program in [&ALL_TO_ALL, &ALL_TO_ALL_V, &SEND_RECV, &ALL_REDUCE] {
        let text = usage("some_perf", program);
        for entry in table::TABLE {
            let only = [Name::Algorithm, Name::RanksPerNode].contains(&entry.name);
            let missing = only && program.algorithms.is_empty();
            assert_eq!(
                text.contains(&format!("--{}", entry.long)),
                !missing,
                "{}",
                entry.long
            );
        }
        for line in text.lines() {
            assert!(line.chars().count() <= 120, "{line}");
        }
        for algorithm in program.algorithms {
            assert!(text.contains(algorithm.about), "{text}");
        }
    }
}

#[test]
fn what_cannot_be_obeyed_is_refused_in_one_sentence_that_names_the_option() {
    let cases: &[(&str, &[&str])] = &[
        ("-b 2K -e 1K", &["-b", "2048", "-e", "1024"]),
        ("-b 1G", &["-b", "-e"]),
        ("-b abc", &["-b", "abc", "size"]),
        ("-b -5", &["-b", "negative"]),
        ("-e 8T", &["-e", "8T"]),
        ("-e 1e30", &["-e", "address"]),
        ("-b 0", &["-b", "-i"]),
        ("-i 0", &["-i"]),
        ("-f 0", &["-f", "1"]),
        ("-n 0", &["-n", "1"]),
        ("-n 1.5", &["-n", "whole number"]),
        ("-n 99999999999", &["-n"]),
        ("-m 0", &["-m"]),
        ("-c -1", &["-c"]),
        ("-z 4", &["-z", "0 to 3"]),
        ("-a 9", &["-a", "0 to 3"]),
        ("-C 2", &["-C"]),
        ("-d f32", &["-d", "f32", "float"]),
        ("-o mean", &["-o", "mean", "sum"]),
        ("-J out.txt", &["-J", ".json"]),
        ("-J", &["-J", "value"]),
        ("-T -1", &["-T"]),
        ("-K 3", &["-K", "-I"]),
        ("-I 1 -n 5 -K 5", &["-K", "-n"]),
        ("-R 3", &["-R", "0 to 2"]),
        ("-G -1", &["-G"]),
        ("-G 3 -I 1", &["-I", "-G 3"]),
        ("-G 3 -z 3", &["-z", "-G 3"]),
        ("-G 3 --memcpy_ratio 1", &["--memcpy_ratio", "-G 3"]),
        (
            "--algo fastest",
            &["--algo", "fastest", "auto, native, grouped, chunked"],
        ),
        ("--algo native,native", &["--algo", "native", "twice"]),
        ("--algo native,", &["--algo"]),
        ("--plot out.png", &["--plot", ".svg"]),
        ("-D 1", &["-D", "not available"]),
        ("-V 200", &["-V"]),
        ("-Q", &["-Q", "--help"]),
        ("--frobnicate", &["--frobnicate", "--help"]),
        ("--step 3", &["--step", "--stepfactor", "--stepbytes"]),
        ("--ranks 0", &["--ranks"]),
        ("--ranks 99999", &["--ranks", "1024"]),
        ("--ranks 3 -t 2", &["--ranks", "-t"]),
        ("-t 100 -g 100", &["-t", "-g", "1024"]),
        ("--spawn fibers", &["--spawn", "threads"]),
        ("-t 2 --spawn processes", &["-t", "--spawn"]),
        ("perf", &["perf", "option"]),
    ];
    for (line, words) in cases {
        let sentence = refusal(line);
        assert!(!sentence.contains('\n'), "{line}: {sentence}");
        for word in *words {
            assert!(
                sentence.contains(word),
                "{line}: {sentence:?} lacks {word:?}"
            );
        }
    }
}

#[test]
fn algorithms_are_named_in_the_order_in_which_they_are_measured() {
    let names = |line: &str| match options(line).algorithms {
        Algorithms::Named(algorithms) => algorithms.iter().map(|one| one.name).collect(),
        other => vec![match other {
            Algorithms::All => "all",
            _ => "default",
        }],
    };
    assert_eq!(names(""), ["default"]);
    assert_eq!(names("--algo grouped"), ["grouped"]);
    assert_eq!(names("--algo native,auto"), ["native", "auto"]);
    assert_eq!(names("--algo all"), ["all"]);
    let failure = parse(&program::ALL_REDUCE, ["--algo", "native"]).unwrap_err();
    assert!(failure.to_string().contains("only one way"), "{failure}");
}

#[test]
fn what_cannot_be_grouped_is_refused_with_groups() {
    const ALONE: Algorithm = Algorithm {
        name: "alone",
        in_groups: false,
        ..program::ALL_TO_ALL.algorithms[0]
    };
    let own = Program {
        algorithms: const { &[ALONE] },
        ..program::ALL_TO_ALL
    };
    let parse = |line: &str| parse(&own, line.split_whitespace());
    assert!(parse("--algo alone").is_ok());
    for line in ["--algo alone -m 2", "--algo alone -G 2"] {
        let failure = parse(line).unwrap_err().to_string();
        assert!(
            failure.contains("alone") && failure.contains("-m and -G"),
            "{failure}"
        );
    }
    // `all` means all that are supported.
    assert!(parse("--algo all -G 2").is_ok());
}

#[test]
fn operators_are_for_programs_whose_rows_have_one() {
    let operators = |program, line: &str| match parse(program, line.split_whitespace()) {
        Ok(Command::Run(options)) => options.operators,
        other => panic!("{line}: {other:?}"),
    };
    assert_eq!(operators(&program::ALL_REDUCE, ""), [ReduceOp::Sum]);
    assert_eq!(operators(&program::ALL_REDUCE, "-o avg"), [ReduceOp::Avg]);
    assert_eq!(operators(&program::SEND_RECV, "-o all").len(), 5);
    assert_eq!(operators(&program::ALL_TO_ALL, "-o mulsum"), []);
    assert_eq!(operators(&program::ALL_TO_ALL, "-o all"), []);
    let failure = parse(&program::ALL_REDUCE, ["-o", "mulsum"]).unwrap_err();
    assert!(failure.to_string().contains("mulsum"), "{failure}");
}

#[test]
fn graphs_and_registered_buffers_are_asked_for_as_in_nccl_tests() {
    let options = options("-G 3 -R 1 --plot out.svg");
    assert_eq!((options.graph, options.register), (3, Register::Local));
    assert!(
        !options.memcpy_ratio,
        "which compares operations outside of graphs"
    );
    assert_eq!(options.plot, Some(PathBuf::from("out.svg")));
}
