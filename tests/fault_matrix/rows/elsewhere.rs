//! Faults that have no row here: each with the test that tries it, or with the reason why no test does.

type Elsewhere = &'static [(&'static str, &'static str)];

pub(crate) const STARTING: Elsewhere = &[
    (
        "ports and addresses, ways between hosts, ranks that never start, fail, come twice, or disagree on how many they are",
        "`tests/failures/start_up_faults.rs`, `tests/failures/rendezvous.rs`, `tests/failures/observer.rs`: [start-up-faults.md](start-up-faults.md) has all sentences",
    ),
    (
        "rank 0 is killed while others still come",
        "`tests/failures/rendezvous.rs`: `a_rank_0_that_dies_while_others_still_come_is_named_at_once`",
    ),
    (
        "a rank fails in a step of its own start",
        "`tests/failures/start_up_faults.rs`: `a_rank_that_fails_while_it_starts`",
    ),
    (
        "other releases of NCCL, one device for two ranks, other settings, unreachable interfaces",
        "`tests/tools/preflight`: found before NCCL is started ([preflight.md](preflight.md))",
    ),
    (
        "a rank is slow before its init",
        "`tests/failures/start_up_faults.rs`: those who wait are told every 10 s for whom",
    ),
    (
        "a rank never comes to NCCL's init; NCCL's init hangs",
        "`tests/failures/hangs`: the table of [deadlines-and-abort.md](deadlines-and-abort.md)",
    ),
    (
        "NCCL's init reports its error late",
        "`tests/failures/deadlines.rs`: `an_init_that_reports_its_error_late_tells_nccls_own_code_on_all_ranks`",
    ),
    (
        "the first operation, which connects the ranks, hangs",
        "`tests/api/many_communicators.rs`: `a_warm_up_connects_all_ranks_or_names_its_limit`",
    ),
    (
        "NCCL's token is another job's, or damaged",
        "`crates/nccl-core/src/sealed_unique_id.rs`",
    ),
    (
        "RDMA adapters that differ between hosts",
        "`crates/nccl-diagnose/src/preflight/rules`, on made-up hosts: it needs adapters",
    ),
];

pub(crate) const DEATHS: Elsewhere = &[
    (
        "a process is killed whose child keeps its connection open",
        "`crates/nccl-control`: `a_killed_rank_is_heard_of_although_a_child_of_it_keeps_its_connection_open`",
    ),
    (
        "rank 0 and its successor are killed together",
        "`tests/failures/succession.rs`: `when_rank_0_and_its_successor_are_killed_together_the_next_one_decides`",
    ),
    (
        "a rank leaves in order, and others work on",
        "`tests/failures/abort_together.rs`: `a_rank_that_leaves_in_order_ends_nothing`",
    ),
    (
        "a rank is killed over NCCL's own sockets or InfiniBand",
        "needs hardware: the rank's own connection tells in either case, and NCCL is not asked",
    ),
];

pub(crate) const SILENCE: Elsewhere = &[
    (
        "a call into NCCL or CUDA that does not come back",
        "`tests/failures/hangs`: the table of [deadlines-and-abort.md](deadlines-and-abort.md)",
    ),
    (
        "a rank that does not come to the next generation",
        "`tests/failures/going_on.rs`: `a_rank_that_hangs_is_left_behind_and_learns_it`",
    ),
];

pub(crate) const OPERATIONS: Elsewhere = &[
    (
        "captures that differ between the ranks",
        "`tests/api/captures_differ.rs`: compared before NCCL is asked",
    ),
    (
        "an error of CUDA's that was there before NCCL was called, on a GPU; Xid",
        "needs a GPU: the emulator executes no kernels of a GPU",
    ),
];

pub(crate) const MESSAGES: Elsewhere = &[
    (
        "teardown noise in NCCL's log",
        "`crates/nccl-diagnose/src/debug_log`: lines of real logs, each with what it counts as",
    ),
    (
        "too many peers for NCCL's proxy",
        "needs several GPUs: the limit is in NCCL's proxy thread, which the emulator does not have",
    ),
];

pub(crate) const TEARDOWN: Elsewhere = &[
    (
        "a panic, `exit`, or the end of `main` with everything alive",
        "`tests/failures/exits.rs`",
    ),
    (
        "graphs that somebody else captured keep an abort from coming back",
        "`tests/api/held_by_graphs.rs`",
    ),
    (
        "an abort that does not come back",
        "`tests/failures/deadlines.rs`: `an_abort_that_hangs_is_reported_as_a_leak_and_not_waited_for`, and `tests/failures/hangs`",
    ),
    (
        "a double destroy",
        "cannot be written: an end consumes the communicator, and a second abort is a row above",
    ),
    (
        "a thousand aborts at random moments",
        "`tests/aborts.rs`: descriptors, threads, heap, device memory",
    ),
];

pub(crate) const ENVIRONMENT: Elsewhere = &[
    (
        "a variable differs, did not reach a host, or is misspelt",
        "`tests/tools/preflight`: found before NCCL is started",
    ),
    (
        "`/dev/shm` too small, IPC namespaces, limits",
        "`tests/tools/preflight` and `crates/nccl-diagnose/src/preflight/rules`",
    ),
    (
        "a variable is changed after NCCL has read it",
        "`tests/tools/preflight`: `a_variable_that_is_changed_when_nccl_has_read_it_is_a_warning`",
    ),
    (
        "ACS or IOMMU in the way of transfers between GPUs",
        "needs two GPUs: `nccl-doctor --ranks 2 --communicate` makes a transfer, with a deadline",
    ),
    (
        "clocks of hosts that differ",
        "no cause depends on a clock: who was first is decided by the order in which it was heard",
    ),
    (
        "no libnccl, or too old a one",
        "`tests/tools/doctor/check.rs`, `crates/nccl-core/src/library.rs`",
    ),
];

pub(crate) const RESOURCES: Elsewhere = &[
    (
        "that the kernel's OOM killer did it is said, with the limit",
        "`tests/tools/nccl_run`: `the_oom_killer_is_named`",
    ),
    (
        "too few descriptors for NCCL's init",
        "`tests/tools/preflight`: `a_rank_with_too_few_open_files_left_is_named_with_the_number_it_needs`",
    ),
    (
        "a coordinator without descriptors",
        "`tests/failures/rendezvous.rs`: `a_coordinator_without_descriptors_waits_for_some_without_spinning`",
    ),
    (
        "no thread for the watchdog of a first communicator",
        "`tests/failures/watchdog.rs`: `a_rank_that_nobody_could_watch_over_gets_no_communicator_and_all_are_told`",
    ),
    (
        "no more threads for NCCL itself",
        "not tried: NCCL ends the process when its own thread cannot be started, which is a row above (`aborts`)",
    ),
    (
        "too little locked memory",
        "needs InfiniBand: found before a start by `crates/nccl-diagnose/src/preflight/rules`",
    ),
    (
        "too few ephemeral ports for NCCL's connections",
        "`crates/nccl-diagnose/src/preflight/rules`: `each_limit_has_a_sentence_of_its_own_with_a_fix`, `only_what_keeps_nccl_from_starting_is_scarce`, with a narrow range; that all of a wide range are taken is not found before NCCL says it",
    ),
    (
        "how much of a device's memory is free, and how much NCCL needed",
        "not told: a rank that looks when NCCL has failed finds what NCCL has given back; NCCL's warning has the bytes of the allocation that failed",
    ),
];

pub(crate) const NETWORK: Elsewhere = &[
    (
        "a firewall, route or refusal before the ranks have met",
        "`tests/failures/rendezvous.rs`, `tests/tools/preflight/between_hosts.rs`",
    ),
    (
        "large packets are lost from the start (MTU)",
        "`tests/tools/preflight/between_hosts.rs`: found before NCCL is started, with the hosts",
    ),
    (
        "IPv6 and IPv4 mixed",
        "`tests/tools/preflight/between_hosts.rs`",
    ),
    (
        "NCCL's own connection to a peer is refused at run time",
        "not tried: the emulator makes no connections. A peer that is dead or cut off is a row above, whatever NCCL makes of it; before a start, `tests/tools/preflight/between_hosts.rs` connects as NCCL would",
    ),
    (
        "a slow link",
        "nothing ends; stragglers are a warning, and a link is not told from a rank",
    ),
];
