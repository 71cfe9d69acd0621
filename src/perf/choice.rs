//! Chooses the algorithms to measure, for a program with several.

use nccl::Library;

use crate::algorithm::Algorithm;
use crate::failure::Failure;
use crate::options::{Algorithms, Options, Register};
use crate::program::Program;

/// The algorithms, and why others are left out.
#[derive(Debug, PartialEq)]
pub(super) struct Choice {
    /// In order; `None` stands for the only algorithm of a program.
    pub(super) algorithms: Vec<Option<&'static Algorithm>>,
    /// A line for each algorithm that was left out.
    pub(super) left_out: Vec<String>,
}

/// Evaluates `--algo` for the loaded library.
pub(super) fn choose(
    program: &Program,
    options: &Options,
    library: &Library,
    ranks: usize,
    hosts: usize,
) -> Result<Choice, Failure> {
    let lacks = |algorithm: &Algorithm| {
        let nodes = options.ranks_per_node.map_or(hosts, |each| ranks / each);
        if algorithm.between_nodes && nodes < 2 {
            return Some("it needs several nodes, which --ranks_per_node makes of one".to_owned());
        }
        let zero = options.register == Register::Window && options.cta_policy == Some(2);
        if algorithm.by_copy_engines && !zero {
            return Some("it needs symmetric windows and the zero policy: -R 2 -x 2".to_owned());
        }
        let capability = algorithm.needs.filter(|&needs| !library.has(needs))?;
        Some(format!(
            "it needs NCCL {}, and this is {}",
            capability.since(),
            library.version()
        ))
    };
    among(program.algorithms, options, lacks)
}

fn among(
    known: &'static [Algorithm],
    options: &Options,
    lacks: impl Fn(&Algorithm) -> Option<String>,
) -> Result<Choice, Failure> {
    let grouped = options.graph > 0 || options.aggregate > 1;
    let mut choice = Choice {
        algorithms: Vec::new(),
        left_out: Vec::new(),
    };
    match &options.algorithms {
        Algorithms::Default => choice.algorithms.push(known.first()),
        Algorithms::Named(algorithms) => {
            for &algorithm in algorithms {
                if let Some(why) = lacks(algorithm) {
                    let name = algorithm.name;
                    return Err(Failure::usage(format!("--algo {name}: {why}")));
                }
                choice.algorithms.push(Some(algorithm));
            }
        }
        Algorithms::All => {
            for algorithm in known {
                let why = match lacks(algorithm) {
                    None if grouped && !algorithm.in_groups => {
                        Some("it cannot be grouped, which -m and -G need".to_owned())
                    }
                    why => why,
                };
                match why {
                    None => choice.algorithms.push(Some(algorithm)),
                    Some(why) => choice
                        .left_out
                        .push(format!("algorithm {} is left out: {why}", algorithm.name)),
                }
            }
        }
    }
    Ok(choice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::TABLE;

    fn names(choice: &Choice) -> Vec<&str> {
        let algorithms = choice.algorithms.iter();
        algorithms
            .map(|one| one.map_or("-", |one| one.name))
            .collect()
    }

    fn old(algorithm: &Algorithm) -> Option<String> {
        let needs = algorithm.needs?;
        Some(format!("it needs {}", needs.since()))
    }

    #[test]
    fn all_leaves_out_what_the_library_lacks_and_says_so() {
        let options = Options {
            algorithms: Algorithms::All,
            ..Options::default()
        };
        let choice = among(TABLE, &options, old).unwrap();
        assert!(!names(&choice).contains(&"native"), "{choice:?}");
        assert!(names(&choice).contains(&"grouped"), "{choice:?}");
        assert_eq!(
            choice.left_out,
            ["algorithm native is left out: it needs 2.28.3"]
        );
        let choice = among(TABLE, &options, |_| None).unwrap();
        assert_eq!(
            (choice.algorithms.len(), choice.left_out.len()),
            (TABLE.len(), 0)
        );
    }

    #[test]
    fn all_leaves_out_what_cannot_be_grouped_where_groups_are_needed() {
        const ALONE: Algorithm = Algorithm {
            name: "alone",
            in_groups: false,
            ..TABLE[0]
        };
        let known = const { &[TABLE[0], ALONE] };
        for (aggregate, graph, left_out) in [(1, 0, 0), (2, 0, 1), (1, 3, 1)] {
            let options = Options {
                algorithms: Algorithms::All,
                aggregate,
                graph,
                ..Options::default()
            };
            let choice = among(known, &options, |_| None).unwrap();
            assert_eq!(choice.left_out.len(), left_out, "-m {aggregate} -G {graph}");
        }
    }

    #[test]
    fn what_is_named_and_lacking_is_refused() {
        let options = Options {
            algorithms: Algorithms::Named(vec![&TABLE[1]]),
            ..Options::default()
        };
        let failure = among(TABLE, &options, old).unwrap_err().to_string();
        assert!(
            failure.contains("--algo native") && failure.contains("2.28.3"),
            "{failure}"
        );
    }

    #[test]
    fn a_program_with_one_way_has_a_table_without_a_name() {
        let choice = among(&[], &Options::default(), old).unwrap();
        assert_eq!(names(&choice), ["-"]);
        assert_eq!(
            names(&among(TABLE, &Options::default(), old).unwrap()),
            ["auto"]
        );
    }
}
