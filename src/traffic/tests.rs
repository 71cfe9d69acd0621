use super::*;
use crate::element;
use crate::failure::Exit;
use crate::sizes::Step;

fn traffic(variables: &[(&str, &str)]) -> Result<Traffic, Failure> {
    Traffic::from_variables(|asked| {
        let found = variables.iter().find(|(name, _)| *name == asked);
        found.map(|(_, value)| (*value).to_owned())
    })
}

fn matrix(text: &str, scale: f64) -> Result<Traffic, Failure> {
    Ok(Traffic {
        pattern: Pattern::Matrix(Matrix::read("m".into(), text, scale)?),
        prints_summary: true,
    })
}

fn bytes(traffic: &Traffic, shape: Shape) -> Vec<Vec<u64>> {
    let row = |from| {
        (0..shape.ranks)
            .map(|to| traffic.bytes(shape, from, to))
            .collect()
    };
    (0..shape.ranks).map(row).collect()
}

#[test]
fn the_farther_the_more_unless_it_is_spread_evenly() {
    let case = Case::of(element::FLOAT);
    let of = |spread: &str| {
        let traffic = traffic(&[(SPREAD, spread)]).unwrap();
        let shape = traffic.shape(6144, case, 4);
        (bytes(&traffic, shape), shape)
    };
    let (even, shape) = of("0");
    assert_eq!(even, vec![vec![1536; 4]; 4]);
    assert_eq!((shape.count, shape.bytes), (384, 6144));
    let (far, shape) = of("1.0");
    assert_eq!(far[0], [0, 1024, 2048, 3072]);
    assert_eq!(far[3], [1024, 2048, 3072, 0]);
    assert_eq!((shape.count, shape.bytes), (384, 6144));
    let (between, _) = of("0.5");
    assert_eq!(between[1], [2304, 768, 1280, 1792]);
    assert_eq!(traffic(&[]), traffic(&[(SPREAD, "1")]));
}

#[test]
fn all_of_one_rank_stays_there() {
    let traffic = traffic(&[]).unwrap();
    let shape = traffic.shape(1000, Case::of(element::FLOAT), 1);
    assert_eq!(
        (shape.bytes, bytes(&traffic, shape)),
        (992, vec![vec![992]])
    );
    assert_eq!(shape.speed(1e-3).bus, 0.0);
}

#[test]
fn a_matrix_is_scaled_and_rounded_down_and_the_busiest_rank_counts() {
    let text = "100 200 150\n 50\t100  75 \n\n300 150 200";
    let one = matrix(text, 1.0).unwrap();
    let shape = one.shape(1024, Case::of(element::FLOAT), 3);
    let expected = vec![vec![96, 192, 144], vec![48, 96, 64], vec![288, 144, 192]];
    assert_eq!(bytes(&one, shape), expected);
    // The bytes that rank 2 sends.
    assert_eq!((shape.count, shape.bytes), (0, 624));
    let double = matrix(text, 2.0).unwrap();
    assert_eq!(double.bytes(shape, 1, 2), 144);
    // A larger matrix is cut to its first rows and columns.
    let shape = one.shape(1024, Case::of(element::FLOAT), 2);
    assert_eq!(bytes(&one, shape), vec![vec![96, 192], vec![48, 96]]);
    assert_eq!(shape.bytes, 288);
}

#[test]
fn each_rank_knows_what_it_receives_and_that_nothing_comes_after_it() {
    let one = matrix("16 32 48\n64 80 96\n112 128 0", 1.0).unwrap();
    let shape = one.shape(1024, Case::of(element::FLOAT), 3);
    let blocks = one.blocks(shape, 1);
    let from: Vec<_> = blocks
        .iter()
        .map(|block| (block.from, block.bytes))
        .collect();
    let expected = [
        (Some((0, 16)), 32),
        (Some((1, 64)), 80),
        (Some((2, 112)), 128),
        (None, shape.bytes - 240),
    ];
    assert_eq!(from, expected);
}

#[test]
fn the_summary_is_that_of_nccl_tests() {
    let one = matrix("0 32\n64 0", 1.5).unwrap();
    let shape = one.shape(96, Case::of(element::FLOAT), 2);
    assert_eq!(
        one.summary(shape, 1e-8),
        [
            "NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY: mode=matrix nranks=2 matrix_dim=2 scale=1.500 time_usec=0.01",
            "  rank=0 send_bytes=48 recv_bytes=96 alg_bw=9.60 bus_bw=4.80",
            "  rank=1 send_bytes=96 recv_bytes=48 alg_bw=9.60 bus_bw=4.80",
        ]
    );
    let generated = traffic(&[(PRINT_SUMMARY, "1")]).unwrap();
    let shape = generated.shape(1024, Case::of(element::FLOAT), 2);
    let lines = generated.summary(shape, 1e-6);
    assert!(
        lines[0].contains("mode=generated nranks=2 total_bytes=1024 spread=1.000 time_usec=1.00")
    );
    assert!(traffic(&[]).unwrap().summary(shape, 1e-6).is_empty());
}

#[test]
fn what_is_no_matrix_is_refused_in_one_sentence() {
    for (text, words) in [
        ("", "empty"),
        (" \n \n", "empty"),
        ("1 2 3\n4 5 6", "2 rows and 3 columns"),
        ("1 2\n3", "row 1 has 1 columns"),
        ("1 2\n3 4 5", "row 1 has 3 columns"),
        ("1 -2\n3 4", "-2 at row 0, column 1 is negative"),
        ("1 2\nx 4", "\"x\" at row 1, column 0"),
        ("1 2\n3 4,5", "\"4,5\""),
        ("1 nan\n3 4", "\"nan\""),
        ("1 inf\n3 4", "\"inf\""),
        ("1 1e30\n3 4", "too much"),
    ] {
        let failure = matrix(text, 1.0).unwrap_err();
        assert_eq!(failure.exit(), Exit::Usage);
        let sentence = failure.to_string();
        assert!(
            sentence.contains(words) && sentence.contains(MATRIX_FILE),
            "{text:?}: {sentence}"
        );
        assert!(!sentence.contains('\n'), "{sentence}");
    }
}

#[test]
fn variables_that_make_no_sense_are_refused() {
    for (name, value) in [
        (SPREAD, "wide"),
        (SPREAD, "1.5"),
        (SPREAD, "-0.1"),
        (SPREAD, "nan"),
        (MATRIX_SCALE, "-1"),
        (MATRIX_SCALE, "inf"),
        (PRINT_SUMMARY, "yes"),
        (MATRIX_FILE, "/no/such/matrix"),
    ] {
        let failure = traffic(&[(name, value)]).unwrap_err().to_string();
        assert!(
            failure.contains(name) && failure.contains(value),
            "{failure}"
        );
    }
}

#[test]
fn sizes_and_ranks_have_to_fit_to_a_matrix() {
    let one = matrix("16 32\n64 80", 1.0).unwrap();
    let sweep = |min, max| Sweep {
        min,
        max,
        step: Step::Factor(2),
    };
    assert_eq!(one.check(sweep(144, 144), 2), Ok(()));
    for (sweep, ranks, words) in [
        (sweep(144, 144), 3, "for 2 ranks, and there are 3"),
        (sweep(64, 144), 2, "-b and -e"),
        (sweep(128, 128), 2, "144 bytes"),
    ] {
        let failure = one.check(sweep, ranks).unwrap_err().to_string();
        assert!(failure.contains(words), "{failure}");
    }
    let generated = traffic(&[]).unwrap();
    assert_eq!(generated.check(sweep(8, 1024), 100), Ok(()));
}
