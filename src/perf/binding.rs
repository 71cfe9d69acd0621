//! Binds the process of a rank to a core. Ranks that the kernel moves between cores find cold caches, and two ranks on
//! one core wait for each other's time slice.

use super::devices::Emulation;
use crate::failure::{Exit, Failure};
use crate::machine;
use crate::options::BindTo;

/// The place of this process among those of its host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The rank on this host; `None` if the launcher does not set it.
    pub(super) rank: Option<usize>,
    pub(super) ranks: usize,
    /// Whether another program starts the ranks, which may have bound them.
    pub(super) is_launched: bool,
}

/// Binds the calling thread, and threads that it starts from now on, to a core, if requested, or by default on the emulator.
/// Returns the text for the header.
///
/// On GPUs a rank is bound only on request: NCCL's own threads move data there, and need cores besides that of the rank. A
/// process that was launched on one core, or on fewer cores than there are ranks, stays there: other ranks may have their own.
///
/// # Errors
/// The kernel's; more ranks than cores, if binding was requested.
pub(super) fn bind(
    wanted: Option<BindTo>,
    emulation: Emulation,
    place: Place,
) -> Result<String, Failure> {
    let failed = |error: std::io::Error| {
        Failure::new(Exit::Failed, format!("binding a rank to a core: {error}"))
    };
    let ranks = place.ranks;
    let allowed = machine::cores().map_err(failed)?;
    let cores = allowed.len();
    if place.is_launched && (cores == 1 || wanted.is_none() && cores < ranks) {
        return Ok(match allowed[..] {
            [core] => format!("as launched: core {core}"),
            _ => format!("as launched: {cores} cores, with {ranks} ranks on this host"),
        });
    }
    let why_not = match (place.rank, wanted) {
        (_, Some(BindTo::None)) => String::from("--bind_to none"),
        (_, None) if emulation != Emulation::Emulated => {
            String::from("--bind_to core binds each rank to a core")
        }
        (None, _) => String::from("the launcher does not say which rank of its host this is"),
        (Some(_), _) if ranks > cores => {
            format!("{ranks} ranks on this host, of which this one may use {cores} cores")
        }
        (Some(rank), _) => {
            machine::bind(rank).map_err(failed)?;
            return Ok(format!("each rank to one of {cores} cores"));
        }
    };
    match wanted {
        Some(BindTo::Core) => Err(Failure::usage(format!(
            "--bind_to core cannot be had: {why_not}"
        ))),
        _ => Ok(format!("none: {why_not}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Binds a thread; returns its number of cores and the result.
    fn bound(
        wanted: Option<BindTo>,
        emulation: Emulation,
        (rank, ranks): (Option<usize>, usize),
    ) -> (usize, Result<String, Failure>) {
        let thread = std::thread::spawn(move || {
            let place = Place {
                rank,
                ranks,
                is_launched: false,
            };
            let said = bind(wanted, emulation, place);
            (machine::cores().expect("cores").len(), said)
        });
        thread.join().expect("it does not panic")
    }

    #[test]
    fn a_rank_of_the_emulator_is_bound_where_there_are_as_many_cores_as_ranks() {
        let all = machine::cores().expect("cores").len();
        let emulated = Emulation::Emulated;
        assert_eq!(bound(None, emulated, (Some(0), 1)).0, 1);
        assert_eq!(
            bound(Some(BindTo::Core), Emulation::None, (Some(0), 1)).0,
            1
        );
        for (wanted, emulation, place) in [
            (Some(BindTo::None), emulated, (Some(0), 1)),
            (None, Emulation::None, (Some(0), 1)),
            (None, emulated, (Some(0), all + 1)),
            (None, emulated, (None, 1)),
        ] {
            let (cores, said) = bound(wanted, emulation, place);
            assert_eq!(cores, all, "{wanted:?} {emulation:?} {place:?}");
            assert!(said.expect("no error").starts_with("none"));
        }
        let (cores, said) = bound(Some(BindTo::Core), emulated, (Some(0), all + 1));
        assert_eq!(cores, all);
        assert!(said.unwrap_err().to_string().contains("cannot be had"));
    }

    #[test]
    fn a_rank_that_its_launcher_bound_to_a_core_stays_there() {
        let place = Place {
            rank: Some(1),
            ranks: 2,
            is_launched: true,
        };
        let cores = machine::cores().expect("cores");
        let last = cores.len() - 1;
        let core = cores[last];
        let thread = std::thread::spawn(move || {
            machine::bind(last).expect("it is allowed");
            let itself = Place {
                is_launched: false,
                ..place
            };
            for wanted in [None, Some(BindTo::Core), Some(BindTo::None)] {
                let said = bind(wanted, Emulation::Emulated, place).expect("it is on a core");
                assert_eq!(said, format!("as launched: core {core}"));
            }
            // Ranks that share the cores of one program cannot have one core each.
            assert!(bind(Some(BindTo::Core), Emulation::Emulated, itself).is_err());
        });
        thread.join().expect("it does not panic");
    }
}
