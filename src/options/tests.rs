use super::*;
use crate::failure::Exit;

fn options(line: &str) -> Options {
    match parse(line.split_whitespace()) {
        Ok(Command::Run(options)) => *options,
        other => panic!("{line}: {other:?}"),
    }
}

fn refusal(line: &str) -> String {
    match parse(line.split_whitespace()) {
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
    assert_eq!(parse(["-h", "-Q"]), Ok(Command::Help));
    let text = usage("all_to_all_perf");
    for entry in table::TABLE {
        assert!(text.contains(entry.long), "{}", entry.long);
    }
    for line in text.lines() {
        assert!(line.chars().count() <= 120, "{line}");
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
        ("-R 2", &["-R", "not available"]),
        ("-G 3", &["-G", "not available"]),
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
