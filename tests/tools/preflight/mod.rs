//! Obstacles for NCCL are found before it is started, and reported on every rank: which rank, which host, why, and the
//! fix.
//!
//! Hosts are network namespaces, which need root; without, these tests report that they were skipped.

mod agreement;
mod between_hosts;
mod hosts;
mod real;

/// Not a test of its own: the code of the other tests' ranks.
#[test]
fn a_rank() {
    let Ok(script) = std::env::var("NCCL_TEST_SCRIPT") else {
        return;
    };
    match hosts::a_rank(&script) {
        Ok(text) => println!("result: {text}"),
        Err(error) => println!("result: {}", format!("{error:#}").replace('\n', " | ")),
    }
}
