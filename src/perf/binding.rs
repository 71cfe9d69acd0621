//! Where the process of a rank may run. Ranks that the kernel moves between cores find their caches cold, and two of them on one
//! core wait for each other's time slice.

use super::devices::Emulation;
use crate::failure::{Exit, Failure};
use crate::machine;
use crate::options::BindTo;

/// Binds this process to a core where that is wanted: the calling thread, and those that it starts from now on. What the
/// header says of it.
///
/// On GPUs that is only done when asked for: NCCL's own threads move data there, and need cores beside that of the rank.
///
/// # Errors
/// Of the kernel; more ranks than cores, where it was asked for.
pub(super) fn bind(
    wanted: Option<BindTo>,
    emulation: Emulation,
    (local_rank, local_ranks): (Option<usize>, usize),
) -> Result<String, Failure> {
    let failed = |error: std::io::Error| {
        Failure::new(Exit::Failed, format!("binding a rank to a core: {error}"))
    };
    let cores = machine::cores().map_err(failed)?.len();
    let why_not = match (local_rank, wanted) {
        (_, Some(BindTo::None)) => String::from("--bind_to none"),
        (_, None) if emulation != Emulation::Emulated => {
            String::from("--bind_to core binds each rank to a core")
        }
        (None, _) => String::from("the launcher does not say which rank of its host this is"),
        (Some(_), _) if local_ranks > cores => {
            format!("{local_ranks} ranks on this host, of which this one may use {cores} cores")
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

    /// The cores of a thread that was bound so, and what it says.
    fn bound(
        wanted: Option<BindTo>,
        emulation: Emulation,
        place: (Option<usize>, usize),
    ) -> (usize, Result<String, Failure>) {
        let thread = std::thread::spawn(move || {
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
}
