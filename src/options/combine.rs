//! Checks and settings that depend on several options.

use super::{Algorithms, Blocking, MOST_RANKS, Options, Pending, Spawn};
use crate::failure::Failure;
use crate::sizes::{Step, Sweep};

/// Joins options that depend on each other, and refuses contradictions.
pub(super) fn combine(options: &mut Options, pending: &Pending) -> Result<(), Failure> {
    options.sweep.step = match (pending.step_factor, pending.step_bytes) {
        (Some(factor), _) if factor > 1 => Step::Factor(factor as u64),
        (_, Some(bytes)) => Step::Bytes(bytes),
        // As in nccl-tests, a factor of 1 counts as unset, and the step is 1 MiB.
        (Some(_), None) => Step::Bytes(1 << 20),
        (None, None) => Step::Factor(2),
    };
    let Sweep { min, max, step } = options.sweep;
    if min > max {
        return Err(Failure::usage(format!(
            "the first size (-b) is {min} bytes, more than the last (-e), which is {max}"
        )));
    }
    if min < max && step == Step::Bytes(0) {
        return Err(Failure::usage(
            "sizes that grow by 0 bytes (-i) never reach the last (-e)",
        ));
    }
    if min == 0 && max > 0 && matches!(step, Step::Factor(_)) {
        return Err(Failure::usage(
            "0 bytes (-b) multiplied (-f) stay 0: begin with at least 1, or add with -i",
        ));
    }
    if options.per_iteration_skip > 0 && !options.per_iteration {
        return Err(Failure::usage(
            "-K leaves iterations out of -I's summary, and needs -I 1",
        ));
    }
    if options.per_iteration_skip >= options.iterations {
        return Err(Failure::usage(format!(
            "-K {} leaves none of the {} iterations (-n)",
            options.per_iteration_skip, options.iterations
        )));
    }
    if options.graph > 0 {
        with_graph(options, pending.memcpy_ratio)?;
    }
    options.memcpy_ratio = pending.memcpy_ratio.unwrap_or(options.graph == 0);
    if let Algorithms::Named(algorithms) = &options.algorithms
        && (options.graph > 0 || options.aggregate > 1)
        && let Some(alone) = algorithms.iter().find(|algorithm| !algorithm.in_groups)
    {
        return Err(Failure::usage(format!(
            "--algo {}: it cannot be grouped, which -m and -G need",
            alone.name
        )));
    }
    if pending.threads_given && options.spawn.is_none() {
        options.spawn = Some(Spawn::Threads);
    }
    if pending.threads_given && options.spawn == Some(Spawn::Processes) {
        return Err(Failure::usage(
            "-t asks for ranks as threads, --spawn for processes",
        ));
    }
    let product = options.threads as usize * options.gpus as usize;
    options.ranks = match pending.ranks {
        Some(ranks) if (pending.threads_given || pending.gpus_given) && ranks != product => {
            return Err(Failure::usage(format!(
                "--ranks {ranks} contradicts -t {} and -g {}, which make {product}",
                options.threads, options.gpus
            )));
        }
        Some(ranks) => Some(ranks),
        None if pending.threads_given || pending.gpus_given => Some(product),
        None => None,
    };
    if product > MOST_RANKS as usize {
        return Err(Failure::usage(format!(
            "-t {} and -g {} make {product} ranks; {MOST_RANKS} are the most on one machine",
            options.threads, options.gpus
        )));
    }
    Ok(())
}

/// Refuses options that do not go with `-G`. nccl-tests switches these off by itself, or fails.
fn with_graph(options: &Options, memcpy_ratio: Option<bool>) -> Result<(), Failure> {
    let graph = options.graph;
    if options.per_iteration {
        return Err(Failure::usage(format!(
            "-I times single iterations, and -G {graph} replays all of them at once: leave out one of the two"
        )));
    }
    if options.blocking != Blocking::Never {
        return Err(Failure::usage(format!(
            "-z waits between iterations, and -G {graph} replays all of them at once: leave out one of the two"
        )));
    }
    if memcpy_ratio == Some(true) {
        return Err(Failure::usage(format!(
            "--memcpy_ratio compares single operations, and -G {graph} replays all of them at once: leave out \
             one of the two"
        )));
    }
    Ok(())
}
