//! Communicators of many ranks in one process.

mod ranks;

use std::fs;
use std::thread;

use ranks::{Rank, alone, unique_id};

#[test]
fn ranks_that_are_threads_do_not_hold_the_descriptors_of_all_devices_each() {
    const RANKS: i32 = 40;
    let name = "ranks_that_are_threads_do_not_hold_the_descriptors_of_all_devices_each";
    alone(name, &[("NCCL_EMULATOR_DEVICES", "40")], || {
        let id = unique_id();
        let used = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        // A few descriptors for each rank, not one for each pair of ranks.
        let most = used + 12 * RANKS as u64;
        assert!(most < (RANKS * RANKS) as u64);
        let limit = libc::rlimit {
            rlim_cur: most,
            rlim_max: most,
        };
        // SAFETY: the call only reads the limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
        thread::scope(|scope| {
            for rank in 0..RANKS {
                scope.spawn(move || Rank::join(id, RANKS, rank).destroy());
            }
        });
    });
}
