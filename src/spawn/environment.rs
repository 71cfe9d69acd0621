//! Detects from the environment which launcher started a program.

/// The variable in which a [`Job`](super::Job) passes the name of the job to its ranks, beside `NCCL_RUN_JOB`. If the
/// two differ, a launcher in between has started the process.
pub(super) const JOB: &str = "NCCL_TOOLS_JOB";

/// The launcher that started this process as one rank among several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// [`Job`](super::Job), in another process of the same program.
    Itself,
    /// `nccl-run`, or another launcher that sets the same variables.
    NcclRun,
    /// `torchrun`, or another launcher that sets its variables.
    Torchrun,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `srun`.
    Slurm,
    /// `mpirun` of MPICH and Intel MPI.
    Hydra,
}

/// For each launcher: the variables that must all be set, and those of the rank, the number of ranks, the rank on the
/// host, and the number of ranks on the host.
const VARIABLES: [(Launcher, &[&str], [&str; 4]); 6] = [
    (Launcher::Itself, &["NCCL_RUN_RANK", JOB], NCCL_RUN),
    (Launcher::NcclRun, &["NCCL_RUN_RANK"], NCCL_RUN),
    (
        Launcher::Torchrun,
        &["RANK", "WORLD_SIZE"],
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    ),
    (
        Launcher::OpenMpi,
        &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        [
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
    ),
    // Hydra under srun sets both; the launcher closer to the process counts.
    (
        Launcher::Hydra,
        &["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
        ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    ),
    // A batch script has SLURM_PROCID, too, although srun started nothing; it has no step.
    (
        Launcher::Slurm,
        &["SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"],
        [
            "SLURM_PROCID",
            "SLURM_NTASKS",
            "SLURM_LOCALID",
            "SLURM_TASKS_PER_NODE",
        ],
    ),
];

const NCCL_RUN: [&str; 4] = [
    "NCCL_RUN_RANK",
    "NCCL_RUN_WORLD_SIZE",
    "NCCL_RUN_LOCAL_RANK",
    "NCCL_RUN_LOCAL_WORLD_SIZE",
];

impl Launcher {
    /// The launcher that started this process, by the variables that `lookup` finds; `None`: a user started it.
    ///
    /// ```
    /// use nccl_tools::spawn::Launcher;
    /// let torchrun = |name: &str| matches!(name, "RANK" | "WORLD_SIZE").then(|| "1".to_owned());
    /// assert_eq!(Launcher::detect(torchrun), Some(Launcher::Torchrun));
    /// assert_eq!(Launcher::detect(|_| None), None);
    /// ```
    pub fn detect(lookup: impl Fn(&str) -> Option<String>) -> Option<Self> {
        VARIABLES
            .iter()
            .filter(|(_, needed, _)| needed.iter().all(|name| lookup(name).is_some()))
            .find(|(who, ..)| *who != Self::Itself || lookup(JOB) == lookup("NCCL_RUN_JOB"))
            .map(|&(launcher, ..)| launcher)
    }

    /// Its name, as a user types it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Itself => "this program",
            Self::NcclRun => "nccl-run",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "mpirun (Open MPI)",
            Self::Slurm => "srun",
            Self::Hydra => "mpirun (Hydra)",
        }
    }

    /// The index of this process among the ranks of its host, from 0, if this launcher sets it.
    pub fn local_rank(self, lookup: impl Fn(&str) -> Option<String>) -> Option<usize> {
        let &(_, _, [_, _, local_rank, _]) =
            VARIABLES.iter().find(|(launcher, ..)| *launcher == self)?;
        lookup(local_rank)?.parse().ok()
    }

    /// The number of ranks on this host, if this launcher sets it; never fewer than the local rank requires.
    pub fn local_world_size(self, lookup: impl Fn(&str) -> Option<String>) -> Option<usize> {
        let &(_, _, [_, size, local_rank, local_size]) =
            VARIABLES.iter().find(|(launcher, ..)| *launcher == self)?;
        let number = |name: &str| {
            let text = lookup(name)?;
            // Slurm writes `4(x2),3`: four on the first two nodes. The largest is always enough.
            let numbers = text.split(',').filter_map(|part| {
                part.split('(')
                    .next()
                    .and_then(|digits| digits.parse::<usize>().ok())
            });
            numbers.max()
        };
        let told = number(local_size).or_else(|| number(size));
        let needed = number(local_rank).map(|rank| rank + 1);
        told.max(needed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn among<'a>(set: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        move |name| {
            set.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        }
    }

    #[test]
    fn a_batch_script_is_not_a_rank_but_a_step_is() {
        let batch = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_JOB_ID", "7"),
        ];
        assert_eq!(Launcher::detect(among(&batch)), None);
        let step = [&batch[..], &[("SLURM_STEP_ID", "0")]].concat();
        assert_eq!(Launcher::detect(among(&step)), Some(Launcher::Slurm));
    }

    #[test]
    fn our_own_variables_win_over_those_of_a_launcher_around() {
        let both = [("NCCL_RUN_RANK", "0"), ("RANK", "1"), ("WORLD_SIZE", "2")];
        assert_eq!(Launcher::detect(among(&both)), Some(Launcher::NcclRun));
        let own = [&both[..], &[(JOB, "a"), ("NCCL_RUN_JOB", "a")]].concat();
        assert_eq!(Launcher::detect(among(&own)), Some(Launcher::Itself));
        // An nccl-run that a rank has started.
        let within = [&both[..], &[(JOB, "a"), ("NCCL_RUN_JOB", "b")]].concat();
        assert_eq!(Launcher::detect(among(&within)), Some(Launcher::NcclRun));
    }

    #[test]
    fn the_place_of_a_rank_on_its_host_is_understood_in_every_launchers_way() {
        let torchrun = [
            ("WORLD_SIZE", "16"),
            ("LOCAL_WORLD_SIZE", "8"),
            ("LOCAL_RANK", "3"),
        ];
        assert_eq!(
            Launcher::Torchrun.local_world_size(among(&torchrun)),
            Some(8)
        );
        let slurm = [("SLURM_TASKS_PER_NODE", "4(x2),3"), ("SLURM_LOCALID", "2")];
        assert_eq!(Launcher::Slurm.local_world_size(among(&slurm)), Some(4));
        let local_rank = |launcher: Launcher, set| launcher.local_rank(among(set));
        assert_eq!(local_rank(Launcher::Torchrun, &torchrun), Some(3));
        assert_eq!(local_rank(Launcher::Slurm, &slurm), Some(2));
        assert_eq!(local_rank(Launcher::OpenMpi, &[]), None);
        let bare = [("WORLD_SIZE", "2"), ("LOCAL_RANK", "5")];
        assert_eq!(Launcher::Torchrun.local_world_size(among(&bare)), Some(6));
        assert_eq!(Launcher::OpenMpi.local_world_size(among(&[])), None);
    }
}
