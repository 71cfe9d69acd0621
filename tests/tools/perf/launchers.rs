//! One rank among several that another launcher starts.

use std::process::{Child, Stdio};

use super::program::{Run, SHORT, command, finish};

/// Starts the ranks as a launcher does, with these variables for rank and number of ranks.
fn launched(variables: impl Fn(usize, usize) -> Vec<(&'static str, String)>) {
    const RANKS: usize = 3;
    let children: Vec<Child> = (0..RANKS)
        .map(|rank| command(SHORT).envs(variables(rank, RANKS)).spawn().unwrap())
        .collect();
    let runs: Vec<Run> = children
        .into_iter()
        .map(|child| finish(child).expect(0))
        .collect();
    assert_eq!(runs[0].devices().len(), RANKS, "{runs:#?}");
    assert_eq!(runs[0].rows().len(), 3);
    for other in &runs[1..] {
        assert_eq!(other.stdout, "", "only rank 0 prints");
    }
}

pub(crate) fn free_port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

#[test]
fn under_nccl_run_it_is_one_rank() {
    let rank = command(SHORT);
    let mut launcher = std::process::Command::new(crate::programs::program("nccl-run"));
    launcher
        .args(["-n", "3", "--no-prefix", "--"])
        .arg(rank.get_program())
        .args(rank.get_args())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    for (name, value) in rank.get_envs() {
        match value {
            Some(value) => launcher.env(name, value),
            None => launcher.env_remove(name),
        };
    }
    let run = finish(launcher.spawn().unwrap()).expect(0);
    assert_eq!((run.devices().len(), run.rows().len()), (3, 3), "{run:#?}");
    assert!(
        run.stdout.contains("3 processes, started by nccl-run"),
        "{run:#?}"
    );
}

/// The variables of torchrun for a rank.
pub(crate) fn torchrun(rank: usize, size: usize, port: &str) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_owned()),
    ]
}

#[test]
fn under_torchrun_it_is_one_rank() {
    let port = free_port();
    launched(|rank, size| torchrun(rank, size, &port));
}

#[test]
fn under_mpirun_of_open_mpi_it_is_one_rank() {
    let job = format!("prterun-host-{}@1", std::process::id());
    launched(|rank, size| {
        vec![
            ("OMPI_COMM_WORLD_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_SIZE", size.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", size.to_string()),
            ("PMIX_NAMESPACE", job.clone()),
        ]
    });
}

/// It sets no job name: the ranks have their parent in common.
#[test]
fn under_mpirun_of_mpich_it_is_one_rank() {
    launched(|rank, size| {
        vec![
            ("PMI_RANK", rank.to_string()),
            ("PMI_SIZE", size.to_string()),
            ("MPI_LOCALRANKID", rank.to_string()),
            ("MPI_LOCALNRANKS", size.to_string()),
        ]
    });
}

#[test]
fn under_srun_it_is_one_rank() {
    let job = std::process::id().to_string();
    launched(|rank, size| {
        vec![
            ("SLURM_PROCID", rank.to_string()),
            ("SLURM_NTASKS", size.to_string()),
            ("SLURM_LOCALID", rank.to_string()),
            ("SLURM_TASKS_PER_NODE", size.to_string()),
            ("SLURM_JOB_ID", job.clone()),
            ("SLURM_STEP_ID", "0".to_owned()),
        ]
    });
}

#[test]
fn the_header_says_on_which_cores_the_ranks_run() {
    let cores = nccl_tools::machine::cores().expect("cores").len();
    let too_many = cores + 1;
    for (arguments, said) in [
        ("--ranks 1", format!("each rank to one of {cores} cores")),
        (
            "--ranks 1 --bind-to none",
            String::from("none: --bind_to none"),
        ),
        (
            &*format!("--ranks {too_many}"),
            format!("none: {too_many} ranks on this host, of which this one may use {cores} cores"),
        ),
        (
            "--spawn threads",
            String::from("none: the ranks are threads"),
        ),
    ] {
        let run = finish(
            command(&format!("-b 1k -e 1k {arguments}"))
                .spawn()
                .unwrap(),
        )
        .expect(0);
        let line = format!("# Binding              : {said}\n");
        assert!(run.stdout.contains(&line), "{line}{run:#?}");
    }
    let refused = format!("-b 1k -e 1k --ranks {too_many} --bind-to core");
    let run = finish(command(&refused).spawn().unwrap());
    assert!(
        run.stderr.contains("--bind_to core cannot be had"),
        "{run:#?}"
    );
}
