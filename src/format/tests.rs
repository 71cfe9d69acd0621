//! The expected texts were printed by nccl-tests 2.19.6 from the same values.

use super::*;
use crate::options::{Command, parse};
use crate::program;

fn cells(time_us: f64, algorithm: f64, bus: f64, wrong: Option<u64>) -> Cells {
    Cells {
        time_us,
        algorithm,
        bus,
        wrong,
        per_iteration: None,
    }
}

fn row() -> Row {
    Row {
        bytes: 1024,
        count: 64,
        element: "float",
        redop: "none".to_owned(),
        out_of_place: cells(12.345, 0.0829, 0.0622, Some(0)),
        in_place: cells(1_234_567.8, 1234.5, 98765.4, None),
        timestamp: Some("2026-01-02 03:04:05".to_owned()),
    }
}

fn summary() -> Summary {
    Summary {
        min: 1e-6,
        max: 2e-6,
        mean: 1.5e-6,
        p50: 1.4e-6,
        p95: 1.9e-6,
        p99: 2e-6,
        deviation: 1e-7,
    }
}

#[test]
fn the_plain_table_is_that_of_nccl_tests() {
    let columns = Columns::default();
    assert_eq!(
        columns.header(),
        "#\n\
         #                                                              out-of-place                       in-place          \n\
         #       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong \n\
         #        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         \n"
    );
    assert_eq!(
        columns.row(&row()),
        "        1024            64     float    none      -1    12.35    0.08    0.06       0  1234568  1234.5   98765    N/A\n"
    );
}

#[test]
fn cpu_time_and_timestamps_change_the_table_as_in_nccl_tests() {
    let columns = Columns {
        cpu_time: true,
        timestamps: true,
        per_iteration: false,
    };
    assert_eq!(
        columns.header(),
        "#\n\
         #                                                              out-of-place                       in-place          \n\
         #       size         count      type   redop    root  cputime   algbw   busbw  #wrong  cputime   algbw   busbw  #wrong           timestamp\n\
         #        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)           %Y-%m-%d %H:%M:%S\n"
    );
    assert_eq!(
        columns.row(&row()),
        "        1024            64     float    none      -1    12.35    0.08    0.06       0  1234568  1234.5   98765    N/A  2026-01-02 03:04:05\n"
    );
}

#[test]
fn iterations_add_four_columns_to_each_placement() {
    let columns = Columns {
        per_iteration: true,
        ..Columns::default()
    };
    assert_eq!(
        columns.header(),
        "#\n\
         #                                                                 out-of-place (+ per-iteration)                                in-place (+ per-iteration)\n\
         #       size         count      type   redop    root     time   algbw   busbw  #wrong    i_min    i_max    i_p99    i_cv%     time   algbw   busbw  #wrong    i_min    i_max    i_p99    i_cv% \n\
         #        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)     (us)     (us)      (%)     (us)  (GB/s)  (GB/s)             (us)     (us)     (us)      (%) \n"
    );
    let mut row = row();
    row.out_of_place.per_iteration = Some(summary());
    row.in_place.per_iteration = Some(summary());
    assert_eq!(
        columns.row(&row),
        "        1024            64     float    none      -1    12.35    0.08    0.06       0     1.00     2.00     2.00     6.67  1234568  1234.5   98765    N/A     1.00     2.00     2.00     6.67\n"
    );
}

#[test]
fn the_footer_is_that_of_nccl_tests() {
    let mut footer = Footer {
        out_of_bounds: 0,
        average_bus: 12.3456,
        needed_bus: None,
    };
    assert_eq!(
        footer.text("all_to_all_perf", None),
        "# Out of bounds values : 0 OK\n\
         # Avg bus bandwidth    : 12.3456 \n\
         #\n\
         # Collective test concluded: all_to_all_perf\n\
         #\n"
    );
    footer = Footer {
        out_of_bounds: 3,
        average_bus: 0.000_012,
        needed_bus: Some(1.0),
    };
    assert_eq!(
        footer.text("all_to_all_perf", Some([123_456_789, 2048, -5])),
        "# Out of bounds values : 3 FAILED\n\
         # Avg bus bandwidth    : 1.2e-05 FAILED\n\
         #\n\
         # Collective test concluded: all_to_all_perf\n\
         # GPU memory usage     : Initialization 118 MB | User-Allocated 2.00 KB | Collective -5.00 B | Total  118 MB\n\
         #\n"
    );
    assert_eq!(
        (last_error(None), last_error(Some(""))),
        ("\n".into(), "\n".into())
    );
    assert_eq!(last_error(Some("broken")), "# error: broken\n");
}

#[test]
fn ninety_percent_of_the_needed_bandwidth_is_enough() {
    let footer = |average_bus| Footer {
        out_of_bounds: 0,
        average_bus,
        needed_bus: Some(1.0),
    };
    assert_eq!(footer(0.9).fast_enough(), Some(true));
    assert_eq!(footer(0.89).fast_enough(), Some(false));
}

#[test]
fn the_preamble_repeats_the_options() {
    let Ok(Command::Run(options)) = parse(
        &program::ALL_TO_ALL,
        "-b 8 -e 128M -f 2 -z 3 -I 1 -K 2 -p 1 -t 2".split_whitespace(),
    ) else {
        panic!("these options are fine")
    };
    assert_eq!(
        preamble("all_to_all_perf", 23203, 23007, &options),
        "# nccl-tests version 2.19.6 nccl-headers=23203 nccl-library=23007\n\
         # Collective test starting: all_to_all_perf\n\
         # nThread 2 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0\n\
         # Blocking Enabled: wait and barrier after each outer iteration (-n); time excludes barrier \n\
         # Per-Iteration Report: CUDA event timing; i_* uses max over process rows; summary skips first 2 iterations \n\
         # Parallel Init Enabled: threads call into NcclInitRank concurrently \n\
         #\n\
         # Using devices\n"
    );
}

#[test]
fn a_device_line_is_that_of_nccl_tests() {
    let line = DeviceLine {
        rank: 3,
        pid: 1234,
        host: "host".into(),
        device: 1,
        pci: [0, 0x18, 0],
        name: "NVIDIA H200".into(),
    };
    assert_eq!(
        line.text(),
        "#  Rank  3 Group  0 Pid   1234 on       host device  1 [0000:18:00] NVIDIA H200\n"
    );
}
