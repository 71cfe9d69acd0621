//! One rank among several that somebody else starts.

use std::process::Child;

use crate::program::{Run, SHORT, command, finish};

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

fn free_port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

#[test]
fn under_torchrun_it_is_one_rank() {
    let port = free_port();
    launched(|rank, size| {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", size.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("LOCAL_WORLD_SIZE", size.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.clone()),
        ]
    });
}
